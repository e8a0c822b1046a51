"""Whether two logs have in common what no two runs have, so that the second is a copy of the first."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlspec import logs
from rlspec.escapes import ESCAPES_IN_BYTES
from rlspec.model import Arm, Result, Run, Series

COPY = "a copy, and no run of its own"

SEARCHED = 4 << 20  # bytes at the beginning of a log
FEW = 4  # different times from which on two runs of a machine do not have the same ones by chance
DATE = (
    r"(?:\d{4}[-/.]\d\d[-/.]\d\d|\d\d[-/.]\d\d[-/.]\d{4}"
    r"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* +\d{1,2},?(?: +\d{4},?)?)"
)
# A time of day alone may as well be the time elapsed, which in whole seconds can be the same twice. The groups are what
# has to differ: dates of data, such as one each quarter of an hour, have the same seconds.
CLOCKS = {
    "clock times": re.compile(rf"\b{DATE}[ T_,-]{{1,2}}\d\d:\d\d:(\d\d(?:[.,]\d+)?)".encode()),
    "time stamps": re.compile(rb'"_?(?:time|timestamp|ts|wall_?time)" ?: ?"?(1\d{9}\.\d*[1-9])'),
    "rates": re.compile(rb"(\d+\.\d{3,}) ?(?:it/s|s/it|ms/it|samples/s|tokens/s|tok/s)"),
}
# Durations and rates by the names that loggers give them. Time in other names may be of the data, such as the
# time step of a simulation, or of the model, such as the loss of a duration.
UNIT = r"(?:[ _/]?\(?(?:s|ms|sec|secs|seconds?)\)?)?"
TIMED = re.compile(
    rf"""(?:.*/)? (?:
        (?:step|iter|iteration|batch|epoch|wall|forward|backward)[-_ ]?time{UNIT}
        | (?:time[-_ ])?elapsed (?:[-_ ]time)? (?:[ ]per[ ]iteration)? {UNIT}
        | time[-_ ]per[-_ ](?:step|iter|iteration|batch){UNIT}
        | (?:tokens?|toks?|samples?|iters?|iterations?|its?|steps?|examples?|sequences?)
          (?:[-_ ]per[-_ ]|/)(?:s|sec|second)(?:[-_ /](?:per[-_ ])?(?:gpu|device|rank))?
        | (?<=perf/)throughput | throughput[ _/]?\(?(?:tps|tokens|samples)\)?
        | tps | tgs | ms | s/it | ms/it | m?tflops | mfu(?:\(%\))?
    )
    | (?:time|timing|time_metrics)/.*(?:_s|_ms|_sec|_seconds|\((?:s|ms)\))
    | (?:.*/)?timing_(?:s|ms)/.*""",
    re.IGNORECASE | re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Read:
    """What an arm was read from: a log, or a folder of event files, and the digest that it had then."""

    path: Path
    digest: str
    reader: str
    pattern: str | None


def twins(logs_of: Mapping[str, Read]) -> dict[str, str]:
    """Arms whose log is that of an earlier arm to the byte, and that arm."""
    first: dict[str, str] = {}
    earlier = {name: first.setdefault(read.digest, name) for name, read in logs_of.items()}
    return {name: other for name, other in earlier.items() if other != name}


def refused(results: Iterable[Result], logs_of: Mapping[str, Read]) -> list[Result]:
    """The results; that of a copied log, which would be compared with itself, with a fault."""
    same, checked = twins(logs_of), list[Result]()
    for one in results:
        if one.arm.name in same:
            checked.append(_refused(one, logs_of, same[one.arm.name]))
        else:
            checked.append(_unlike(one, checked, logs_of))
    return checked


def _refused(result: Result, logs_of: Mapping[str, Read], twin: str) -> Result:
    if result.run is None:
        return result
    read = next((read for read in (logs_of[result.arm.name], logs_of[twin]) if read.path.exists()), None)
    if read is None:
        gone = f"its log was that of {twin} to the byte, and neither is there any more: was it a copy?"
        return dataclasses.replace(result, run=dataclasses.replace(result.run, notes=(*result.run.notes, gone)))
    held = unrepeatable(read.path, read.reader, read.pattern)
    if not held:
        return result
    return _faulted(
        result, f"{logs_of[result.arm.name].path.name} is the log of {twin} to the byte, with {held}: {COPY}"
    )


def _faulted(result: Result, fault: str) -> Result:
    assert result.run is not None
    return dataclasses.replace(result, run=dataclasses.replace(result.run, faults={**result.run.faults, "*": fault}))


def _unlike(result: Result, earlier: Iterable[Result], logs_of: Mapping[str, Read]) -> Result:
    """A result; with a fault if its log is that of an earlier arm but for the header, blanks or some lines."""
    mine = logs_of.get(result.arm.name)
    for other in earlier:
        theirs = logs_of.get(other.arm.name)
        if mine is None or theirs is None or result.run is None or other.run is None:
            continue
        if _same_values(result.run, other.run) and (held := shared(mine, theirs)):
            return _faulted(result, f"{mine.path.name} has the values of {other.arm.name} and {held} of it: {COPY}")
    return result


def _same_values(one: Run, other: Run) -> bool:
    """Whether each metric that both runs have is the same on half of the steps: else neither log is read again."""
    both = one.series.keys() & other.series.keys()
    return bool(both) and all(_equal(one.series[name], other.series[name]) for name in both)


def _equal(one: Series, other: Series) -> bool:
    if one.steps == other.steps:
        same = sum(map(bool, map(operator.eq, one.values, other.values)))
    else:
        at = dict(zip(other.steps, other.values, strict=True))
        same = sum(at.get(step) == value for step, value in zip(one.steps, one.values, strict=True))
    return 2 * same >= max(len(one.steps), len(other.steps), 1)


def shared(one: Read, other: Read) -> str:
    """What two logs have in common that two runs cannot, such as `32 clock times`; empty where nothing of it is found.

    Clocks on lines of half as many steps count, as they do for `unrepeatable`. What else tells runs apart must not
    differ: dates of the data are the same in two runs, and the clock beside them is not.
    """
    if not (one.path.exists() and other.path.exists()):
        return ""
    mine, theirs = (logs.read(it.path, it.reader, Arm(name="", role="base"), pattern=it.pattern) for it in (one, other))
    if not logs.READERS[one.reader].folders:
        seen, known = _dated(one.path), dict(_dated(other.path))
        steps = max((len(series.steps) for series in mine.series.values()), default=0)
        enough = (len(seen) if one.path.stat().st_size > SEARCHED else steps) / 2
        both = [seconds for line, seconds in seen if line in known]
        if len(set(both)) >= FEW and len(both) >= enough:
            return f"{len(both)} clock times"
        if len({seconds for _, seconds in seen}) >= FEW and len(seen) >= enough:
            return ""
    timed = [name for name in mine.series if TIMED.fullmatch(name) and _readings(mine.series[name]) >= FEW]
    if timed and all(name in theirs.series and _equal(mine.series[name], theirs.series[name]) for name in timed):
        return f"{_readings(mine.series[timed[0]])} values of {timed[0]}"
    return ""


def _dated(log: Path) -> list[tuple[bytes, bytes]]:
    """The lines of a log that have a clock, as far as two runs cannot share it, and its seconds.

    Those are its clocks; a whole second two runs may share, so all behind it belongs to it.
    """
    with log.open("rb") as file:
        text = ESCAPES_IN_BYTES.sub(b"", file.read(SEARCHED))
    found = []
    for line in text.splitlines():
        clocks = [one for clock in CLOCKS.values() for one in clock.finditer(line)]
        if clocks and clocks[0].re is not CLOCKS["rates"]:
            behind = [line[clocks[0].start() :]] if clocks[0][1].isdigit() else [one[0] for one in clocks]
            found.append((b" ".join(b" ".join(behind).split()), clocks[0][1]))
    return found


def unrepeatable(log: Path, reader: str, pattern: str | None) -> str:
    """What in a log cannot be the same in another run, such as `32 clock times`; empty where nothing of it is found.

    Training that is deterministic to the bit repeats its losses, but neither the clock nor its speed. Dates on fewer
    than half as many lines as there are steps may be of the data, or of commits.
    """
    if logs.READERS[reader].folders:
        return "the time at which each value was written"
    with log.open("rb") as file:
        text = file.read(SEARCHED)
    found = logs.read(log, reader, Arm(name=log.name, role="base"), pattern=pattern)
    steps = max((len(series.steps) for series in found.series.values()), default=0)
    for name, clock in CLOCKS.items():
        seen = [one[1] for one in clock.finditer(text)]
        if len(set(seen)) >= FEW and (2 * len(seen) >= steps or log.stat().st_size > SEARCHED):
            return f"{len(seen)} {name}"
    for metric, series in found.series.items():
        if TIMED.fullmatch(metric) and (count := _readings(series)) >= FEW:
            return f"{count} values of {metric}"
    return ""


def _readings(series: Series) -> int:
    """How many different values are no whole numbers, where at least three decimals are printed; or 0."""
    if not series.resolution < 1e-3:
        return 0
    different = set(filter(math.isfinite, series.values))
    return sum(not value.is_integer() for value in different) if 2 * len(different) > len(series.values) else 0
