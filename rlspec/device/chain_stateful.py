"""The executions of inference: generated and rescored against training, decoded against prefilled, the cache itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlspec import chains
from rlspec.chains import RESCORE
from rlspec.device import chain_trace, comparing
from rlspec.device.chain_calls import watched
from rlspec.device.chain_inference import ATTENTION, KEYS, QUERY, VALUES, Walk
from rlspec.device.chain_lines import yardstick
from rlspec.device.chain_session import Session
from rlspec.device.chain_trace import STREAM, Trace, divergence
from rlspec.device.chain_training import Canonical
from rlspec.device.operators import Operators, Segment, Segments
from rlspec.workloads import Decode, Sample

Stored = Sequence[Sequence[Tensor]]  # [layer][sample] of [positions, Hkv, D]


class Inference:
    """All that one arm infers; `canonical` is what it was trained as, if it was."""

    def __init__(self, session: Session, canonical: Canonical | None) -> None:
        self.session, self.lines, self.on = session, session.lines, session.on
        self.canonical, self.engine = canonical, session.engine()

    def run(self) -> None:
        """Every execution that the spec's judgments need."""
        if self.session.asked("train_inference_parity"):
            for name in chains.EXECUTIONS:
                self._generated(name)
        if self.session.asked("decode_prefill", "kv_cache"):
            for case in self.on.chain.decode:
                self._decoded(case)
        if self.session.asked("kv_cache"):
            for kind in chains.CACHES:
                self._chunked(kind)

    @contextmanager
    def _seen(self, name: str) -> Iterator[None]:
        """A record of the calls within, and of the caches that they were given."""
        with watched(self.engine.decoder) as calls:
            yield
        self.lines.line("execution", name=name, calls=[call.inferred() for call in calls])

    # Train against inference

    def _generated(self, name: str) -> None:
        """The active tokens as a rollout engine scores them."""
        self.session.step(name)
        samples = self.session.samples
        groups = [[sample] for sample in samples] if name.startswith("B1") else [list(samples)]
        with self._seen(name):
            walks = [self._execution(name, group, self._trace(group) if name == RESCORE else None) for group in groups]
        values = [
            walk.logprobs[index, position - 1]
            for group, walk in zip(groups, walks, strict=True)
            for index, sample in enumerate(group)
            for position in range(sample.prompt, sample.length)
        ]
        self.lines.logprobs(name, torch.tensor(values, dtype=torch.float32))
        if self.canonical is None:
            return
        equal = values == self.canonical.logprobs.tolist()
        if name != RESCORE and equal:
            return
        if not equal:
            walks = [self._execution(name, group, self._trace(group, keep="*")) for group in groups]
        whole = _joined([walk.trace for walk in walks if walk.trace], samples, self.on.device)
        found = divergence(whole, self.canonical.trace, self.session.names, self.session.layers)
        if not equal and any(key.name != STREAM for key in self.canonical.trace.rows):
            found["apart"] = chain_trace.apart(whole, self.canonical.trace)
        self.lines.trace("train_inference_parity", name, found)

    def _trace(self, group: Sequence[Sample], keep: str = STREAM) -> Trace:
        """Of samples that run together, with those of all samples' probes that are theirs."""
        at: list[int] = []
        start = 0
        for sample, probes in zip(self.session.samples, _probes(self.session.samples), strict=True):
            if sample in group:
                at += [start + probe for probe in probes]
                start += sample.length
        return Trace([sample.length for sample in group], self.on.device, keep=keep, at=at)

    def _execution(self, name: str, group: Sequence[Sample], trace: Trace | None) -> Walk:
        if name == RESCORE:
            return self.engine.prefill(group, trace=trace or False)
        chunk = self.on.chain.tier.chunk if name.endswith("chunked") else 0
        cache = self.engine.cache("paged" if name.endswith("paged") else "contiguous", group)
        return self.engine.walk(
            group, chains.generation(self.on.chain, group, chunk=chunk), cache, trace=trace or False
        )

    # Decode against prefill

    def _decoded(self, case: Decode) -> None:
        """Token by token through both caches, against one prefill of the same grid."""
        single, near = dict(chains.decoded(case)), chains.prefixes(self.on.chain, case)
        rows = {index: sorted({*positions, *(length - 1 for at, length in near if at == index)})
                for index, positions in single.items()}  # fmt: skip
        self.session.step(f"{case.name}/prefill")
        grid: dict[str, Any] = {"left": case.left, "width": case.width}
        full = self.engine.prefill(case.samples, wanted=rows, trace=True, **grid)
        for kind in chains.CACHES:
            name = f"{case.name}/{kind}"
            self.session.step(name)
            run = partial(self.engine.walk, case.samples, chains.columns(case), wanted=single, **grid)
            cache = self.engine.cache(kind, case.samples)
            with self._seen(name):
                walk = run(cache, store=True)
            if self.session.asked("decode_prefill") and not self._logits(name, case, walk, full):
                again = run(self.engine.cache(kind, case.samples), trace=True)
                names = [sample.id for sample in case.samples]
                assert again.trace is not None and full.trace is not None
                self.lines.trace(
                    "decode_prefill", name, divergence(again.trace, full.trace, names, self.session.layers)
                )
            if self.session.asked("kv_cache"):
                self._cached(name, case, walk, cache)
        if self.session.asked("decode_prefill"):
            self._prefixes(case, full, near)

    def _logits(self, name: str, case: Decode, walk: Walk, full: Walk) -> bool:
        places = [(index, position) for index, positions in chains.decoded(case) for position in positions]
        followed = [(index, at) for index, at in places if at + 1 < case.samples[index].length]
        pairs = [(walk.logprobs[place], full.logprobs[place]) for place in followed]
        return self._rows(name, case, [walk.logits[place] for place in places], full, places, pairs)

    def _prefixes(self, case: Decode, full: Walk, near: Sequence[tuple[int, int]]) -> None:
        """The last token of prefixes that are prefilled by themselves."""
        name = f"{case.name}/{chains.PREFIX}"
        self.session.step(name)
        found, pairs = [], []
        for index, length in near:
            sample = case.samples[index]
            walk = self.engine.walk([sample], [(0, length)], None, wanted={0: [length - 1]})
            found.append(walk.logits[0, length - 1])
            if length < sample.length:
                pairs.append((walk.logprobs[0, length - 1], full.logprobs[index, length - 1]))
        if not self._rows(name, case, found, full, [(index, length - 1) for index, length in near], pairs):
            apart = [(index, length) for (index, length), logits in zip(near, found, strict=True)
                     if not comparing.identical(logits, full.logits[index, length - 1])]  # fmt: skip
            self._parted(name, case, dict(reversed(apart)), full)

    def _parted(self, name: str, case: Decode, lengths: Mapping[int, int], full: Walk) -> None:
        """Where prefixes of these lengths, one of a sample by its index, leave the prefill of all."""
        traces = []
        for index, (sample, probes) in enumerate(zip(case.samples, _probes(case.samples), strict=True)):
            traces.append(Trace([sample.length], self.on.device, at=probes))
            if index in lengths:
                self.engine.walk([sample], [(0, lengths[index])], None, trace=traces[-1])
        assert full.trace is not None
        names = [sample.id for sample in case.samples]
        found = divergence(_joined(traces, case.samples, self.on.device), full.trace, names, self.session.layers)
        self.lines.trace("decode_prefill", name, found)

    def _rows(
        self,
        name: str,
        case: Decode,
        found: Sequence[Tensor],
        full: Walk,
        places: Sequence[tuple[int, int]],
        pairs: Sequence[tuple[float, float]],
    ) -> bool:
        got, want = torch.stack(list(found)), torch.stack([full.logits[place] for place in places])

        def place(flat: int) -> dict[str, Any]:
            row, element = divmod(flat, got.shape[1])
            index, position = places[row]
            return {"sample": case.samples[index].id, "position": position, "element": element}

        return self.lines.bits("decode_prefill", name, "logits", got, want, against="prefill", place=place, pairs=pairs)

    # The cache

    def _cached(self, name: str, case: Decode, walk: Walk, cache: Any) -> None:
        """What was written is read; cursors count tokens; pads are not stored; attention is that of the whole."""
        layers, count = self.session.layers, len(case.samples)
        for tensor, node, slot in (("keys", KEYS, 0), ("values", VALUES, 1)):
            read = [[cache.read(layer, index)[slot] for index in range(count)] for layer in range(layers)]
            written = [[walk.stored(layer, index, node) for index in range(count)] for layer in range(layers)]
            self._stored(name, tensor, read, written, "written", [sample.id for sample in case.samples])
        lengths = torch.tensor([cache.lengths.get(index, -1) for index in range(count)])
        due = torch.tensor([sample.length for sample in case.samples])
        self.lines.bits("kv_cache", name, "cursor", lengths, due, against="tokens",
                        place=lambda index: {"sample": case.samples[index].id})  # fmt: skip
        none, strays = torch.zeros(1, dtype=torch.int64), torch.tensor([cache.strays()])
        self.lines.bits("kv_cache", name, "strays", strays, none, against="none")
        found = [self._direct(walk, layer, index) for layer in range(layers) for index in range(count)]
        got, direct, exact, plain = (
            torch.stack(list(part)).unflatten(0, (layers, count)) for part in zip(*found, strict=True)
        )

        def last(index: int) -> dict[str, Any]:
            layer, rest = divmod(index, got[0].numel())
            sample = case.samples[rest // got[0, 0].numel()]
            return {"layer": layer, "sample": sample.id, "position": sample.length - 1}

        self.lines.bits("kv_cache", name, "attention", got, direct, against="direct", place=last)
        self.lines.near("kv_cache", name, "attention", got, exact, yardstick(plain, exact), last)

    def _direct(self, walk: Walk, layer: int, index: int) -> tuple[Tensor, ...]:
        """[Hq, D] each: the last call's attention of a sample; then on its keys and values as they were written, by
        the same operator, by the reference, and by plain torch."""
        query = walk.last[layer, index, QUERY][None, None]
        key, value = (walk.stored(layer, index, node)[None] for node in (KEYS, VALUES))
        segments = Segments((Segment(0, 0, 1, 0, key.shape[1]),), 1, 1, key.shape[1], self.on.device)
        scale = self.on.model.head_dim**-0.5
        whole = [x.to(self.session.wide) for x in (query, key, value)]
        with torch.no_grad():
            direct = self.engine.decoder.operators.attention(query, key, value, segments, scale=scale)
            exact = Operators("reference").attention(*whole, segments, scale=scale)
            plain = Operators("torch").attention(query, key, value, segments, scale=scale)
        return walk.last[layer, index, ATTENTION], direct[0, 0], exact[0, 0], plain[0, 0]

    def _chunked(self, kind: str) -> None:
        """What a sample leaves in the cache in chunks is what it leaves in one call."""
        name, size = f"chunked/{kind}", self.on.chain.tier.chunk
        self.session.step(name)
        with self._seen(name):
            sides = [
                [self._left(kind, sample, cut or sample.length) for sample in self.session.samples] for cut in (size, 0)
            ]
        for slot, tensor in enumerate(("keys", "values")):
            got, want = ([[one[layer][slot] for one in side] for layer in range(self.session.layers)] for side in sides)
            self._stored(name, tensor, got, want, "once", self.session.names)

    def _left(self, kind: str, sample: Sample, size: int) -> list[tuple[Tensor, Tensor]]:
        """By layer the keys and values of a sample that came in pieces of `size`."""
        pieces = [(at, min(at + size, sample.length)) for at in range(0, sample.length, size)]
        cache = self.engine.cache(kind, [sample])
        self.engine.walk([sample], pieces, cache)
        return [cache.read(layer, 0) for layer in range(self.session.layers)]

    def _stored(self, name: str, tensor: str, got: Stored, want: Stored, against: str, names: Sequence[str]) -> None:
        mine, theirs = (torch.stack([torch.cat(list(layer)) for layer in side]) for side in (got, want))
        lengths = [len(one) for one in want[0]]

        def place(index: int) -> dict[str, Any]:
            layer, token = divmod(index // (mine.shape[2] * mine.shape[3]), mine.shape[1])
            sample = 0
            while token >= lengths[sample]:
                token, sample = token - lengths[sample], sample + 1
            return {"layer": layer, "sample": names[sample], "position": token}

        self.lines.bits("kv_cache", name, tensor, mine, theirs, against=against, place=place)


def _probes(samples: Sequence[Sample]) -> list[list[int]]:
    """Of each sample, the positions that are probes of all samples together."""
    every, first, found = chain_trace.probes(sum(sample.length for sample in samples)), 0, []
    for sample in samples:
        found.append([probe - first for probe in every if first <= probe < first + sample.length])
        first += sample.length
    return found


def _joined(traces: Sequence[Trace], samples: Sequence[Sample], device: torch.device) -> Trace:
    """The traces of samples that ran alone, as that of all of them together; what did not run is left out."""
    whole = Trace([sample.length for sample in samples], device)
    for key in {key: None for trace in traces for key in trace.tables}:
        nothing = partial(torch.zeros, dtype=torch.int64, device=device)
        whole.tables[key] = torch.cat([trace.tables.get(key, nothing(trace.tokens)) for trace in traces])
    slots = {probe: slot for slot, probe in enumerate(whole.probes)}
    for key, one in {key: rows for trace in traces for key, rows in trace.rows.items()}.items():
        rows, start = one.new_zeros(len(slots), *one.shape[1:]), 0
        for trace in traces:
            if key in trace.rows:  # a short sample may have no probe
                places = torch.tensor([slots[start + probe] for probe in trace.probes], device=device)
                rows[places] = trace.rows[key]
            start += trace.tokens
        whole.rows[key] = rows
    return whole
