"""Files beside the modules of operators of one's own: what these compile, load or read, which no observer sees.

They must be the same for all arms, as code must. What an arm builds there itself is no edit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlspec
from rlspec import checkouts, snapshot
from rlspec.changes import below, listed
from rlspec.checkouts import content
from rlspec.model import Arm, Spec, Step

SOURCES = frozenset(
    (".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hh", ".hpp", ".inc", ".inl", ".hip", ".pyx", ".rs", ".s")
)
BUILT = frozenset((".so", ".o", ".a", ".pyd", ".ptx", ".cubin", ".fatbin", ".hsaco", ".bc", ".ll", ".dylib"))
DATA = frozenset(
    (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".csv", ".npy", ".npz", ".pt", ".pkl", ".bin", ".safetensors")
)
LOOKED_AT = SOURCES | BUILT | DATA
SMALL = 1 << 22  # bytes up to which a file's content is read; of larger ones, size and time of change
_PACKAGE = Path(rlspec.__file__).resolve().parent
_OURS = {_PACKAGE, *((_PACKAGE / name).resolve() for name in ("kernels", "csrc"))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """Of an arm that is about to start: where its operators lie, as far as their names tell, and what lies there."""

    folders: frozenset[Path]
    files: Mapping[Path, str]


def tables(arm: Arm) -> set[str]:
    """The modules of an arm's own operators."""
    given = arm.implementation or (arm.settings.get("implementation") if arm.engine else None) or ""
    names = [given] if isinstance(given, str) else given.values()
    return {name.partition(":")[0] for name in names if ":" in name}


def take(spec: Spec, arm: Arm, environment: Mapping[str, str], own: Iterable[Path]) -> Near | None:
    """None where an arm has no operators of its own. What rlspec itself writes is below `own`."""
    if not (modules := tables(arm)):
        return None
    beside = environment.get("RLSPEC_SPEC_DIR", str(spec.path.parent))
    path = [*arm.environment.get("PYTHONPATH", "").split(os.pathsep), beside]
    path += environment.get("PYTHONPATH", "").split(os.pathsep)
    places = [Path(place).resolve() for place in path if place]
    folders = frozenset(folder for name in modules if (folder := _home(name, places)) is not None)
    return Near(folders=folders, files=_files(spec, folders, own))


def of(
    spec: Spec, step: Step, before: Near | None, top: Path, seen: Mapping[str, Any], began: int, own: Iterable[Path]
) -> dict[str, Any]:
    """What the state of an arm keeps, once it has ended; `began`: in ns by the clock of the file system.

    `near`: name -> digest; `built`: what the arm made itself; `edited`: what somebody else may have changed meanwhile.
    """
    if before is None:
        return {}
    folders = before.folders | _imported(seen, top)
    now = _files(spec, folders, own)
    if step.commit:  # its tree is the commit's
        now = {file: found for file, found in now.items() if not file.is_relative_to(top)}
    fresh = {file for file, found in now.items() if _changed(before, file, found, began)}
    kept = checkouts.tracked(fresh if not spec.build else now)
    if spec.build:  # a build may make files anew each time
        now = {file: found for file, found in now.items() if file in kept}
    edited = {file for file in fresh if file in kept or _foreign(file, before)} & now.keys()
    made = (fresh - edited) & now.keys()
    return {
        "near": {
            "folders": sorted(map(str, folders)),
            "files": {checkouts.name_of(top, file): found for file, found in now.items() if file not in made},
            "built": {checkouts.name_of(top, file): now[file] for file in sorted(made)},
            "rebuilt": sorted(checkouts.name_of(top, file) for file in made if file in before.files),
            "edited": sorted(checkouts.name_of(top, file) for file in edited),
        }
    }


