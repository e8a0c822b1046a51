"""What every operator gave each logical token, as 64 bits a token: where two runs of a model first part.

A trace has a line a node (layer, name, operator) in the order of execution, and in it a digest for each token of the
samples, whatever layout they came in. Two traces of one model and one set of tokens are compared node by node. On the
way back the nodes are visited in the order of the backward, and what is digested is the gradient by each node's result;
where that differs first, the fault lies in the backward of the operator that the result went into: `CONSUMER`.

Memory: 8 bytes a token and node. Rows themselves are kept of the `probes` alone, a few tokens, and of nodes that end a
layer, so that errors against a reference can be measured node by node and drift against depth.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlspec.device import comparing
from rlspec.device.chain_decoder import TrainingDecoder
from rlspec.device.chain_gradients import Ledger
from rlspec.device.decoder import Node, Site, Span
from rlspec.device.gradients import Identity, Run

_CHUNK = 1 << 25  # elements digested at a time, in int64
_A, _B = 0x9E3779B97F4A7C15 - 2**64, 0x2127599BF4325C37
PROBES = 64
FORWARD, BACKWARD = "forward", "backward"
STREAM = "mlp.residual"  # ends a layer
LOSS = "loss"
# A result -> the operator that it goes into, and whether that one stands in the next layer.
CONSUMER: Mapping[str, tuple[str, str, int]] = {
    "logprob": (LOSS, LOSS, 0),
    "lm_head": ("logprob", "logprob", 0),
    "model.norm": ("lm_head", "lm_head", 0),
    "mlp.residual": ("input_layernorm", "rms_norm", 1),
    "mlp.down_proj": ("mlp.residual", "residual_add", 0),
    "mlp.experts": ("mlp.residual", "residual_add", 0),
    "mlp.act": ("mlp.down_proj", "det_gemm", 0),
    "mlp.gate_proj": ("mlp.act", "swiglu", 0),
    "mlp.up_proj": ("mlp.act", "swiglu", 0),
    "post_attention_layernorm": ("mlp.gate_proj", "det_gemm", 0),
    "self_attn.residual": ("post_attention_layernorm", "rms_norm", 0),
    "self_attn.o_proj": ("self_attn.residual", "residual_add", 0),
    "self_attn": ("self_attn.o_proj", "det_gemm", 0),
    "self_attn.q_rope": ("self_attn", "attention", 0),
    "self_attn.k_rope": ("self_attn", "attention", 0),
    "self_attn.v_proj": ("self_attn", "attention", 0),
    "self_attn.q_norm": ("self_attn.q_rope", "rope", 0),
    "self_attn.k_norm": ("self_attn.k_rope", "rope", 0),
    "self_attn.q_proj": ("self_attn.q_norm", "qk_norm", 0),
    "self_attn.k_proj": ("self_attn.k_norm", "qk_norm", 0),
    "input_layernorm": ("self_attn.q_proj", "det_gemm", 0),
    "model.embed_tokens": ("input_layernorm", "rms_norm", 1),
}


class Key(NamedTuple):
    """A node of the model; `layer` None outside the layers."""

    layer: int | None
    name: str
    operator: str


def row_digests(rows: Tensor) -> Tensor:
    """int64 [R] of [R, ...]: dtype, shape of a row and every byte of it count, the number of rows does not.

    Σ key of the place · bits, modulo 2^64. Keys are odd, so one element that differs always shows.
    """
    flat = comparing.bits(rows).reshape(len(rows), -1)
    head = zlib.crc32(f"{rows.dtype}{list(rows.shape[1:])}".encode())
    keys, step = _keys(flat.shape[1], rows.device), max(1, _CHUNK // max(1, flat.shape[1]))
    parts = [(part.long() * keys).sum(1) for part in flat.split(step)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)) + head


@lru_cache(maxsize=64)
def _keys(width: int, device: torch.device) -> Tensor:
    mixed = (torch.arange(1, width + 1, device=device) * _A) * _B
    mixed = (mixed ^ comparing.shifted(mixed, 29)) * _A
    return (mixed ^ comparing.shifted(mixed, 32)) | 1


class Trace:
    """See the module. `lengths` of the samples; `keep`: of which nodes the rows of probes are held: "*" for all.

    `at`: the tokens that are probes, where these samples are some of those of a whole run.
    """

    def __init__(
        self, lengths: Sequence[int], device: torch.device, *, keep: str = STREAM, at: Sequence[int] | None = None
    ) -> None:
        self.lengths, self.device = tuple(lengths), device
        self.starts = [sum(self.lengths[:index]) for index in range(len(self.lengths))]
        self.tokens = sum(self.lengths)
        self.tables: dict[Key, Tensor] = {}
        self.backward: dict[Key, Tensor] = {}
        self.rows: dict[Key, Tensor] = {}
        self.finite: dict[Key, Tensor] = {}
        self.keep, self.probes = keep, probes(self.tokens) if at is None else list(at)
        self._slot = {token: slot for slot, token in enumerate(self.probes)}

    def add(self, key: Key, runs: Sequence[Run], rows: Tensor, *, backward: bool = False) -> None:
        """Results [R, ...] of one call or chunk, `run.row` being a row of them."""
        tables = self.backward if backward else self.tables
        if key not in tables:
            tables[key] = torch.zeros(self.tokens, dtype=torch.int64, device=self.device)
        digests = row_digests(rows)
        for place, row, length in self._pieces(runs):
            tables[key][place : place + length] = digests[row : row + length]
        if not backward and rows.is_floating_point():
            self._look(key, runs, rows)
        for run in runs:
            place = self.starts[run.sample] + run.position
            if self.keep and self.keep in ("*", key.name) and not backward and rows.is_floating_point():
                self._keep(key, place, run, rows)

    def _look(self, key: Key, runs: Sequence[Run], rows: Tensor) -> None:
        if key not in self.finite:
            self.finite[key] = torch.ones(self.tokens, dtype=torch.bool, device=self.device)
        ends = rows.reshape(len(rows), -1).aminmax(dim=1)  # NaN is both ends of its row; no copy of the rows is made
        finite = ends.min.isfinite() & ends.max.isfinite()
        for place, row, length in self._pieces(runs):
            self.finite[key][place : place + length] = finite[row : row + length]

    def broken(self, names: Sequence[str]) -> str | None:
        """The first node, and in it the first token, whose result is not finite; `names` of the samples."""
        for key, table in self.finite.items():
            if not bool(table.all()):
                place = _place(self, key, int((~table).int().argmax()), names)
                layer = "" if key.layer is None else f"layer {key.layer}, "
                return f"{layer}{key.name} ({key.operator}), sample {place['sample']} position {place['position']}"
        return None

    def _pieces(self, runs: Sequence[Run]) -> list[tuple[int, int, int]]:
        """(token, row, length) of the runs, those that go on where one ended joined to it."""
        made: list[tuple[int, int, int]] = []
        for run in runs:
            token, (place, row, length) = self.starts[run.sample] + run.position, made[-1] if made else (0, 0, 0)
            if made and (place + length, row + length) == (token, run.row):
                made[-1] = place, row, length + run.length
            else:
                made.append((token, run.row, run.length))
        return made

    def capture(self, node: Node, runs: tuple[Run, ...], rows: Tensor) -> None:
        """As `TrainingPass.run` takes it."""
        self.add(Key(node.layer, node.name, node.operator), runs, rows)

    def _keep(self, key: Key, place: int, run: Run, rows: Tensor) -> None:
        wanted = [token for token in self.probes if place <= token < place + run.length]
        if not wanted:
            return
        if key not in self.rows:
            self.rows[key] = torch.zeros(len(self.probes), *rows.shape[1:], dtype=rows.dtype, device=rows.device)
        source = torch.tensor([run.row + token - place for token in wanted], device=rows.device)
        target = torch.tensor([self._slot[token] for token in wanted], device=rows.device)
        self.rows[key][target] = rows.index_select(0, source)

    def digest(self) -> str:
        """Over all nodes and tokens of the forward."""
        names = hashlib.sha256("".join(map(str, self.tables)).encode()).hexdigest()[:16]
        return names + comparing.fingerprint(torch.stack(list(self.tables.values()))).rpartition("]")[2]

    def where(self, token: int) -> tuple[int, int]:
        """(sample, position) of a token."""
        sample = max(index for index, start in enumerate(self.starts) if start <= token)
        return sample, token - self.starts[sample]


def probes(tokens: int) -> list[int]:
    """All tokens, or some of them at equal distances."""
    return list(range(tokens)) if tokens <= PROBES else [index * tokens // PROBES for index in range(PROBES)]


def divergence(
    got: Trace, want: Trace, names: Sequence[str], layers: int, *, only: Sequence[int] | None = None
) -> dict[str, Any]:
    """Where `got` leaves `want` on the way forward: the first node, how many do, and how the drift grows with depth.

    `depth`: for each layer the RMS difference of what it ends in over its RMS, on the probes. `only`: tokens that are
    compared, default all. Tokens that `got` never computed, since a cache had them, are left out; a node that it lacks
    is a difference.
    """
    index = None if only is None else torch.tensor(only, dtype=torch.int64, device=got.device)
    first, differing = None, 0
    for key, table in want.tables.items():
        other = got.tables.get(key)
        wrong = torch.ones_like(table, dtype=torch.bool) if other is None else (table != other) & (other != 0)
        part = wrong if index is None else wrong[index]
        count = int(part.sum())
        if not count:
            continue
        differing += 1
        if first is None:
            at = int(part.int().argmax())
            first = _place(want, key, at if only is None else only[at], names) | {"tokens": count}
    depth = drift(got, want, layers) if first is not None else []
    return {"nodes": len(want.tables), "differing": differing, "first": first, "depth": depth}


def apart(got: Trace, want: Trace) -> list[list[Any]]:
    """Each node at which `got` leaves `want`, as `divergence` counts them, with the RMS difference on the probes.

    None instead where no rows are kept: which experts were chosen is no number.
    """
    gaps = {key: comparing.number(error) for key, error, _ in node_errors(got, want)}
    tables = ((key, table, got.tables.get(key)) for key, table in want.tables.items())
    return [[*key, gaps.get(key)] for key, table, other in tables
            if other is None or bool(((table != other) & (other != 0)).any())]  # fmt: skip


def drift(got: Trace, want: Trace, layers: int) -> list[float | str]:
    """Layer by layer, on the probes: the RMS difference of the residual stream over the RMS of `want`'s."""
    found = {key.layer: (error, size) for key, error, size in node_errors(got, want, only=STREAM)}
    pairs = [found.get(layer, (math.inf, 1.0)) for layer in range(layers)]
    return [comparing.number(error / size if size else error) for error, size in pairs]


