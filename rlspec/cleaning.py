"""`rlspec clean`: old runs and worktrees that a killed run left behind."""

from __future__ import annotations

import contextlib
import shutil
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlspec import repository, runs
from rlspec.errors import RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Folders that may go, and the words to ask with."""

    paths: tuple[Path, ...]
    text: str


def find(start: Path, keep: int) -> Found:
    """All but the newest `keep` runs of each spec, and the worktrees in those that stay.

    A folder without a plan (rendered only, or cut off at once) counts as a run of the spec that its name ends in.
    Raises SpecError while a run goes on that would go, or that uses one of the worktrees.
    """
    by_spec: dict[str, list[runs.Folder]] = defaultdict(list)
    for folder in runs.folders(runs.root(start.resolve())):
        by_spec[_spec(folder)].append(folder)
    old, kept = [], []
    for folders in by_spec.values():
        count = max(0, len(folders) - keep)
        old += folders[:count]
        kept += folders[count:]
    trees = [tree for folder in kept for tree in _worktrees(folder.workspace)]
    for tree in [*trees, *(tree for folder in old for tree in _worktrees(folder.workspace))]:
        _require_idle(tree, start)
    for folder in old:
        if (folder.workspace / "lock").exists():
            with folder.lock("clean"):
                pass
    paths = [*(path for folder in old for path in (folder.workspace, folder.logging) if path.exists()), *trees]
    sizes = [_size(path) for path in paths]
    lines = [f"{size / 2**20:8.1f} MiB  {path}" for size, path in zip(sizes, paths, strict=True)]
    return Found(paths=tuple(paths), text="\n".join([*lines, f"{sum(sizes) / 2**20:8.1f} MiB  in all"]))


def _require_idle(tree: Path, start: Path) -> None:
    """SpecError while a run uses it. A tree made where this file system is mounted elsewhere does not find its git."""
    top = repository.top(tree) or repository.top(start)
    if top is not None:  # else its repository is gone, and with it every run
        with repository.lock(top, "clean"):
            pass


def _spec(folder: runs.Folder) -> str:
    with contextlib.suppress(RunError, KeyError, TypeError):
        return str(runs.spec_of(folder, runs.load(folder.plan)))
    return folder.name.partition("-")[2]


def _worktrees(workspace: Path) -> list[Path]:
    """In a worktree of git, `.git` is a file."""
    return sorted(git.parent for git in workspace.glob("*/.git") if git.is_file())


def _size(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def remove(found: Found) -> None:
    """Remove the folders; a worktree is taken out of git's list, too. Raises RunError."""
    for path in found.paths:
        for tree in [path] if (path / ".git").is_file() else _worktrees(path):
            repository.remove_worktree(tree)
        if path.exists():
            shutil.rmtree(path)
    _tidy(path.parent for path in found.paths)


def _tidy(places: Iterable[Path]) -> None:
    """Links `latest` that lead nowhere, and folders that are empty now."""
    for place in set(places):
        latest = place / "latest"
        if latest.is_symlink() and not latest.exists():
            latest.unlink()
        with contextlib.suppress(OSError):  # not empty
            place.rmdir()
            place.parent.rmdir()