def apart(state: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> str | None:
    """Why it is not known what an arm ran, or why it is not what one before it ran."""
    mine = state.get("near") or {}
    if edited := [name for name in mine.get("edited", ()) if not _is_data(name)]:
        return (
            f"{listed(edited)} changed while the arm ran, so what ran is not known; leave the checkout alone "
            "meanwhile, or commit and name a `revision`"
        )
    for other in others:
        if moved := [name for name in _moved(state, other) if not _is_data(name)]:
            return (
                f"{listed(moved)} changed after {other['arm']} ran, so the two arms did not run the same code; "
                "`--retry-errors` runs both as it is now"
            )
    return None


def remarks(state: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Sentences on what is no code, or may be an arm's own."""
    mine, name = state.get("near") or {}, state["arm"]
    if edited := [one for one in mine.get("edited", ()) if _is_data(one)]:
        yield f"{listed(edited)} changed while {name} ran"
    if rebuilt := mine.get("rebuilt"):
        yield (
            f"{listed(rebuilt)}, which git does not track, changed while an arm ran; where the arm did not write that "
            "itself, what ran is not known"
        )
    for other in others:
        if moved := [one for one in _moved(state, other) if _is_data(one)]:
            yield f"{listed(moved)} changed after {other['arm']} ran, and {name} ran with it"


def changed(
    spec: Spec, arm: Arm, state: Mapping[str, Any], top: Path, place: Callable[[str], Path], own: Iterable[Path]
) -> str | None:
    """Why what lies beside the operators of an arm is not what it was; `place` says where a file is on this machine."""
    if not tables(arm):
        return None
    if (then := state.get("near")) is None:
        return "what lay beside its operators was not written down"

    def at(name: str) -> Path:
        return place(name) if os.path.isabs(name) else top / name

    rebuilt = {name: then["built"][name] for name in then["rebuilt"]}
    files = {at(name): found for name, found in {**then["files"], **rebuilt}.items()}
    now = _files(spec, [place(folder) for folder in then["folders"]], own)
    if state.get("commit"):
        now = {file: found for file, found in now.items() if file in files}
    added = [] if spec.build else sorted(now.keys() - files.keys() - {*map(at, then["built"])})
    names = [*(file for file, found in files.items() if content(file, SMALL) != found), *added]
    return f"{listed([checkouts.name_of(top, file) for file in names], 3)} changed since then" if names else None


def _home(module: str, places: Iterable[Path]) -> Path | None:
    """The folder of a module, or that of a package."""
    for place in places:
        path = place.joinpath(*module.split("."))
        if path.with_suffix(".py").is_file():
            return path.parent
        if (path / "__init__.py").is_file():
            return path
    return None


def _imported(seen: Mapping[str, Any], top: Path) -> set[Path]:
    """Folders of the code that was seen to be imported, rlspec's own aside."""
    files = [Path(file) for file in seen.get("files") or ()]
    return {file.parent for file in files if checkouts.is_source(top, file) and not below(file, _OURS)}


def _files(spec: Spec, folders: Iterable[Path], own: Iterable[Path]) -> dict[Path, str]:
    places = {place.resolve() for place in own}
    found = {file for folder in _outermost(folders) for file in _walk(folder) if not below(file, places)}
    return {
        file: content(file, SMALL) for file in sorted(found) if not checkouts.is_spec(file) and not _is_report(file)
    }


def _outermost(folders: Iterable[Path]) -> set[Path]:
    every = set(folders)
    return {folder for folder in every if every.isdisjoint(folder.parents)}


def _walk(place: Path) -> Iterator[Path]:
    """Files of a folder and below, those that lie highest first, up to a limit."""
    visited = found = 0
    for folder, folders, files in os.walk(place):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in snapshot.PASSED_OVER)
        visited += len(folders) + len(files)
        for name in sorted(files):
            if os.path.splitext(name)[1] in LOOKED_AT and (found := found + 1) <= snapshot.MOST:
                yield Path(folder, name)
        if visited > snapshot.VISITED or found > snapshot.MOST:
            return


def _changed(before: Near, file: Path, found: str, began: int) -> bool:
    if file in before.files:
        return before.files[file] != found
    try:
        return file.stat().st_mtime_ns > began
    except OSError:
        return False


def _foreign(file: Path, before: Near) -> bool:
    """A source outside of git that was there: arms build, and seldom write what is built from."""
    return file in before.files and file.suffix in SOURCES and not snapshot.top_of(file.parent)[1]


def _moved(state: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of files that two arms found as different ones."""
    if other["status"] != "done":
        return []
    mine, theirs = ((one.get("near") or {}).get("files", {}) for one in (state, other))
    return sorted(name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name])


def _is_data(name: str) -> bool:
    return os.path.splitext(name)[1] in DATA


def _is_report(path: Path) -> bool:
    """A report of rlspec's, which `-o` may have put there."""
    try:
        with path.open("rb") as file:
            return path.suffix == ".json" and file.read(80).startswith(b'{\n  "schema_version": 1,\n  "rlspec": ')
    except OSError:
        return False
