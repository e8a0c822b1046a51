"""Judge a whole model: trained in every cell and inferred in every way, all compared, for one arm.

Writes records.jsonl line by line: `logprobs` of each execution, a `comparison` a tensor and pair, a `trace` for each
pair that shows where two runs part, `depth` with errors node by node, and what was seen to run. Numbers and digests
only: the host decides.

Memory. Parameters in the working dtype, the gradients of one cell in fp32, the graph of one call. The reference's
gradients and the canonical cell's are kept on the device where two more sets fit. Where they do not, cells are told
apart by digests alone, and errors are measured while the graph is that of one sample: a cell of the same digest has
them too, and for any other the reference is run again.
"""

from __future__ import annotations

import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from rlspec import chains
from rlspec.chains import ONLY_GRADIENTS, Cell
from rlspec.device import chain_faults, chain_trace, comparing, observe, weights
from rlspec.device.chain_bench import ChainBench
from rlspec.device.chain_inference import ATTENTION, KEYS, QUERY, VALUES, Walk
from rlspec.device.chain_model import Trained, TrainingPass, logical_weights
from rlspec.device.chain_observed import ObservedInference, ObservedPass, Observer
from rlspec.device.chain_trace import Trace, WatchedDecoder, divergence
from rlspec.device.decoder import PROFILES
from rlspec.device.execution import NoBackward
from rlspec.device.operators import Operators, Segment, Segments
from rlspec.layouts import CANONICAL, Layout
from rlspec.workloads import Decode, Sample

_TAIL = 6
_FILE = re.compile(r'File "(?:[^"]*/)?([^"/]+)"')
_GIB = float(1 << 30)
AHEAD = "ahead"  # a run of the arm for its errors alone


