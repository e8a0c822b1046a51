"""The drift judgment: is the feature as far from the base runs as they are from each other?"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from rlspec import compare
from rlspec.compare import Jump, Pair
from rlspec.errors import SpecError
from rlspec.model import Judgment, Row, Run, Series, Status, Verdict

NOT_JUDGED = ("out_of_scope", "not_applicable")
FEW_UNITS = 5  # an envelope of fewer units of the last printed digit is mostly rounding
ONE_SIDED_FROM = 8  # judged steps below which an equal sign on all of them is no news


def default_metrics(names: Sequence[str], runs: Sequence[Run]) -> tuple[str, ...]:
    """Those of `names` that at least one run prints, in the order of `names`."""
    return tuple(name for name in names if any(compare.has(run, name) for run in runs))


def wants_base_run(judgment: Judgment, verdict: Verdict, base_runs: int) -> bool:
    """Whether one more base run could settle this verdict: in the grey band, or a FAIL that rests on one envelope."""
    if base_runs >= judgment.max_base_runs:
        return False
    cause = verdict.evidence.get("cause")
    if verdict.status == "INVESTIGATE":
        # Not on a zero envelope: an equal run is not counted. Not on an unstable fixture: more such runs give more
        # such envelopes. Not on differing machines: one more run here says nothing about the machine there.
        return cause == "grey_band"
    counted = verdict.evidence.get("base_runs_counted")
    return verdict.status == "FAIL" and judgment.confirm_fail and cause == "ratio" and counted == 2


def judge_drift(judgment: Judgment, runs: Sequence[Run], resolve: Callable[[str], Row]) -> Verdict:
    """PASS, INVESTIGATE or FAIL by the ratio of the feature's drift to the run-to-run floor; ERROR without a floor.

    `runs` in the order of the arms, the first base run is the reference; `resolve` gives the row of a judgment and
    may raise SpecError, as does a row without the limits `pass_below` and `fail_above`.
    """
    metric = judgment.metric or ""
    bases = [run for run in runs if run.arm.role == "base"]
    features = [run for run in runs if run.arm.role == "feature"]
    used = [*bases, *features]
    evidence: dict[str, Any] = {"floor": None, "base_runs": len(bases), "steps_judged": None}
    notes = [compare.attributed(run.arm.name, note) for run in used for note in run.notes]
    verdict = _Draft(metric, evidence, notes)
    if lack := _lack_of_runs(judgment, len(bases), len(features)):
        return verdict.error([lack])
    row = resolve(_row_name(judgment, len(bases)))
    if row.status in NOT_JUDGED:
        return verdict.made("N/A", row.reason, row=row)
    bad = [text for run in features for text in _non_finite(run, metric)]
    if found := _findings(metric, bases, features):
        return verdict.error([*found, *bad], row)
    if bad:
        evidence |= {"cause": "non_finite", "findings": bad}
        notes += bad[1:]
        return verdict.made("FAIL", bad[0], row=row)

    counted, dropped = _counted([run.series[metric] for run in bases])
    notes += dropped
    series = [run.series[metric] for run in features]
    start = compare.first_judged(counted[0].steps)
    case = _Case(
        judgment=judgment,
        row=resolve(_row_name(judgment, len(counted))),
        bases=counted,
        features=series,
        start=start,
        perturbed=[run.arm.name for run in bases if run.arm.perturb],
        jump=_first_jump(bases),
        machines=compare.machine_differences(used),
        kept={one.arm: compare.deltas(counted[0], one, start) for one in (counted[1], series[0])},
    )
    return _judge(case, verdict, used)


class _Draft:
    """A verdict in the making: evidence and notes grow until it is made."""

    def __init__(self, metric: str, evidence: dict[str, Any], notes: list[str]) -> None:
        self.metric, self.evidence, self.notes = metric, evidence, notes

    def made(self, status: Status, reason: str, statistic: float | None = None, row: Row | None = None) -> Verdict:
        return Verdict(
            judgment="drift",
            subject=self.metric,
            status=status,
            reason=reason,
            statistic=statistic,
            row=row,
            evidence=self.evidence,
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def error(self, found: Sequence[str], row: Row | None = None) -> Verdict:
        self.evidence["findings"] = list(found)
        self.notes += found[1:]
        return self.made("ERROR", found[0], row=row)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What is left to judge once all runs can be read and joined."""

    judgment: Judgment
    row: Row
    bases: Sequence[Series]
    features: Sequence[Series]
    start: int
    perturbed: Sequence[str]
    jump: Jump | None
    machines: dict[str, dict[str, str]]
    kept: dict[str, array[float]]

    def delta(self, a: Series, b: Series) -> array[float]:
        """b - a over the judged steps; those of base0 to base1 and feat0, which are asked for twice, are kept."""
        return self.kept[b.arm] if a is self.bases[0] and b.arm in self.kept else compare.deltas(a, b, self.start)

    def pair(self, a: Series, b: Series) -> Pair:
        return compare.pair(a, b, self.delta(a, b))

    @property
    def pooled(self) -> bool:
        return len(self.bases) > 2 or len(self.features) > 1

    @property
    def resolution(self) -> float:
        return max(series.resolution for series in (*self.bases, *self.features))


