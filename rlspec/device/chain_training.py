"""The cells of training: every one run, held against the canonical one and, for its errors, against the model in fp32.

Memory. Parameters in the working dtype, the gradients of one cell in fp32, the graph of one call. The reference's
gradients and the canonical cell's are kept where two more sets fit. Where they do not, cells are told apart by digests
alone, and errors are measured while the graph is that of one sample: a cell of the same digest has them too, and for
any other the reference is run again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlspec import chains
from rlspec.chains import ONLY_GRADIENTS, PLAIN, REFERENCE, Cell
from rlspec.device import chain_trace, comparing
from rlspec.device.chain_calls import watched
from rlspec.device.chain_lines import yardstick
from rlspec.device.chain_model import Trained, TrainingPass
from rlspec.device.chain_routes import RoutedDecoder, RoutedPass, Routes
from rlspec.device.chain_session import Session
from rlspec.device.chain_trace import STREAM, Trace, WatchedDecoder, divergence
from rlspec.device.decoder import PROFILES, Node
from rlspec.device.operators import Operators
from rlspec.errors import RunError
from rlspec.layouts import CANONICAL, Layout

AHEAD = "ahead"  # a run of the arm for its errors alone
_SHARE = 0.85  # of the GPU's memory that an estimate may fill


@dataclass
class Canonical:
    """What the other cells are held against; `kept`: gradients by name, where they fit."""

    logprobs: Tensor
    trace: Trace
    digests: dict[str, str]
    kept: dict[str, Tensor]


@dataclass
class Yardsticks:
    """The run in fp32, and what plain torch errs by: by tensor in `found`, by node in `nodes`.

    `lines`: (name, digest) of a gradient -> what it errs by.
    """

    logprobs: Tensor
    gradients: dict[str, Tensor]
    digests: dict[str, str]
    found: dict[str, dict[str, float | str]]
    trace: Trace
    nodes: dict[chain_trace.Key, float]
    lines: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)


class Cells:
    """All cells of one arm; `run` gives what inference is held against."""

    def __init__(self, session: Session) -> None:
        self.session, self.lines, self.on = session, session.lines, session.on
        self.routes: Routes | None = None
        self.taken: dict[str, Any] | None = None  # what the reference says of these routes

    def run(self) -> Canonical:
        """The canonical cell, then the others, each with its comparisons."""
        asked, chosen = self.session.asked, self.on.cells
        accuracy = asked(*chains.ACCURACY)
        if accuracy and self.on.model.num_experts:
            self._find_routes(chosen[0])
        yardsticks = self._yardsticks() if accuracy else None
        if yardsticks is not None and not self._resident:
            self._ahead(yardsticks)
        trained, trace = self._cell(chosen[0], keep="*" if accuracy else STREAM)
        if not accuracy:  # else the reference is finite, and the errors against it tell where the arm is not
            self._finite(trained, trace, CANONICAL)
        digests = {name: comparing.fingerprint(x) for name, x in trained.gradients.items()}
        canonical = Canonical(trained.logprobs, trace, digests, {})
        self.lines.logprobs(CANONICAL, trained.logprobs)
        if yardsticks is not None:
            self._depth(trace, yardsticks)
            self._accuracy(CANONICAL, trained, digests, yardsticks)
        if self.session.asked("train_inference_parity"):  # which measures how far inference is off, node by node
            trace.rows = {key: rows if key.name == STREAM else rows.cpu() for key, rows in trace.rows.items()}
        else:
            trace.rows = {key: rows for key, rows in trace.rows.items() if key.name == STREAM}
        measured = chains.accuracy_cells(chosen) if accuracy else ()
        others = [cell for cell in chosen[1:] if asked(*chains.INVARIANCE) or cell.name in measured]
        canonical.kept = dict(trained.gradients) if others and self._resident else {}
        trained.gradients.clear()
        for cell in others:
            self._other(cell, canonical, yardsticks if cell.name in measured else None)
        canonical.kept.clear()
        return canonical

    @property
    def _resident(self) -> bool:
        """Whether two more sets of gradients fit beside those of a cell."""
        if self.on.device.type != "cuda" or not self.session.backward:
            return True
        return self.session.memory.resident <= _SHARE * self.session.total_memory()

    def _cell(self, cell: Cell, keep: str = STREAM) -> tuple[Trained, Trace]:
        """One cell of the arm."""
        made = self.session.training(self.session.lives.training, self.on.operators())
        return self._traced(made, cell.layout, cell.chunk, keep, cell.name)

    def _traced(self, made: TrainingPass, layout: Layout, chunk: int, keep: str, name: str) -> tuple[Trained, Trace]:
        self.session.step(name)
        started, device = time.monotonic(), self.on.device
        trace = Trace([sample.length for sample in self.session.samples], device, keep=keep)
        if isinstance(made.decoder, WatchedDecoder):
            made.decoder.trace = trace
        with watched(made.decoder) as calls:

            def capture(node: Node, *shown: Any) -> None:
                calls[-1].chunks.add(node.chunk)
                trace.capture(node, *shown)

            trained = made.run(layout, chunk_size=chunk or None, capture=capture)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.lines.line(
            "cell",
            name=name,
            layout=layout.digest,
            chunk=chunk,
            seconds=round(time.monotonic() - started, 3),
            calls=len(layout.calls),
            loss=comparing.number(self._loss(trained.logprobs, made)),
            summed_by_autograd=list(trained.accumulated_by.values()).count("autograd"),
            digest=trace.digest(),
            ran=[call.trained() for call in calls],
        )
        return trained, trace

    def _loss(self, logprobs: Tensor, made: TrainingPass) -> float:
        tier = self.on.chain.tier
        pairs = zip(made.loss_weights, tier.samples, strict=True)
        shares = torch.cat([weights[sample.prompt :] for weights, sample in pairs])
        return float(-(shares * logprobs.double()).sum() / tier.active)

    def _finite(self, trained: Trained, trace: Trace, name: str) -> None:
        """RunError with the first result that is not finite: NaN agrees with nothing, so there is nothing to judge."""
        if place := trace.broken(self.session.names):
            raise RunError(f"{name}: a result is not finite, first that of {place}")
        for parameter, x in trained.gradients.items():
            if not bool(x.isfinite().all()):
                raise RunError(f"{name}: the gradient of {parameter} is not finite")

    # Invariance

    def _other(self, cell: Cell, want: Canonical, yardsticks: Yardsticks | None) -> None:
        trained, trace = self._cell(cell)
        forward = divergence(trace, want.trace, self.session.names, self.session.layers)
        if self.session.asked("forward_invariance") and cell.name != ONLY_GRADIENTS:
            self.lines.bits(
                "forward_invariance", cell.name, "logprob", trained.logprobs, want.logprobs, place=self._active
            )
            self.lines.trace("forward_invariance", cell.name, forward)
        digests = {name: self._digest(name, x, want) for name, x in trained.gradients.items()}
        if self.session.asked("gradient_invariance"):
            for name, x in trained.gradients.items():
                self._gradient(cell.name, name, x, digests[name], want)
            first = forward["first"] and {**forward["first"], "phase": chain_trace.FORWARD}
            if first is None:
                first = chain_trace.backward_divergence(trace, want.trace, self.session.names)
                first = first and {**first, "phase": chain_trace.BACKWARD}
            self.lines.trace("gradient_invariance", cell.name, {**forward, "first": first})
        if yardsticks is not None:
            self._accuracy(cell.name, trained, digests, yardsticks)

    def _digest(self, name: str, x: Tensor, want: Canonical) -> str:
        """The digest of a gradient; of one equal to the canonical cell's, where that is kept, without computing it."""
        if name in want.kept and comparing.identical(x, want.kept[name]):
            return want.digests[name]
        return comparing.fingerprint(x)

    def _gradient(self, cell: str, name: str, x: Tensor, own: str, want: Canonical) -> None:
        digest, broken = want.digests[name], int(x.isnan().sum())
        found: dict[str, Any] = {"differing": 0, "first": None, "digest": own, "against_digest": digest}
        if name in want.kept and (broken or own != digest):
            found = comparing.same_bits(x, want.kept[name], digest)
        elif broken or own != digest:  # NaN is a difference, whatever the digests say
            found["differing"] = broken or None
        self.lines.comparison("gradient_invariance", cell, name, CANONICAL, x, x, found)

    def _active(self, index: int) -> dict[str, Any]:
        """Which token the log-prob is of."""
        for sample in self.session.samples:
            if index < sample.active:
                return {"sample": sample.id, "position": sample.prompt + index}
            index -= sample.active
        return {}

    # Accuracy

    def _yardsticks(self) -> Yardsticks:
        """The same model in fp32, and as plain torch runs it in the arm's dtype with the roundings of transformers."""
        alone = self.session.alone()
        whole = self._whole()
        wanted, trace = self._traced(whole, alone.layout, 0, "*", REFERENCE)
        if isinstance(whole.decoder, RoutedDecoder):
            self.taken = whole.decoder.summary()
        self._finite(wanted, trace, "the reference in fp32")
        plain = self._measure(Operators("torch"))
        plain.decoder.profile = PROFILES["hf"]
        theirs, their_trace = self._traced(plain, alone.layout, 0, "*", PLAIN)
        self.lines.logprobs(REFERENCE, wanted.logprobs)
        self.lines.logprobs(PLAIN, theirs.logprobs)
        found = {name: yardstick(x, wanted.gradients[name]) for name, x in theirs.gradients.items()}
        found["logprob"] = yardstick(theirs.logprobs, wanted.logprobs)
        nodes = {key: error for key, error, _ in chain_trace.node_errors(their_trace, trace)}
        digests = {name: comparing.fingerprint(x) for name, x in wanted.gradients.items()}
        return Yardsticks(wanted.logprobs, wanted.gradients, digests, found, trace, nodes)

    def _whole(self) -> TrainingPass:
        return self._measure(Operators("reference"), dtype=self.session.wide, recompute=True)

    def _measure(self, operators: Operators, **options: Any) -> TrainingPass:
        """A run that errors are measured by: with experts, along the routes of the arm."""
        if self.routes is None:
            return self.session.training(TrainingPass, operators, **options)
        made = self.session.training(RoutedPass, operators, **options)
        assert isinstance(made, RoutedPass)
        return made.follow(self.routes)

    def _find_routes(self, cell: Cell) -> None:
        self.session.step("routes")
        self.routes = Routes([sample.length for sample in self.session.samples], self.on.device)
        made = self.session.training(self.session.lives.training, self.on.operators())
        made.run(cell.layout, chunk_size=cell.chunk or None, capture=self.routes.capture)

    def _ahead(self, yardsticks: Yardsticks) -> None:
        """The errors of the arm's gradients while those of the reference still fit beside its graph."""
        made = self.session.training(self.session.lives.training, self.on.operators())
        trained, _ = self._traced(made, self.session.alone().layout, 0, "", AHEAD)
        if self.session.asked("gradient_accuracy"):
            for name, x in trained.gradients.items():
                self._error(name, x, comparing.fingerprint(x), yardsticks)
        yardsticks.gradients.clear()

    def _error(self, name: str, x: Tensor, digest: str, yardsticks: Yardsticks) -> dict[str, Any]:
        """What a gradient errs by; once for each digest."""
        if (name, digest) not in yardsticks.lines:
            if not yardsticks.gradients:
                yardsticks.gradients |= self._whole().run(self.session.alone().layout).gradients
            line = self.lines.errors("gradient_accuracy", x, yardsticks.gradients[name], yardsticks.found[name])
            line |= {"digest": digest, "against_digest": yardsticks.digests[name]}
            yardsticks.lines[name, digest] = line
        return yardsticks.lines[name, digest]

    def _depth(self, trace: Trace, yardsticks: Yardsticks) -> None:
        """Errors node by node, beside those of plain torch."""
        nodes = [
            [*key, *map(comparing.number, (error, yardsticks.nodes.get(key, float("inf")), size))]
            for key, error, size in chain_trace.node_errors(trace, yardsticks.trace)
        ]
        routes = {} if self.taken is None else {"routes": self.taken}
        self.lines.line("depth", configuration=CANONICAL, probes=len(trace.probes), nodes=nodes, **routes)
        yardsticks.trace.rows.clear()

    def _accuracy(self, cell: str, trained: Trained, digests: Mapping[str, str], yardsticks: Yardsticks) -> None:
        lines = self.lines
        if self.session.asked("forward_accuracy"):
            known = yardsticks.found["logprob"]
            lines.near("forward_accuracy", cell, "logprob", trained.logprobs, yardsticks.logprobs, known, self._active)
        if self.session.asked("gradient_accuracy"):
            limits = lines.limits["gradient_accuracy"]
            for name, x in trained.gradients.items():
                found = self._error(name, x, digests[name], yardsticks)
                lines.comparison("gradient_accuracy", cell, name, REFERENCE, x, x, found, limits)
