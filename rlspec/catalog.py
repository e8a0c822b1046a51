"""The data that specs name: models, workloads and contracts, the user's own first, then the shipped ones."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

from rlspec import architecture, config_json, document, schema
from rlspec.errors import SpecError
from rlspec.model import Problem

SHIPPED = Path(__file__).parent / "specs"
FOLDERS = ("models", "workloads", "contracts")
SCHEMAS = {"models": "model", "workloads": "workload", "contracts": "contract", "pins": "pins"}


def home(near: Path) -> Path | None:
    """The nearest folder at or above `near` that holds catalog folders, not above the repository's top."""
    for folder in (near, *near.parents):
        if any((folder / name).is_dir() for name in FOLDERS):
            return folder
        if (folder / ".git").exists():
            return None
    return None


def entries(folder: str, near: Path) -> dict[str, Path]:
    """Name to file of all entries of `folder` that a spec in the folder `near` can name."""
    found: dict[str, Path] = {}
    for place in (SHIPPED, home(near)):
        if place is not None:
            found.update({path.stem: path for path in sorted((place / folder).glob("*.yaml"))})
    return found


def find(folder: str, name: str, near: Path) -> Path | None:
    """The file of an entry given by name, or by a path relative to `near`."""
    if "/" in name or name.endswith((".yaml", ".json")):
        path = near / name
        return path if path.is_file() else None
    return entries(folder, near).get(name)


def checked(folder: str, path: Path) -> tuple[Any, list[Problem]]:
    """An entry's data, the caller's own, with its problems against the schema of its folder."""
    try:
        data, problems = _checked(folder, path, path.read_bytes())
    except OSError:
        return None, document.read(path)[1]
    return copy.deepcopy(data), list(problems)


@functools.lru_cache(maxsize=64)
def _checked(folder: str, path: Path, raw: bytes) -> tuple[Any, list[Problem]]:
    read, problems = document.parse(raw, path)
    if read is None:
        return None, problems
    return read.data, schema.check(read, SCHEMAS[folder])


def model(name: str, near: Path) -> dict[str, Any]:
    """A model entry, or what a Hugging Face config.json says of the same. Raises SpecError."""
    path = find("models", name, near)
    if path is None and (near / name / "config.json").is_file():
        raise SpecError(f"{name!r} is a folder; name its config.json: {name.rstrip('/')}/config.json")
    if path is None:
        raise SpecError(f"unknown model {name!r}; {schema.suggestion(name, entries('models', near))}")
    if path.suffix == ".json":
        return _from_config(path)
    return _sound("models", path)


def workload(name: str, near: Path) -> dict[str, Any]:
    """The workload called `name`, or at that path, as plain data. Raises SpecError."""
    path = find("workloads", name, near)
    if path is None:
        raise SpecError(f"unknown workload {name!r}; {schema.suggestion(name, entries('workloads', near))}")
    return _sound("workloads", path)


def pins(name: str, near: Path) -> dict[str, Any]:
    """Hash and size of every file of a model's weights. Raises SpecError."""
    folders = [place / "models" / "pins" for place in (home(near), SHIPPED) if place]
    given = "/" in name or name.endswith(".yaml")
    places = [near / name] if given else [folder / f"{name}.yaml" for folder in folders]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        known = {one.stem for folder in folders for one in folder.glob("*.yaml")}
        raise SpecError(f"unknown pins {name!r}; {schema.suggestion(name, known)}")
    return _sound("pins", path)


def _sound(folder: str, path: Path) -> dict[str, Any]:
    data, problems = checked(folder, path)
    if problems:
        first = problems[0]
        raise SpecError(f"{first.path}:{first.line}:{first.column}: {first.message}")
    return data  # type: ignore[no-any-return]


def whole(name: str, near: Path) -> dict[str, Any]:
    """What a template gets of a model: a model entry, or a config.json with all its keys. Raises SpecError."""
    path = find("models", name, near)
    return _config(path) if path is not None and path.suffix == ".json" else model(name, near)


def _config(path: Path) -> dict[str, Any]:
    try:
        config = config_json.parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: not a readable config.json: {error}") from None
    if problems := config_json.oversized(config):
        raise SpecError(f"{path}: {'; '.join(problems)}")
    return config


def _from_config(path: Path) -> dict[str, Any]:
    config = _config(path)
    fields: dict[str, Any] = {ours: config[theirs] for ours, theirs in architecture.NAMES.items() if theirs in config}
    if count := architecture.experts(config):
        fields["experts"] = {"count": count}
    return {"name": path.parent.name or "model", **fields}
