"""Which operators a table `module:table` of the user's own names, read from its source: no module is imported."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path


def keys(name: str, folder: Path) -> tuple[str, ...] | None:
    """The keys of a dict written out in a file beside the spec, or else on PYTHONPATH; None for anything else."""
    module, _, table = name.partition(":")
    later = [Path(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    for place in (folder, *later):
        path = place.joinpath(*module.split(".")).with_suffix(".py")
        if path.is_file():
            return _written_out(path, table)
    return None


def _written_out(path: Path, table: str) -> tuple[str, ...] | None:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    made = [value for target, value in _assigned(tree) if isinstance(target, ast.Name) and target.id == table]
    mentioned = sum(isinstance(node, ast.Name) and node.id == table for node in ast.walk(tree))
    if len(made) != 1 or mentioned != 1 or not isinstance(made[0], ast.Dict):  # else it may get more keys elsewhere
        return None
    found = [key.value for key in made[0].keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return tuple(found) if len(found) == len(made[0].keys) else None


def _assigned(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:  # by another name it may get more keys
            yield node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign):
            yield node.target, node.value