# Can it be judged?


def _row_name(judgment: Judgment, base_runs: int) -> str:
    return f"drift_calibrated_{min(max(base_runs, 3), 5)}" if judgment.judge == "calibrated" else "drift"


def _lack_of_runs(judgment: Judgment, bases: int, features: int) -> str:
    if not features:
        return "there is no feature run to judge"
    if bases < 2:
        return f"drift needs two base runs of the same code for its floor, there are {bases}: add an arm of role base"
    if judgment.judge == "calibrated" and bases < 3:
        return f"judge: calibrated needs three base runs, {bases} count: add base arms, or use judge: ratio"
    return ""


def _non_finite(run: Run, metric: str) -> list[str]:
    series = run.series[metric] if compare.has(run, metric) else None
    at = compare.first_non_finite(series) if series else None
    if series is None or at is None:
        return []
    return [f"{run.arm.name}: {metric} is {series.values[at]} at step {series.steps[at]}, not a finite number"]


def _findings(metric: str, bases: Sequence[Run], features: Sequence[Run]) -> list[str]:
    runs = [*bases, *features]
    found = [f"{text}; without a finite base there is no floor" for run in bases for text in _non_finite(run, metric)]
    broken = compare.findings(metric, runs)
    found += [*broken, *_different_data(runs)]
    if found:
        return found
    series = [run.series[metric] for run in runs]
    steps = series[0].steps
    if compare.first_judged(steps) == len(steps):
        return [f"step {steps[0]} is the only one of {metric}, and it precedes any update: nothing to judge"]
    value = compare.single_value(series)
    if value is not None:
        return [_cannot_fail(metric, value)]
    return _printed_perturbation(metric, bases, series)


def _different_data(runs: Sequence[Run]) -> list[str]:
    for a, b in combinations(runs, 2):
        if a.data == b.data:
            continue
        step = min((step for step in a.data if step in b.data and a.data[step] != b.data[step]), default=None)
        if step is not None:
            names = f"{a.arm.name} read {a.data[step]} and {b.arm.name} read {b.data[step]}"
            return [f"different data at step {step}: {names}; the arms must see the same batches"]
    return []


def _cannot_fail(metric: str, value: float) -> str:
    text = f"{metric} is the same constant {value:g} in all runs: this gate cannot fail"
    if value == -1:
        return f"{text} (-1 is the placeholder of a rank without a loss: print it from the last pipeline stage)"
    if value == 1 and "balanc" in metric:
        return f"{text} (forced routing pins it at 1: judge it with real routing)"
    return text


def _printed_perturbation(metric: str, bases: Sequence[Run], series: Sequence[Series]) -> list[str]:
    """One ulp of the weights moves a loss by less than printed digits show: such a floor needs fp32's precision."""
    perturbed = [run.arm.name for run in bases if run.arm.perturb]
    unit = 2 * max(one.resolution for one in series)
    if not perturbed or unit <= 2**-23 * max(map(abs, series[0].values)):
        return []
    return [
        f"{perturbed[0]} is perturbed, but {metric} is printed to {unit:g}: "
        "a perturbed envelope is judged from full-precision records only"
    ]


# What it stands on


def _counted(bases: Sequence[Series]) -> tuple[list[Series], list[str]]:
    """The base runs that count, and why others do not.

    Two equal runs are a zero floor only while nothing contradicts them. Once another base run differs, the stack is
    not bit-reproducible, and a pair that never parted says nothing about what parting costs: as in a sparse pair its
    zeros would only dilute the floor. So the later one of two equal runs is left out, be it base1 or an added one.
    """
    start = compare.first_judged(bases[0].steps)
    kept: list[Series] = [bases[0]]
    twins: list[tuple[Series, Series]] = []
    for run in bases[1:]:
        twin = next((one for one in kept if one.values[start:] == run.values[start:]), None)
        if twin is None:
            kept.append(run)
        else:
            twins.append((run, twin))
    if len(kept) == 1:
        kept.append(twins.pop(0)[0])
    return kept, [f"{run.arm} equals {twin.arm} to the bit and is not counted" for run, twin in twins]


