"""Whether a log holds what no two runs have in common, so that a second log with the same bytes is a copy of it."""

from __future__ import annotations

import dataclasses
import filecmp
import itertools
import math
import re
from collections.abc import Iterable, Mapping
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


def twins(files: Mapping[str, Path]) -> dict[str, str]:
    """Arms whose log is that of an earlier arm to the byte, and that arm. Folders are not looked at."""
    found: dict[str, str] = {}
    for one, other in itertools.combinations([name for name, file in files.items() if file.is_file()], 2):
        if other not in found and filecmp.cmp(files[one], files[other], shallow=False):
            found[other] = one
    return found


def refused(results: Iterable[Result], files: Mapping[str, Path], reader: str, pattern: str | None) -> list[Result]:
    """The results; that of a copied log, which would be compared with itself, with a fault."""
    same = twins(files)
    return [_refused(one, same.get(one.arm.name), files, reader, pattern) for one in results]


def _refused(result: Result, twin: str | None, files: Mapping[str, Path], reader: str, pattern: str | None) -> Result:
    if result.run is None or twin is None:
        return result
    log = files[result.arm.name]
    held = unrepeatable(log, reader, pattern)
    if not held:
        return result
    fault = f"{log.name} is the log of {twin} to the byte, with {held}: {COPY}"
    return dataclasses.replace(result, run=dataclasses.replace(result.run, faults={**result.run.faults, "*": fault}))


def unrepeatable(log: Path, reader: str, pattern: str | None) -> str:
    """What in a log cannot be the same in another run, such as `32 clock times`; empty where nothing of it is found.

    Training that is deterministic to the bit repeats its losses, but neither the clock nor its speed.
    """
    if logs.READERS[reader].folders:
        return "the time at which each value was written"
    with log.open("rb") as file:
        text = file.read(SEARCHED)
    for name, clock in CLOCKS.items():
        seen = {one[0]: one[1] for one in clock.finditer(text)}
        if len(set(seen.values())) >= FEW:
            return f"{len(seen)} {name}"
    found = logs.read(log, reader, Arm(name=log.name, role="base"), pattern=pattern)
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
