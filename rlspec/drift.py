"""The drift judgment: is the feature as far from the base runs as they are from each other?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlspec import compare, drift_doubts, joining, verdicts
from rlspec.drift_evidence import figures, remarks
from rlspec.drift_findings import broken_steps, findings
from rlspec.envelope import Envelope, measure
from rlspec.errors import SpecError
from rlspec.model import Judgment, Row, Run, Status, Verdict

NOT_JUDGED = ("out_of_scope", "not_applicable")
SETTLED_BY_MORE = ("grey_band", "rounding", "split_bases", "spike", "late")  # causes of INVESTIGATE


def default_metrics(names: Sequence[str], runs: Sequence[Run]) -> tuple[str, ...]:
    """Those of `names` that at least one run prints, in the order of `names`."""
    return tuple(name for name in names if any(joining.has(run, name) for run in runs))


def wants_base_run(judgment: Judgment, verdict: Verdict, base_runs: int) -> bool:
    """Whether one more base run could settle this verdict.

    It could in the grey band, on a floor of flips, of which more may come, where base runs are of two kinds, where they
    have not shown what the feature does on few steps, for a FAIL that rests on one envelope, and where base runs are
    equal and too few count.
    """
    if base_runs >= judgment.max_base_runs:
        return False
    cause = verdict.evidence.get("cause")
    if verdict.status == "INVESTIGATE":
        # Not on a zero envelope: an equal run is not counted. Not on an unstable fixture: more such runs give more
        # such envelopes. Not on differing machines: one more run here says nothing about the machine there.
        # Nor where digits differ.
        return cause in SETTLED_BY_MORE
    if verdict.status == "ERROR":
        return cause == "equal_base_runs"
    counted = verdict.evidence.get("base_runs_counted")
    return verdict.status == "FAIL" and judgment.confirm_fail and cause == "ratio" and counted == 2


def judge_drift(
    judgment: Judgment, runs: Sequence[Run], resolve: Callable[[str], Row], beside: Sequence[str] = ()
) -> Verdict:
    """PASS, INVESTIGATE or FAIL by the ratio of the feature's drift to the run-to-run floor; ERROR without a floor.

    `runs` in the order of the arms, the first base run is the reference; `resolve` gives the row of a judgment and
    may raise SpecError, as does a row without the limits `pass_below` and `fail_above`. `beside` are metrics that have
    verdicts of their own. Feature runs of different settings are no sample of one thing: each group of equal settings
    is judged by itself, and the worst decides.
    """
    bases = [run for run in runs if run.arm.role == "base"]
    features = [run for run in runs if run.arm.role == "feature"]
    groups = joining.alike(features) or [[]]
    answers = [_sound(bases, group, _answer(judgment, bases, group, resolve), beside) for group in groups]
    answer = _worst(groups, answers)
    notes = [joining.attributed(run.arm.name, note) for run in (*bases, *features) for note in run.notes]
    return Verdict(
        judgment="drift",
        subject=judgment.metric or "",
        status=answer.status,
        reason=answer.reason,
        statistic=answer.statistic,
        row=answer.row,
        evidence={"floor": None, "base_runs": len(bases), "steps_judged": None, **answer.evidence},
        notes=tuple(dict.fromkeys([*notes, *answer.notes])),
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    """The part of a verdict that a rule decides."""

    status: Status
    reason: str
    row: Row | None = None
    statistic: float | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()


def _worst(groups: Sequence[Sequence[Run]], answers: Sequence[_Answer]) -> _Answer:
    """The answer of the group that came out worst, of several such that with the largest ratio; the others as notes."""
    status = verdicts.worst(answer.status for answer in answers)
    of_it = [answer for answer in answers if answer.status == status]
    chosen = max(of_it, key=lambda answer: -math.inf if answer.statistic is None else answer.statistic)
    others = [
        f"{', '.join(run.arm.name for run in group)} of other settings: {answer.status}, {answer.reason}"
        for group, answer in zip(groups, answers, strict=True)
        if answer is not chosen
    ]
    return replace(chosen, notes=[*chosen.notes, *others]) if others else chosen


def _error(found: Sequence[str], row: Row | None = None) -> _Answer:
    return _Answer("ERROR", found[0], row, evidence={"findings": list(found)}, notes=found[1:])


def _answer(
    judgment: Judgment, bases: Sequence[Run], features: Sequence[Run], resolve: Callable[[str], Row]
) -> _Answer:
    metric = judgment.metric or ""
    if lack := _lack_of_runs(judgment, len(bases), len(features)):
        return _error([lack])
    row = resolve(_row_name(judgment, len(bases)))
    if row.status in NOT_JUDGED:
        return _Answer("N/A", row.reason, row)
    bad = [text for run in features for text in joining.non_finite(metric, run)]
    if found := findings(metric, bases, features):
        return _error([*found, *bad], row)
    if bad:
        return _Answer("FAIL", bad[0], row, evidence={"cause": "non_finite", "findings": bad}, notes=bad[1:])
    envelope, runs = measure(metric, bases, features), [*bases, *features]
    row = resolve(_row_name(judgment, len(envelope.bases)))
    limits = _limits(row)
    evidence = figures(envelope, limits, runs)
    notes = [*envelope.dropped, *remarks(envelope, evidence, limits, runs)]
    answer = _judge(judgment, envelope, row, limits)
    return replace(answer, evidence={**evidence, **answer.evidence}, notes=[*notes, *answer.notes])


def _sound(bases: Sequence[Run], features: Sequence[Run], answer: _Answer, beside: Sequence[str]) -> _Answer:
    """An answer, but never a PASS of runs whose gradients were NaN: what they would have done to the metric is lost."""
    bad = [text for run in features for text in broken_steps(run, beside)]
    if not bad or answer.status in ("ERROR", "N/A"):
        return answer
    if shown := [text for run in bases for text in broken_steps(run, beside)]:
        status: Status = "INVESTIGATE" if answer.status == "PASS" else answer.status
        reason = f"{answer.reason}; but {bad[0]}, as in the base runs ({shown[0]})"
    else:
        status, reason = "FAIL", bad[0]
    evidence = {**answer.evidence, "cause": "non_finite", "findings": bad}
    return replace(answer, status=status, reason=reason, evidence=evidence, notes=[*answer.notes, *bad[1:]])


def _row_name(judgment: Judgment, base_runs: int) -> str:
    return f"drift_calibrated_{min(max(base_runs, 3), 5)}" if judgment.judge == "calibrated" else "drift"


def _limits(row: Row) -> tuple[float, float]:
    """`pass_below` and `fail_above`, nan where the row only measures."""
    if row.status == "measured":
        return math.nan, math.nan
    try:
        return row.limits["pass_below"], row.limits["fail_above"]
    except KeyError as missing:
        raise SpecError(
            f"contract row {row.id} has no limit {missing.args[0]}; drift needs pass_below and fail_above"
        ) from None


def _lack_of_runs(judgment: Judgment, bases: int, features: int) -> str:
    if not features:
        return "there is no feature run to judge: add an arm of role feature"
    if bases < 2:
        return f"drift needs two base runs of the same code for its floor, there are {bases}: add an arm of role base"
    if judgment.judge == "calibrated" and bases < 3:
        return f"judge: calibrated needs three base runs, {bases} count: add base arms, or use judge: ratio"
    return ""


def _judge(judgment: Judgment, envelope: Envelope, row: Row, limits: tuple[float, float]) -> _Answer:
    if envelope.floor == "zero":
        return _judge_zero(judgment, envelope, row)
    if lack := _lack_of_runs(judgment, len(envelope.bases), len(envelope.features)):
        return replace(_error([lack], row), evidence={"findings": [lack], "cause": "equal_base_runs"})
    if not 0 < envelope.width < math.inf:
        return _error([f"the differences of the base runs do not fit a double (envelope {envelope.width})"], row)
    answer = _judge_ratio(envelope, row, limits)
    return answer if row.status == "measured" else _doubted(envelope, answer, limits)


def _judge_zero(judgment: Judgment, envelope: Envelope, row: Row) -> _Answer:
    """No ratio exists here, so an unstable fixture does not matter: equal bits are equal bits."""
    base, unit, gated = envelope.bases[0], 2 * envelope.resolution, row.status != "measured"
    notes = [f"the printed resolution hides any difference below {unit:g}"] if unit else []
    if envelope.perturbed:
        lost = f"{envelope.perturbed[0]} is perturbed but equals {base.arm} to the bit"
        answer = _error([f"{lost}: the perturbation did not reach the training"], row)
        return replace(answer, notes=notes)
    printed = f"as printed (to {unit:g})" if unit else "at full precision"
    moved = [at for at, pair in enumerate(envelope.cross[0]) if pair.differing]
    if not moved:
        reason = f"identical to the bit in all runs on all {envelope.cross[0][0].steps} judged steps, {printed}"
        return _Answer("PASS" if gated else "MEASURED", reason, row, evidence={"cause": "identical"}, notes=notes)
    feature, pair = envelope.features[moved[0]], envelope.cross[0][moved[0]]
    first = _first_difference(envelope, moved[0])
    reason = (
        f"this stack is bit-reproducible (the base runs are identical, {printed}), so any difference is the change's "
        f"own: {feature.arm} differs on {pair.differing} of {pair.steps} steps, first at step {first['step']}"
    )
    evidence = {"cause": "zero_envelope", "first_difference": first}
    if not gated:
        return _Answer("MEASURED", reason, row, evidence=evidence, notes=notes)
    if doubt := drift_doubts.of_digits(envelope):
        return _Answer("INVESTIGATE", f"{feature.arm} differs; but {doubt[1]}", row, None, {"cause": doubt[0]}, notes)
    if judgment.zero_envelope == "investigate":
        return _Answer("INVESTIGATE", reason, row, evidence=evidence, notes=notes)
    answer = _Answer("FAIL", reason, row, evidence=evidence, notes=notes)
    return _by_machine(envelope, answer) if envelope.machines else answer


def _first_difference(envelope: Envelope, feature: int) -> dict[str, Any]:
    series = envelope.features[feature]
    delta = compare.deltas(envelope.bases[0], series, envelope.start)
    at = next(at for at, value in enumerate(delta) if value)
    return {"arm": series.arm, "step": series.steps[envelope.start + at], "value": delta[at]}


def _judge_ratio(envelope: Envelope, row: Row, limits: tuple[float, float]) -> _Answer:
    below, above = limits
    ratio = compare.divide(envelope.drift, envelope.width)
    diluted = compare.divide(envelope.drift, envelope.diluted_width)
    evidence = {"ratio": ratio, "diluted_ratio": diluted, "limits": {"pass_below": below, "fail_above": above}}
    reason = _ratio_text(envelope, ratio)
    if row.status == "measured":
        return _Answer("MEASURED", f"{reason}; the contract does not gate it", row, ratio, evidence)
    # In the passing direction: a ratio that is nan or infinite ends in FAIL.
    if ratio < below:
        return _Answer("PASS", f"{reason}, below {below:g}", row, ratio, {**evidence, "cause": "ratio"})
    if ratio <= above:
        reason = f"{reason}, between {below:g} and {above:g}: another base run may settle it"
        return _Answer("INVESTIGATE", reason, row, ratio, {**evidence, "cause": "grey_band"})
    reason, notes = f"{reason}, above {above:g}", []
    if len(envelope.bases) == 2:
        reason += " (one envelope)"
        notes = ["one base pair with an unlucky narrow envelope fails good code: confirm_fail: true adds a run"]
    return _Answer("FAIL", reason, row, ratio, {**evidence, "cause": "ratio"}, notes)


def _ratio_text(envelope: Envelope, ratio: float) -> str:
    features = " and ".join(series.arm for series in envelope.features)
    others = f"the {len(envelope.bases)} base runs" if envelope.pooled else envelope.bases[0].arm
    floor = f"{envelope.width:.3g} by which the base runs differ"
    if envelope.sparse:
        floor += " where they differ (sparse)"
    return f"{features} drifts {envelope.drift:.3g} from {others}, {ratio:.4g} times the {floor}"


def _doubted(envelope: Envelope, answer: _Answer, limits: tuple[float, float]) -> _Answer:
    """A ratio's answer, unless the runs, their digits, the fixture or the machines account for it."""
    if answer.status != "FAIL" and (split := _split_features(envelope, limits[1])):
        reason = f"{answer.reason}; but {', '.join(split)}, so the feature runs are not of one kind"
        evidence = {**answer.evidence, "cause": "split_features"}
        answer = replace(answer, status="INVESTIGATE", reason=reason, evidence=evidence, notes=[*answer.notes, *split])
    if said := drift_doubts.kinds_text(envelope):
        answer = replace(answer, notes=[*answer.notes, said])
    if envelope.jump:
        return _unstable(envelope, answer)
    if doubt := drift_doubts.find(envelope, answer.status, limits[1]):
        cause, said = doubt
        evidence = {**answer.evidence, "cause": cause}
        return replace(answer, status="INVESTIGATE", reason=f"{answer.reason}; but {said}", evidence=evidence)
    if answer.status == "FAIL" and envelope.machines:
        return _by_machine(envelope, answer)
    if answer.status == "PASS" and envelope.machines:
        hidden = f"such an envelope hides about half of steady offsets of {limits[0] * envelope.width:.3g}"
        note = f"the arms' machines differ in {', '.join(envelope.machines)}: {hidden}"
        return replace(answer, notes=[*answer.notes, note])
    return answer


