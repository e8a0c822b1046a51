"""The whole model trained on one micro-step of full sequences, so that no bit of it depends on how they were laid out.

What is run. Each call of a layout goes forward to the log-prob of every next token and back at once. The loss is
-Σ weight · log-prob over the active tokens, those at positions from the prompt's end on, divided by their number in all
samples, whatever share of them a call has. It is never added up: its gradient by each log-prob, -weight / number, is
what the backward starts from. So micro-batches, singletons and one packed call ask for the same gradients.

Promise. With operators that keep the promises of the catalogue (`weight_gradient`, `forward` and `backward` of the
attention), log-probs and gradients have the same bits packed, padded on either side, permuted, one sample a call, in
micro-batches and in chunks of any size. Each use of a weight hands its rows to `rlspec.device.chain_gradients`, and
attention goes back once a sample and layer over whole sequences, whatever chunks it came in. Calls must come in the
order of the workload; any other is a RunError. What an operator does not promise is left to autograd.

Limits. Load-balance losses are no part of it.
Samples are whole in a call; chunks are columns of its grid, with layers outside and chunks inside (`Decoder.forward`).

Memory. The graph of one call is alive at a time, with one fp32 accumulator a weight (two of a tied table). With
`recompute` each operator keeps its inputs alone, weights in the dtype of the parameters, and is run again on the way
back: so an fp32 run fits beside the model it is the reference of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlspec import layouts
from rlspec.device import fills
from rlspec.device.autograd import accumulate
from rlspec.device.chain_decoder import TrainingDecoder
from rlspec.device.chain_gradients import Ledger
from rlspec.device.decoder import Decoder, Node, Span
from rlspec.device.execution import NoBackward
from rlspec.device.gradients import Identity, Run
from rlspec.device.operators import Operators
from rlspec.layouts import Call, Layout
from rlspec.workloads import Sample, Tier

Capture = Callable[[Node, tuple[Run, ...], Tensor], None]
"""capture(node, runs, rows [R, ...]): a result without pads, its runs in logical order; run.row is a row of `rows`."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """`logprobs` fp32 of the active tokens, samples in order, positions ascending; `gradients` fp32 by parameter.

    `accumulated_by`: who summed each gradient over rows and calls, "operator" or "autograd".
    """

    logprobs: Tensor
    gradients: dict[str, Tensor]
    accumulated_by: dict[str, str]


class TrainingPass:
    """One model, one implementation of its operators, the samples of a tier; `run` takes them through a layout.

    `tokens`: the ids of each sample of the tier, then of its company, which stands beside them and is not trained on.
    `loss_weights`: one a position for each sample, 1 if left out (see `logical_weights`). `dtype`: the working dtype,
    if not the decoder's. The parameters are the decoder's own and are left as they are. Without `backward` the forward
    is that of training, and there are no gradients.
    Raises ValueError for tokens and weights that do not fit, and for samples without a prompt or with earlier keys.
    """

    decoder_type: type[TrainingDecoder] = TrainingDecoder

    def __init__(
        self,
        decoder: Decoder,
        operators: Operators,
        tier: Tier,
        tokens: Sequence[Sequence[int]],
        *,
        loss_weights: Sequence[Sequence[float]] | None = None,
        pad_token: int = 0,
        dtype: torch.dtype | None = None,
        recompute: bool = False,
        backward: bool = True,
    ) -> None:
        self.decoder = self.decoder_type.of(decoder, operators, dtype=dtype, recompute=recompute)
        self.tier, self.pad_token = tier, pad_token
        self.backward = self.decoder.backward = backward
        self.device = next(decoder.parameters()).device
        _check_samples(tier, tokens, pad_token, decoder.architecture.vocab_size)
        self.tokens = [torch.tensor(ids, dtype=torch.int64, device=self.device) for ids in tokens]
        if loss_weights is None:
            loss_weights = [[1.0] * sample.length for sample in tier.samples]
        if [len(row) for row in loss_weights] != [sample.length for sample in tier.samples]:
            raise ValueError("loss_weights must have one number for each position of each sample")
        if not all(math.isfinite(weight) for row in loss_weights for weight in row):
            raise ValueError("loss_weights must be finite")
        self.loss_weights = [torch.as_tensor(row, dtype=torch.float64, device=self.device) for row in loss_weights]

    def run(self, layout: Layout, *, chunk_size: int | None = None, capture: Capture | None = None) -> Trained:
        """Every call forward and back; `chunk_size` cuts the columns of its grid.

        Raises ValueError for a layout that does not hold each sample whole, or asks for what tokens cannot show;
        NoBackward for an operator that passes no gradient on; RunError for rows out of the logical order.
        """
        self._check_layout(layout)
        ledger = Ledger([sample.length for sample in self.tier.samples])
        found: dict[int, Tensor] = {}
        for call in layout.calls:
            found |= self._call(call, ledger, chunk_size, capture)
        logprobs = torch.cat([found[index] for index in range(len(self.tier.samples))])
        gradients = ledger.finish(name for name, _ in self.decoder.named_parameters()) if self.backward else {}
        return Trained(logprobs=logprobs, gradients=gradients, accumulated_by=ledger.accumulated_by)

    def denominator(self, call: Call) -> int:
        """What the loss of a call is divided by: the active tokens of all samples."""
        return self.tier.active

    def upstream(self, call: Call, dtype: torch.dtype) -> Tensor:
        """[rows, width]: the loss's gradient by the log-prob that stands in each slot, rounded once."""
        grid = torch.zeros(call.rows, call.width, dtype=torch.float64, device=self.device)
        for run in self._judged(call):
            weights = self.loss_weights[run.sample][self.tier.samples[run.sample].prompt :]
            grid[self._predicting(run)] = -weights / self.denominator(call)
        return grid.to(dtype)

    def _call(self, call: Call, ledger: Ledger, chunk_size: int | None, capture: Capture | None) -> dict[int, Tensor]:
        """The log-probs of the active tokens by sample. When it returns, nothing of its graph is alive."""
        chunks = self._identities(call, chunk_size)
        spans = [Span(run.row, run.column, run.length) for run in call.runs]
        self.decoder.begin(ledger, chunks, spans)
        logprobs = self.decoder(
            self._grid(call, self.tokens, self.pad_token),
            targets=self._grid(call, [ids.roll(-1) for ids in self.tokens], 0),
            spans=spans,
            chunk_size=chunk_size,
            capture=None if capture is None else _restoring(capture, chunks, self.device),
        ).logprobs
        if self.backward:
            if not logprobs.requires_grad:
                raise NoBackward("no gradient flows through the log-probs")
            accumulate([logprobs], [self.upstream(call, logprobs.dtype)])
            ledger.end()
        return {run.sample: logprobs.detach()[self._predicting(run)].clone() for run in self._judged(call)}

    def _predicting(self, run: layouts.Run) -> tuple[int, slice]:
        """The slots whose next token is active: one before each."""
        return run.row, slice(run.column + self.tier.samples[run.sample].prompt - 1, run.column + run.length - 1)

    def _judged(self, call: Call) -> list[layouts.Run]:
        return [run for run in call.runs if run.sample < len(self.tier.samples)]

    def _grid(self, call: Call, rows: Sequence[Tensor], pad: int) -> Tensor:
        grid = torch.full((call.rows, call.width), pad, dtype=torch.int64, device=self.device)
        for run in call.runs:
            grid[run.row, run.column : run.column + run.length] = rows[run.sample]
        return grid

    def _identities(self, call: Call, chunk_size: int | None) -> list[Identity]:
        """Which rows of each chunk are which positions."""
        size, parts = chunk_size or call.width, []
        for start in range(0, call.width, size):
            width, runs = min(size, call.width - start), []
            for run in self._judged(call):
                first, last = max(run.column, start), min(run.column + run.length, start + width)
                if first < last:
                    row = run.row * width + first - start
                    runs.append(Run(run.sample, first - run.column, last - first, row, run.length))
            parts.append(Identity(tuple(runs), call.rows * width))
        return parts

    def _check_layout(self, layout: Layout) -> None:
        layouts.restore(layout, self.tier)
        samples = (*self.tier.samples, *self.tier.company)
        for run in (run for call in layout.calls for run in call.runs):
            if (run.position, run.length) != (0, samples[run.sample].length):
                part = f"{layout.name}: {run} is a part of its sample"
                raise ValueError(f"{part}; training takes whole samples, and cuts them with chunk_size")
        if layout.how or layout.pads != "zero" or not layout.parameters:
            raise ValueError(f"{layout.name}: strides, values of pads and changed contents are of tensors, not tokens")


