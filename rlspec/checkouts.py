"""Arms without a revision run what lies in a work tree, which must be the same for all of them, from begin to end.

Known of each: the commit and what differs from it (`checkout`, see `snapshot`), and the files it ran (`code`).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlspec import differing, git, snapshot
from rlspec.changes import listed
from rlspec.errors import RunError
from rlspec.model import Spec
from rlspec.reports import digest
from rlspec.snapshot import Snapshot
from rlspec.trainers import TRAINERS

SPEC = re.compile(r"^kind:\s*['\"]?(correctness|performance|operators|chain|parity)\b", re.MULTILINE)


def of(before: Snapshot, seen: Mapping[str, Any], own: Collection[str] = ()) -> dict[str, Any]:
    """What the state of an arm keeps of its checkout; `own` are the files that it wrote itself, which are no edit."""
    ran = _ran(seen)
    files = sorted(file for file in ran or () if file.is_file() and is_source(before.top, file))
    code = None
    if ran is not None:
        code = {name_of(before.top, file): digest(file) for file in files if str(file) not in own}
    kept = {"head": before.head, "changed": dict(before.changed)}
    return {"checkout": kept, "code": code, "written": sorted(own)}


def beside(before: Snapshot, seen: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """What the state of an arm with a revision keeps of the code that it ran outside its tree: no commit says that."""
    code = of(before, seen, own)["code"] or {}
    return {"beside": {name: found for name, found in code.items() if Path(name).is_absolute()}}


def written(before: Snapshot, seen: Mapping[str, Any], began: int, others: Iterable[Mapping[str, Any]]) -> set[str]:
    """Files of code that are younger than the arm that ran them and that nobody keeps in git: it wrote them itself.

    Outside of git, those that were not there before it, or that an arm before it wrote. `began`: a time of change (ns)
    by the clock of the file system.
    """
    young = {file for file in _ran(seen) or () if is_source(before.top, file) and _age(file) > began}
    if not young:
        return set()
    earlier = {name for other in others for name in other.get("written") or ()}
    known = tracked(young) | {before.top / name for name in (before.changed if before.head is None else ())}
    return {str(file) for file in young if file not in known or str(file) in earlier}


def without(seen: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """What was observed of an arm, less the files that it wrote itself."""
    lists = {part: seen.get(part) for part in ("files", "main")}
    return {**seen, **{part: found and [file for file in found if file not in own] for part, found in lists.items()}}


def rewritten(before: Snapshot, own: Collection[str], others: Iterable[Mapping[str, Any]]) -> str | None:
    """A sentence on files that an arm wrote itself and that were there before it: it cannot be told from an edit."""
    earlier = {name for other in others for name in other.get("written") or ()}
    there = {str(before.top / name) for name in (*before.changed, *(before.beside or ()))} | earlier
    names = [name_of(before.top, Path(file)) for file in sorted(own) if file in there]
    if not names:
        return None
    return (
        f"{listed(names)}, which git does not track, changed while an arm ran; where the trainer did not write that "
        "itself, what ran is not known"
    )


def folder(spec: Spec) -> Path:
    """Where an arm without a revision runs."""
    return (spec.repository or spec.path.parent).resolve()


def changed(spec: Spec, top: Path, then: Mapping[str, Any], seen: Mapping[str, Any]) -> list[str] | None:
    """Names of the files an arm ran or may have read that are not as they were; None where that cannot be told."""
    try:
        names = snapshot.differing(top, then["head"], then["changed"])
    except RunError:
        return None
    return _counted(spec, top, names, seen)


def meanwhile(
    spec: Spec, before: Snapshot, seen: Mapping[str, Any], began: int, own: Collection[str] = ()
) -> tuple[str | None, list[str]]:
    """Why it is not known what code an arm ran, and what else was changed while it ran."""
    found = changed(spec, before.top, {"head": before.head, "changed": before.changed}, seen) or []
    found = [name for name in found if str(before.top / name) not in own]
    code = [name for name in found if name.endswith(".py") and _ran(seen) is not None]
    others = [name for name in found if name not in code]
    reason = (
        f"{listed(code)} changed while the arm ran, so what ran is not known; leave the checkout alone meanwhile, or "
        "commit and name a `revision`"
    )
    return reason if code else elsewhere(before.top, seen, began, own), others


def elsewhere(top: Path, seen: Mapping[str, Any], began: int, own: Collection[str] = ()) -> str | None:
    """Why it is not known what code of other work trees (a submodule, an editable install) an arm ran."""
    ran = _ran(without(seen, own)) or ()
    young = {file for file in ran if is_source(top, file) and _age(file) > began}
    found = sorted(name_of(top, file) for file, place in _places(young).items() if place not in (None, top.resolve()))
    if not found:
        return None
    return f"{listed(found)} changed while the arm ran, so what ran is not known; leave that repository alone meanwhile"


def other_code(state: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> str | None:
    """Why an arm and one before it did not run the same checkout."""
    mine = _code(state)
    for other in others:
        theirs = _code(other) if other["status"] == "done" else {}
        if apart := sorted(name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]):
            return (
                f"{listed(apart)} changed after {other['arm']} ran, so the two arms did not run the same code; "
                "`--retry-errors` runs both as it is now"
            )
    return None


def _code(state: Mapping[str, Any]) -> Mapping[str, str]:
    return state.get("code") or state.get("beside") or {}


def other_files(spec: Spec, before: Snapshot, others: Iterable[Mapping[str, Any]]) -> str | None:
    """A sentence where what is no code changed between the arm before and this one."""
    last = next((other for other in reversed(list(others)) if other.get("checkout")), None)
    if last is None or last["checkout"] == {"head": before.head, "changed": before.changed}:
        return None
    found = changed(spec, before.top, last["checkout"], last.get("observed") or {}) or []
    names = [name for name in found if not name.endswith(".py")]
    return f"{listed(names)} changed after {last['arm']} ran, and the next arm ran with it" if names else None


def _counted(spec: Spec, top: Path, names: Iterable[str], seen: Mapping[str, Any]) -> list[str]:
    """Python files that ran (any, where that was not observed), and others below or beside which the trainer ran."""
    ran, read = _ran(seen), spec.trainer is None or not TRAINERS[spec.trainer.name].own_records
    read = read and not spec.workload
    near = {file.parent for file in ran or ()}
    place = folder(spec)
    templates = [spec.run_template, *(arm.template for arm in spec.arms)]  # the run file is compared by itself
    own = {spec.path.resolve(), *(template.resolve() for template in templates if template is not None)}
    found = []
    for name in names:
        path = top / name
        if name.endswith(".py"):
            counts = path in ran if ran is not None else not differing.aside(name)
        else:
            counts = read and (path.is_relative_to(place) or path.parent in near) and not differing.aside(name)
        if counts and path not in own and not is_spec(path):
            found.append(name)
    return found


def _ran(seen: Mapping[str, Any]) -> set[Path] | None:
    if seen.get("files") is None:
        return None
    return {Path(file) for file in {*seen["files"], *(seen.get("main") or ())} - {seen.get("run_file")}}


def tracked(files: Iterable[Path]) -> set[Path]:
    return {file for file, place in _places(files).items() if place is not None}


def _places(files: Iterable[Path]) -> dict[Path, Path | None]:
    """File -> top of the work tree that tracks it, None where none does."""
    found: dict[Path, Path | None] = {}
    for folder in {file.parent for file in files}:
        here = [file for file in files if file.parent == folder]
        top, known = snapshot.top_of(folder)
        tracked: set[str] = set()
        with contextlib.suppress(RunError):
            if known:
                tracked = {*git.names(folder, "ls-files", "-z", "--", *(file.name for file in here))}
        found |= {file: top.resolve() if file.name in tracked else None for file in here}
    return found


def _age(file: Path) -> int:
    """Time of change (ns), by the clock of the file system; of a file that is gone, before all others."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def is_source(top: Path, file: Path) -> bool:
    """No file that the arm made itself in some cache, such as those of torch's compiler."""
    return file.is_relative_to(top) or any((place / ".git").exists() for place in file.parents)


def name_of(top: Path, file: Path) -> str:
    """Below the top, so that arms agree wherever the file system is mounted."""
    return file.relative_to(top).as_posix() if file.is_relative_to(top) else str(file)


def content(path: Path, small: int) -> str:
    """The digest of a file of up to `small` bytes, size and time of change of a larger one; empty if there is none."""
    try:
        with path.open("rb") as file:  # opened, since only then NFS asks how the file is now
            state = os.fstat(file.fileno())
        return digest(path) if state.st_size <= small else f"{state.st_size} {state.st_mtime_ns}"
    except OSError:
        return ""


def is_spec(path: Path) -> bool:
    """A spec of rlspec's, which no trainer reads."""
    if path.suffix not in (".yaml", ".yml"):
        return False
    try:
        return SPEC.search(path.read_text(encoding="utf-8")) is not None
    except (OSError, ValueError):
        return False
