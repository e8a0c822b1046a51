"""`rlspec clean`: old runs and worktrees that a killed run left behind."""

from __future__ import annotations

import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from rlspec import repository, runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Folders that may go, and the words to ask with."""

    paths: tuple[Path, ...]
    text: str


def find(start: Path, keep: int) -> Found:
    """All but the newest `keep` runs of each spec, with their size."""
    base = runs.root(start.resolve())
    by_spec: dict[str, list[runs.Folder]] = defaultdict(list)
    for folder in runs.all_of(base):
        by_spec[runs.load(folder.plan)["spec"]["path"]].append(folder)
    old = [folder for folders in by_spec.values() for folder in folders[: max(0, len(folders) - keep)]]
    paths = [path for folder in old for path in (folder.workspace, folder.logging) if path.exists()]
    lines = [f"{_size(path) / 2**20:8.1f} MiB  {path}" for path in paths]
    return Found(paths=tuple(paths), text="\n".join(lines))


def _size(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def remove(found: Found) -> None:
    """Remove the folders; a worktree in one is taken out of git's list, too."""
    for path in found.paths:
        for git in path.glob("*/.git"):
            repository.remove_worktree(git.parent)
        shutil.rmtree(path)
    for path in found.paths:
        latest = path.parent / "latest"
        if latest.is_symlink() and not latest.exists():
            latest.unlink()
