"""Why a metric cannot be judged for drift, once there are runs enough."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from rlspec import compare, joining
from rlspec.model import Run, Series
from rlspec.readers import GRADIENT_NORMS, NAN_COUNTERS


def findings(metric: str, bases: Sequence[Run], features: Sequence[Run]) -> list[str]:
    """Everything that forbids a verdict; empty if there is a floor and something to judge by it."""
    runs = [*bases, *features]
    broken = [text for run in bases for text in joining.non_finite(metric, run)]
    found = [f"{text}; without a finite base there is no floor" for text in broken]
    found += [*joining.findings(metric, runs), *_different_data(runs)]
    if found:
        return found
    series = [run.series[metric] for run in runs]
    steps = series[0].steps
    if compare.start(series[0]) == len(steps):
        return [f"step {steps[0]} is the only one of {metric}, and it precedes any update: train more steps"]
    value = compare.single_value(series)
    if value is not None:
        return [_cannot_fail(metric, value)]
    return _printed_perturbation(metric, bases, series)


def broken_steps(run: Run, beside: Sequence[str]) -> list[str]:
    """Where a run says that a step came to nothing: its gradient norm or a count of NaNs, none of those `beside`."""
    found = [text for name in GRADIENT_NORMS if name not in beside for text in joining.non_finite(name, run)]
    for counter in (run.series[name] for name in NAN_COUNTERS if joining.has(run, name)):
        bad = next(((at, one) for at, one in zip(counter.steps, counter.values, strict=True) if not one <= 0), None)
        found += [f"{run.arm.name}: {counter.metric} is {bad[1]:g} at step {bad[0]}"] if bad else []
    return found


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
    return f"{text}; judge a metric that varies"


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