def backward_divergence(got: Trace, want: Trace, names: Sequence[str]) -> dict[str, Any] | None:
    """The first node of the backward whose incoming gradient differs, blamed on the operator that it comes from."""
    for key, table in want.backward.items():
        other = got.backward.get(key)
        wrong = torch.ones_like(table, dtype=torch.bool) if other is None else table != other
        count = int(wrong.sum())
        if count:
            return _place(want, _consumer(key), int(wrong.int().argmax()), names) | {"tokens": count, "by": key.name}
    return None


def _consumer(key: Key) -> Key:
    name, operator, further = CONSUMER.get(key.name, (key.name, key.operator, 0))
    layer = (-1 if key.layer is None else key.layer) + 1 if further else key.layer
    return Key(layer if name.startswith(("self_attn", "mlp", "input", "post")) else None, name, operator)


def _place(trace: Trace, key: Key, token: int, names: Sequence[str]) -> dict[str, Any]:
    sample, position = trace.where(token)
    return {**key._asdict(), "sample": names[sample], "position": position}


def node_errors(got: Trace, want: Trace, *, only: str = "*") -> list[tuple[Key, float, float]]:
    """(node, RMS error, RMS of the reference) over the probes, in the order of the reference's forward."""
    made = []
    for key, reference in want.rows.items():
        if only not in ("*", key.name):
            continue
        other, table = got.rows.get(key), got.tables.get(key)
        if other is None or table is None:
            made.append((key, float("inf"), float(reference.double().square().mean().sqrt())))
            continue
        seen = (table != 0)[torch.tensor(got.probes, device=table.device)]
        wide, ours = reference.to(other.device)[seen].double(), other[seen].double()
        made.append((key, float((ours - wide).square().mean().sqrt()), float(wide.square().mean().sqrt())))
    return made


