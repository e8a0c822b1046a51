"""Judge operators: every layout of every tier through a candidate, compared with a reference and with itself.

Writes records.jsonl line by line: `comparison` lines with what was measured, then one `cell` line for an operator and
tier with what was seen to run. The host decides: it holds the lines against the contract and against what had to run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from rlspec import layouts, nodes, workloads
from rlspec.device import architecture, cases, comparing, observe
from rlspec.device.execution import NoBackward, Results, Subject, run
from rlspec.device.operators import resolve
from rlspec.layouts import CANONICAL, Layout
from rlspec.nodes import NODES
from rlspec.workloads import Tier, Workload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ONLY_CANONICAL = "RLSPEC_CANONICAL_DIGESTS"
_FP64_ELEMENTS = 1 << 31  # the largest input of a reference in fp64; larger ones are taken in fp32
_TAIL = 6
_FILE = re.compile(r'File "(?:[^"]*/)?([^"/]+)"')


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What one arm is judged on. `limits`: judgment -> class -> limits of its row, None where it has none."""

    run_file: Path
    arm: str
    implementation: str | Mapping[str, str]
    workload: Workload
    model: architecture.Architecture
    operators: tuple[str, ...]
    judgments: tuple[str, ...]
    limits: Mapping[str, Mapping[str, Mapping[str, float] | None]]
    dtype: torch.dtype
    device: torch.device

    def implementation_of(self, operator: str) -> str:
        return nodes.implementation_of(operator, self.implementation)


def bench(run_file: Path, config: Mapping[str, Any], arm: Mapping[str, Any]) -> Bench:
    """From a run file's configuration and the arm's entry in plan.json. Raises ValueError."""
    sys.path.append(
        os.environ.get("RLSPEC_SPEC_DIR", config["spec_dir"])
    )  # a user's operators lie beside the spec, and shadow nothing
    if config["dtype"] not in DTYPES:
        raise ValueError(f"operators are judged in {', '.join(DTYPES)}, not in {config['dtype']}")
    cuda = torch.cuda.is_available() and config["device"] != "cpu"
    if config["device"] == "cuda" and not cuda:
        raise ValueError("the spec requires a CUDA device, and torch sees none")
    return Bench(
        run_file=run_file,
        arm=arm["name"],
        implementation=arm.get("implementation") or nodes.DEFAULT,
        workload=workloads.of(config["workload"]),
        model=architecture.read(config["model"]),
        operators=tuple(config["operators"]),
        judgments=tuple(config["judgments"]),
        limits=config["limits"],
        dtype=DTYPES[config["dtype"]],
        device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
    )


