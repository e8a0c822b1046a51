"""What does a change cost or gain in step time, throughput and memory? Measured, never gated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlspec import plan, timing
from rlspec.checks import training
from rlspec.contract import Contract
from rlspec.logs import READERS
from rlspec.model import Arm, Document, Problem, Result, Spec, Step, Verdict


def lint(document: Document, broken: Iterable[str]) -> list[Problem]:
    return training.lint(document, broken)


def parse(document: Document) -> Spec:
    return training.parse(document)


def expand(spec: Spec, workspace: Path, logging: Path) -> tuple[Step, ...]:
    return plan.steps(spec, workspace, logging)


def judge(spec: Spec, results: Sequence[Result], contract: Contract) -> list[Verdict]:
    """One MEASURED verdict a figure; a usual one that no arm prints is left out, and the others say so."""
    assert spec.trainer is not None
    failures = [f"arm {result.arm.name}: {result.failure}" for result in results if result.failure]
    if failures or any(result.run is None for result in results):
        reason = "; ".join(failures) or "an arm has not run"
        return [Verdict(judgment=j.check, subject="*", status="ERROR", reason=reason) for j in spec.judgments]
    runs = [result.run for result in results if result.run is not None]
    reader = READERS[spec.trainer.reader]
    printed = {metric for run in runs for metric in run.series}
    asked = "judgments" in spec.data
    verdicts, absent = [], []
    for judgment in spec.judgments:
        metric, factor = metric_of(spec, judgment.check, printed)
        if metric not in printed and not asked:
            absent.append(judgment.check)
            continue
        contract.resolve(judgment.check)
        scope = reader.throughput_scope if judgment.check == "throughput" else ""
        verdicts.append(timing.judge_timing(judgment.check, runs, metric, factor, scope))
    if absent and verdicts:
        note = f"left out, since reader {spec.trainer.reader} found nothing of it: {', '.join(absent)}"
        verdicts[0] = dataclasses.replace(verdicts[0], notes=(*verdicts[0].notes, note))
    return verdicts or [_nothing(spec)]


def metric_of(spec: Spec, check: str, printed: Iterable[str]) -> tuple[str, float]:
    """The trainer's name of a figure, and the factor to its unit."""
    assert spec.trainer is not None
    found = READERS[spec.trainer.reader].timing.get(check)
    if isinstance(found, tuple) and found[0] in set(printed):
        return found
    return found or (check, 1.0)


def _nothing(spec: Spec) -> Verdict:
    assert spec.trainer is not None
    reason = f"reader {spec.trainer.reader} found no step time, throughput or memory in any arm"
    return Verdict(judgment="step_time", subject="*", status="ERROR", reason=reason)


def more(spec: Spec, verdicts: Sequence[Verdict]) -> Arm | None:
    return None