def reference(
    decoder: Decoder,
    tier: Tier,
    tokens: Sequence[Sequence[int]],
    layout: Layout,
    *,
    capture: Capture | None = None,
    **options: Any,
) -> Trained:
    """The same in fp32 with implementation `reference`: what the log-probs and gradients of others are judged against.

    The weights are those that the decoder works with, rounded to its dtype. `options` are those of `TrainingPass`.
    """
    operators = Operators("reference")
    whole = TrainingPass(decoder, operators, tier, tokens, dtype=torch.float32, recompute=True, **options)
    return whole.run(layout, capture=capture)


def logical_weights(tier: Tier) -> list[list[float]]:
    """Loss weights by identity, from 7/8 to 9/8: no two neighbours weigh the same, so a token out of place shows."""
    cpu = torch.device("cpu")
    rows = [fills.rows("published", 0, one.id, range(one.length), 1, 0, cpu).flatten() for one in tier.samples]
    return [(1 + row).tolist() for row in rows]


def _restoring(capture: Capture, chunks: Sequence[Identity], device: torch.device) -> Callable[[Node, Tensor], None]:
    places: list[tuple[tuple[Run, ...], Tensor]] = []
    for identity in chunks:
        runs: list[Run] = []
        slots: list[int] = []
        for run in identity.ordered:
            runs.append(run._replace(row=len(slots)))
            slots += range(run.row, run.row + run.length)
        places.append((tuple(runs), torch.tensor(slots, dtype=torch.int64, device=device)))

    def show(node: Node, grid: Tensor) -> None:
        runs, index = places[node.chunk]
        if runs:
            capture(node, runs, grid.detach().flatten(0, 1).index_select(0, index))

    return show


def _check_samples(tier: Tier, tokens: Sequence[Sequence[int]], pad_token: int, vocabulary: int) -> None:
    samples: tuple[Sample, ...] = (*tier.samples, *tier.company)
    if len(tokens) != len(samples):
        raise ValueError(f"{len(tokens)} rows of tokens for {len(samples)} samples")
    if not 0 <= pad_token < vocabulary:
        raise ValueError(f"pad_token {pad_token} is not below the vocabulary, {vocabulary}")
    for sample, ids in zip(samples, tokens, strict=True):
        if sample.first:
            raise ValueError(f"sample {sample.id}: training needs the queries of all positions")
        if sample in tier.samples and not 0 < sample.prompt < sample.length:
            raise ValueError(f"sample {sample.id}: training needs a prompt of at least 1 token, and active ones behind")
        if len(ids) != sample.length:
            raise ValueError(f"sample {sample.id}: {len(ids)} token ids for {sample.length} positions")
        if not all(0 <= token < vocabulary for token in ids):
            raise ValueError(f"sample {sample.id}: a token id is not below the vocabulary, {vocabulary}")
