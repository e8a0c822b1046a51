"""One form of an operator in one tier: every layout of it compared with a reference and with the canonical run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from rlspec import layouts, nodes
from rlspec.device import cases, comparing, conduct, observe, other_process
from rlspec.device.bench import Bench, subject
from rlspec.device.execution import NoBackward, Results, run
from rlspec.device.grids import SPREAD, STRIDED
from rlspec.device.operators import resolve
from rlspec.layouts import CANONICAL, Layout
from rlspec.nodes import NODES
from rlspec.workloads import Tier

_FP64_ELEMENTS = 1 << 31  # the largest input of a reference in fp64; larger ones are taken in fp32


class Cell(Protocol):
    """What a form knows of its cell, and what it tells it."""

    on: Bench
    operator: str
    tier: Tier
    layouts: tuple[Layout, ...]
    candidate: Callable[..., Any] | None
    elsewhere: Mapping[str, str]
    seen: observe.Seen
    no_backward: str | None
    apart: list[str]
    passed_by: dict[str, list[str]]


class Variant:
    """One form of the operator: reference, baseline and canonical run once, then every layout against them."""

    def __init__(self, cell: Cell, variant: str, judged: tuple[str, ...]) -> None:
        on, tier = cell.on, cell.tier
        self.cell, self.variant, self.judged, self.node = cell, variant, judged, NODES[cell.operator]
        self.subject = subject(on, cell.operator, tier, variant, cell.candidate)
        self.backward = any(name.startswith("gradient") for name in judged)
        self.both = self.backward and any(name.startswith("forward") for name in judged)
        self.reference = self._reference()
        self.baseline = self._baseline()
        self.first = self._is_first()
        self.canonical = Results()
        self.digests: dict[tuple[str, str, tuple[int, ...] | None], str] = {}
        self.accuracies: dict[tuple[str, str], dict[str, Any]] = {}

    def _is_first(self) -> bool:
        """Whether no tier before has the same form and judgments: what calls do to each other is looked at once."""
        on, operator = self.cell.on, self.cell.operator
        for tier in nodes.tiers(operator, on.workload.tiers):
            if self.variant in nodes.variants(operator, tier) and nodes.judged(tier, on.judgments) == self.judged:
                return tier.name == self.cell.tier.name
        return True

    def comparisons(self) -> Iterator[dict[str, Any]]:
        before = {name: comparing.fingerprint(weight) for name, weight in self.subject.weights.items()}
        self.canonical = self._run(self.cell.layouts[0])
        self._weights_are_those(before)
        self._profile()
        self._weights_are_read()
        lines = list(self._all(self.cell.layouts[0], self.canonical))
        yield from lines
        for layout in self.cell.layouts[1:]:
            if layout.how == "other_process":
                yield from self._elsewhere(layout, self.canonical)
            else:
                yield from self._all(layout, self._through(layout))
        if self.first and not any(map(_problem, lines)):  # what is wrong in one call is told by its lines
            self._conduct()
            self._weights_are_those(before)

    def _through(self, layout: Layout) -> Results:
        """Of a strided layout the tensors lie in two ways, and what is told is the results of one that is off."""
        found = self._run(layout)
        if layout.how != STRIDED:
            return found
        spread = self._run(replace(layout, how=SPREAD))
        for mine, theirs in ((found.outputs, spread.outputs), (found.gradients, spread.gradients)):
            mine |= {name: x for name, x in theirs.items() if name in mine and not comparing.identical(x, mine[name])}
        return found

    def _run(self, layout: Layout) -> Results:
        if self.backward and self.cell.no_backward is None:
            try:
                return self._told(run(self.subject, layout, self.cell.seen, backward=True, both=self.both))
            except NoBackward as error:
                self.cell.no_backward = str(error)
        return self._told(run(self.subject, layout, self.cell.seen, backward=False, both=self.both))

    def _told(self, found: Results) -> Results:
        if found.apart:
            self.cell.apart.append(" ".join(filter(None, (self.variant, found.apart))))
        return found

    def _weights_are_those(self, before: Mapping[str, str]) -> None:
        for name, weight in self.subject.weights.items():
            if comparing.fingerprint(weight) != before[name]:
                raise ValueError(f"the operator writes into its {name}")

    def _weights_are_read(self) -> None:
        """After a step of an optimizer a weight lies where it lay, with other values: none may be kept."""
        if not self.subject.weights:
            return
        backward = self.first and self.backward and self.cell.no_backward is None
        with conduct.doubled(self.subject.weights):
            doubled = run(self.subject, self.cell.layouts[0], self.cell.seen, backward=backward, both=self.both)
        conduct.reads_weights(self.node, self.canonical, doubled, CANONICAL)
        if doubled.apart and not self.canonical.apart:
            raise ValueError(f"with the weight doubled in place, {doubled.apart}: is one kept?")

    def _conduct(self) -> None:
        """Between calls; then autograd through the canonical ones, where the operator promises other gradients."""
        on, seen = self.cell.on, self.cell.seen
        few = conduct.small(self.subject, on.workload, on.model, on.dtype)
        backward = self.backward and self.cell.no_backward is None
        try:
            apart = conduct.check(few, seen, backward=backward, both=self.both, near=self._near)
            if backward and conduct.promises(self.subject):
                whole = replace(self.subject, operator=conduct.called(self.subject.operator))
                self._same_by_autograd(run(whole, self.cell.layouts[0], seen, backward=True, both=self.both))
        except NoBackward as error:
            self.cell.no_backward = f"{error} where autograd runs through the call"
            return self._conduct()  # of its forwards
        self._told(Results(apart=apart))

    def _same_by_autograd(self, bare: Results) -> None:
        conduct.same_by_autograd(self.canonical, self._told(bare), CANONICAL)
        limits = self._limits("gradient_accuracy") if "gradient_accuracy" in self.judged else None
        for name in self.canonical.accumulated_by if limits else ():
            got, want = bare.gradients[name], self.reference.gradients[name]
            got = got.to(self.subject.weights[name.removeprefix("d")].dtype)
            if problem := self._beside(got, want, limits or {}, name):
                raise ValueError(f"autograd through the call gives another {name} than `weight_gradient`: {problem}")

    def _beside(self, got: Tensor, want: Tensor, limits: Mapping[str, float], name: str) -> str | None:
        line = comparing.errors(got, want, limits.get("atol", 0.0), limits.get("rtol", 0.0)).plain()
        if "baseline_ratio" in limits:
            line["yardstick"] = self._yardstick("gradient_accuracy", name, got.dtype)
        return nodes.accuracy_problem(line, limits)

    def _near(self, name: str, got: Tensor, want: Tensor) -> str | None:
        """A gradient of a few tokens against the same one made in another way: no more apart than from a reference."""
        limits = self._limits("gradient_accuracy") if "gradient_accuracy" in self.judged else None
        if not limits:
            return "the bits differ, and no row is asked for"
        found = comparing.errors(got, want.double(), limits.get("atol", 0.0), limits.get("rtol", 0.0)).plain()
        if found["nonfinite"] or "baseline_ratio" not in limits:
            return nodes.accuracy_problem(found, {})
        much = float(found["relative_rms"])
        return None if much <= limits["relative_rms"] else f"an RMS error of {much:.3g} of its RMS"

    def _profile(self) -> None:
        """The canonical calls once more under the profiler; what it sees joins what was seen to run."""
        if self.cell.on.device.type != "cuda":
            return
        seen = observe.Seen(profiling=True, profiled=self.cell.seen.profiled)
        backward = self.backward and self.cell.no_backward is None
        run(self.subject, self.cell.layouts[0], seen, backward=backward, both=self.both)
        self.cell.seen.profiled = seen.profiled

    def _reference(self) -> Results:
        """fp64 where it is cheap, else fp32, on the same inputs, upcast."""
        largest = max(table.numel() for table in (*self.subject.tables.values(), *self.subject.weights.values()))
        wide = torch.float64 if largest <= _FP64_ELEMENTS else torch.float32
        whole = replace(
            self.subject,
            operator=resolve(self.cell.operator, "reference"),
            tables=upcast(self.subject.tables, wide),
            weights=upcast(self.subject.weights, wide),
            upstream=upcast(self.subject.upstream, wide),
            like={},
            wide=wide,
        )
        return run(whole, self.cell.layouts[0], observe.Seen(), backward=self.backward)

    def _baseline(self) -> Results | None:
        """Plain torch on the same inputs, if a row asks how much worse than it the candidate is."""
        limits = [self._limits(name) or {} for name in self.judged]
        if not any("baseline_ratio" in one for one in limits):
            return None
        plain = replace(self.subject, operator=resolve(self.cell.operator, "torch"))
        return run(plain, self.cell.layouts[0], observe.Seen(), backward=self.backward)

    def _limits(self, judgment: str) -> Mapping[str, float] | None:
        return self.cell.on.limits[judgment][self.node.family]

    def _all(self, layout: Layout, found: Results) -> Iterator[dict[str, Any]]:
        for judgment in self.judged:
            gradient = judgment.startswith("gradient")
            if gradient and self.cell.no_backward is not None:
                continue
            accuracy = judgment.endswith("accuracy")
            if layout.name == CANONICAL and not accuracy:
                continue
            against = self.reference if accuracy else self.canonical
            mine, other = (one.gradients if gradient else one.outputs for one in (found, against))
            for name, got in mine.items():
                if gradient and name.removeprefix("d") in self.node.parameters:
                    line = self._compared(judgment, name, layout, layout.name, got, other[name], None)
                    yield {**line, "accumulated_by": found.accumulated_by[name]}
                    continue
                for configuration, samples in nodes.compared(layout, self.cell.tier, accuracy=accuracy):
                    rows = self._rows(name, samples)
                    part = slice(rows[0], rows[-1] + 1)
                    yield self._compared(judgment, name, layout, configuration, got[part], other[name][part], samples)

    def _rows(self, name: str, samples: tuple[int, ...]) -> range:
        """The rows of some consecutive samples in a restored tensor."""
        keys = name.removeprefix("d") in self.node.of_keys
        lengths = [sample.length if keys else sample.queries for sample in self.cell.tier.samples]
        start = sum(lengths[: samples[0]])
        return range(start, start + sum(lengths[index] for index in samples))

    def _compared(
        self,
        judgment: str,
        name: str,
        layout: Layout,
        configuration: str,
        got: Tensor,
        want: Tensor,
        samples: tuple[int, ...] | None,
    ) -> dict[str, Any]:
        limits = self._limits(judgment)
        line: dict[str, Any] = {
            "judgment": judgment,
            "variant": self.variant,
            "tensor": name,
            "configuration": configuration,
            "tokens": 0 if samples is None else len(got),
            "shape": list(got.shape),
            "dtype": _name(got.dtype),
            "against_dtype": _name(want.dtype),
            "elements": got.numel(),
            "limits": limits,
        }
        if judgment.endswith("invariance"):
            line |= {
                "against": CANONICAL,
                **comparing.same_bits(got, want, self._digest(judgment, name, samples, want)),
            }
        else:
            line |= {"against": "reference", **self._accuracy(judgment, name, layout, got, want, limits)}
        return self._located(line, layout, samples, got)

    def _accuracy(
        self, judgment: str, name: str, layout: Layout, got: Tensor, want: Tensor, limits: Mapping[str, float] | None
    ) -> dict[str, Any]:
        """Of a tensor that is the canonical one to the bit, the figures are known."""
        canonical = self.canonical.gradients if judgment.startswith("gradient") else self.canonical.outputs
        if (judgment, name) in self.accuracies and comparing.identical(got, canonical[name]):
            known = self.accuracies[judgment, name]
            return {**known, "first": known["first"] and dict(known["first"])}
        allowed = limits if limits is not None and got.is_floating_point() else {}
        atol, rtol = allowed.get("atol", 0.0), allowed.get("rtol", 0.0)
        line = comparing.errors(got, want, atol, rtol).plain()
        line |= {"digest": comparing.fingerprint(got), "against_digest": self._digest(judgment, name, None, want)}
        if "baseline_ratio" in allowed:
            known = self.accuracies.get((judgment, name))
            line["yardstick"] = known["yardstick"] if known else self._yardstick(judgment, name, got.dtype)
        if layout.name == CANONICAL:
            self.accuracies[judgment, name] = {**line, "first": line["first"] and dict(line["first"])}
            if limits is not None:
                self._violable(judgment, name, got, want, line)
        return line

    def _digest(self, judgment: str, name: str, samples: tuple[int, ...] | None, want: Tensor) -> str:
        """The fingerprint of a right side, taken once."""
        key = (judgment, name, samples)
        if key not in self.digests:
            self.digests[key] = comparing.fingerprint(want)
        return self.digests[key]

    def _yardstick(self, judgment: str, name: str, dtype: torch.dtype) -> dict[str, float | str]:
        """Largest and RMS error of plain torch in the canonical layout, and of the reference once rounded."""
        assert self.baseline is not None
        gradient = judgment.startswith("gradient")
        plain, gold = self.baseline, self.reference
        theirs, whole = (one.gradients[name] if gradient else one.outputs[name] for one in (plain, gold))
        found = comparing.errors(theirs, whole, 0.0, 0.0)
        most, rms = comparing.rounding(whole, dtype)
        made = {"torch_max_abs": found.max_abs, "torch_rms": found.rms, "rounding_max_abs": most, "rounding_rms": rms}
        return {name: comparing.number(value) for name, value in made.items()}

    def _violable(self, judgment: str, name: str, got: Tensor, want: Tensor, line: Mapping[str, Any]) -> None:
        """Wrong candidates that the row would also pass: where there are any, it proves nothing."""
        limits = self._limits(judgment)
        assert limits is not None
        exact = not got.is_floating_point()
        for wrong, candidate in comparing.wrong_candidates(got).items():
            atol, rtol = (0.0, 0.0) if exact else (limits.get("atol", 0.0), limits.get("rtol", 0.0))
            found = comparing.errors(candidate, want, atol, rtol).plain()
            held = (
                nodes.accuracy_problem({**found, "yardstick": line.get("yardstick")}, {} if exact else limits) is None
            )
            if held and not (wrong == "sign_flipped" and exact):
                where = f"{self.variant} {name}".strip()
                self.cell.passed_by.setdefault(judgment, []).append(f"{wrong} {where}")

    def _located(
        self, line: dict[str, Any], layout: Layout, samples: tuple[int, ...] | None, got: Tensor
    ) -> dict[str, Any]:
        """Sample, position and the size of the call for the first element that differs."""
        first = line["first"]
        if first is None or samples is None or not len(got):
            return line
        width = max(1, got.numel() // len(got))
        row, element = divmod(first["index"], width)
        keys = line["tensor"].removeprefix("d") in self.node.of_keys
        for index in samples:
            sample = self.cell.tier.samples[index]
            length = sample.length if keys else sample.queries
            if row < length:
                position = row if keys else sample.first + row
                first |= {"sample": sample.id, "position": position, "element": element}
                if not keys:
                    number, _ = layouts.restore(layout, self.cell.tier)[index, position]
                    first["call"] = [layout.calls[number].rows, layout.calls[number].width]
                break
            row -= length
        return line

    def _elsewhere(self, layout: Layout, canonical: Results) -> Iterator[dict[str, Any]]:
        """The canonical call in a process of its own, of which only digests came back."""
        for judgment in self.judged:
            if judgment.endswith("accuracy") or (judgment.startswith("gradient") and self.cell.no_backward is not None):
                continue
            results = canonical.gradients if judgment.startswith("gradient") else canonical.outputs
            for name, want in results.items():
                mine = comparing.fingerprint(want)
                theirs = self.cell.elsewhere.get(
                    other_process.key(self.cell.operator, self.cell.tier, self.variant, name)
                )
                if theirs is None:
                    continue  # the host misses the comparison
                parameter = name.removeprefix("d") in self.node.parameters
                line = {
                    "judgment": judgment, "variant": self.variant, "tensor": name, "configuration": layout.name,
                    "tokens": 0 if parameter else len(want), "shape": list(want.shape), "dtype": _name(want.dtype),
                    "against_dtype": _name(want.dtype), "elements": want.numel(), "limits": self._limits(judgment),
                    "against": CANONICAL, "differing": 0 if mine == theirs else None, "first": None,
                    "digest": theirs, "against_digest": mine,
                }  # fmt: skip
                yield {**line, "accumulated_by": canonical.accumulated_by[name]} if parameter else line


def upcast(tensors: cases.Tensors, wide: torch.dtype) -> dict[str, Tensor]:
    return {name: x.to(wide) if x.is_floating_point() else x for name, x in tensors.items()}


def _problem(line: Mapping[str, Any]) -> str | None:
    """Why the canonical run is outside a row, if one is asked for."""
    floating = line["dtype"].startswith(("float", "bfloat"))
    return nodes.accuracy_problem(line, line["limits"] if floating else {}) if line["limits"] else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