def main(on: ChainBench, records: Path) -> None:
    """Run the arm into `records`."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if on.device.type == "cpu":
        torch.set_num_threads(1)  # many small operators: threads would wait for each other for most of the time
    with records.open("w", encoding="utf-8") as file:
        _Harness(on, _Writer(file)).run()


@dataclass
class _Writer:
    file: TextIO
    lines: int = 0

    def line(self, record: str, **line: Any) -> None:
        self.file.write(json.dumps({"record": record, **line}, allow_nan=False) + "\n")
        self.file.flush()
        self.lines += 1


@dataclass
class _Canonical:
    """What the other cells are held against: log-probs, gradients by name where they are kept, digests, a trace."""

    trained: Trained
    trace: Trace
    digests: dict[str, str]
    kept: dict[str, Tensor]
    errors: dict[str, dict[str, Any]] = field(default_factory=dict)


class _Harness:
    def __init__(self, on: ChainBench, writer: _Writer) -> None:
        self.on, self.write = on, writer
        self.lives = chain_faults.lives(on.fault)
        self.samples = on.chain.tier.samples
        self.names = [sample.id for sample in self.samples]
        self.layers = on.sizes.layers
        self.memory = chains.memory(on.chain, on.sizes, bits=8 * on.dtype.itemsize)
        self.canonical: _Canonical | None = None

    def asked(self, *judgments: str) -> bool:
        return bool(set(judgments) & set(self.on.judgments))

    def run(self) -> None:
        on = self.on
        blocked = self._blocked()
        self.write.line(
            "run", schema_version=1, arm=on.arm, kind="chain", environment=observe.environment(on.device),
            implementation=on.implementation if isinstance(on.implementation, str) else dict(on.implementation),
            profile=on.profile, dtype=_name(on.dtype), fingerprint=on.model.fingerprint(), blocked=blocked,
            cells={cell.name: cell.digest for cell in on.cells}, parameters=len(on.sizes.parameters),
            estimate_gib=round(self.memory.least / _GIB, 1), faulty=on.fault,
        )  # fmt: skip
        if blocked is None:
            self._whole()
        self.write.line("end", lines=self.write.lines)

    def _blocked(self) -> str | None:
        """Why the machine cannot hold the run, asked before anything is allocated."""
        on = self.on
        backends = {getattr(getattr(on.operators(), name), "backend", None) for name in _OPERATORS}
        if on.device.type != "cuda":
            own = sorted(filter(None, backends))
            return f"{own[0]} kernels need a CUDA device, and there is none here" if own else None
        total = torch.cuda.get_device_properties(on.device).total_memory
        need = self.memory.least / _GIB
        if need * _GIB <= total:
            return None
        return f"the run is estimated to need {need:.0f} GiB of GPU memory, and here are {total / _GIB:.0f} GiB"

    def _whole(self) -> None:
        with observe.watch() as seen:
            with self._phase("weights"):
                self.decoder = self.on.decoder()
                found = {key: self.on.weights.get(key) for key in ("source", "seed", "path")}
                digest = weights.fingerprint(self.decoder)
                self.write.line("weights", **found, pinned=self.on.weights["source"] != "seeded", digest=digest)
            if hasattr(self, "decoder"):
                if self.asked(*chains.INVARIANCE, *chains.ACCURACY, "train_inference_parity"):
                    with self._phase("training"):
                        self._training()
                if self.asked(*chains.STATEFUL):
                    with self._phase("inference"):
                        self._inference()
                with self._phase("provenance"):
                    self._provenance()
        after = weights.fingerprint(self.decoder) if hasattr(self, "decoder") else None
        self.write.line("kernels", triton=seen.triton, native=seen.native, weights=after)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """One part of the run, with its time and memory; an exception in it ends this part alone."""
        started, error, where = time.monotonic(), None, self.on.device
        if where.type == "cuda":
            torch.cuda.reset_peak_memory_stats(where)
        self.at = ""
        try:
            yield
        except Exception as problem:  # whatever a user's operator raises is said, and what else can be judged is
            error = _told(problem, self.at)
        peak = torch.cuda.max_memory_allocated(where) / _GIB if where.type == "cuda" else None
        seconds = round(time.monotonic() - started, 3)
        self.write.line("phase", name=name, seconds=seconds, peak_gib=peak, error=error)
        print(f"{name}: {seconds:.1f} s" + (f", peak {peak:.1f} GiB" if peak else "") +
              (f", {error['message']}" if error else ""), flush=True)  # fmt: skip

    def _step(self, name: str) -> None:
        """Where the run is, for messages; also what a person who waits sees."""
        self.at = name
        print(f"at {name}", flush=True)

    # Training

    def _training(self) -> None:
        on = self.on
        accuracy = self.asked(*chains.ACCURACY)
        yardsticks = self._yardsticks() if accuracy else None
        if yardsticks is not None and not self._resident:
            self._ahead(yardsticks)
        cell = on.cells[0]
        trained, trace = self._cell(cell, keep="*" if accuracy else chain_trace.STREAM)
        digests = {name: comparing.fingerprint(x) for name, x in trained.gradients.items()}
        self.canonical = _Canonical(trained, trace, digests, {})
        self._logprobs(CANONICAL, trained.logprobs)
        if yardsticks is not None:
            self._depth(trace, yardsticks)
            self._accuracy(cell.name, trained, yardsticks)
        trace.rows = {key: rows for key, rows in trace.rows.items() if key.name == chain_trace.STREAM}
        others = on.cells[1:] if self.asked(*chains.INVARIANCE) or accuracy else ()
        if others and self._resident:
            self.canonical.kept = dict(trained.gradients)
        trained.gradients.clear()
        for cell in others:
            measured = accuracy and cell.name in chains.accuracy_cells(on.cells)
            if self.asked(*chains.INVARIANCE) or measured:
                self._other(cell, yardsticks if measured else None)
        self.canonical.kept.clear()

    @property
    def _resident(self) -> bool:
        """Whether two more sets of gradients fit beside those of a cell."""
        if self.on.device.type != "cuda":
            return True
        return self.memory.resident <= 0.85 * torch.cuda.get_device_properties(self.on.device).total_memory

    def _pass(self, kind: type[TrainingPass], operators: Operators, **options: Any) -> TrainingPass:
        tier, on = self.on.chain.tier, self.on
        loss_weights = logical_weights(tier) if on.chain.loss_weights == "logical" else None
        tokens = [on.tokens(sample) for sample in (*tier.samples, *tier.company)]
        return kind(self.decoder, operators, tier, tokens, loss_weights=loss_weights, pad_token=on.pad_token, **options)

    def _cell(self, cell: Cell, keep: str = chain_trace.STREAM) -> tuple[Trained, Trace]:
        """One cell of the arm."""
        made = self._pass(self.lives.training, self.on.operators())
        return self._traced(made, cell.layout, cell.chunk, keep, cell.name)

    def _traced(self, made: TrainingPass, layout: Layout, chunk: int, keep: str, name: str) -> tuple[Trained, Trace]:
        self._step(name)
        started, device = time.monotonic(), self.on.device
        trace = Trace([sample.length for sample in self.samples], device, keep=keep)
        if isinstance(made.decoder, WatchedDecoder):
            made.decoder.trace = trace
        trained = made.run(layout, chunk_size=chunk or None, capture=trace.capture)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        by_autograd = sorted(name for name, by in trained.accumulated_by.items() if by == "autograd")
        self.write.line(
            "cell", name=name, layout=layout.digest, chunk=chunk, seconds=round(time.monotonic() - started, 3),
            calls=len(layout.calls), loss=comparing.number(self._loss(trained.logprobs, made)),
            summed_by_autograd=len(by_autograd), digest=trace.digest(),
        )  # fmt: skip
        return trained, trace

    def _loss(self, logprobs: Tensor, made: TrainingPass) -> float:
        tier = self.on.chain.tier
        pairs = zip(made.loss_weights, tier.samples, strict=True)
        shares = torch.cat([weights[sample.prompt :] for weights, sample in pairs])
        return float(-(shares * logprobs.double()).sum() / tier.active)

    def _other(self, cell: Cell, yardsticks: _Yardsticks | None) -> None:
        want = self.canonical
        assert want is not None
        trained, trace = self._cell(cell)
        forward = divergence(trace, want.trace, self.names, self.layers)
        if self.asked("forward_invariance") and cell.name != ONLY_GRADIENTS:
            digest = comparing.fingerprint(want.trained.logprobs)
            self._bits("forward_invariance", cell.name, "logprob", trained.logprobs, want.trained.logprobs, digest,
                       place=self._active)  # fmt: skip
            self._trace("forward_invariance", cell.name, forward)
        differing = []
        digests = {name: self._told_apart(name, x) for name, x in trained.gradients.items()}
        if self.asked("gradient_invariance"):
            for name, x in trained.gradients.items():
                same = digests[name] == want.digests[name] and not bool(x.isnan().any())
                differing += [] if same else [name]
                self._gradient_bits(cell.name, name, x, digests[name], same)
            first = forward["first"] and {**forward["first"], "phase": chain_trace.FORWARD}
            if first is None:
                first = chain_trace.backward_divergence(trace, want.trace, self.names)
                first = first and {**first, "phase": chain_trace.BACKWARD}
            if first is None and differing:
                first = _of_parameter(differing[-1])  # the backward meets the last parameter first
            self._trace("gradient_invariance", cell.name, {**forward, "first": first})
        if yardsticks is not None:
            self._accuracy(cell.name, trained, yardsticks, digests)

    def _told_apart(self, name: str, x: Tensor) -> str:
        """The digest of a gradient; of one equal to the canonical cell's, where that is kept, without computing it."""
        assert self.canonical is not None
        kept = self.canonical.kept.get(name)
        return (
            self.canonical.digests[name]
            if kept is not None and comparing.identical(x, kept)
            else comparing.fingerprint(x)
        )

    def _gradient_bits(self, cell: str, name: str, x: Tensor, own: str, same: bool) -> None:
        assert self.canonical is not None
        digest = self.canonical.digests[name]
        if same:
            found: dict[str, Any] = {"differing": 0, "first": None, "digest": digest, "against_digest": digest}
        elif name in self.canonical.kept:
            found = comparing.same_bits(x, self.canonical.kept[name], digest)
        else:
            broken = int(x.isnan().sum())  # NaN is a difference, whatever the digests say
            found = {"differing": broken or None, "first": None, "digest": own, "against_digest": digest}
        self._comparison("gradient_invariance", cell, name, CANONICAL, x, x, None, found)

    # Accuracy

    def _yardsticks(self) -> _Yardsticks:
        """The same model in fp32, and as plain torch runs it in the arm's dtype with the roundings of transformers."""
        alone = self._alone()
        wanted, trace = self._traced(self._whole_pass(), alone.layout, 0, "*", chains.REFERENCE)
        plain = self._pass(TrainingPass, Operators("torch"))
        plain.decoder.profile = PROFILES["hf"]
        theirs, their_trace = self._traced(plain, alone.layout, 0, "*", chains.PLAIN)
        self._logprobs(chains.REFERENCE, wanted.logprobs)
        self._logprobs(chains.PLAIN, theirs.logprobs)
        found = {name: _yardstick(x, wanted.gradients[name]) for name, x in theirs.gradients.items()}
        found["logprob"] = _yardstick(theirs.logprobs, wanted.logprobs)
        nodes = {key: error for key, error, _ in chain_trace.node_errors(their_trace, trace)}
        digests = {name: comparing.fingerprint(x) for name, x in wanted.gradients.items()}
        return _Yardsticks(wanted.logprobs, wanted.gradients, digests, found, trace, nodes)

    def _alone(self) -> Cell:
        """One sample a call: the smallest graphs."""
        return next(cell for cell in chains.cells(self.on.chain, ("B1/full",)) if cell.name == "B1/full")

    def _whole_pass(self) -> TrainingPass:
        wide = torch.float64 if self.on.dtype == torch.float32 else torch.float32
        return self._pass(TrainingPass, Operators("reference"), dtype=wide, recompute=True)

    def _ahead(self, yardsticks: _Yardsticks) -> None:
        """The errors of the arm's gradients while those of the reference still fit beside its graph."""
        alone = self._alone()
        made = self._pass(self.lives.training, self.on.operators())
        trained, _ = self._traced(made, alone.layout, 0, "", AHEAD)
        if self.asked("gradient_accuracy"):
            for name, x in trained.gradients.items():
                self._gradient_error(name, x, comparing.fingerprint(x), yardsticks)
        yardsticks.gradients.clear()

    def _gradient_error(self, name: str, x: Tensor, digest: str, yardsticks: _Yardsticks) -> dict[str, Any]:
        """What a gradient errs by; once for each digest."""
        if (name, digest) not in yardsticks.lines:
            if not yardsticks.gradients:
                yardsticks.gradients |= self._whole_pass().run(self._alone().layout).gradients
            line = self._errors("gradient_accuracy", x, yardsticks.gradients[name], yardsticks.found[name])
            line |= {"digest": digest, "against_digest": yardsticks.digests[name]}
            yardsticks.lines[name, digest] = line
        return yardsticks.lines[name, digest]

    def _depth(self, trace: Trace, yardsticks: _Yardsticks) -> None:
        lines = [
            [*key, comparing.number(error), comparing.number(yardsticks.nodes.get(key, float("inf"))), size]
            for key, error, size in chain_trace.node_errors(trace, yardsticks.trace)
        ]
        self.write.line("depth", configuration=CANONICAL, probes=len(trace.probes), nodes=lines)
        yardsticks.trace.rows.clear()

    def _accuracy(
        self, cell: str, trained: Trained, yardsticks: _Yardsticks, digests: Mapping[str, str] | None = None
    ) -> None:
        if self.asked("forward_accuracy"):
            self._near("forward_accuracy", cell, "logprob", trained.logprobs, yardsticks.logprobs,
                       yardsticks.found["logprob"], place=self._active)  # fmt: skip
        if not self.asked("gradient_accuracy"):
            return
        for name, x in trained.gradients.items():
            digest = digests[name] if digests else self._digest(name)
            line = self._gradient_error(name, x, digest, yardsticks)
            self._comparison("gradient_accuracy", cell, name, chains.REFERENCE, x, x,
                             self.on.limits["gradient_accuracy"], line)  # fmt: skip

    def _digest(self, name: str) -> str:
        assert self.canonical is not None
        return self.canonical.digests[name]

    def _near(
        self, judgment: str, configuration: str, tensor: str, got: Tensor, want: Tensor,
        yardstick: Mapping[str, float | str], place: Callable[[int], dict[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        line = self._errors(judgment, got, want, yardstick)
        line |= {"digest": comparing.fingerprint(got), "against_digest": comparing.fingerprint(want)}
        if place and line["first"]:
            line["first"] |= place(line["first"]["index"])
        self._comparison(judgment, configuration, tensor, chains.REFERENCE, got, want, self.on.limits[judgment], line)

    def _errors(self, judgment: str, got: Tensor, want: Tensor, yardstick: Mapping[str, float | str]) -> dict[str, Any]:
        limits = self.on.limits[judgment] or {}
        line = comparing.errors(got, want, limits.get("atol", 0.0), limits.get("rtol", 0.0)).plain()
        return {**line, "yardstick": dict(yardstick)}

    # Inference

    def _engine(self) -> Any:
        on = self.on
        return self.lives.engine(
            self.decoder, on.operators(), tokens=on.tokens, pad_token=on.pad_token, page_size=on.chain.page_size,
            unwritten=on.unwritten,
        )  # fmt: skip

    def _inference(self) -> None:
        self.engine = self._engine()
        if self.asked("train_inference_parity"):
            self._generation()
        if self.asked("decode_prefill", "kv_cache"):
            for case in self.on.chain.decode:
                self._decode(case)
        if self.asked("kv_cache"):
            for kind in chains.CACHES:
                self._chunked(kind)

    def _generation(self) -> None:
        """The active tokens as rollout engines score them: prefilled and decoded, then rescored."""
        chain, engine = self.on.chain, self.engine
        for name in chains.EXECUTIONS:
            self._step(name)
            groups = [[sample] for sample in self.samples] if name.startswith("B1") else [list(self.samples)]

            def run(group: Sequence[Sample], trace: bool, name: str = name) -> Walk:
                if name == chains.RESCORE:
                    return engine.prefill(group, trace=trace)  # type: ignore[no-any-return]
                chunk = chain.tier.chunk if name.endswith("chunked") else 0
                cache = engine.cache("paged" if name.endswith("paged") else "contiguous", group)
                return engine.walk(group, chains.generation(chain, group, chunk=chunk), cache, trace=trace)  # type: ignore[no-any-return]

            always = name == chains.RESCORE
            walks = [run(group, always) for group in groups]
            values = [
                walk.logprobs[index, position - 1]
                for group, walk in zip(groups, walks, strict=True)
                for index, sample in enumerate(group)
                for position in range(sample.prompt, sample.length)
            ]
            self._logprobs(name, torch.tensor(values, dtype=torch.float32))
            want = self.canonical
            if want is None:
                continue
            if values != want.trained.logprobs.tolist() and not always:
                walks = [run(group, True) for group in groups]
            if walks[0].trace is not None:
                whole = _joined([walk.trace for walk in walks if walk.trace], self.samples, self.on.device)
                self._trace("train_inference_parity", name, divergence(whole, want.trace, self.names, self.layers))

    def _decode(self, case: Decode) -> None:
        """Token by token through both caches, against one prefill of the same grid."""
        wanted = dict(chains.decoded(case))
        places = [(index, position) for index, positions in wanted.items() for position in positions]
        names = [sample.id for sample in case.samples]
        near = chains.prefixes(self.on.chain, case)
        rows = {index: sorted({*positions, *(length - 1 for at, length in near if at == index)})
                for index, positions in wanted.items()}  # fmt: skip
        self._step(f"{case.name}/prefill")
        asked: dict[str, Any] = {"left": case.left, "width": case.width}
        full = self.engine.prefill(case.samples, wanted=rows, trace=True, **asked)
        for kind in chains.CACHES:
            name = f"{case.name}/{kind}"
            self._step(name)

            def run(trace: bool, kind: str = kind) -> tuple[Walk, Any]:
                cache = self.engine.cache(kind, case.samples)
                columns = chains.columns(case)
                walk = self.engine.walk(
                    case.samples, columns, cache, wanted=wanted, store=not trace, trace=trace, **asked
                )
                return walk, cache

            walk, cache = run(False)
            if self.asked("decode_prefill"):
                same = self._decoded(name, walk, full, places, names)
                trace = None if same else run(True)[0].trace
                found = None if trace is None else divergence(trace, full.trace, names, self.layers)
                if found is not None:
                    self._trace("decode_prefill", name, found)
            if self.asked("kv_cache"):
                self._cached(name, case, walk, cache)
        if self.asked("decode_prefill"):
            self._prefixes(case, full, near, names)

    def _decoded(
        self, name: str, walk: Walk, full: Walk, places: Sequence[tuple[int, int]], names: Sequence[str]
    ) -> bool:
        got, want = (torch.stack([one.logits[place] for place in places]) for one in (walk, full))
        lengths = {index: self._length(full, index) for index in dict(places)}
        pairs = [(walk.logprobs[place], full.logprobs[place]) for place in places if place[1] < lengths[place[0]] - 1]
        found = self._bits(
            "decode_prefill", name, "logits", got, want, comparing.fingerprint(want), against="prefill",
            place=lambda index: _token(index, got, places, names), pairs=pairs,
        )  # fmt: skip
        return bool(found["differing"] == 0)

    def _length(self, full: Walk, index: int) -> int:
        return 1 + max(position for sample, position in full.logprobs if sample == index)

    def _prefixes(self, case: Decode, full: Walk, near: Sequence[tuple[int, int]], names: Sequence[str]) -> None:
        self._step(f"{case.name}/{chains.PREFIX}")
        found, pairs = [], []
        for index, length in near:
            sample = case.samples[index]
            walk = self.engine.walk([sample], [(0, length)], None, wanted={0: [length - 1]})
            found.append(walk.logits[0, length - 1])
            if length < sample.length:
                pairs.append((walk.logprobs[0, length - 1], full.logprobs[index, length - 1]))
        places = [(index, length - 1) for index, length in near]
        got, want = torch.stack(found), torch.stack([full.logits[place] for place in places])
        self._bits(
            "decode_prefill", f"{case.name}/{chains.PREFIX}", "logits", got, want, comparing.fingerprint(want),
            against="prefill", place=lambda index: _token(index, got, places, names), pairs=pairs,
        )  # fmt: skip

    # The cache

    def _cached(self, name: str, case: Decode, walk: Walk, cache: Any) -> None:
        count, device = len(case.samples), self.on.device
        for tensor, node, slot in (("keys", KEYS, 0), ("values", VALUES, 1)):
            read = [[cache.read(layer, index)[slot] for index in range(count)] for layer in range(self.layers)]
            written = [[walk.stored(layer, index, node) for index in range(count)] for layer in range(self.layers)]
            self._stored(name, tensor, read, written, "written", [sample.id for sample in case.samples])
        lengths = torch.tensor([cache.lengths.get(index, -1) for index in range(count)])
        due = torch.tensor([sample.length for sample in case.samples])
        self._bits("kv_cache", name, "cursor", lengths, due, comparing.fingerprint(due), against="tokens",
                   place=lambda index: {"sample": case.samples[index].id})  # fmt: skip
        none, strays = torch.zeros(1, dtype=torch.int64), torch.tensor([cache.strays()])
        self._bits("kv_cache", name, "strays", strays, none, comparing.fingerprint(none), against="none")
        pairs = [self._direct(walk, layer, index, device) for layer in range(self.layers) for index in range(count)]
        shape = (self.layers, count)
        got, direct, exact, plain = (torch.stack(list(part)).unflatten(0, shape) for part in zip(*pairs, strict=True))
        self._bits("kv_cache", name, "attention", got, direct, comparing.fingerprint(direct), against="direct",
                   place=lambda index: _head(index, got, case.samples))  # fmt: skip
        self._near("kv_cache", name, "attention", got, exact, _yardstick(plain, exact))

    def _direct(self, walk: Walk, layer: int, index: int, device: torch.device) -> tuple[Tensor, ...]:
        """The last call's attention of a sample; then on its keys and values as written: by the same operator, in fp32,
        and by plain torch."""
        query = walk.last[layer, index, QUERY][None, None]
        key, value = (walk.stored(layer, index, node)[None] for node in (KEYS, VALUES))
        segments = Segments((Segment(0, 0, 1, 0, key.shape[1]),), 1, 1, key.shape[1], device)
        scale = self.on.model.head_dim**-0.5
        with torch.no_grad():
            direct = self.engine.decoder.operators.attention(query, key, value, segments, scale=scale)
            wide = torch.float64 if self.on.dtype == torch.float32 else torch.float32
            exact = Operators("reference").attention(*(x.to(wide) for x in (query, key, value)), segments, scale=scale)
            plain = Operators("torch").attention(query, key, value, segments, scale=scale)
        return walk.last[layer, index, ATTENTION], direct[0, 0], exact[0, 0], plain[0, 0]

    def _chunked(self, kind: str) -> None:
        """What a prompt leaves in the cache in chunks is what it leaves in one call."""
        name, size = f"chunked/{kind}", self.on.chain.tier.chunk
        self._step(name)
        stores: dict[str, list[list[list[Tensor]]]] = {"once": [], "chunked": []}
        for sample in self.samples:
            chunks = [(at, min(at + size, sample.length)) for at in range(0, sample.length, size)]
            cuts = {"once": [(0, sample.length)], "chunked": chunks}
            for how, columns in cuts.items():
                cache = self.engine.cache(kind, [sample])
                self.engine.walk([sample], columns, cache)
                stores[how].append([list(cache.read(layer, 0)) for layer in range(self.layers)])
        for slot, tensor in enumerate(("keys", "values")):
            got, want = (
                [[one[layer][slot] for one in stores[how]] for layer in range(self.layers)]
                for how in ("chunked", "once")
            )
            self._stored(name, tensor, got, want, "once", self.names)

    def _stored(
        self,
        name: str,
        tensor: str,
        got: Sequence[Sequence[Tensor]],
        want: Sequence[Sequence[Tensor]],
        against: str,
        names: Sequence[str],
    ) -> None:
        """[layer][sample] of [positions, Hkv, D] on both sides."""
        mine, theirs = (torch.stack([torch.cat(list(layer)) for layer in side]) for side in (got, want))
        lengths = [len(one) for one in want[0]]

        def place(index: int) -> dict[str, Any]:
            layer, token = divmod(index // (mine.shape[2] * mine.shape[3]), mine.shape[1])
            sample = 0
            while token >= lengths[sample]:
                token, sample = token - lengths[sample], sample + 1
            return {"layer": layer, "sample": names[sample], "position": token}

        self._bits("kv_cache", name, tensor, mine, theirs, comparing.fingerprint(theirs), against=against, place=place)

    # What ran

    def _provenance(self) -> None:
        """The first sample trained and decoded once more, operator by operator, and under the profiler on a GPU."""
        self._step("provenance")
        observer = Observer(self.on.operators())
        made = self._pass(ObservedPass, self.on.operators())
        alone = next(cell for cell in chains.cells(self.on.chain, ("B1/full",)) if cell.name == "B1/full")
        assert isinstance(made, ObservedPass)
        call = alone.layout.calls[0]  # the logical order begins with its sample
        made.observe(call, observer)
        self._decode_once(observer)
        for operator, seen in observer.plain().items():
            self.write.line("operator", operator=operator, implementation=self.on.implementation_of(operator), **seen)
        profiled = observer.profiled((lambda: made.observe(call, None), self._decode_once), self.on.device)
        self.write.line("profile", profiled=profiled)

    def _decode_once(self, observer: Observer | None = None) -> None:
        """A prompt and two tokens."""
        engine, sample = self._engine(), self.samples[0]
        engine.decoder = ObservedInference.of(self.decoder, self.on.operators())
        engine.decoder.observer = observer
        cuts = [(0, sample.prompt), *((at, at + 1) for at in range(sample.prompt, sample.length)[:2])]
        engine.walk([sample], cuts, engine.cache("contiguous", [sample]))

    # Lines

    def _logprobs(self, name: str, values: Tensor) -> None:
        plain = [comparing.number(value) for value in values.tolist()]
        self.write.line("logprobs", execution=name, values=plain, digest=comparing.fingerprint(values))

    def _trace(self, judgment: str, configuration: str, found: Mapping[str, Any]) -> None:
        self.write.line("trace", judgment=judgment, configuration=configuration, **found)

    def _bits(
        self,
        judgment: str,
        configuration: str,
        tensor: str,
        got: Tensor,
        want: Tensor,
        digest: str,
        *,
        against: str = CANONICAL,
        place: Callable[[int], dict[str, Any]] | None = None,
        pairs: Sequence[tuple[float, float]] = (),
    ) -> dict[str, Any]:
        found = comparing.same_bits(got, want, digest)
        if place and found["first"]:
            found["first"] |= place(found["first"]["index"])
        more = {"dlogp": [[comparing.number(value) for value in pair] for pair in pairs]} if pairs else {}
        self._comparison(judgment, configuration, tensor, against, got, want, None, {**found, **more})
        return found

    def _comparison(
        self,
        judgment: str,
        configuration: str,
        tensor: str,
        against: str,
        got: Tensor,
        want: Tensor,
        limits: Mapping[str, float] | None,
        found: Mapping[str, Any],
    ) -> None:
        self.write.line(
            "comparison", judgment=judgment, configuration=configuration, tensor=tensor, against=against,
            shape=list(want.shape), dtype=_name(got.dtype), against_dtype=_name(want.dtype),
            **({"elements": want.numel()} | {"limits": None if limits is None else dict(limits)} | dict(found)),
        )  # fmt: skip

    def _active(self, index: int) -> dict[str, Any]:
        """Which token the log-prob is of."""
        for sample in self.samples:
            if index < sample.active:
                return {"sample": sample.id, "position": sample.prompt + index}
            index -= sample.active
        return {}


@dataclass
class _Yardsticks:
    """The fp32 run, and what plain torch errs by: by tensor in `found`, by node in `nodes`."""

    logprobs: Tensor
    gradients: dict[str, Tensor]
    digests: dict[str, str]
    found: dict[str, dict[str, float | str]]
    trace: Trace
    nodes: dict[chain_trace.Key, float]
    lines: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)


_OPERATORS = (
    *("embedding", "rms_norm", "qk_norm", "det_gemm", "rope", "attention", "swiglu", "residual_add"),
    *("lm_head", "logprob"),
)


def _yardstick(plain: Tensor, want: Tensor) -> dict[str, float | str]:
    """What plain torch errs by, and what one rounding to its dtype does."""
    found = comparing.errors(plain, want, 0.0, 0.0)
    peak, rms = comparing.rounding(want, plain.dtype)
    return {
        "torch_rms": comparing.number(found.rms),
        "torch_max_abs": comparing.number(found.max_abs),
        "rounding_rms": comparing.number(rms),
        "rounding_max_abs": comparing.number(peak),
    }


def _joined(traces: Sequence[Trace], samples: Sequence[Sample], device: torch.device) -> Trace:
    """The traces of samples that ran alone, as that of all of them together."""
    whole = Trace([sample.length for sample in samples], device)
    for key in traces[0].tables:
        whole.tables[key] = torch.cat([trace.tables[key] for trace in traces])
    for key in traces[0].rows:
        kept = {probe: slot for slot, probe in enumerate(whole.probes)}
        one, start = traces[0].rows[key], 0
        rows = one.new_zeros(len(kept), *one.shape[1:])
        for trace in traces:
            for slot, probe in enumerate(trace.probes):
                if start + probe in kept:
                    rows[kept[start + probe]] = trace.rows[key][slot]
            start += trace.tokens
        whole.rows[key] = rows
    return whole


def _of_parameter(name: str) -> dict[str, Any]:
    """The node of a parameter whose gradient differs though all that reaches it is equal: its own sum."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+?)(?:\.weight)?", name)
    layer, short = (int(found[1]), found[2]) if found else (None, name.removesuffix(".weight"))
    operator = next((operator for part, operator in _OF_NAME.items() if part in short), "det_gemm")
    return {"layer": layer, "name": short, "operator": operator, "phase": "weight gradient"}


_OF_NAME = {
    "layernorm": "rms_norm",
    "q_norm": "qk_norm",
    "k_norm": "qk_norm",
    "model.norm": "rms_norm",
    "embed": "embedding",
    "lm_head": "lm_head",
    "mlp.gate_proj": "det_gemm",
    "mlp.experts": "grouped_gemm",
    "mlp.gate": "router",
}


def _token(index: int, rows: Tensor, places: Sequence[tuple[int, int]], names: Sequence[str]) -> dict[str, Any]:
    row, element = divmod(index, rows.shape[1])
    return {"sample": names[places[row][0]], "position": places[row][1], "element": element}


def _head(index: int, grid: Tensor, samples: Sequence[Sample]) -> dict[str, Any]:
    """Of [layers, samples, heads, width]: every sample's last token."""
    layer, rest = divmod(index, grid[0].numel())
    sample = samples[rest // grid[0, 0].numel()]
    return {"layer": layer, "sample": sample.id, "position": sample.length - 1}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _told(error: Exception, at: str) -> dict[str, Any]:
    text = "".join(traceback.format_exception(error)).rstrip()
    print(text, file=sys.stderr, flush=True)
    lines = [_FILE.sub(r'File "\1"', line) for line in text.splitlines()]  # whole paths are in the log alone
    place = f" (at {at})" if at else ""
    message = f"{type(error).__name__}: {error}".splitlines()[0] + place
    return {"message": message, "tail": lines[-_TAIL:], "no_backward": isinstance(error, NoBackward)}
