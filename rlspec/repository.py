"""A revision becomes a commit once, arms run in clean trees of it, and the user's tree comes back in every ending.

While rlspec runs, a journal says what it did, from which `repair` undoes what a killed run left.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlspec import checkout, git, journal
from rlspec.changes import changes, listed, require_clean, status, verify
from rlspec.errors import RunError
from rlspec.git import REDIRECTS, resolve, top
from rlspec.interrupts import postponed
from rlspec.journal import lock
from rlspec.trees import ISOLATIONS, Trees, is_back, origin, remove, undo

__all__ = [
    "REDIRECTS",
    "changes",
    "isolation",
    "lock",
    "remove_worktree",
    "repair",
    "repair_around",
    "require_clean",
    "resolve",
    "top",
    "verify",
]


@contextmanager
def isolation(repo: Path, kind: str, commits: Sequence[str], folder: Path) -> Iterator[Trees]:
    """Trees of the commits, `worktree`s below `folder` or the user's own by `checkout`; undone in every ending.

    Call `repair` before, under the same `lock`. What an arm did to tracked files of the user's tree is saved below
    `folder`. SIGINT, SIGTERM and SIGHUP wait while git switches trees. SpecError where a commit cannot be isolated so.
    """
    root, file = git.require_top(repo), journal.place(repo)
    assert not file.exists(), "repair() comes first"
    trees = ISOLATIONS[kind](root, folder.resolve(), file)
    try:
        trees.admit(commits)
        yield trees
    finally:
        with postponed():
            if file.exists() and journal.is_mine(file):
                trees.notes += undo(file)


def repair(repo: Path) -> list[str]:
    """Undo what a killed run left behind: its worktrees, its checkout. Returns what was found and done, one line each.

    A tree that somebody has moved since then is left alone. RunError where a cut-off git still blocks the index.
    """
    file = journal.place(repo)
    if not file.exists():
        return []
    entry = journal.read(file)
    who = f"rlspec (pid {entry['pid']} on {entry['host']}, started {entry['since']}) was cut off"
    with postponed():
        if "head" not in entry:
            return [f"{who}; its worktrees are removed", *undo(file)]
        root, was = Path(entry["top"]), origin(entry)
        checkout.await_git(root)
        branch, head = git.branch(root), git.head(root)
        if is_back(root, entry):
            file.unlink()
            return [f"{who}; {root} is on {was} already", *_half_switched(root, entry)]
        if branch is not None or head not in entry["commits"]:
            file.unlink()
            return [f"{who} and left {root} off {was}; the tree was moved since and stays as it is"]
        return [f"{who} while {head[:12]} was checked out; {root} is back on {was}", *undo(file)]


def repair_around(path: Path) -> list[str]:
    """`repair` the repository around a path, if a run was cut off there. To be called before a spec is read.

    The kill may have left another commit checked out, in which the spec is missing, or worse, an older one. The path
    need not exist. SpecError while the run that has it checked out is still going on.
    """
    root = top(path)
    if root is None or not journal.place(root).exists():
        return []
    with lock(root, "repair"):
        return repair(root)


def remove_worktree(place: Path) -> None:
    """Take a worktree off the disk and off git's list, with all that is in it. RunError if it cannot be removed."""
    done = git.run(place, "rev-parse", "--git-common-dir")
    if (place / ".git").is_file() and done.returncode == 0:
        notes = remove((place / os.fsdecode(done.stdout).strip()).resolve(), place)
        if notes:
            raise RunError(notes[0])
    shutil.rmtree(place, ignore_errors=True)


def _half_switched(root: Path, entry: Mapping[str, Any]) -> list[str]:
    names = [name for _, name in status(root, "no") if name not in entry["keep"]]
    remedy = "look at them; `git checkout HEAD -- FILE` brings the committed file back"
    what = "git may have been cut off while it switched these"
    return [f"{what}: {listed(names, 10)}; {remedy}"] if names else []
