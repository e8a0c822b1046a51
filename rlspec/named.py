"""Files that a command names, such as a script or a configuration: arms read them, though no observer sees it.

They must be the same for all arms, as code must. What arms write themselves, such as the log of `tee train.log`, is
told from what they read by that: each of them writes it.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlspec import checkouts
from rlspec.changes import below, listed
from rlspec.checkouts import content
from rlspec.model import Spec, Step

SMALL = 1 << 24  # bytes up to which a file's content is read; of larger ones, size and time of change
PROGRAMS = frozenset(  # interpreters and launchers, which are each machine's own
    Path(folder)
    for folder in ("/bin", "/usr/bin", "/usr/local/bin", f"{sys.base_prefix}/bin", os.path.dirname(sys.executable))
)
Named = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> digest, and what a write moves though it writes the same


def take(spec: Spec, step: Step, cwd: Path, top: Path, own: Iterable[Path]) -> Named:
    """Of a command that is about to start in `cwd`, in a work tree; what rlspec itself writes is below `own`.

    A build may make files anew each time, so that beside one only those count that git tracks. In the tree of a
    revision a commit says what is tracked; the rest of it is the same for all arms where they share a checkout.
    """
    places = {place.resolve() for place in own}
    files = {file for file in _files(step.argv, cwd) if not below(file.resolve(), places)}
    inside = {file for file in files if file.is_relative_to(top)}
    tracked = checkouts.tracked(inside) if spec.build or step.commit else set()
    if step.commit:
        shared = spec.isolation == "checkout" and not spec.build
        files -= tracked if shared else inside
    elif spec.build:
        files -= inside - tracked
    return {checkouts.name_of(top, file): (content(file, SMALL), _stamp(file)) for file in sorted(files)}


def of(before: Named, top: Path, seen: Mapping[str, Any]) -> dict[str, Any]:
    """What the state of an arm keeps, once it has ended: files as it began, and those that were written meanwhile.

    Code that was seen to run is kept by `checkouts`.
    """
    ran = {*(seen.get("files") or ()), *(seen.get("main") or ())}
    kept = {name: then for name, then in before.items() if str(top / name) not in ran}
    now = {name: (content(top / name, SMALL), _stamp(top / name)) for name in kept}
    return {
        "named": {name: then[0] for name, then in kept.items()},
        "rewrote": {name: now[name][0] for name, then in kept.items() if now[name] != then},
    }


def apart(state: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> str | None:
    """Why an arm and one before it were not given the same files."""
    mine = state.get("named") or {}
    for other in others:
        theirs = (other.get("named") or {}) if other["status"] == "done" else {}
        both = sorted(name for name in mine.keys() & theirs.keys() if not {name} <= _rewrote(state) & _rewrote(other))
        for one, unlike in ((state, other), (other, state)):
            if edited := _edited(one, both):
                return (
                    f"{listed(edited)}, which the command names, changed while {one['arm']} ran, and not while "
                    f"{unlike['arm']} ran: leave it alone meanwhile, and `--retry-errors` runs both as it is now; what "
                    "only some arms write belongs beside RLSPEC_RECORDS"
                )
        if moved := [name for name in both if mine[name] != theirs[name]]:
            return (
                f"{listed(moved)}, which the command names, changed after {other['arm']} ran, so the two arms did not "
                "run the same; `--retry-errors` runs both as it is now"
            )
    return None


def changed(state: Mapping[str, Any], arms: Collection[Mapping[str, Any]], place: Callable[[str], Path]) -> list[str]:
    """Names of what an arm was given and is not as it was; `arms`, of its run, show what they write themselves."""
    having = {name: [arm for arm in arms if name in (arm.get("named") or {})] for name in state.get("named") or {}}
    read = [name for name, known in having.items() if not all(name in _rewrote(arm) for arm in known)]
    return [name for name in read if content(place(name), SMALL) != state["named"][name]]


def _edited(state: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    then, now = state["named"], state.get("rewrote") or {}
    return [name for name in names if now.get(name, then[name]) != then[name]]


def _rewrote(state: Mapping[str, Any]) -> set[str]:
    return set(state.get("rewrote") or ())


def _files(argv: Sequence[str], cwd: Path) -> set[Path]:
    """Regular files that are there; a link by its own name, since it may come to lead elsewhere."""
    found = {cwd / word for word in _words(argv) if word and os.path.isfile(cwd / word)}
    files = {path.parent.resolve() / path.name for path in found}
    return {file for file in files if file.parent not in PROGRAMS}


def _words(argv: Sequence[str]) -> Iterator[str]:
    """Words, those of a shell's text (`bash -c "…"`), and what follows `=` or `@` in them."""
    for word in argv:
        for part in (word, *(_split(word) if " " in word or "\n" in word else ())):
            yield part.removeprefix("@")
            yield part.partition("=")[2]


def _split(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
    except ValueError:  # a quote that is not closed, which a here-document may hold
        return text.split()


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        state = path.stat()
        return state.st_mtime_ns, state.st_size, state.st_ino
    except OSError:
        return ()