def _first_jump(bases: Sequence[Run]) -> Jump | None:
    norms = (run.series[name] for run in bases for name in compare.GRADIENT_NORMS if compare.has(run, name))
    return next(filter(None, map(compare.find_jump, norms)), None)


def _judge(case: _Case, draft: _Draft, runs: Sequence[Run]) -> Verdict:
    pairs = [case.pair(a, b) for a, b in combinations(case.bases, 2)]
    cross = [[case.pair(a, b) for b in case.features] for a in case.bases]
    envelope = compare.mean((one.floor for one in pairs), len(pairs))
    drift = compare.mean((one.mean_abs for row in cross for one in row), len(case.bases) * len(case.features))
    if not case.pooled:
        drift = cross[0][0].mean_abs
    zero = not any(one.differing for one in pairs)
    draft.evidence.update(
        {
            "floor": _floor_kind(case, pairs),
            "base_runs_counted": len(case.bases),
            "pooled": case.pooled,
            "envelope": envelope,
            "drift": drift,
            **_figures(case, pairs, cross, envelope),
        }
    )
    draft.notes += _remarks(case, pairs, draft.evidence, runs)
    if zero:
        return _judge_zero(case, cross, draft)
    if lack := _lack_of_runs(case.judgment, len(case.bases), len(case.features)):
        return draft.error([lack], case.row)
    if not 0 < envelope < math.inf:
        return draft.error([f"the differences of the base runs do not fit a double (envelope {envelope})"], case.row)
    return _judge_ratio(case, pairs, cross, draft)


def _floor_kind(case: _Case, pairs: Sequence[Pair]) -> str:
    if not any(one.differing for one in pairs):
        return "zero"
    if case.jump:
        return "unstable"
    if case.perturbed:
        return "perturbed"
    return "sparse" if any(one.sparse for one in pairs) else "steady"


# The verdict


def _judge_zero(case: _Case, cross: Sequence[Sequence[Pair]], draft: _Draft) -> Verdict:
    """No ratio exists here, so an unstable fixture does not matter: equal bits are equal bits."""
    base, evidence = case.bases[0], draft.evidence
    printed = f"as printed (to {2 * case.resolution:g})" if case.resolution else "at full precision"
    if case.resolution:
        draft.notes.append(f"the printed resolution hides any difference below {2 * case.resolution:g}")
    if case.perturbed:
        lost = f"{case.perturbed[0]} is perturbed but equals {base.arm} to the bit"
        return draft.error([f"{lost}: the perturbation did not reach the training"], case.row)
    gated = case.row.status != "measured"
    moved = next(((one, pair) for one, pair in zip(case.features, cross[0], strict=True) if pair.differing), None)
    if moved is None:
        evidence["cause"] = "identical"
        reason = f"identical to the bit in all runs on all {cross[0][0].steps} judged steps, {printed}"
        return draft.made("PASS" if gated else "MEASURED", reason, row=case.row)
    feature, pair = moved
    delta = case.delta(base, feature)
    first = next(at for at, value in enumerate(delta, case.start) if value)
    evidence["cause"] = "zero_envelope"
    evidence["first_difference"] = {"arm": feature.arm, "step": base.steps[first], "value": delta[first - case.start]}
    reason = (
        f"this stack is bit-reproducible (the base runs are identical, {printed}), so any difference is the change's "
        f"own: {feature.arm} differs on {pair.differing} of {pair.steps} steps, first at step {base.steps[first]}"
    )
    if not gated:
        return draft.made("MEASURED", reason, row=case.row)
    if case.judgment.zero_envelope == "investigate":
        return draft.made("INVESTIGATE", reason, row=case.row)
    if case.machines:
        return _by_machine(case, draft, reason, None)
    return draft.made("FAIL", reason, row=case.row)


def _limits(row: Row) -> tuple[float, float]:
    if row.status == "measured":
        return math.nan, math.nan
    try:
        return row.limits["pass_below"], row.limits["fail_above"]
    except KeyError as missing:
        raise SpecError(f"contract row {row.id} has no limit {missing.args[0]}") from None


