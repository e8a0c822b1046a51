"""Paths that another machine wrote down, as they are here: a shared file system may be mounted elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BEFORE = r"(?<![^\s=:,;'\"(\[{])"  # where a path begins in a command line, a variable or a source file
_AFTER = r"(?![^/\s:,;'\")\]}])"


@dataclass(frozen=True, slots=True)
class Move:
    """From a folder as it was seen when something was written down to the same folder as it is seen here.

    What the two paths end in alike is the file system's own, so its neighbours move, too: where /net/x/repo is now
    /data/x/repo, /net/y is /data/y.
    """

    old: Path
    new: Path

    def text(self, text: str) -> str:
        """A text with every path of the old mount in it as it is here."""
        old, new = _mounts(self.old, self.new)
        return text if old == new else re.sub(f"{_BEFORE}{re.escape(str(old))}{_AFTER}", lambda _: str(new), text)

    def path(self, path: str) -> Path:
        return Path(self.text(path))

    def value(self, value: Any) -> Any:
        """`text` on every string of lists and mappings."""
        if isinstance(value, dict):
            return {key: self.value(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self.value(one) for one in value]
        return self.text(value) if isinstance(value, str) else value

    def back(self) -> Move:
        return Move(self.new, self.old)


def _mounts(old: Path, new: Path) -> tuple[Path, Path]:
    """The folders without what they end in alike, never as short as the root itself."""
    while old.name == new.name and len(old.parents) > 1 and len(new.parents) > 1:
        old, new = old.parent, new.parent
    return old, new
