"""What a work tree holds beside its commit when an arm starts: was any of it changed since, and what did the arm leave?

Outside of git there is no commit: the Python files below the folder are all that is known.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from rlspec import git
from rlspec.changes import below
from rlspec.errors import RunError, SpecError
from rlspec.reports import digest

MOST = 2000  # untracked Python files that are looked at
VISITED = 20000  # files that are passed on the way to them, outside of git, and names of what is not tracked
PASSED_OVER = frozenset({"site-packages", "dist-packages", "node_modules", "workspace", "logging", "__pycache__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """`changed`: name -> SHA-256 of tracked files that differ from `head`, and of untracked Python files; "" is gone.

    `beside`: name -> time of change of what git does not track, ignored or not; a folder stands for what it holds, and
    None for a tree outside of git, or with too many of them.
    """

    top: Path
    head: str | None
    changed: Mapping[str, str]
    beside: Mapping[str, int] | None


def top_of(place: Path) -> tuple[Path, bool]:
    """The top of the work tree that holds a folder, and True; the folder itself, and False, where git knows none."""
    with contextlib.suppress(SpecError, RunError):  # what git refuses to look at is a folder like any other
        if (top := git.top(place)) is not None:
            return top, True
    return place.resolve(), False


def take(place: Path) -> Snapshot:
    """Of the work tree that holds a folder, or of the folder where git knows none."""
    top, known = top_of(place)
    if known:
        with contextlib.suppress(RunError):
            return _of_git(top)
    return _of_folder(top)


def differing(top: Path, head: str | None, changed: Mapping[str, str]) -> list[str]:
    """Names of the files that are not what they were then. RunError where the commit of then is gone."""
    asked = ("diff", "--name-only", "-z", "--no-renames", "--ignore-submodules=all")
    since = set(git.names(top, *asked, head)) - set(changed) if head is not None else set()
    return sorted(since | {name for name, then in changed.items() if _digest(top / name) != then})


def left(before: Snapshot, own: Iterable[Path]) -> list[str]:
    """What is untracked or ignored in a tree and was not there before, or a folder with other entries than before."""
    if before.beside is None:
        return []
    now: Mapping[str, int] = {}
    with contextlib.suppress(RunError):
        now = _beside(before.top, _rows(before.top)) or {}
    places = {place.resolve() for place in own} - {before.top, *before.top.parents}
    fresh = [name for name, changed in now.items() if before.beside.get(name) != changed]
    return sorted(name for name in fresh if not below(before.top / name, places))


def _of_git(top: Path) -> Snapshot:
    done = git.run(top, "rev-parse", "--verify", "--quiet", "HEAD")
    rows = _rows(top)
    tracked = [name for code, name in rows if code not in ("??", "!!")]
    python = [name for code, name in rows if code == "??" and name.endswith(".py")][:MOST]
    return Snapshot(
        top=top,
        head=os.fsdecode(done.stdout).strip() or None,
        changed=_digests(top, [*tracked, *python]),
        beside=_beside(top, rows),
    )


def _rows(top: Path) -> list[tuple[str, str]]:
    """(two letters, name) of what is not as committed, or not tracked; an ignored folder stands for its files."""
    asked = ("--porcelain", "-z", "--no-renames", "--ignore-submodules=all", "-uall", "--ignored=matching")
    return [(row[:2], row[3:]) for row in git.names(top, "status", *asked)]


def _beside(top: Path, rows: Iterable[tuple[str, str]]) -> dict[str, int] | None:
    names = [name for code, name in rows if code in ("??", "!!") and not _compiled(name)]
    return {name: _changed(top / name) for name in names} if len(names) <= VISITED else None


def _of_folder(top: Path) -> Snapshot:
    return Snapshot(top=top, head=None, changed=_digests(top, _python(top)), beside=None)


def _compiled(name: str) -> bool:
    return name.endswith(".pyc") or "__pycache__" in PurePath(name).parts


def _changed(path: Path) -> int:
    """When entries of a folder came or went; of a file, that it is there is enough."""
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime_ns if path.is_dir() and not path.is_symlink() else 0
    return 0


def _python(place: Path) -> Iterator[str]:
    visited = found = 0
    for folder, folders, files in os.walk(place):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in PASSED_OVER)
        visited += len(folders) + len(files)
        for name in sorted(files):
            if name.endswith(".py") and (found := found + 1) <= MOST:
                yield (Path(folder) / name).relative_to(place).as_posix()
        if visited > VISITED or found > MOST:
            return


def _digests(top: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: _digest(top / name) for name in names}


def _digest(path: Path) -> str:
    try:
        return "folder" if path.is_dir() else digest(path)
    except OSError:
        return ""