def _judge_ratio(case: _Case, pairs: Sequence[Pair], cross: Sequence[Sequence[Pair]], draft: _Draft) -> Verdict:
    evidence, notes = draft.evidence, draft.notes
    below, above = _limits(case.row)
    ratio = compare.divide(evidence["drift"], evidence["envelope"])
    diluted = compare.divide(evidence["drift"], evidence["diluted_envelope"])
    evidence |= {"ratio": ratio, "diluted_ratio": diluted, "limits": {"pass_below": below, "fail_above": above}}
    reason = _ratio_text(case, evidence)
    if case.row.status == "measured":
        return draft.made("MEASURED", f"{reason}; the contract does not gate it", ratio, case.row)
    status: Status
    # In the passing direction: a ratio that is nan or infinite ends in FAIL.
    if ratio < below:
        status, reason = "PASS", f"{reason}, below {below:g}"
    elif ratio <= above:
        status, reason = "INVESTIGATE", f"{reason}, between {below:g} and {above:g}: another base run may settle it"
    else:
        status, reason = "FAIL", f"{reason}, above {above:g}"
        if len(case.bases) == 2:
            reason += " (one envelope)"
            notes.append("one base pair with an unlucky narrow envelope fails good code: confirm_fail: true adds a run")
    evidence["cause"] = "grey_band" if status == "INVESTIGATE" else "ratio"
    notes += _split_features(case, pairs, cross, status)
    if case.jump:
        evidence["cause"] = "unstable"
        jump = f"gradient norm of {case.jump.arm} jumps from {case.jump.before:.3g} to {case.jump.value:.3g}"
        reason = (
            f"unstable fixture: {jump} at step {case.jump.step}, so the ratio {ratio:.4g} means little either way: "
            "use a learning-rate warm-up"
        )
        return draft.made("INVESTIGATE", reason, ratio, case.row)
    if status == "FAIL" and case.machines:
        return _by_machine(case, draft, reason, ratio)
    if status == "PASS" and case.machines:
        hidden = f"such an envelope can hide a steady offset up to {below * evidence['envelope']:.3g}"
        notes.append(f"the arms' machines differ in {', '.join(case.machines)}: {hidden}")
    return draft.made(status, reason, ratio, case.row)


def _by_machine(case: _Case, draft: _Draft, reason: str, ratio: float | None) -> Verdict:
    draft.evidence["cause"] = "machine"
    keys = ", ".join(case.machines)
    advice = f"the arms' machines differ in {keys}: re-run on the same nodes before you blame the code"
    return draft.made("INVESTIGATE", f"{reason}; {advice}", ratio, case.row)


def _ratio_text(case: _Case, evidence: dict[str, Any]) -> str:
    features = " and ".join(series.arm for series in case.features)
    others = f"the {len(case.bases)} base runs" if case.pooled else case.bases[0].arm
    floor = f"{evidence['envelope']:.3g} by which the base runs differ"
    if evidence["sparse"]:
        floor += " where they differ (sparse)"
    return f"{features} drifts {evidence['drift']:.3g} from {others}, {evidence['ratio']:.4g} times the {floor}"


def _split_features(case: _Case, pairs: Sequence[Pair], cross: Sequence[Sequence[Pair]], status: Status) -> list[str]:
    """Pooling several feature runs must not hide one that is far off."""
    if len(case.features) < 2 or status == "FAIL":
        return []
    _, above = _limits(case.row)
    floor = compare.mean((one.floor for one in pairs), len(pairs))
    own = {
        series.arm: compare.divide(compare.mean((row[at].mean_abs for row in cross), len(cross)), floor)
        for at, series in enumerate(case.features)
    }
    return [f"{arm} alone reads {ratio:.3g}, above {above:g}" for arm, ratio in own.items() if not ratio <= above]


# What is always printed


