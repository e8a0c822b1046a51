"""Operators of your own lie beside the spec: what is imported is found there first, wherever else it may be installed.

Before it comes the PYTHONPATH that an arm itself declares, by which arms may differ; that of the shell comes behind it.
A module of the standard library or of what rlspec itself runs on is never looked for there, so that a file or folder
with such a name shadows nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_OURS = ("rlspec", "torch", "triton", "numpy", "safetensors", "transformers")
_NEVER = {*sys.stdlib_module_names, *sys.builtin_module_names, *_OURS}


class Finder(MetaPathFinder):
    """Modules and packages of some folders, by their own names alone."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = list(folders)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or name in _NEVER:
            return None
        found = PathFinder.find_spec(name, self.folders)
        return found if found is not None and found.origin is not None else None  # a mere folder is no package


def first(folder: str) -> None:
    """Find modules in the folder of a spec before anywhere else but where the arm itself says, from now on."""
    folder = os.path.abspath(folder)
    declared = os.environ.get("RLSPEC_DECLARED_PATH", "").split(os.pathsep)
    folders = [*(os.path.abspath(place) for place in declared if place), folder]
    if not any(isinstance(one, Finder) and one.folders == folders for one in sys.meta_path):
        sys.meta_path.insert(0, Finder(folders))
    if folder not in sys.path:
        sys.path.append(folder)
