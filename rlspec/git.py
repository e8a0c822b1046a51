"""Ask git: no hook runs, the environment cannot redirect it, and file names travel separated by NUL."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
from pathlib import Path

from rlspec.errors import RunError, SpecError

REDIRECTS = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE"),
    *("GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_PREFIX", "GIT_GRAFT_FILE", "GIT_SHALLOW_FILE", "GIT_REPLACE_REF_BASE"),
    *("GIT_IMPLICIT_WORK_TREE", "GIT_GLOB_PATHSPECS", "GIT_NOGLOB_PATHSPECS", "GIT_ICASE_PATHSPECS"),
)
SETTINGS = (
    *("--literal-pathspecs", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor="),
    *("-c", "core.warnAmbiguousRefs=true", "-c", "submodule.recurse=false"),
)


def run(repo: Path, *arguments: str, feed: str = "") -> subprocess.CompletedProcess[bytes]:
    """A git command in a repository, whatever it returns. SpecError where git is not installed.

    In a session of its own, so that a Ctrl-C at the terminal cannot stop git half way, and with `-C` rather than
    `cwd=`, since a checkout spares the folder that git was started in, which may be ours and the user's shell's.
    """
    environment = {name: value for name, value in os.environ.items() if name not in REDIRECTS}
    environment |= {"LC_ALL": "C.UTF-8", "LANGUAGE": "", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    command = ["git", *SETTINGS, "-C", str(repo), *arguments]
    try:
        return subprocess.run(
            command, input=os.fsencode(feed), capture_output=True, env=environment, start_new_session=True, check=False
        )
    except FileNotFoundError:
        raise SpecError("git is not installed, or not on PATH") from None


def output(repo: Path, *arguments: str, feed: str = "") -> bytes:
    """What a git command prints. RunError where it fails."""
    done = run(repo, *arguments, feed=feed)
    if done.returncode:
        raise RunError(f"git {arguments[0]} failed in {repo}: {words(done)}")
    return done.stdout


def ask(repo: Path, *arguments: str) -> str:
    """`output` as one text."""
    return os.fsdecode(output(repo, *arguments)).removesuffix("\n")


def names(repo: Path, *arguments: str) -> list[str]:
    """`output` of a command with -z, as its parts."""
    return [name for name in os.fsdecode(output(repo, *arguments)).split("\0") if name]


def words(done: subprocess.CompletedProcess[bytes]) -> str:
    """What git said when it failed."""
    return os.fsdecode(done.stderr).strip() or f"exit {done.returncode}"


def top(path: Path) -> Path | None:
    """The top of the work tree that holds `path`, which need not exist; None outside of one, and without git.

    SpecError where git refuses the repository.
    """
    if shutil.which("git") is None:
        return None
    folder = next(place for place in (path, *path.absolute().parents) if place.is_dir())
    done = run(folder, "rev-parse", "--show-toplevel")
    if done.returncode == 0:
        return Path(os.fsdecode(done.stdout)[:-1])
    said = words(done)
    if "not a git repository" in said or "must be run in a work tree" in said:
        return None
    raise SpecError(f"{folder}: git refuses this repository: {said}")


def require_top(repo: Path) -> Path:
    """`top`, SpecError where there is none."""
    root = top(repo)
    if root is None:
        raise SpecError(f"{repo} lies in no git work tree, or git is not installed")
    return root


def resolve(repo: Path, revision: str) -> str:
    """The full commit hash of a revision. SpecError if it is malformed, unknown or ambiguous."""
    if not revision.strip() or revision.startswith("-") or not revision.isprintable():
        raise SpecError(f"revision {revision!r} is malformed; write a branch, a tag or a commit hash")
    done = run(require_top(repo), "rev-parse", "--verify", f"{revision}^{{commit}}")
    commit = os.fsdecode(done.stdout).strip()
    if "is ambiguous" in words(done):
        raise SpecError(
            f"revision {revision!r} is ambiguous in {repo}; write refs/heads/… or refs/tags/…, or the full hash"
        )
    if done.returncode or len(commit) not in (40, 64):
        raise SpecError(f"revision {revision!r} is no commit of {repo}{_advice(repo, revision)}")
    return commit


def _advice(repo: Path, revision: str) -> str:
    known = ask(repo, "for-each-ref", "--format=%(refname:short)").splitlines()
    near = [name for name in known if name.endswith(f"/{revision}")] + difflib.get_close_matches(revision, known)
    shallow = ask(repo, "rev-parse", "--is-shallow-repository") == "true"
    fetch = "the clone is shallow: `git fetch --unshallow`" if shallow else "if it is on a remote, `git fetch` it first"
    return (f"; nearest: {', '.join(dict.fromkeys(near))}" if near else "") + f"; {fetch}"


def head(repo: Path) -> str:
    """The commit that is checked out."""
    return ask(repo, "rev-parse", "--verify", "HEAD")


def branch(repo: Path) -> str | None:
    """The full name of the branch that is checked out, None on a detached HEAD."""
    return os.fsdecode(run(repo, "symbolic-ref", "--quiet", "HEAD").stdout).strip() or None


def git_dir(repo: Path) -> Path:
    """The git directory of this work tree, where git's own state of a merge or a rebase lies."""
    return Path(ask(repo, "rev-parse", "--absolute-git-dir"))


def common_dir(repo: Path) -> Path:
    """The git directory that all work trees of the repository share."""
    root = require_top(repo)
    return (root / ask(root, "rev-parse", "--git-common-dir")).resolve()


def gitlinks(repo: Path, commit: str) -> dict[str, str]:
    """The submodules of a commit: path to pinned commit."""
    rows = [row.split("\t", 1) for row in names(repo, "ls-tree", "-r", "-z", commit)]
    return {name: info.split()[2] for info, name in rows if info.startswith("160000")}
