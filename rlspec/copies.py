"""Whether a log holds what no two runs have in common, so that a second log with the same bytes is a copy of it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlspec import logs
from rlspec.model import Arm, Result, Series

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
    same = twins(logs_of)
    return [_refused(one, logs_of, same[one.arm.name]) if one.arm.name in same else one for one in results]


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
    fault = f"{logs_of[result.arm.name].path.name} is the log of {twin} to the byte, with {held}: {COPY}"
    return dataclasses.replace(result, run=dataclasses.replace(result.run, faults={**result.run.faults, "*": fault}))


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
        seen = {one[0]: one[1] for one in clock.finditer(text)}
        if len(set(seen.values())) >= FEW and (2 * len(seen) >= steps or log.stat().st_size > SEARCHED):
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
