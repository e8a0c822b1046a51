"""Whether runs can be joined by step number, and if not, why: names, faults, absent metrics, sets of steps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from rlspec import compare
from rlspec.model import Arm, Run, Series

# Variables by which runs of one sample differ: seeds, and where each writes to. What is read or loaded, such as data,
# weights or code, is a setting, and so is a number or a switch by whatever name, such as FAN_OUT=4.
SEED = re.compile(r"SEED|(?:^|_)RNG(?:_|$)", re.IGNORECASE)
SEEDED = re.compile(r"seed[=: ]+\d", re.IGNORECASE)  # in a value, such as --seed 1
PLACE = re.compile(r"(?:^|_)(?:\w*DIR|\w*PATH|OUT|OUTPUTS?|(?:OUT|LOG)_?FILE|LOGS?|(?:RUN|WANDB)_NAME)$", re.IGNORECASE)
INPUT = re.compile(
    r"DATA|CORPUS|MODEL|WEIGHTS|TOKENIZER|VOCAB|TEACHER|INIT|LOAD|RESUME|RESTORE|INPUT|CONFIG|CFG|PYTHON|LIB|PRELOAD"
    r"|PLUGIN|KERNEL|CODE|SRC|SOURCE|HOME|CUDA|(?:^|_)(?:BIN|IN)(?:_|$)|^PATH$",
    re.IGNORECASE,
)
SWITCH = re.compile(r"[+-]?[\d.]*(?:[eE][+-]?\d+)?|true|false|on|off|yes|no|none", re.IGNORECASE | re.ASCII)
FOLDERS = ("/", "./", "../", "~")


def findings(metric: str, runs: Sequence[Run]) -> list[str]:
    """Why `metric` cannot be compared over `runs`: equal names, faults, absence, step sets that differ or have holes.

    Without findings, all series of `metric` have the same steps, so position joins them by step number.
    """
    names = Counter(run.arm.name for run in runs)
    if twice := [name for name, count in names.items() if count > 1]:
        return [f"several runs are called {twice[0]}: give each its own name"]
    if found := [*_faults(metric, runs), *_absences(metric, runs)]:
        return found
    totals = {run.arm.name: run.steps_expected for run in runs if run.steps_expected is not None}
    if len(set(totals.values())) > 1:
        each = ", ".join(f"{arm} {total}" for arm, total in totals.items())
        return [f"the runs expect different numbers of steps: {each}; give all the same"]
    return _step_findings([run.series[metric] for run in runs], next(iter(totals.values()), None))


def non_finite(metric: str, run: Run) -> list[str]:
    """The first value of a run that is nan or infinite, in words; empty if there is none."""
    series = run.series[metric] if has(run, metric) else None
    at = compare.first_non_finite(series) if series else None
    if series is None or at is None:
        return []
    return [f"{run.arm.name}: {metric} is {series.values[at]} at step {series.steps[at]}, not a finite number"]


def has(run: Run, metric: str) -> bool:
    """Whether a run has any value of a metric."""
    return metric in run.series and len(run.series[metric].steps) > 0


def attributed(arm: str, note: str) -> str:
    """A note that begins with the arm that it is about."""
    return note if note.startswith(arm) else f"{arm}: {note}"


def machine_differences(runs: Sequence[Run]) -> dict[str, dict[str, str]]:
    """Keys of the machine fingerprints that differ, with the value of each arm that has one."""
    keys = sorted({key for run in runs for key in run.machine})
    values: Mapping[str, dict[str, str]] = {
        key: {run.arm.name: run.machine[key] for run in runs if key in run.machine} for key in keys
    }
    return {key: by_arm for key, by_arm in values.items() if len(set(by_arm.values())) > 1}


def alike(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs whose arms declare the same, seeds and places to write to apart: runs of one sample differ in those."""
    groups: list[tuple[Arm, list[Run]]] = []
    for run in runs:
        arm = _without_seed_and_places(run.arm)
        same = next((group for other, group in groups if other == arm), None)
        if same is None:
            groups.append((arm, [run]))
        else:
            same.append(run)
    return [group for _, group in groups]


