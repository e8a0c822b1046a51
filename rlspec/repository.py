"""Git: a revision becomes a commit once, arms run in clean trees of it, and the user's tree comes back in every ending.

Hooks never run, the environment cannot redirect git, and file names travel separated by NUL. While rlspec runs, the
folder `rlspec` of the common git directory holds a lock, and a journal from which `repair` undoes what a killed run
left. Submodules are never fetched: `worktree` refuses commits that have any (a fresh worktree has them empty),
`checkout` takes commits that pin the same submodule commits as the user's HEAD.
"""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

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
OPERATIONS = {
    "MERGE_HEAD": "merge",
    "CHERRY_PICK_HEAD": "cherry-pick",
    "REVERT_HEAD": "revert",
    "rebase-merge": "rebase",
    "rebase-apply": "rebase or am",
    "BISECT_LOG": "bisect",
}
WORDS = {"?": "untracked", "A": "added", "D": "deleted", "T": "type changed", "U": "unmerged"}


class Trees(Protocol):
    """What `isolation` gives: the tree of a commit, and sentences for the report (filled up to the very end)."""

    notes: list[str]

    def tree(self, commit: str) -> Path: ...


def top(path: Path) -> Path | None:
    """The top of the work tree that holds `path`; None outside of one, and where git is not installed."""
    if shutil.which("git") is None:
        return None
    folder = next(place for place in (path, *path.absolute().parents) if place.is_dir())
    done = _run(folder, "rev-parse", "--show-toplevel")
    if done.returncode == 0:
        return Path(os.fsdecode(done.stdout)[:-1])
    words = _words(done)
    if "not a git repository" in words or "must be run in a work tree" in words:
        return None
    raise SpecError(f"{folder}: git refuses this repository: {words}")


def resolve(repo: Path, revision: str) -> str:
    """The full commit hash of a revision. SpecError if it is malformed, unknown or ambiguous."""
    if not revision.strip() or revision.startswith("-") or not revision.isprintable():
        raise SpecError(f"revision {revision!r} is malformed")
    done = _run(_top(repo), "rev-parse", "--verify", f"{revision}^{{commit}}")
    commit, words = os.fsdecode(done.stdout).strip(), _words(done)
    if "is ambiguous" in words:
        raise SpecError(
            f"revision {revision!r} is ambiguous in {repo}; write refs/heads/… or refs/tags/…, or the full hash"
        )
    if done.returncode or len(commit) not in (40, 64):
        raise SpecError(f"revision {revision!r} is no commit of {repo}{_advice(repo, revision)}")
    return commit


def changes(repo: Path, ignore: Iterable[Path] = ()) -> list[str]:
    """What is not committed, a line a file (`modified a.py`): untracked files count, those that git ignores do not.

    Paths in `ignore`, and all below them, do not count; a path that holds the whole repository is not honoured.
    """
    return _changes(_top(repo), ignore, "all")


def require_clean(repo: Path, ignore: Iterable[Path] = ()) -> None:
    """SpecError that lists what is not committed: no arm would run it."""
    if found := changes(repo, ignore):
        raise SpecError(
            f"{repo} has uncommitted changes, which no arm would run:\n"
            + "".join(f"  {line}\n" for line in found[:10])
            + (f"  and {len(found) - 10} more\n" if len(found) > 10 else "")
            + "commit them, or put them away with `git stash -u`; list what never belongs to a commit in .gitignore"
        )


def verify(tree: Path, commit: str, ignore: Iterable[Path] = ()) -> str | None:
    """Why the tree no longer is what the commit says, or None."""
    head = _head(tree)
    if head != commit:
        return f"HEAD of {tree} is {head[:12]}, not {commit[:12]}: something moved it during the arm"
    if found := _changes(tree.resolve(), ignore, "no"):
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        return f"tracked files of {tree} are not as in {commit[:12]}: {', '.join(found[:5])}{more}"
    return None