class WatchedDecoder(TrainingDecoder):
    """A decoder in training whose gradients are digested as they pass, if `trace` is there."""

    trace: Trace | None = None

    def begin(self, ledger: Ledger, chunks: Sequence[Identity], spans: Sequence[Span]) -> None:
        super().begin(ledger, chunks, spans)
        self.places = [_gathered(identity, ledger) for identity in chunks]

    def operate(self, at: Site, name: str, operator: str, *arguments: Any, **options: Any) -> Any:
        out = super().operate(at, name, operator, *arguments, **options)
        if isinstance(out, Tensor) and not name.startswith("mlp.experts"):
            self._watch(at, name, operator, out)
        return out

    def attend(self, sites: Sequence[Site], parts: Any, cache: Any) -> list[Tensor]:
        outs = super().attend(sites, parts, cache)
        if hasattr(self.operators.attention, "backward"):  # else each chunk has passed `operate`
            for at, out in zip(sites, outs, strict=True):
                self._watch(at, "self_attn", "attention", out)
        return outs

    def _watch(self, at: Site, name: str, operator: str, out: Tensor) -> None:
        trace = self.trace
        if trace is None or not out.requires_grad or out.dim() < 2:
            return
        runs, index = self.places[at.chunk.index]
        grid = (at.chunk.segments.rows, at.chunk.stop - at.chunk.start)
        if not runs or tuple(out.shape[:2]) != grid:
            return
        key = Key(at.layer, name, operator)

        def arrived(dy: Tensor) -> None:
            assert trace is not None
            trace.add(key, runs, dy.flatten(0, 1).index_select(0, index.to(dy.device)), backward=True)

        out.register_hook(arrived)


def _gathered(identity: Identity, ledger: Ledger) -> tuple[tuple[Run, ...], Tensor]:
    """The runs of a chunk in logical order, each run's row counted in what the slots gather."""
    runs: list[Run] = []
    slots: list[int] = []
    for run in identity.ordered:
        runs.append(run._replace(row=len(slots)))
        slots += range(run.row, run.row + run.length)
    return tuple(runs), torch.tensor(slots, dtype=torch.int64)