def seeds(environments: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Variables that name a seed and differ between arms, with their values in words, such as `1 in base0, 2 in base1`.

    What such arms differ by is what seeds do, which is far more than two runs of one thing part by.
    """
    given = {pair for each in environments.values() for pair in each.items()}
    names = sorted({name for name, value in given if SEED.search(name) or SEEDED.search(value)})
    values = {name: {arm: each.get(name, "nothing") for arm, each in environments.items()} for name in names}
    return {
        name: ", ".join(f"{value} in {arm}" for arm, value in by_arm.items())
        for name, by_arm in values.items()
        if len(set(by_arm.values())) > 1
    }


def _without_seed_and_places(arm: Arm) -> Arm:
    environment = {name: value for name, value in arm.environment.items() if not _tells_runs_apart(name, value)}
    perturb = {name: value for name, value in (arm.perturb or {}).items() if name != "seed"}
    return replace(arm, name="", records=None, environment=environment, perturb=perturb)


def _tells_runs_apart(name: str, value: str) -> bool:
    if SEED.search(name):
        return True
    place = value.startswith(FOLDERS) or (PLACE.search(name) is not None and not SWITCH.fullmatch(value))
    return place and not INPUT.search(name)


def _faults(metric: str, runs: Sequence[Run]) -> list[str]:
    return [attributed(run.arm.name, run.faults[key]) for run in runs for key in ("*", metric) if key in run.faults]


def _absences(metric: str, runs: Sequence[Run]) -> list[str]:
    sound = [run for run in runs if not {"*", metric} & run.faults.keys()]
    absent = [run.arm.name for run in sound if not has(run, metric)]
    if not absent:
        return []
    if others := [run.arm.name for run in runs if has(run, metric)]:
        return [f"{metric} is missing in {', '.join(absent)}, though printed by {', '.join(others)}"]
    known = sorted({name for run in runs for name in run.series if has(run, name)})
    return [f"no run prints {metric}; they print {', '.join(known) or 'nothing that could be read'}"]


def _step_findings(series: Sequence[Series], total: int | None) -> list[str]:
    steps = series[0].steps
    same = all(one.steps == steps for one in series)
    complete = steps[-1] - steps[0] == len(steps) - 1 and (total is None or steps[-1] == total - (steps[0] == 0))
    if same and complete:
        return []
    union = steps if same else sorted(set().union(*(one.steps for one in series)))
    if same:
        found = _holes("every run", series[0], union, total)
    else:
        found = [text for one in series for text in _holes(one.arm, one, union, total)]
    return found or _irregular(union)


def _holes(who: str, series: Series, union: Sequence[int], total: int | None) -> list[str]:
    """Steps that a run lacks of those that any run has or that are due, and steps that it has beyond the last due."""
    steps, have = series.steps, set(series.steps)
    due = f"expected T = {total}" if total is not None else f"the runs reach step {union[-1]}"
    found = []
    missing = list(islice((step for step in _wanted(union, total) if step not in have), 6))
    if missing:
        ends = f", it ends at step {steps[-1]}" if missing[0] > steps[-1] else ""
        found.append(f"{who} is missing {_listed(missing)} of {series.metric} ({due}{ends})")
    if total is not None and steps[-1] > total:
        extra = [step for step in steps if step > total]
        found.append(f"{who} has {_listed(extra)} of {series.metric} beyond the expected T = {total}")
    return found


def _wanted(union: Sequence[int], total: int | None) -> Iterator[int]:
    """The steps with holes filled, up to the last one that is due. Lazy: one stray step can be far away."""
    steps = [step for step in union if total is None or step <= total]
    if not steps:
        return
    apart = compare.spacing(steps)
    final = steps[-1] if total is None else total - 1 if steps[0] == 0 else total
    for step, following in zip(steps, islice(steps, 1, None), strict=False):
        yield from range(step, following, apart)
    yield from range(steps[-1], max(final, steps[-1]) + 1, apart)


def _listed(steps: Sequence[int]) -> str:
    text = ", ".join(map(str, steps[:5]))
    return f"step {text}" if len(steps) == 1 else f"steps {text}{', …' if steps[5:] else ''}"


def _irregular(steps: Sequence[int]) -> list[str]:
    apart, gaps = compare.spacing(steps), compare.gaps(steps)
    at = next((at for at, gap in enumerate(gaps[1:-1], 1) if gap != apart), None)
    if at is None:
        return []
    where = f"steps {steps[at]} and {steps[at + 1]} are {gaps[at]} apart, the others {apart}"
    return [f"the printed steps are irregular: {where}, so a missing step cannot be told"]
