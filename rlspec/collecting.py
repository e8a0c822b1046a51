"""From what an arm left behind to its records: the trainer's own, a file at full precision beside them, or the log."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlspec import copies, logs, records
from rlspec.checks import training
from rlspec.errors import RunError, SpecError
from rlspec.model import Run, Spec, Step
from rlspec.reports import digest
from rlspec.trainers import TRAINERS, Beside

RECORDS = ".records.jsonl"


def beside(spec: Spec, step: Step) -> Path | None:
    """Where the run leaves what it measured beside its log, if it does."""
    exact = _exact(spec)
    return step.records.with_name(step.records.name.removesuffix(RECORDS) + exact.suffix) if exact else None


def _exact(spec: Spec) -> Beside | None:
    """The trainer's own, or what the reader of a user's trainer says."""
    if spec.trainer is None:
        return None
    if spec.trainer.suffix is None:
        return TRAINERS[spec.trainer.name].beside
    return Beside(suffix=spec.trainer.suffix, reader=spec.trainer.reader)


def read_from(spec: Spec, steps: Sequence[Step], states: Mapping[str, Mapping[str, Any]]) -> dict[str, copies.Read]:
    """What the arms were read from; not where the trainer writes records itself, nor of runs that kept no digest."""
    assert spec.trainer is not None
    exact, found = _exact(spec), dict[str, copies.Read]()
    reader = exact.reader if exact else spec.trainer.reader
    for step in steps:
        state = states.get(step.arm.name) or {}
        if made := state.get("read_digest"):
            own, earlier = beside(spec, step) or step.log, Path(state.get("log") or "")
            place = earlier if not own.exists() and earlier.is_file() else own  # of an arm of another run
            found[step.arm.name] = copies.Read(place, made, reader, spec.trainer.pattern)
    return found


def clear(spec: Spec, step: Step) -> None:
    """Take away what an earlier try that failed has left."""
    step.records.unlink(missing_ok=True)
    remove(beside(spec, step))


def remove(place: Path | None) -> None:
    """A file or a folder, if it is there."""
    if place is not None and place.is_dir():
        shutil.rmtree(place)
    elif place is not None:
        place.unlink(missing_ok=True)


def collect(spec: Spec, step: Step, state: dict[str, Any]) -> str | None:
    """Write the records of a training arm and note them in its state; why it cannot be done, or None."""
    if spec.trainer is not None:
        own = TRAINERS[spec.trainer.name].own_records
        try:
            found = records.read(step.records, step.arm) if own else _measured(spec, step)
        except (SpecError, RunError) as error:  # the arm has run, so this is its failure
            return str(error)
        if not own:
            records.write(found, step.records, spec.trainer.reader)
            state["read_digest"] = digest(beside(spec, step) or step.log)
        state["steps"] = max((len(series.steps) for series in found.series.values()), default=0)
    if not step.records.is_file():
        return f"the command wrote no {step.records.name}"
    state["records_digest"] = digest(step.records)
    return None


def _measured(spec: Spec, step: Step) -> Run:
    assert spec.trainer is not None
    asked = [judgment.metric for judgment in spec.judgments if judgment.metric]
    usual = training.default_metrics(spec.data)
    timed = [entry[0] for entry in logs.READERS[spec.trainer.reader].timing.values()]
    metrics = tuple(dict.fromkeys([*asked, *usual, *timed])) if usual else ()
    found = _due(_read(spec, step, metrics), spec.trainer.steps)
    reader, pattern = spec.trainer.reader, spec.trainer.pattern
    if step.log.is_file() and (told := logs.survived(step.log, found, reader, pattern)):
        found = dataclasses.replace(found, notes=(*found.notes, told))
    return found


def _due(found: Run, steps: int | None) -> Run:
    """A run with the number of steps that its spec declares, if it does."""
    if steps is None:
        return found
    if found.steps_expected not in (None, steps):
        fault = f"the log says that it has {found.steps_expected} steps, the spec says {steps}"
        found = dataclasses.replace(found, faults={**found.faults, "*": fault})
    return dataclasses.replace(found, steps_expected=steps)


def _read(spec: Spec, step: Step, metrics: tuple[str, ...]) -> Run:
    """The file beside the log, its metrics by the names that the log has for them, or the log."""
    assert spec.trainer is not None
    place, exact = beside(spec, step), _exact(spec)
    if place is None or exact is None:
        return logs.read(step.log, spec.trainer.reader, step.arm, metrics=metrics, pattern=spec.trainer.pattern)
    if not place.exists():
        raise RunError(f"the arm ended well and left no {place.name}, which reader {exact.reader} is to read")
    ours = {name: tag for tag, name in exact.names.items()}
    wanted = dict.fromkeys([*metrics, *ours])
    tags = [ours.get(name, name) for name in wanted]
    found = logs.read(place, exact.reader, step.arm, metrics=tags, pattern=spec.trainer.pattern)
    series = [dataclasses.replace(one, metric=exact.names.get(one.metric, one.metric)) for one in found.series.values()]
    faults = {exact.names.get(name, name): text for name, text in found.faults.items()}
    return dataclasses.replace(found, series={one.metric: one for one in series}, faults=faults)