def _split_features(envelope: Envelope, above: float) -> list[str]:
    """Pooling several feature runs must not hide one that is far off."""
    if len(envelope.features) < 2:
        return []
    columns = envelope.columns
    own = [(pairs[0].b, compare.mean((pair.mean_abs for pair in pairs), len(pairs))) for pairs in columns]
    ratios = [(arm, compare.divide(drift, envelope.width)) for arm, drift in own]
    return [f"{arm} alone reads {ratio:.3g}, above {above:g}" for arm, ratio in ratios if not ratio <= above]


def _unstable(envelope: Envelope, answer: _Answer) -> _Answer:
    assert envelope.jump is not None
    jump = f"{envelope.jump.arm} jumps from {envelope.jump.before:.3g} to {envelope.jump.value:.3g}"
    reason = (
        f"unstable fixture: gradient norm of {jump} at step {envelope.jump.step}, so the ratio {answer.statistic:.4g} "
        "means little either way: use a learning-rate warm-up"
    )
    return replace(answer, status="INVESTIGATE", reason=reason, evidence={**answer.evidence, "cause": "unstable"})


def _by_machine(envelope: Envelope, answer: _Answer) -> _Answer:
    keys = ", ".join(envelope.machines)
    advice = f"the arms' machines differ in {keys}: re-run on the same nodes before you blame the code"
    evidence = {**answer.evidence, "cause": "machine"}
    return replace(answer, status="INVESTIGATE", reason=f"{answer.reason}; {advice}", evidence=evidence)
