"""Whether a work tree is what its commit says."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlspec.errors import SpecError
from rlspec.git import ask, head, names, output, require_top

WORDS = {"?": "untracked", "A": "added", "D": "deleted", "T": "type changed", "U": "unmerged"}


def changes(repo: Path, ignore: Iterable[Path] = ()) -> list[str]:
    """What is not committed, a line a file (`modified a.py`): untracked files count, those that git ignores do not.

    Paths in `ignore`, and all below them, do not count; a path that holds the whole repository is not honoured.
    """
    return _changes(require_top(repo), ignore, "all")


def require_clean(repo: Path, ignore: Iterable[Path] = ()) -> None:
    """SpecError that lists what is not committed: no arm would run it."""
    if found := changes(repo, ignore):
        raise SpecError(
            f"{repo} has uncommitted changes, which no arm would run:\n"
            + "".join(f"  {line}\n" for line in found[:10])
            + (f"  and {len(found) - 10} more\n" if len(found) > 10 else "")
            + "commit them, or put them away with `git stash -u`; list what never belongs to a commit, such as the "
            + "reports of `-o`, in .gitignore"
        )


def verify(tree: Path, commit: str, ignore: Iterable[Path] = ()) -> str | None:
    """Why the tree no longer is what the commit says, or None. Untracked files are no reason."""
    now = head(tree)
    if now != commit:
        return f"HEAD of {tree} is {now[:12]}, not {commit[:12]}: something moved it during the arm"
    if found := _changes(tree.resolve(), ignore, "no"):
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        return f"tracked files of {tree} are not as in {commit[:12]}: {', '.join(found[:5])}{more}"
    return None


def status(root: Path, untracked: str) -> list[tuple[str, str]]:
    """(two letters, name) of each file that differs from HEAD; `untracked` is `all`, or `no` to leave those out."""
    rows = names(root, "status", "--porcelain", "-z", "--no-renames", "--ignore-submodules=none", f"-u{untracked}")
    return [(row[:2], row[3:]) for row in rows]


def below(path: Path, places: set[Path]) -> bool:
    """Whether a path is, or lies below, one of the places."""
    return not places.isdisjoint((path, *path.parents))


def shown(name: str) -> str:
    """A file name that can be printed."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return text if text.isprintable() else ascii(text)


def listed(file_names: Sequence[str], most: int = 5) -> str:
    """The first names, printable."""
    return ", ".join(map(shown, file_names[:most])) + (" …" if len(file_names) > most else "")


def _changes(root: Path, ignore: Iterable[Path], untracked: str) -> list[str]:
    places = {place for path in ignore for place in (path.resolve(), path.parent.resolve() / path.name)}
    spared = places - {root, *root.parents}
    found = [(_word(code), name) for code, name in status(root, untracked)]
    found += [("modified, though git was told to overlook it:", name) for name in _overlooked(root)]
    return [f"{word} {shown(name)}" for word, name in found if not below(root / name, spared)]


def _word(code: str) -> str:
    return WORDS.get("U" if "U" in code else code.strip()[0], "modified")


def _overlooked(root: Path) -> list[str]:
    """Changed files that git was told not to look at (assume-unchanged, skip-worktree)."""
    rows = [row.split(" ", 1) for row in names(root, "ls-files", "-v", "-z")]
    files = [name for tag, name in rows if tag.islower() or tag == "S" and os.path.lexists(root / name)]
    if not files:
        return []
    staged = {row.split("\t", 1)[1]: row.split(" ", 2)[1] for row in names(root, "ls-files", "-s", "-z")}
    return [name for name in files if _blob(root, name) != staged[name]]


def _blob(root: Path, name: str) -> str:
    """The hash that git would give a file, empty if there is none."""
    if (root / name).is_symlink():
        return output(root, "hash-object", "--stdin", feed=os.readlink(root / name)).decode().strip()
    return ask(root, "hash-object", "--", name) if (root / name).is_file() else ""
