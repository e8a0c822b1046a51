"""A drift verdict in words: the floor it stands on, what that floor lets pass, and every figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlspec.report import rows
from rlspec.report.text import clean, number, ratio

FLOORS = {
    "zero": "the base runs are identical to the bit",
    "sparse": "the base runs differ on few steps, and only those count",
    "steady": "the base runs differ on most steps",
    "unstable": "a base run's own gradient norm jumps, so the ratio means little",
    "perturbed": "a base run started from weights moved by one unit in the last place",
}


def sentences(verdict: rows.Verdict) -> Iterator[str]:
    """Floor, blind spot, signs, step 1 and precision; nothing where no floor was found."""
    evidence = verdict["evidence"]
    if evidence.get("envelope") is None:
        return
    yield f"{_floor(evidence)}{_blind(evidence)}."
    moved = _signs(evidence.get("sign_balance")), _first(evidence.get("step_1"))
    if any(moved):
        yield f"{'; '.join(filter(None, moved))}."
    yield f"{_precision(evidence)}; {_rest(evidence)}."


def _rest(evidence: Mapping[str, Any]) -> str:
    """The figures that a reader of statistics looks for, in one line."""
    parts = [f"steps judged {clean(evidence.get('steps') or evidence.get('steps_judged'))}"]
    if single := evidence.get("single_ratios"):
        parts.append(f"single ratios {ratio(single['min'])} to {ratio(single['max'])}")
    if evidence.get("sparse") and evidence.get("diluted_ratio") is not None:
        parts.append(f"diluted ratio {ratio(evidence['diluted_ratio'])}")
    if evidence.get("lag1") is not None:
        parts.append(f"lag-1 {number(evidence['lag1'], digits=2)}")
    largest, mean = evidence.get("largest_contribution"), evidence.get("run_mean_t")
    if largest and largest["share"] is not None:
        parts.append(f"step {largest['step']} contributes {100 * largest['share']:.0f} %")
    if mean and mean["t"] is not None:
        parts.append(f"run-mean t {number(mean['t'], digits=3)}, p {number(mean['p'], digits=2)}, {mean['df']} df")
    return "; ".join(parts)


def _floor(evidence: Mapping[str, Any]) -> str:
    runs = f"{evidence.get('base_runs_counted', evidence['base_runs'])} base runs"
    if evidence["floor"] == "zero":
        return f"Zero floor: {runs} are identical to the bit on all {evidence.get('steps_judged', '')} judged steps"
    where = "where they differ" if evidence.get("sparse") else "on average"
    apart = f"{runs} differ on {_differing(evidence.get)}, by {number(evidence['envelope'], digits=3)} {where}"
    return f"{clean(evidence['floor']).capitalize()} floor: {apart}"


def _differing(get: Callable[..., Any]) -> str:
    """On how many steps two base runs differ; with several pairs, the fewest and the most."""
    counts = sorted(pair["differing"] for pair in get("base_pairs", ()))
    if len(counts) > 1 and counts[0] != counts[-1]:
        return f"{counts[0]} to {counts[-1]} of {number(get('steps_judged'))} steps, pair by pair"
    return f"{clean(get('base_steps_differing', 'some'))} steps"


def _blind(evidence: Mapping[str, Any]) -> str:
    """What the floor hides, and what it does not; reports of earlier versions say only the first."""
    half, most = (_size(evidence.get(name), 2) for name in ("smallest_offset", "caught_offset"))
    caught = f", one of {most} is a FAIL 9 times in 10" if most else ""
    return f"; a steady offset of {half} passes about half the time{caught}" if half else ""


def _size(offset: Mapping[str, Any] | None, digits: int) -> str:
    if not offset or not (offset["absolute"] or 0) > 0:
        return ""
    share = "" if offset["percent"] is None else f" ({number(offset['percent'], digits=digits)} %)"
    return f"{number(offset['absolute'], digits=3)}{share}"


def _signs(balance: Mapping[str, Any] | None) -> str:
    if not balance or not balance["positive"] + balance["negative"]:
        return ""
    who, _, base = clean(balance.get("of", "feature - base")).partition(" - ")
    same = f", equal on {balance['zero']}" if balance["zero"] else ""
    return f"{who} is above {base} on {balance['positive']} steps, below on {balance['negative']}{same}"


def _first(step: Mapping[str, Any] | None) -> str:
    if not step:
        return ""
    feature, base = number(step["feature_delta"], digits=3), number(step["base_delta"], digits=3)
    return f"at step {step['step']} (not gated) the feature differs by {feature}, the base runs by {base}"


def _precision(evidence: Mapping[str, Any]) -> str:
    unit = evidence.get("printed_unit")
    return f"Values printed to {number(unit)}" if unit else "Values at full precision"


def figures(verdict: rows.Verdict) -> Iterator[rows.Figure]:
    """Every figure of the evidence; where there was no floor, only what is known without one."""
    evidence, get = verdict["evidence"], verdict["evidence"].get
    if get("base_runs") is not None:
        counted = get("base_runs_counted", evidence["base_runs"])
        left_out = "" if counted == evidence["base_runs"] else f", of which {counted} count"
        yield "base runs", f"{evidence['base_runs']}{left_out}"
    if get("envelope") is None:
        return
    yield from _of_the_ratio(verdict, get)
    yield from _of_the_floor(get)
    yield from _of_the_feature(get)
    yield from rows.machines(get("machines_differ"))


def _of_the_ratio(verdict: rows.Verdict, get: Callable[..., Any]) -> Iterator[rows.Figure]:
    near = rows.limit_values(verdict)
    yield "ratio", ratio(get("ratio"), near)
    yield "ratio with the diluted floor", ratio(get("diluted_ratio"))
    if single := get("single_ratios"):
        yield "ratios of single pairs", f"{ratio(single['min'], near)} to {ratio(single['max'], near)}"
    yield "steps judged", clean(get("steps") or f"{number(get('steps_judged'))} of {number(get('steps_expected'))}")


def _of_the_floor(get: Callable[..., Any]) -> Iterator[rows.Figure]:
    if kind := get("floor"):
        yield "kind of floor", f"{clean(kind)}: {FLOORS.get(kind, '')}"
    yield "base runs differ on", _differing(get)
    yield "envelope (floor)", number(get("envelope"))
    yield "envelope over all steps", number(get("diluted_envelope"))
    if half := _size(get("smallest_offset"), 3):
        yield "steady offset that passes half the time", half
    if most := _size(get("caught_offset"), 3):
        yield "steady offset that is a FAIL 9 times in 10", most
    units = get("envelope_in_resolution_units")
    spread = "" if units is None else f"; the envelope is {number(units, digits=3)} units of that"
    yield "printed to", f"{number(get('printed_unit'))}{spread}" if get("printed_unit") else "full precision"
    yield "lag-1 autocorrelation of the base delta", number(get("lag1"), digits=3)
    if jump := get("unstable"):
        size = f"from {number(jump['before'])} to {number(jump['value'])}"
        yield "gradient norm of a base run", f"{clean(jump['arm'])} jumps {size} at step {jump['step']}"


def _of_the_feature(get: Callable[..., Any]) -> Iterator[rows.Figure]:
    yield "drift of the feature", number(get("drift"))
    yield "sign balance", _signs(get("sign_balance"))
    if step := get("step_1"):
        values = ", ".join(f"{clean(arm)} {number(value, digits=8)}" for arm, value in step["values"].items())
        moved = f"{number(step['feature_delta'])} and {number(step['base_delta'])}"
        yield f"step {step['step']} (not gated)", values
        yield f"step {step['step']}, feature and base delta", moved
    if first := get("first_difference"):
        yield "first difference", f"{clean(first['arm'])} at step {first['step']} by {number(first['value'])}"
    if largest := get("largest_contribution"):
        share = "" if largest["share"] is None else f", {100 * largest['share']:.0f} % of the sum"
        yield "step that contributes most", f"step {largest['step']}: {number(largest['value'])}{share}"
    if mean := get("run_mean_t"):
        freedom = f"{mean['df']} degree{'s' * (mean['df'] != 1)} of freedom"
        yield "run means, t", f"{number(mean['t'], digits=3)} with {freedom}, p {number(mean['p'], digits=2)}"
