"""Where the commits of the arms are checked out, and how that is undone.

Submodules are never fetched: `worktree` refuses commits that have any (a fresh worktree has them empty), `checkout`
takes commits that pin the same submodule commits as the user's HEAD.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlspec import checkout, git, journal
from rlspec.changes import listed, status
from rlspec.errors import RunError, SpecError
from rlspec.interrupts import postponed

OPERATIONS = {
    "MERGE_HEAD": "merge",
    "CHERRY_PICK_HEAD": "cherry-pick",
    "REVERT_HEAD": "revert",
    "rebase-merge": "rebase",
    "rebase-apply": "rebase or am",
    "BISECT_LOG": "bisect",
}


class Trees(Protocol):
    """What `isolation` gives: the tree of a commit, and sentences for the report (filled up to the very end)."""

    notes: list[str]

    def tree(self, commit: str) -> Path: ...


class _Worktrees:
    """Each commit in a detached worktree of its own; the user's tree is never touched."""

    def __init__(self, root: Path, folder: Path, file: Path) -> None:
        self.root, self.folder, self.file, self.notes = root, folder, file, list[str]()
        self.places: dict[str, Path] = {}

    def admit(self, commits: Sequence[str]) -> None:
        places = {commit: self.folder / commit[:12] for commit in commits}
        for commit, place in places.items():
            if links := git.gitlinks(self.root, commit):
                raise SpecError(
                    f"commit {commit[:12]} has submodules ({listed(sorted(links))}), which a fresh worktree leaves "
                    "empty; use `isolation: checkout`"
                )
            if place.exists():
                raise RunError(f"{place} is in the way of a worktree; remove it (`rlspec clean`)")
        self.places |= places
        journal.write(self.file, {"top": str(self.root), "worktrees": [str(place) for place in self.places.values()]})
        for commit, place in places.items():
            with postponed():
                git.ask(self.root, "worktree", "add", "--quiet", "--detach", str(place), commit)

    def tree(self, commit: str) -> Path:
        if commit not in self.places:
            self.admit([commit])
        return self.places[commit]


class _Checkout:
    """One commit after the other in the user's own tree; files that the user has changed (`keep`) stay as they are."""

    def __init__(self, root: Path, folder: Path, file: Path) -> None:
        self.root, self.folder, self.file, self.notes = root, folder, file, list[str]()
        under_way = [word for name, word in OPERATIONS.items() if (git.git_dir(root) / name).exists()]
        if under_way:
            raise SpecError(f"a {under_way[0]} is under way in {root}; finish or abort it first")
        self.branch, self.head, self.commits = git.branch(root), git.head(root), list[str]()
        self.keep = {name for _, name in status(root, "all")}

    def admit(self, commits: Sequence[str]) -> None:
        links = git.gitlinks(self.root, self.head)
        for commit in commits:
            if git.gitlinks(self.root, commit) != links:
                raise SpecError(
                    f"commit {commit[:12]} pins other submodule commits than HEAD; rlspec switches none: run each side "
                    "in a checkout of its own, and judge the logs with `rlspec judge`"
                )
            if blocked := self._blocked(commit):
                raise SpecError(
                    f"checking out {commit[:12]} would overwrite {listed(blocked)} in {self.root}; "
                    "move that away, or use `isolation: worktree`"
                )
        self.commits += commits
        entry = {"branch": self.branch, "head": self.head, "commits": self.commits, "keep": sorted(self.keep)}
        journal.write(self.file, {"top": str(self.root), "folder": str(self.folder), **entry})

    def _blocked(self, commit: str) -> list[str]:
        touched = set(git.names(self.root, "diff", "--name-only", "-z", "--no-renames", "HEAD", commit))
        return sorted(touched & self.keep | set(checkout.in_the_way(self.root, commit)))

    def tree(self, commit: str) -> Path:
        if commit not in self.commits:
            self.admit([commit])
        with postponed():
            self.notes += checkout.switch(self.root, self.folder, self.keep, commit)
        return self.root


ISOLATIONS: Mapping[str, type[_Worktrees] | type[_Checkout]] = {"worktree": _Worktrees, "checkout": _Checkout}


def undo(file: Path) -> list[str]:
    """Take back what a journal tells of, and delete it. Returns what is left or saved, one line each."""
    entry = journal.read(file)
    notes = [note for place in entry.get("worktrees", ()) for note in remove(Path(entry["top"]), Path(place))]
    if "head" in entry:
        notes += _restore(entry)
    file.unlink()
    return notes


def remove(root: Path, place: Path) -> list[str]:
    """Take a worktree away; a line if it stays.

    Never `worktree prune`: it would also forget the user's worktrees on a disk that is not mounted now.
    """
    known = _known_elsewhere(root, place)
    done = git.run(root, "worktree", "remove", "--force", "--force", str(place))
    shutil.rmtree(place, ignore_errors=True)
    if known is not None:
        shutil.rmtree(known)
    return [f"the worktree {place} could not be removed: {git.words(done)}"] if place.exists() else []


def _known_elsewhere(root: Path, place: Path) -> Path | None:
    """What git keeps of a worktree that it knows by the path that another machine has for it, which git cannot remove.

    That path is nowhere here, ends like ours, and our `.git` file leads to the entry.
    """
    link, done = place / ".git", git.run(root, "rev-parse", "--git-common-dir")
    if not link.is_file() or done.returncode:
        return None
    common = root / os.fsdecode(done.stdout).strip()
    entry = common / "worktrees" / Path(os.fsdecode(link.read_bytes()).strip()).name
    if not (entry / "gitdir").is_file():
        return None
    there = Path(os.fsdecode((entry / "gitdir").read_bytes()).strip())
    alike = there.is_absolute() and there.parts[-3:] == link.parts[-3:]
    return entry if alike and not there.exists() else None


def _restore(entry: Mapping[str, Any]) -> list[str]:
    root, folder, keep = Path(entry["top"]), Path(entry["folder"]), set(entry["keep"])
    try:
        if is_back(root, entry):
            notes = checkout.settle(root, folder, keep)
        else:
            notes = checkout.switch(root, folder, keep, entry["head"], entry["branch"])
    except (OSError, RunError) as error:
        raise RunError(f"{root} could not be put back on {origin(entry)}; do it by hand: {error}") from error
    left = [name for code, name in status(root, "all") if code == "??" and name not in keep]
    return [*notes, f"files that the arms left in {root}: {listed(left, 10)}"] if left else notes


def is_back(root: Path, entry: Mapping[str, Any]) -> bool:
    """Whether the work tree of a journal is where it was before."""
    return (git.branch(root), git.head(root)) == (entry["branch"], entry["head"])


def origin(entry: Mapping[str, Any]) -> str:
    """The branch or commit on which the work tree of a journal was."""
    return str(entry["branch"] or f"commit {entry['head'][:12]}").removeprefix("refs/heads/")
