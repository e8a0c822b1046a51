"""The folders of runs: where they lie, what is in them, how one is found again. Nothing overwrites an earlier run."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlspec import schema
from rlspec.errors import RunError, SpecError

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """The two folders of one run, below `workspace/` and `logging/` of the same root."""

    workspace: Path
    logging: Path

    @property
    def name(self) -> str:
        return self.workspace.name

    @property
    def plan(self) -> Path:
        return self.workspace / "plan.json"

    @property
    def report(self) -> Path:
        return self.workspace / "report.json"


def root(start: Path) -> Path:
    """The top of the git repository that holds `start`, else `start`."""
    for folder in (start, *start.parents):
        if (folder / ".git").exists():
            return folder
    return start


def create(base: Path, kind: str, model: str, stem: str) -> Folder:
    """A new, empty run folder; two runs in the same second get a suffix."""
    below = Path(f"validate-{kind}") / (_UNSAFE.sub("_", model) or "any")
    for top in (base / "workspace", base / "logging"):
        _keep_out_of_git(top)
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        name = f"{now}-{_UNSAFE.sub('_', stem)}{suffix}"
        workspace = base / "workspace" / below / name
        try:
            workspace.mkdir(parents=True)
        except FileExistsError:
            continue
        logging = base / "logging" / below / name
        logging.mkdir(parents=True, exist_ok=True)
        folder = Folder(workspace=workspace, logging=logging)
        _link(folder)
        return folder
    raise RunError(f"{base / 'workspace' / below}: a thousand runs in one second")


def _keep_out_of_git(top: Path) -> None:
    top.mkdir(parents=True, exist_ok=True)
    ignore = top / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n", encoding="utf-8")


def _link(folder: Folder) -> None:
    for place in (folder.workspace, folder.logging):
        link = place.parent / "latest"
        fresh = place.parent / f".latest-{place.name}"
        fresh.symlink_to(place.name)
        fresh.replace(link)


def all_of(base: Path) -> Iterator[Folder]:
    """All runs below a root, oldest first."""
    found = [path.parent for path in (base / "workspace").glob("validate-*/*/*/plan.json")]
    for workspace in sorted((path for path in found if not path.is_symlink()), key=lambda path: path.name):
        yield _of(workspace)


def _of(workspace: Path) -> Folder:
    workspace = workspace.resolve()
    base = workspace.parents[3]
    return Folder(workspace=workspace, logging=base / "logging" / workspace.relative_to(base / "workspace"))


def find(base: Path, run: str) -> Folder:
    """A run by its folder, its report.json or its name. Raises SpecError with the newest names."""
    path = Path(run)
    if path.name in ("report.json", "plan.json"):
        path = path.parent
    if (path / "plan.json").is_file():
        return _of(path)
    matching = [folder for folder in all_of(base) if folder.name == run]
    if len(matching) == 1:
        return matching[0]
    newest = [folder.name for folder in all_of(base)][-3:]
    hint = f"the newest are {', '.join(reversed(newest))}" if newest else f"there is none below {base / 'workspace'}"
    raise SpecError(f"no run {run!r}; {hint}")


def latest(base: Path, spec_path: Path) -> Folder | None:
    """The newest run of a spec."""
    for folder in reversed(list(all_of(base))):
        if load(folder.plan, "plan")["spec"]["path"] == str(spec_path.resolve()):
            return folder
    return None


def save(path: Path, data: dict[str, Any]) -> None:
    """Write JSON whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def load(path: Path, name: str | None = None) -> dict[str, Any]:
    """Read JSON back and check it against the schema `name`. Raises RunError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise RunError(f"{path}: one JSON object is due")
    if name and (found := schema.check_value(data, name)):
        raise RunError(f"{path}: {found[0]}")
    return data
