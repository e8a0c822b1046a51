"""What a drift verdict stands on: how far the base runs lie from each other, and the feature runs from them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from rlspec import compare, joining
from rlspec.compare import Jump, Pair
from rlspec.model import Run, Series
from rlspec.readers import GRADIENT_NORMS

Floor = Literal["zero", "sparse", "steady", "perturbed", "unstable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Joined runs of one metric: the base runs that count (the first is the reference) and the feature runs.

    Index `start` is the first judged step. `base_pairs` are all pairs of base runs, the reference's first; `cross` has
    a row a base run with its pair to each feature run. The two deltas are base1 and feat0 above base0.
    """

    bases: Sequence[Series]
    features: Sequence[Series]
    start: int
    base_pairs: Sequence[Pair]
    cross: Sequence[Sequence[Pair]]
    base_delta: array[float]
    feature_delta: array[float]
    perturbed: Sequence[str]
    jump: Jump | None
    machines: dict[str, dict[str, str]]
    dropped: Sequence[str]

    @property
    def width(self) -> float:
        """The mean floor of the base pairs: what a run differs by from itself."""
        return compare.mean((pair.floor for pair in self.base_pairs), len(self.base_pairs))

    @property
    def diluted_width(self) -> float:
        """`width` with sparse pairs taken over all steps."""
        return compare.mean((pair.mean_abs for pair in self.base_pairs), len(self.base_pairs))

    @property
    def drift(self) -> float:
        """Mean |delta| of the feature runs to the base runs; without pooling, of feat0 to base0."""
        if not self.pooled:
            return self.cross[0][0].mean_abs
        pairs = [pair for row in self.cross for pair in row]
        return compare.mean((pair.mean_abs for pair in pairs), len(pairs))

    @property
    def pooled(self) -> bool:
        return len(self.bases) > 2 or len(self.features) > 1

    @property
    def sparse(self) -> bool:
        return any(pair.sparse for pair in self.base_pairs)

    @property
    def resolution(self) -> float:
        return max(series.resolution for series in (*self.bases, *self.features))

    @property
    def printed(self) -> tuple[Series, Series]:
        """The run with the finest and the run with the coarsest digits."""
        runs = sorted((*self.bases, *self.features), key=lambda run: run.resolution)
        return runs[0], runs[-1]

    @property
    def coarse(self) -> bool:
        """Whether runs are printed to different digits and the coarsest are no finer than the floor.

        A floor of flips of a coarse last digit is one to two units of it.
        """
        fine, coarse = self.printed
        return self.width < 4 * coarse.resolution and not _printed_alike(fine, coarse)

    @property
    def columns(self) -> list[tuple[Pair, ...]]:
        """The pairs of each feature run with all base runs."""
        return list(zip(*self.cross, strict=True))

    @property
    def floor(self) -> Floor:
        if not any(pair.differing for pair in self.base_pairs):
            return "zero"
        if self.jump:
            return "unstable"
        if self.perturbed:
            return "perturbed"
        return "sparse" if self.sparse else "steady"


def measure(metric: str, base_runs: Sequence[Run], feature_runs: Sequence[Run]) -> Envelope:
    """The envelope of runs that can be judged, two base runs and one feature run at least."""
    bases, dropped = _counted([run.series[metric] for run in base_runs])
    features = [run.series[metric] for run in feature_runs]
    start = compare.start(bases[0])
    kept = {one.arm: compare.deltas(bases[0], one, start) for one in (bases[1], features[0])}

    def pair(a: Series, b: Series) -> Pair:
        known = kept.get(b.arm) if a is bases[0] else None
        return compare.pair(a, b, compare.deltas(a, b, start) if known is None else known)

    return Envelope(
        bases=bases,
        features=features,
        start=start,
        base_pairs=[pair(a, b) for a, b in combinations(bases, 2)],
        cross=[[pair(a, b) for b in features] for a in bases],
        base_delta=kept[bases[1].arm],
        feature_delta=kept[features[0].arm],
        perturbed=[run.arm.name for run in base_runs if run.arm.perturb],
        jump=_first_jump(base_runs),
        machines=joining.machine_differences([*base_runs, *feature_runs]),
        dropped=dropped,
    )


def _counted(bases: Sequence[Series]) -> tuple[list[Series], list[str]]:
    """The base runs that count, and why others do not.

    Two equal runs are a zero floor only while nothing contradicts them. Once another base run differs, the stack is
    not bit-reproducible, and a pair that never parted says nothing about what parting costs: as in a sparse pair its
    zeros would only dilute the floor. So the later one of two equal runs is left out, be it base1 or an added one.
    """
    start = compare.start(bases[0])
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


def _printed_alike(a: Series, b: Series) -> bool:
    """Whether values are printed to the same decimals, or to as many significant digits, decimal or binary."""
    if a.resolution == b.resolution or not (a.resolution and b.resolution):
        return a.resolution == b.resolution
    sizes = [(max(map(abs, run.values)), run.resolution) for run in (a, b)]
    decimal = {_decimal(largest) - _decimal(2 * unit) for largest, unit in sizes}
    binary = {math.frexp(largest)[1] - math.log2(unit) for largest, unit in sizes}
    return len(decimal) == 1 or len(binary) == 1


def _decimal(value: float) -> int:
    """The exponent of ten; a unit of the last digit may lie an ulp below its power."""
    return math.floor(math.log10(value) + 1e-9) if value else 0


def _first_jump(bases: Sequence[Run]) -> Jump | None:
    norms = (run.series[name] for run in bases for name in GRADIENT_NORMS if joining.has(run, name))
    return next(filter(None, map(compare.find_jump, norms)), None)
