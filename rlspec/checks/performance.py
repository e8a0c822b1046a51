"""What does a change cost or gain in step time, throughput and memory? Measured, never gated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rlspec import plan, timing
from rlspec.checks import training, training_rules
from rlspec.contract import Contract
from rlspec.logs import READERS
from rlspec.model import Arm, Result, Spec, Verdict

lint, parse, expand = training_rules.lint, training.parse, plan.steps


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
        metric, factor = metric_of(spec, judgment.check)
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


def metric_of(spec: Spec, check: str) -> tuple[str, float]:
    """The trainer's name of a figure, and the factor to its unit."""
    assert spec.trainer is not None
    return READERS[spec.trainer.reader].timing.get(check, (check, 1.0))


def _nothing(spec: Spec) -> Verdict:
    assert spec.trainer is not None
    reason = f"reader {spec.trainer.reader} found no step time, throughput or memory in any arm"
    return Verdict(judgment="step_time", subject="*", status="ERROR", reason=reason)


def more(spec: Spec, verdicts: Sequence[Verdict]) -> Arm | None:
    return None