def main(on: Bench, records: Path) -> None:
    """Judge all operators of the bench into `records`; in a process that was asked for digests alone, only those."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if wanted := os.environ.get(_ONLY_CANONICAL):
        Path(wanted).write_text(json.dumps(dict(_canonical_digests(on))), encoding="utf-8")
        return
    with records.open("w", encoding="utf-8") as file:
        writer, environment = _Writer(file), observe.environment(on.device)
        writer.line({"record": "run", "schema_version": 1, "arm": on.arm, "kind": "operators",
                     "environment": environment})  # fmt: skip
        elsewhere = _digests_of_another_process(on)
        due = [(name, tier) for name in on.operators if not NODES[name].not_applicable
               for tier in nodes.tiers(name, on.workload.tiers)]  # fmt: skip
        for number, (operator, tier) in enumerate(due, 1):
            said = _cell(on, operator, tier, writer, elsewhere, environment)
            print(f"step {number}/{len(due)} | {operator} {tier.name}: {said}", flush=True)
        writer.line({"record": "end", "cells": writer.cells, "comparisons": writer.comparisons})


@dataclass
class _Writer:
    file: TextIO
    cells: int = 0
    comparisons: int = 0

    def line(self, line: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(line, allow_nan=False) + "\n")
        self.file.flush()
        self.cells += line["record"] == "cell"
        self.comparisons += line["record"] == "comparison"


def _cell(
    on: Bench, operator: str, tier: Tier, writer: _Writer, elsewhere: Mapping[str, str], environment: Mapping[str, Any]
) -> str:
    """Write one cell; what came of it in a few words."""
    cell, started = _Cell(on, operator, tier, elsewhere, environment), time.monotonic()
    try:
        cell.prepare()
        for line in cell.comparisons():
            writer.line({"record": "comparison", "operator": operator, "tier": tier.name, **line})
    except Exception as error:  # whatever a user's operator raises is the end of its own cell alone
        cell.error = _told(error)
    summary = cell.summary()
    writer.line(summary)
    problem = cell.error["message"] if cell.error else cell.blocked
    return problem or f"measured in {time.monotonic() - started:.1f} s"


def _told(error: Exception) -> dict[str, Any]:
    text = "".join(traceback.format_exception(error)).rstrip()
    print(text, file=sys.stderr, flush=True)
    lines = [_FILE.sub(r'File "\1"', line) for line in text.splitlines()]  # whole paths are in the log alone
    place = getattr(error, "place", "")
    message = f"{type(error).__name__}: {error}".splitlines()[0] + (f" ({place})" if place else "")
    return {"message": message, "tail": lines[-_TAIL:]}


@dataclass
class _Cell:
    """One operator in one tier, all judgments, all variants."""

    on: Bench
    operator: str
    tier: Tier
    elsewhere: Mapping[str, str]
    environment: Mapping[str, Any]
    backend: str | None = None
    blocked: str | None = None
    no_backward: str | None = None
    error: dict[str, Any] | None = None
    seen: observe.Seen = field(default_factory=observe.Seen)
    passed_by: dict[str, list[str]] = field(default_factory=dict)
    layouts: tuple[Layout, ...] = ()
    candidate: Callable[..., Any] | None = None

    def prepare(self) -> None:
        self.candidate = resolve(self.operator, self.on.implementation_of(self.operator))
        self.backend = getattr(self.candidate, "backend", None)
        interpreted = os.environ.get("TRITON_INTERPRET") == "1" and self.backend == "triton"
        if self.backend in ("triton", "cuda") and self.on.device.type != "cuda" and not interpreted:
            self.blocked = f"{self.backend} kernels need a CUDA device, and there is none here"
        here = self.on.device.type
        self.layouts = tuple(one for one in layouts.of(self.tier) if not nodes.left_out(one, here))

    def summary(self) -> dict[str, Any]:
        return {
            "record": "cell",
            "operator": self.operator,
            "tier": self.tier.name,
            "implementation": self.on.implementation_of(self.operator),
            "backend": self.backend,
            "blocked": self.blocked,
            "no_backward": self.no_backward,
            "error": self.error,
            "provenance": None if self.error or self.blocked else self._provenance(),
            "seen": self.seen.plain(),
            "passed_by": self.passed_by,
            "layouts": {one.name: one.digest for one in self.layouts},
        }

    def _provenance(self) -> str | None:
        """What the first line of the records cannot show: state of the process that changed meanwhile."""
        now = observe.environment(self.on.device)
        changed = [f"{name} {self.environment[name]} to {value}" for name, value in now.items()
                   if value != self.environment[name]]  # fmt: skip
        return f"the operator changed {', '.join(changed)}" if changed else None

    def comparisons(self) -> Iterator[dict[str, Any]]:
        if self.blocked:
            return
        judged = nodes.judged(self.tier, self.on.judgments)
        with observe.watch() as self.seen:
            for variant in nodes.variants(self.operator, self.tier):
                yield from _Variant(self, variant, judged).comparisons()


class _Variant:
    """One form of the operator: reference, baseline and canonical run once, then every layout against them."""

    def __init__(self, cell: _Cell, variant: str, judged: tuple[str, ...]) -> None:
        on, tier = cell.on, cell.tier
        self.cell, self.variant, self.judged, self.node = cell, variant, judged, NODES[cell.operator]
        self.subject = subject(on, cell.operator, tier, variant, cell.candidate)
        self.backward = any(name.startswith("gradient") for name in judged)
        self.reference = self._reference()
        self.baseline = self._baseline()
        self.canonical = Results()
        self.digests: dict[tuple[str, str, tuple[int, ...] | None], str] = {}
        self.accuracies: dict[tuple[str, str], dict[str, Any]] = {}

    def comparisons(self) -> Iterator[dict[str, Any]]:
        before = {name: comparing.fingerprint(weight) for name, weight in self.subject.weights.items()}
        self.canonical = self._run(self.cell.layouts[0])
        for name, weight in self.subject.weights.items():
            if comparing.fingerprint(weight) != before[name]:
                raise ValueError(f"the operator writes into its {name}")
        self._profile()
        yield from self._all(self.cell.layouts[0], self.canonical)
        for layout in self.cell.layouts[1:]:
            if layout.how == "other_process":
                yield from self._elsewhere(layout, self.canonical)
            else:
                yield from self._all(layout, self._run(layout))

    def _run(self, layout: Layout) -> Results:
        if self.backward and self.cell.no_backward is None:
            try:
                return run(self.subject, layout, self.cell.seen, backward=True)
            except NoBackward as error:
                self.cell.no_backward = str(error)
        return run(self.subject, layout, self.cell.seen, backward=False)

    def _profile(self) -> None:
        """The canonical calls once more under the profiler; what it sees joins what was seen to run."""
        if self.cell.on.device.type != "cuda":
            return
        seen = observe.Seen(profiling=True, profiled=self.cell.seen.profiled)
        run(self.subject, self.cell.layouts[0], seen, backward=self.backward and self.cell.no_backward is None)
        self.cell.seen.profiled = seen.profiled

    def _reference(self) -> Results:
        """fp64 where it is cheap, else fp32, on the same inputs, upcast."""
        largest = max(table.numel() for table in (*self.subject.tables.values(), *self.subject.weights.values()))
        wide = torch.float64 if largest <= _FP64_ELEMENTS else torch.float32
        whole = replace(
            self.subject,
            operator=resolve(self.cell.operator, "reference"),
            tables=_upcast(self.subject.tables, wide),
            weights=_upcast(self.subject.weights, wide),
            upstream=_upcast(self.subject.upstream, wide),
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
        """Which wrong candidates the row would pass: it judges nothing there."""
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
                theirs = self.cell.elsewhere.get(_key(self.cell.operator, self.cell.tier, self.variant, name))
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


def subject(on: Bench, operator: str, tier: Tier, variant: str, candidate: Callable[..., Any] | None) -> Subject:
    """An operator with its tables, weights and upstream gradients, whose shapes a run of the reference tells."""
    assert candidate is not None
    case = cases.of(operator, variant, on.model, on.workload)
    plain = Subject(
        case=case,
        tier=tier,
        operator=candidate,
        tables=cases.logical(case, tier, on.workload, on.model, on.dtype, on.device),
        weights=cases.weights(case, tier, on.workload, on.dtype, on.device),
        upstream={},
        device=on.device,
    )
    shapes = run(
        replace(plain, operator=resolve(operator, "torch")), layouts.of(tier)[0], observe.Seen(), backward=False
    )
    upstream = {
        name: cases.upstream(out.shape[1:], tier, on.workload, out.dtype, on.device, index)
        for index, (name, out) in enumerate(shapes.outputs.items())
        if out.is_floating_point()
    }
    return replace(plain, upstream=upstream, like=shapes.outputs)


def _upcast(tensors: cases.Tensors, wide: torch.dtype) -> dict[str, Tensor]:
    return {name: x.to(wide) if x.is_floating_point() else x for name, x in tensors.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The canonical call in another process


def _key(operator: str, tier: Tier, variant: str, tensor: str) -> str:
    return "|".join((operator, tier.name, variant, tensor))


def _digests_of_another_process(on: Bench) -> Mapping[str, str]:
    if not any("other_process" in tier.layouts for tier in on.workload.tiers):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "digests.json"
        environment = {**os.environ, _ONLY_CANONICAL: str(place)}
        done = subprocess.run([sys.executable, str(on.run_file)], env=environment, check=False)
        if done.returncode or not place.is_file():
            print(f"the process for the layout other_process ended with {done.returncode}", flush=True)
            return {}
        return json.loads(place.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _canonical_digests(on: Bench) -> Iterator[tuple[str, str]]:
    for operator in on.operators:
        for tier in nodes.tiers(operator, on.workload.tiers):
            if NODES[operator].not_applicable or "other_process" not in tier.layouts:
                continue
            try:
                yield from _digests_of(on, operator, tier)
            except Exception as error:  # the cell itself meets the same in the process that judges it
                print(f"{operator} {tier.name}: {_told(error)['message']}", flush=True)


def _digests_of(on: Bench, operator: str, tier: Tier) -> Iterator[tuple[str, str]]:
    candidate = resolve(operator, on.implementation_of(operator))
    backward = any(name.startswith("gradient") for name in nodes.judged(tier, on.judgments))
    for variant in nodes.variants(operator, tier):
        one = subject(on, operator, tier, variant, candidate)
        try:
            found = run(one, layouts.of(tier)[0], observe.Seen(), backward=backward)
        except NoBackward:
            found = run(one, layouts.of(tier)[0], observe.Seen(), backward=False)
        for name, tensor in {**found.outputs, **found.gradients}.items():
            yield _key(operator, tier, variant, name), comparing.fingerprint(tensor)
