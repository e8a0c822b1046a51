"""Switch a work tree that is the user's to another commit and back, losing nothing that an arm or the user made."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from rlspec.changes import below, listed, status
from rlspec.errors import RunError
from rlspec.git import git_dir, head, names, output, run, words


def switch(root: Path, folder: Path, keep: set[str], commit: str, branch: str | None = None) -> list[str]:
    """Check out, detached unless a branch is given, after saving what an arm did: all changes but those in `keep`.

    Returns what was saved below `folder`, one line each. RunError where git refuses.
    """
    notes = settle(root, folder, keep)
    if way := [name for name in in_the_way(root, branch or commit) if name not in keep]:
        notes.append(_set_aside(root, folder, way))
    name = branch.removeprefix("refs/heads/") if branch else commit
    target = ["--ignore-other-worktrees" if branch else "--detach", name, "--"]
    done = run(root, "checkout", "--quiet", "--no-overwrite-ignore", *target)
    endangered = {*in_the_way(root, branch or commit), *(other for _, other in status(root, "no"))}
    if done.returncode and branch and keep.isdisjoint(endangered):  # what an arm did is saved by now
        done = run(root, "checkout", "--quiet", "--force", *target)
    if done.returncode:
        raise RunError(f"git checkout of {name} failed in {root}: {words(done)}")
    return notes


def settle(root: Path, folder: Path, keep: set[str]) -> list[str]:
    """Bring tracked files back to HEAD, all but those in `keep`; the changes go into a patch below `folder`."""
    changed = [name for _, name in status(root, "no") if name not in keep]
    if not changed:
        return []
    patch = _unused(folder / f"{head(root)[:12]}.patch")
    patch.write_bytes(output(root, "diff", "--binary", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD"))
    only = ("--quiet", "--pathspec-from-file=-", "--pathspec-file-nul")
    output(root, "reset", *only, feed="\0".join(changed))  # a file that the arm added stays, untracked
    if still := [name for _, name in status(root, "no") if name not in keep]:
        output(root, "checkout", *only, "HEAD", feed="\0".join(still))
    what = f"an arm changed tracked files of {root} ({listed(changed)})"
    return [f"{what}; they are as committed again, the changes in {patch}"]


def in_the_way(root: Path, commit: str) -> list[str]:
    """Untracked files, ignored ones too, where the commit has files that HEAD has not: git would overwrite them."""
    added = names(root, "diff", "--name-only", "-z", "--no-renames", "--diff-filter=A", "HEAD", commit)
    found = {place for name in added if (place := _on_disk(root, name)) is not None}
    if not found:
        return []
    others = names(root, "ls-files", "--others", "-z")
    return [name for name in others if below(root / name, found)]


def await_git(root: Path, seconds: float = 10.0) -> None:
    """Wait for a git that outlived its rlspec and still switches the tree. RunError where it does not end."""
    held, end = git_dir(root) / "index.lock", time.monotonic() + seconds
    while held.exists():
        if time.monotonic() > end:
            raise RunError(f"{held} exists: a git is at work or was killed; if none is, delete the file and run again")
        time.sleep(0.05)


def _on_disk(root: Path, name: str) -> Path | None:
    """The first part of the path that is no plain folder, or the whole path, if that exists."""
    place = root
    for part in Path(name).parts:
        place /= part
        if place.is_symlink() or not place.is_dir():
            return place if os.path.lexists(place) else None
    return place


def _set_aside(root: Path, folder: Path, file_names: Sequence[str]) -> str:
    aside = _unused(folder / "set-aside")
    for name in file_names:
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(root / name, aside / name)
    what = f"files made during an arm lay where a checkout needed the place ({listed(file_names)})"
    return f"{what}; they are in {aside}"


def _unused(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    choices = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(1, 10000))
    return path if not path.exists() else next(choice for choice in choices if not choice.exists())
