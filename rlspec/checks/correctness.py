"""Does a change train like the base, within what two base runs differ by?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from rlspec import drift, plan
from rlspec.checks import training, training_rules
from rlspec.contract import Contract
from rlspec.logs import READERS
from rlspec.model import Arm, Judgment, Result, Run, Spec, Verdict

lint, parse, expand = training_rules.lint, training.parse, plan.steps


def judge(spec: Spec, results: Sequence[Result], contract: Contract) -> list[Verdict]:
    """One drift verdict a metric. An arm that left nothing behind makes every one an ERROR."""
    failures = [f"arm {result.arm.name}: {result.failure}" for result in results if result.failure]
    judgments = [one for judgment in spec.judgments for one in _metrics(spec, judgment, results)]
    if failures or any(result.run is None for result in results):
        reason = "; ".join(failures) or "an arm has not run"
        return [Verdict(judgment="drift", subject=j.metric or "*", status="ERROR", reason=reason) for j in judgments]
    runs = [result.run for result in results if result.run is not None]
    beside = [one.metric for one in judgments if one.metric]
    made = [drift.judge_drift(j, runs, partial(contract.resolve, subject=j.metric or "*"), beside) for j in judgments]
    if made and (said := _left_out(spec, runs, [verdict.subject for verdict in made])):
        made[0] = dataclasses.replace(made[0], notes=(*made[0].notes, *said))
    return made


def _metrics(spec: Spec, judgment: Judgment, results: Sequence[Result]) -> list[Judgment]:
    """A judgment that names no metric stands for every usual one that a run prints, and for a loss in any case.

    A loss that changed its form would otherwise drop out of what is judged, and with it whatever the change did to it.
    """
    if judgment.metric is not None:
        return [judgment]
    usual = training.default_metrics(spec.data)
    runs = [result.run for result in results if result.run is not None]
    found = drift.default_metrics(usual, runs)
    losses = READERS[training.reader_name(spec.data)].losses
    if losses and not set(losses) & set(found):
        found = (next((one for one in losses if any(one in run.faults for run in runs)), losses[0]), *found)
    return [dataclasses.replace(judgment, metric=metric) for metric in found or usual[:1]]


def _left_out(spec: Spec, runs: Sequence[Run], judged: Sequence[str]) -> list[str]:
    """Usual metrics that no run has a readable value of, though they stand in a log; where a spec names none."""
    if all(judgment.metric is not None for judgment in spec.judgments):
        return []
    usual = (metric for metric in training.default_metrics(spec.data) if metric not in judged)
    why = ((metric, next((run.faults[metric] for run in runs if metric in run.faults), "")) for metric in usual)
    return [f"{metric} was not judged: {fault}" for metric, fault in why if fault]


def more(spec: Spec, verdicts: Sequence[Verdict]) -> Arm | None:
    """A further base arm where a verdict in the grey band asks for one."""
    bases = sum(arm.role == "base" for arm in spec.arms)
    by_metric = {judgment.metric: judgment for judgment in spec.judgments}
    for verdict in verdicts:
        judgment = by_metric.get(verdict.subject) or by_metric.get(None)
        if judgment is not None and drift.wants_base_run(judgment, verdict, bases):
            return plan.base_copy(spec)
    return None
