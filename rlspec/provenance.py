"""What ran, as observed: by `observer/sitecustomize.py` in every Python process of an arm, never by the declaration.

A value that nobody observed is null.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlspec.errors import SpecError

OBSERVER = Path(__file__).resolve().parent / "observer"
DEFAULTS = {
    "PYTHONDONTWRITEBYTECODE": "1",  # two checkouts in one second with files of one size would share a stale .pyc
    "PYTHONUNBUFFERED": "1",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "WANDB_MODE": "disabled",
    "WANDB_PROJECT": "rlspec",
}
SECRET = re.compile("TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
INSTALLED = frozenset({"site-packages", "dist-packages"})


def environment(
    tree: Path | None, folder: Path, inherited: Mapping[str, str], declared: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Variables to lay over `inherited` for a child that is observed and imports from `tree` first.

    `declared` is what the spec sets: it wins, but its PYTHONPATH, like the inherited one, comes after ours. Raises
    SpecError where a path cannot be put into PYTHONPATH.
    """
    declared = declared or {}
    places = [OBSERVER, *([tree, tree / "src"] if tree else [])]
    paths = [str(place.absolute()) for place in places if place.is_dir()]
    for path in paths:
        if os.pathsep in path:
            raise SpecError(f"{path}: a path with {os.pathsep!r} in it cannot be put into PYTHONPATH; move it")
    own = declared.get("PYTHONPATH", inherited.get("PYTHONPATH", ""))
    ours = {
        "PYTHONPATH": os.pathsep.join([*paths, *([own] if own else [])]),
        "RLSPEC_DECLARED_PATH": declared.get("PYTHONPATH", ""),  # operators are looked for there before all else
        "RLSPEC_OBSERVE": str(folder.absolute()),
    }
    return {**DEFAULTS, **declared, **ours}


def collect(
    folder: Path, *, commit: str | None, dirty: bool | None, run_file: Path | None, tree: Path | None
) -> dict[str, Any]:
    """One account of all processes that wrote into `folder`.

    Where processes differ, a value is the list of what was seen. Machine, device, flags, versions and environment are
    those of the ranks where there are any (a launcher has torch loaded, too, but does not compute).
    """
    records, unreadable = _read(folder)
    ranks = [record for record in records if (record.get("ranks") or {}).get("RANK")]
    workers = ranks or [record for record in records if record.get("flags")] or records
    return {
        "commit": commit,
        "dirty": dirty,
        "tree": str(tree) if tree else None,
        "run_file": str(run_file.resolve()) if run_file else None,
        "run_file_digest": hashlib.sha256(run_file.read_bytes()).hexdigest() if run_file else None,
        "processes": len(records),
        "unreadable": unreadable,
        "ranks": sorted({int(record["ranks"]["RANK"]) for record in ranks}) or None,
        "world_size": _one(record["ranks"].get("WORLD_SIZE") for record in ranks),
        "commands": _distinct(record.get("command") for record in records) or None,
        "main": _union(records, "main"),
        "imported": _imported(records),
        "files": _union(records, "files"),
        "versions": _merged(workers, "versions"),
        "device": _merged(workers, "device"),
        "flags": _merged(workers, "flags"),
        "environment": _without_secrets(_merged(workers, "environment")),
        "machine": _merged(workers, "machine"),
    }


def machine(provenance: Mapping[str, Any]) -> dict[str, str]:
    """The fingerprint by which arms are compared: what was observed of torch, cuda, driver, gpu, image and cpu.

    The name of the host is not in it (see `hosts`): the same code on an equal node is the same machine.
    """
    versions, device, seen = (provenance.get(part) or {} for part in ("versions", "device", "machine"))
    image = seen.get("image") or seen.get("os")
    found = {
        "torch": versions.get("torch"),
        "cuda": versions.get("torch_cuda") or versions.get("torch_hip"),
        "driver": seen.get("driver"),
        "gpu": device.get("name"),
        "image": f"{_text(image)} {_text(seen.get('arch'))}" if image else None,
        "cpu": seen.get("cpu"),
    }
    return {name: _text(value) for name, value in found.items() if value is not None}


def code_digest(provenance: Mapping[str, Any], place: Callable[[str], Path] = Path) -> str | None:
    """SHA-256 over the files that an arm imported, stdlib and site-packages aside, as they are now; None if unseen.

    `place` says where a file of the arm is on this machine.
    """
    run_file = provenance.get("run_file")
    seen = sorted({*(provenance.get("files") or ()), *(provenance.get("main") or ())} - {run_file})
    if provenance.get("files") is None:
        return None
    total = hashlib.sha256()
    for name in seen:
        path = place(name)
        total.update(name.encode() + b"\0")
        total.update(hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"gone")
    return total.hexdigest()


def hosts(provenance: Mapping[str, Any]) -> list[str]:
    """The names of the hosts that the ranks ran on."""
    found = (provenance.get("machine") or {}).get("host") or []
    return [found] if isinstance(found, str) else list(found)


