"""From paths on the command line to documents and problems: what `lint`, `plan` and `run` share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlspec import catalog, document, schema
from rlspec.checks import CHECKS, common, training_rules
from rlspec.errors import SpecError
from rlspec.model import Document, Problem


def files(paths: Iterable[Path]) -> list[Path]:
    """All spec files at and below the paths, in order. Raises SpecError for a path that is not there."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            below = sorted({*path.rglob("*.yaml"), *path.rglob("*.yml")})
            found += [file for file in below if not _hidden(file.relative_to(path))]
        elif path.exists():
            found.append(path)
        else:
            raise SpecError(f"there is no {path}")
    return list(dict.fromkeys(found))


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part in ("workspace", "logging", "node_modules") for part in path.parts)


def is_data(path: Path) -> bool:
    """Catalog data is linted with its own schema and is never run."""
    return path.resolve().parent.name in (*catalog.FOLDERS, "pins")


def lint(paths: Iterable[Path], overrides: Sequence[str] = ()) -> tuple[list[Document], list[Problem]]:
    """The specs among the paths with all problems of all files, sorted by place."""
    specs: list[Document] = []
    problems: list[Problem] = []
    for path in files(paths):
        if is_data(path):
            problems += _data(path)
            continue
        read, found = document.read(path)
        if read is not None and overrides:
            read = override(read, overrides)
        if read is not None:
            found = problems_of(read)
            specs.append(read)
        problems += found
    broken = {problem.path for problem in problems if problem.severity == "error"}
    sound = [spec for spec in specs if spec.path not in broken]
    problems += training_rules.across([spec for spec in sound if spec.data["kind"] in ("correctness", "performance")])
    return sound, sorted(problems, key=lambda p: (str(p.path), p.line, p.column, p.rule))


def problems_of(read: Document) -> list[Problem]:
    """What the schema and the rules of its kind have against a spec that is data already."""
    problems = schema.check_spec(read)
    kind = read.data.get("kind") if isinstance(read.data, dict) else None
    if isinstance(kind, str) and kind in CHECKS:
        broken = {problem.pointer.split("/")[1] for problem in problems if problem.pointer}
        problems = problems + CHECKS[kind].lint(read, broken)
    return problems


def _data(path: Path) -> list[Problem]:
    folder = path.resolve().parent.name
    if folder not in catalog.SCHEMAS:
        return document.read(path)[1]
    data, problems = catalog.checked(folder, path)
    if not problems and folder == "contracts":
        problems = _double_rows(path, data)
    return problems


def _double_rows(path: Path, data: dict[str, Any]) -> list[Problem]:
    read, _ = document.read(path)
    assert read is not None
    seen: set[tuple[str, ...]] = set()
    problems = []
    for index, row in enumerate(data["rows"]):
        key = (row["judgment"], row.get("subject", "*"), row.get("dtype", "*"))
        if key in seen:
            line, column = schema.place(read, f"/rows/{index}")
            message = f"a second row for {'/'.join(key)}"
            problems.append(Problem(rule="RL401", path=path, line=line, column=column, message=message))
        seen.add(key)
    return problems


def override(read: Document, overrides: Sequence[str]) -> Document:
    """The document with `key.key=value` settings laid over it. Raises SpecError."""
    data = read.data
    for text in overrides:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise SpecError(f"--set {text}: write key=value, such as trainer.settings.max_steps=8")
        parsed, problems = document.parse(value.encode(), Path("--set"))
        if parsed is None:
            raise SpecError(f"--set {text}: {problems[0].message}")
        data = _put(data, name.split("."), parsed.data, text)
    return dataclasses.replace(read, data=data)


def _put(data: Any, keys: list[str], value: Any, text: str) -> Any:
    if not keys:
        return value
    head, rest = keys[0], keys[1:]
    if isinstance(data, list):
        if not head.isdigit() or int(head) >= len(data):
            raise SpecError(f"--set {text}: {head!r} is no index of a list of {len(data)}")
        return [_put(item, rest, value, text) if i == int(head) else item for i, item in enumerate(data)]
    if not isinstance(data, (dict, type(None))):
        raise SpecError(f"--set {text}: {head!r} stands below a plain value")
    below = (data or {}).get(head)
    return {**(data or {}), head: _put(below, rest, value, text)}


def name(read: Document) -> str:
    """The name that a spec's report carries."""
    return str(read.data.get("name") or common.default_name(read))