def _figures(case: _Case, pairs: Sequence[Pair], cross: Sequence[Sequence[Pair]], envelope: float) -> dict[str, Any]:
    base, feature = case.bases[0], case.features[0]
    base_delta, feature_delta = case.delta(base, case.bases[1]), case.delta(base, feature)
    steps = len(feature_delta)
    single = _single_ratios(pairs, cross)
    unit = 2 * case.resolution
    at, value = compare.largest(feature_delta)
    offset = _limits(case.row)[0] * envelope
    percent = 100 * compare.divide(offset, compare.mean(map(abs, base.values[case.start :]), steps))
    return {
        "ratio": None,
        "diluted_ratio": None,
        "diluted_envelope": compare.mean((one.mean_abs for one in pairs), len(pairs)),
        "sparse": any(one.sparse for one in pairs),
        "single_ratios": {"min": min(single), "max": max(single)} if single else None,
        "base_pairs": [_plain(one) for one in pairs],
        "feature_pairs": [_plain(one) for row in cross for one in row],
        "steps_judged": steps,
        "steps_expected": steps,
        "base_steps_differing": f"{pairs[0].differing} of {steps}",
        "lag1": compare.lag1(base_delta),
        "sign_balance": {"of": f"{feature.arm} - {base.arm}", **compare.sign_balance(feature_delta)},
        "step_1": _step_1(case),
        "largest_contribution": {
            "step": base.steps[case.start + at],
            "value": value,
            "share": compare.divide(abs(value), cross[0][0].mean_abs * steps) if value else None,
        },
        "run_mean_t": compare.run_mean_t(
            [0.0, *(one.mean for one in pairs[: len(case.bases) - 1])], [one.mean for one in cross[0]]
        ),
        "smallest_offset": {"absolute": _finite(offset), "percent": _finite(percent)},
        "resolution": case.resolution,
        "printed_unit": unit,
        "envelope_in_resolution_units": envelope / unit if unit else None,
        "unstable": asdict(case.jump) if case.jump else None,
        "machines_differ": case.machines,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _single_ratios(pairs: Sequence[Pair], cross: Sequence[Sequence[Pair]]) -> list[float]:
    """What one feature and one base pair alone would have read, either run of the pair as the reference."""
    drift = {row[0].a: [one.mean_abs for one in row] for row in cross}
    both = [(pair, name) for pair in pairs if pair.floor for name in (pair.a, pair.b)]
    return [value / pair.floor for pair, name in both for value in drift[name]]


def _plain(one: Pair) -> dict[str, Any]:
    return {"runs": [one.a, one.b], "differing": one.differing, "mean_abs": one.mean_abs, "floor": one.floor}


def _step_1(case: _Case) -> dict[str, Any] | None:
    if case.start == 0:
        return None
    values = {series.arm: series.values[0] for series in (*case.bases, *case.features)}
    first = case.bases[0].values[0]
    return {
        "step": case.bases[0].steps[0],
        "values": values,
        "base_delta": case.bases[1].values[0] - first,
        "feature_delta": case.features[0].values[0] - first,
        "resolution": case.resolution,
    }


def _remarks(case: _Case, pairs: Sequence[Pair], evidence: dict[str, Any], runs: Sequence[Run]) -> list[str]:
    steps = case.bases[0].steps
    known = any(run.steps_expected is not None for run in runs)
    apart = compare.spacing(steps)
    judged = evidence["steps_judged"]
    printed = f" printed (every {_ordinal(apart)})" if apart > 1 else "" if known else " printed"
    evidence["steps"] = f"{judged} of {judged}{printed}"
    said = [
        f"sparse envelope: {one.a} and {one.b} differ on {one.differing} of {one.steps} steps"
        for one in pairs
        if one.sparse
    ]
    if apart > 1:
        said.append(f"steps judged {evidence['steps']}")
    if case.start == 0:
        said.append(f"the log begins at step {steps[0]}: step 1 is not in it, every printed step is judged")
    said += _resolution_remark(evidence)
    said += _step_1_remark(case, evidence["step_1"])
    said += _sign_remark(case, evidence["sign_balance"])
    if case.jump and evidence["floor"] == "zero":
        said.append(f"the gradient norm of {case.jump.arm} jumps at step {case.jump.step} (unstable fixture)")
    silent = [run.arm.name for run in runs if not run.machine]
    if silent and len(silent) < len(runs):
        said.append(f"no machine fingerprint from {', '.join(silent)}: whether it ran on the same kind is not known")
    return said


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _resolution_remark(evidence: dict[str, Any]) -> list[str]:
    units = evidence["envelope_in_resolution_units"]
    if units is None or evidence["floor"] == "zero" or units >= FEW_UNITS:
        return []
    return [
        f"the envelope is {units:.2g} units of the last printed digit ({evidence['printed_unit']:g}): "
        f"below {FEW_UNITS} it is mostly the print's resolution; read values with more digits"
    ]


def _step_1_remark(case: _Case, row: dict[str, Any] | None) -> list[str]:
    if row is None or not abs(row["feature_delta"]) > _limits(case.row)[1] * abs(row["base_delta"]):
        return []
    feature, base = case.features[0].arm, case.bases[0].arm
    return [
        f"step {row['step']} is not gated, but {feature} differs there from {base} by {row['feature_delta']:.3g} "
        f"and the base runs by {row['base_delta']:.3g}: the forward itself moved"
    ]


def _sign_remark(case: _Case, balance: dict[str, Any]) -> list[str]:
    moved = balance["positive"] + balance["negative"]
    if moved < ONE_SIDED_FROM or balance["share"] not in (0.0, 1.0):
        return []
    side = "above" if balance["positive"] else "below"
    return [f"sign balance: {case.features[0].arm} is {side} {case.bases[0].arm} on all {moved} steps that differ"]