def wrong_imports(provenance: Mapping[str, Any], tree: Path, repo: Path, *, required: bool) -> str | None:
    """Why the arm did not run the code of its tree, as one sentence, or None.

    `required`: the isolation depends on the imports, so what was not observed is a reason as well.
    """
    if provenance["imported"] is None or provenance["unreadable"]:
        return _not_observed(provenance) if required else None
    tree, repo = tree.resolve(), repo.resolve()
    for name, files in provenance["imported"].items():
        if not name.isidentifier() or name == "sitecustomize":
            continue
        expected = next((place for place in _homes(tree, name) if place.exists()), None)
        for file in map(Path, files):
            copied = expected is not None and (not file.is_relative_to(tree) or installed(file, tree))
            if copied or _strays(file, tree, repo):
                return sentence(f"{name} was imported", file, tree, repo)
    ran = [Path(file) for file in provenance["main"] or () if file != provenance["run_file"]]
    for verb, files in (("was run", ran), ("was imported", map(Path, provenance["files"]))):
        if stray := next((file for file in files if _strays(file, tree, repo)), None):
            return sentence(f"{stray.stem} {verb}", stray, tree, repo)
    return None


def unused_tree(provenance: Mapping[str, Any], tree: Path) -> str | None:
    """A sentence if Python ran, and neither ran nor imported a single file of the tree: what ran was another code."""
    if provenance["imported"] is None:
        return None
    seen, root = {*provenance["files"], *(provenance["main"] or ())} - {provenance["run_file"]}, tree.resolve()
    if any(file.is_relative_to(root) and not installed(file, root) for file in map(Path, seen)):
        return None
    return (
        f"no Python file of {tree} was run or imported, so what ran does not depend on the commit: is the package "
        "installed elsewhere, or kept below another folder than `src`? Uninstall it, or put that folder on PYTHONPATH"
    )


def _read(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    records, unreadable = [], []
    for file in sorted(folder.glob("*.json")):
        try:
            records.append(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            unreadable.append(file.name)
    return records, unreadable


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({json.dumps(value): value for value in values if value is not None}.values())


def _one(values: Iterable[Any]) -> Any:
    found = _distinct(values)
    return found[0] if len(found) == 1 else sorted(found, key=json.dumps) or None


def _merged(records: list[dict[str, Any]], part: str) -> dict[str, Any] | None:
    parts = [record[part] for record in records if record.get(part) is not None]
    names = dict.fromkeys(name for seen in parts for name in seen)
    return {name: _one(seen.get(name) for seen in parts) for name in names} if parts else None


def _union(records: list[dict[str, Any]], part: str) -> list[str] | None:
    lists = [record[part] for record in records if record.get(part) is not None]
    return sorted({file for files in lists for file in files}) if lists else None


def _imported(records: list[dict[str, Any]]) -> dict[str, list[str]] | None:
    """None unless every process told: one that kept silent may have imported anything."""
    parts = [record.get("imported") for record in records]
    if not parts or None in parts or any(record.get("files") is None for record in records):
        return None
    names = sorted({name for part in parts if part for name in part})
    return {name: sorted({part[name] for part in parts if part and name in part}) for name in names}


def _without_secrets(values: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if values is None else {name: value for name, value in values.items() if not SECRET.search(name)}


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _homes(tree: Path, name: str) -> tuple[Path, ...]:
    return tuple(base / leaf for base in (tree, tree / "src") for leaf in (f"{name}/__init__.py", f"{name}.py"))


def installed(file: Path, tree: Path) -> bool:
    """A copy in an environment that itself lies in the tree."""
    return not INSTALLED.isdisjoint(file.relative_to(tree).parts)


def _strays(file: Path, tree: Path, repo: Path) -> bool:
    inside = file.is_relative_to(repo) and not file.is_relative_to(tree)
    return inside and INSTALLED.isdisjoint(file.relative_to(repo).parts)


def sentence(what: str, file: Path, tree: Path, repo: Path) -> str:
    """That a file is not of the arm's tree, and what to do."""
    if not INSTALLED.isdisjoint(file.parts):
        cause = "a copy is installed there; uninstall it"
    elif tree == repo:
        cause = "an editable install or a sys.path entry leads there; uninstall it"
    else:
        cause = "an editable install or a sys.path entry leads there; uninstall it, or use `isolation: checkout`"
    return f"{what} from {file}, not from the tree of this arm, {tree}: {cause}"


def _not_observed(provenance: Mapping[str, Any]) -> str:
    if provenance["unreadable"]:
        return f"what the arm imported cannot be read: {', '.join(provenance['unreadable'])} is no JSON"
    return (
        "no process told what it imported, so it cannot be shown that the commit's code ran: the command is no Python, "
        "runs with -I, -E or -S, replaces PYTHONPATH (write `PYTHONPATH=src:$PYTHONPATH`), or ends by os._exit or a "
        "signal; else use `isolation: checkout`, which does not depend on imports"
    )