@contextmanager
def lock(repo: Path, what: str = "run") -> Iterator[None]:
    """Keep a second rlspec off the repository and its worktrees. The lock dies with the process that holds it."""
    file = _state(repo) / "lock"
    try:
        file.parent.mkdir(exist_ok=True)
        stream = open(os.open(file, os.O_RDWR | os.O_CREAT, 0o666), "r+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise SpecError(f"{file}: cannot be opened to lock the repository: {error.strerror}") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SpecError(f"{_holder(stream.read())} is using {repo}; wait for it or end it ({file})") from None
        except OSError as error:
            raise RunError(f"{file}: this file system cannot lock: {error.strerror}") from error
        stream.truncate(0)
        json.dump({**_signature(), "what": what}, stream)
        stream.flush()
        try:
            yield
        finally:
            stream.seek(0)
            stream.truncate()


@contextmanager
def isolation(repo: Path, kind: str, commits: Sequence[str], folder: Path) -> Iterator[Trees]:
    """Trees of the commits, `worktree`s below `folder` or the user's own by `checkout`; undone in every ending.

    Call `repair` before, under the same `lock`. What an arm did to tracked files of the user's tree is saved below
    `folder`. SIGINT, SIGTERM and SIGHUP wait while git switches trees. SpecError where a commit cannot be isolated so.
    """
    root, journal = _top(repo), _state(repo) / "journal.json"
    assert not journal.exists(), "repair() comes first"
    trees = ISOLATIONS[kind](root, folder.resolve(), journal)
    try:
        trees.admit(commits)
        yield trees
    finally:
        with _undisturbed():
            if journal.exists():
                trees.notes += _undo(journal)


def repair(repo: Path) -> list[str]:
    """Undo what a killed run left behind: its worktrees, its checkout. Returns what was found and done, one line each.

    A tree that somebody has moved since then is left alone. RunError where a cut-off git still blocks the index.
    """
    journal = _state(repo) / "journal.json"
    if not journal.exists():
        return []
    entry = _read(journal)
    who = f"rlspec (pid {entry['pid']} on {entry['host']}, started {entry['since']}) was cut off"
    with _undisturbed():
        if "head" not in entry:
            return [f"{who}; its worktrees are removed", *_undo(journal)]
        root, was = Path(entry["top"]), _name(entry)
        _await_git(root)
        branch, head = _branch(root), _head(root)
        if _is_back(root, entry):
            journal.unlink()
            return [f"{who}; {root} is on {was} already", *_half_switched(root, entry)]
        if branch is not None or head not in entry["commits"]:
            journal.unlink()
            return [f"{who} and left {root} off {was}; the tree was moved since and stays as it is"]
        return [f"{who} while {head[:12]} was checked out; {root} is back on {was}", *_undo(journal)]


def repair_around(path: Path) -> list[str]:
    """`repair` the repository around a path, if a run was cut off there. To be called before a spec is read.

    The kill may have left another commit checked out, in which the spec is missing, or worse, an older one. The path
    need not exist. SpecError while the run that has it checked out is still going on.
    """
    root = top(path)
    if root is None or not (_state(root) / "journal.json").exists():
        return []
    with lock(root, "repair"):
        return repair(root)


def remove_worktree(place: Path) -> None:
    """Take a worktree off the disk and off git's list, with all that is in it. RunError if it cannot be removed."""
    done = _run(place, "rev-parse", "--git-common-dir")
    if (place / ".git").is_file() and done.returncode == 0:
        notes = _remove((place / os.fsdecode(done.stdout).strip()).resolve(), place)
        if notes:
            raise RunError(notes[0])
    shutil.rmtree(place, ignore_errors=True)


class _Worktrees:
    """Each commit in a detached worktree of its own; the user's tree is never touched."""

    def __init__(self, root: Path, folder: Path, journal: Path) -> None:
        self.root, self.folder, self.journal, self.notes = root, folder, journal, list[str]()
        self.places: dict[str, Path] = {}

    def admit(self, commits: Sequence[str]) -> None:
        places = {commit: self.folder / commit[:12] for commit in commits}
        for commit, place in places.items():
            if links := _gitlinks(self.root, commit):
                raise SpecError(
                    f"commit {commit[:12]} has submodules ({', '.join(map(_show, sorted(links)))}), which a fresh "
                    "worktree leaves empty; use `isolation: checkout`"
                )
            if place.exists():
                raise RunError(f"{place} is in the way of a worktree; remove it (`rlspec clean`)")
        self.places |= places
        _write(self.journal, {"top": str(self.root), "worktrees": [str(place) for place in self.places.values()]})
        for commit, place in places.items():
            with _undisturbed():
                _git(self.root, "worktree", "add", "--quiet", "--detach", str(place), commit)

    def tree(self, commit: str) -> Path:
        if commit not in self.places:
            self.admit([commit])
        return self.places[commit]


class _Checkout:
    """One commit after the other in the user's own tree."""

    def __init__(self, root: Path, folder: Path, journal: Path) -> None:
        self.root, self.folder, self.journal, self.notes = root, folder, journal, list[str]()
        under_way = [word for name, word in OPERATIONS.items() if (_git_dir(root) / name).exists()]
        if under_way:
            raise SpecError(f"a {under_way[0]} is under way in {root}; finish or abort it first")
        self.branch, self.head, self.commits = _branch(root), _head(root), list[str]()
        self.keep = {name for _, name in _status(root, "all")}

    def admit(self, commits: Sequence[str]) -> None:
        links = _gitlinks(self.root, self.head)
        for commit in commits:
            if _gitlinks(self.root, commit) != links:
                raise SpecError(f"commit {commit[:12]} pins other submodule commits than HEAD; rlspec switches none")
            touched = set(_names(self.root, "diff", "--name-only", "-z", "--no-renames", "HEAD", commit))
            blocked = sorted(touched & self.keep | set(_in_the_way(self.root, commit)))
            if blocked:
                raise SpecError(
                    f"checking out {commit[:12]} would overwrite {', '.join(map(_show, blocked[:5]))} in {self.root}; "
                    "move that away, or use `isolation: worktree`"
                )
        self.commits += commits
        entry = {"branch": self.branch, "head": self.head, "commits": self.commits, "keep": sorted(self.keep)}
        _write(self.journal, {"top": str(self.root), "folder": str(self.folder), **entry})

    def tree(self, commit: str) -> Path:
        if commit not in self.commits:
            self.admit([commit])
        with _undisturbed():
            self.notes += _switch(self.root, self.folder, self.keep, commit)
        return self.root


ISOLATIONS: Mapping[str, type[_Worktrees] | type[_Checkout]] = {"worktree": _Worktrees, "checkout": _Checkout}


def _undo(journal: Path) -> list[str]:
    entry = _read(journal)
    notes = [note for place in entry.get("worktrees", ()) for note in _remove(Path(entry["top"]), Path(place))]
    if "head" in entry:
        notes += _restore(entry)
    journal.unlink()
    return notes


def _remove(root: Path, place: Path) -> list[str]:
    """Never `worktree prune`: it would also forget the user's worktrees on a disk that is not mounted now."""
    done = _run(root, "worktree", "remove", "--force", "--force", str(place))
    shutil.rmtree(place, ignore_errors=True)
    return [f"the worktree {place} could not be removed: {_words(done)}"] if place.exists() else []


def _restore(entry: Mapping[str, Any]) -> list[str]:
    root, keep = Path(entry["top"]), set(entry["keep"])
    folder = Path(entry["folder"])
    try:
        if _is_back(root, entry):
            notes = _settle(root, folder, keep)
        else:
            notes = _switch(root, folder, keep, entry["head"], entry["branch"])
    except (OSError, RunError) as error:
        raise RunError(f"{root} could not be put back on {_name(entry)}; do it by hand: {error}") from error
    left = [_show(name) for code, name in _status(root, "all") if code == "??" and name not in keep]
    if left:
        notes.append(f"files that the arms left in {root}: {', '.join(left[:10])}{' …' if len(left) > 10 else ''}")
    return notes


def _is_back(root: Path, entry: Mapping[str, Any]) -> bool:
    return (_branch(root), _head(root)) == (entry["branch"], entry["head"])


def _switch(root: Path, folder: Path, keep: set[str], commit: str, branch: str | None = None) -> list[str]:
    """Check out, detached unless a branch is given, after saving what an arm did: all changes but those in `keep`."""
    notes = _settle(root, folder, keep)
    if way := [name for name in _in_the_way(root, branch or commit) if name not in keep]:
        notes.append(_set_aside(root, folder, way))
    name = branch.removeprefix("refs/heads/") if branch else commit
    target = ["--ignore-other-worktrees" if branch else "--detach", name, "--"]
    done = _run(root, "checkout", "--quiet", "--no-overwrite-ignore", *target)
    endangered = {*_in_the_way(root, branch or commit), *(other for _, other in _status(root, "no"))}
    if done.returncode and branch and keep.isdisjoint(endangered):  # what an arm did is saved by now
        done = _run(root, "checkout", "--quiet", "--force", *target)
    if done.returncode:
        raise RunError(f"git checkout of {name} failed in {root}: {_words(done)}")
    return notes


def _settle(root: Path, folder: Path, keep: set[str]) -> list[str]:
    changed = [name for _, name in _status(root, "no") if name not in keep]
    if not changed:
        return []
    patch = _unused(folder / f"{_head(root)[:12]}.patch")
    patch.write_bytes(_output(root, "diff", "--binary", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD"))
    only = ("--quiet", "--pathspec-from-file=-", "--pathspec-file-nul")
    _output(root, "reset", *only, feed="\0".join(changed))  # a file that the arm added stays, untracked
    if still := [name for _, name in _status(root, "no") if name not in keep]:
        _output(root, "checkout", *only, "HEAD", feed="\0".join(still))
    names = ", ".join(map(_show, changed[:5])) + (" …" if len(changed) > 5 else "")
    return [f"an arm changed tracked files of {root} ({names}); they are as committed again, the changes in {patch}"]


def _in_the_way(root: Path, commit: str) -> list[str]:
    """Untracked files, ignored ones too, where the commit has files that HEAD has not: git would overwrite them."""
    added = _names(root, "diff", "--name-only", "-z", "--no-renames", "--diff-filter=A", "HEAD", commit)
    found = {place for name in added if (place := _on_disk(root, name)) is not None}
    if not found:
        return []
    others = _names(root, "ls-files", "--others", "-z")
    return [name for name in others if _below(root / name, found)]


def _on_disk(root: Path, name: str) -> Path | None:
    """The first part of the path that is no plain folder, or the whole path, if that exists."""
    place = root
    for part in Path(name).parts:
        place /= part
        if place.is_symlink() or not place.is_dir():
            return place if os.path.lexists(place) else None
    return place


def _set_aside(root: Path, folder: Path, names: Sequence[str]) -> str:
    aside = _unused(folder / "set-aside")
    for name in names:
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(root / name, aside / name)
    listed = ", ".join(map(_show, names[:5])) + (" …" if len(names) > 5 else "")
    return f"files made during an arm lay where a checkout needed the place ({listed}); they are in {aside}"


def _unused(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    choices = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(1, 10000))
    return path if not path.exists() else next(choice for choice in choices if not choice.exists())


def _half_switched(root: Path, entry: Mapping[str, Any]) -> list[str]:
    names = [_show(name) for _, name in _status(root, "no") if name not in entry["keep"]]
    remedy = "look at them; `git checkout HEAD -- FILE` brings the committed file back"
    return [f"git may have been cut off while it switched these: {', '.join(names[:10])}; {remedy}"] if names else []


def _await_git(root: Path, seconds: float = 10.0) -> None:
    """A git that outlived its rlspec may still be switching the tree."""
    held, end = _git_dir(root) / "index.lock", time.monotonic() + seconds
    while held.exists():
        if time.monotonic() > end:
            raise RunError(f"{held} exists: a git is at work or was killed; if none is, delete the file and run again")
        time.sleep(0.05)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold SIGINT, SIGTERM and SIGHUP back until the end: a tree that is half switched helps nobody."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only
        return
    late: list[int] = []
    handlers: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                handlers[number] = signal.signal(number, lambda caught, _: late.append(caught))
        yield
    finally:
        for held, handler in handlers.items():
            signal.signal(held, handler)
        if late:
            signal.raise_signal(late[0])


def _changes(root: Path, ignore: Iterable[Path], untracked: str) -> list[str]:
    places = {place for path in ignore for place in (path.resolve(), path.parent.resolve() / path.name)}
    spared = places - {root, *root.parents}
    found = [(_word(code), name) for code, name in _status(root, untracked)] + _hidden(root)
    return [f"{word} {_show(name)}" for word, name in found if not _below(root / name, spared)]


def _status(root: Path, untracked: str) -> list[tuple[str, str]]:
    """(two letters, name) of each file that differs from HEAD."""
    rows = _names(root, "status", "--porcelain", "-z", "--no-renames", "--ignore-submodules=none", f"-u{untracked}")
    return [(row[:2], row[3:]) for row in rows]


def _hidden(root: Path) -> list[tuple[str, str]]:
    """Changed files that git was told not to look at (assume-unchanged, skip-worktree)."""
    rows = [row.split(" ", 1) for row in _names(root, "ls-files", "-v", "-z")]
    files = [name for tag, name in rows if tag.islower() or tag == "S" and os.path.lexists(root / name)]
    if not files:
        return []
    staged = {row.split("\t", 1)[1]: row.split(" ", 2)[1] for row in _names(root, "ls-files", "-s", "-z")}
    return [("modified, though git was told to overlook it:", n) for n in files if _blob(root, n) != staged[n]]


def _blob(root: Path, name: str) -> str:
    if (root / name).is_symlink():
        return _output(root, "hash-object", "--stdin", feed=os.readlink(root / name)).decode().strip()
    return _output(root, "hash-object", "--", name).decode().strip() if (root / name).is_file() else ""


def _gitlinks(root: Path, commit: str) -> dict[str, str]:
    rows = [row.split("\t", 1) for row in _names(root, "ls-tree", "-r", "-z", commit)]
    return {name: info.split()[2] for info, name in rows if info.startswith("160000")}


def _advice(repo: Path, revision: str) -> str:
    names = _git(repo, "for-each-ref", "--format=%(refname:short)").splitlines()
    near = [name for name in names if name.endswith(f"/{revision}")] + difflib.get_close_matches(revision, names)
    shallow = _git(repo, "rev-parse", "--is-shallow-repository") == "true"
    fetch = "the clone is shallow: `git fetch --unshallow`" if shallow else "if it is on a remote, `git fetch` it first"
    return (f"; nearest: {', '.join(dict.fromkeys(near))}" if near else "") + f"; {fetch}"


def _below(path: Path, places: set[Path]) -> bool:
    return not places.isdisjoint((path, *path.parents))


def _word(code: str) -> str:
    return WORDS.get("U" if "U" in code else code.strip()[0], "modified")


def _show(name: str) -> str:
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return text if text.isprintable() else ascii(text)


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry["branch"] or f"commit {entry['head'][:12]}").removeprefix("refs/heads/")


def _top(repo: Path) -> Path:
    root = top(repo)
    if root is None:
        raise SpecError(f"{repo} lies in no git work tree, or git is not installed")
    return root


def _head(repo: Path) -> str:
    return _git(repo, "rev-parse", "--verify", "HEAD")


def _branch(root: Path) -> str | None:
    return os.fsdecode(_run(root, "symbolic-ref", "--quiet", "HEAD").stdout).strip() or None


def _git_dir(root: Path) -> Path:
    return Path(_git(root, "rev-parse", "--absolute-git-dir"))


def _state(repo: Path) -> Path:
    root = _top(repo)
    return (root / _git(root, "rev-parse", "--git-common-dir")).resolve() / "rlspec"


def _signature() -> dict[str, Any]:
    since = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": since}


def _holder(text: str) -> str:
    try:
        data = json.loads(text)
    except ValueError:  # read between its two writes
        return "another rlspec"
    return f"another rlspec {data['what']} (pid {data['pid']} on {data['host']}, since {data['since']})"


def _write(file: Path, data: Mapping[str, Any]) -> None:
    """On disk as a whole, or not at all."""
    draft = file.with_suffix(".tmp")
    file.parent.mkdir(exist_ok=True)
    with draft.open("w", encoding="utf-8") as stream:
        json.dump({**_signature(), **data}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)


def _read(file: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{file}: the journal of an earlier run cannot be read: {error}") from error
    return data


def _names(root: Path, *arguments: str) -> list[str]:
    return [name for name in os.fsdecode(_output(root, *arguments)).split("\0") if name]


def _git(repo: Path, *arguments: str) -> str:
    return os.fsdecode(_output(repo, *arguments)).removesuffix("\n")


def _output(repo: Path, *arguments: str, feed: str = "") -> bytes:
    done = _run(repo, *arguments, feed=feed)
    if done.returncode:
        raise RunError(f"git {arguments[0]} failed in {repo}: {_words(done)}")
    return done.stdout


def _words(done: subprocess.CompletedProcess[bytes]) -> str:
    return os.fsdecode(done.stderr).strip() or f"exit {done.returncode}"


def _run(repo: Path, *arguments: str, feed: str = "") -> subprocess.CompletedProcess[bytes]:
    """In a session of its own, so that a Ctrl-C at the terminal cannot stop git half way, and with `-C` rather than
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
