"""The embedded trainer: a decoder of the catalogue, AdamW, gradient accumulation, data parallelism, one row a step.

A step reads `global_batch_size` samples. Rank r of dp takes of each micro-step the micro-batch number r, so the ranks'
micro-batches together are those that one process with dp times the micro-batch size would take. The cross-entropy is
the sum over all counted tokens divided by their number over all ranks and micro-batches, the load-balance loss the
mean over micro-batches; gradients are summed over the ranks, so every rank makes the same update.

`faults` overrides single methods of `Trainer`; that is why each decision has a method of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlspec.device import architecture, perturb
from rlspec.device.architecture import Architecture
from rlspec.device.data import Corpus, default_corpus
from rlspec.device.decoder import Decoder, RouterStatistics
from rlspec.device.job import Job
from rlspec.device.operators import Operators
from rlspec.device.settings import Settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BETAS, EPSILON = (0.9, 0.95), 1e-8


class MicroBatch(NamedTuple):
    """int64 tokens and targets, bool mask of the targets that count, all [sequences, T]; `counted` is its sum."""

    tokens: Tensor
    targets: Tensor
    mask: Tensor
    counted: int


class Batch(NamedTuple):
    """This rank's micro-batches of step `number`. `counted` and `fingerprint` are over the whole job."""

    number: int
    micro_batches: list[MicroBatch]
    counted: int
    fingerprint: str


class Row(NamedTuple):
    """What one step measured, the same on all ranks."""

    step: int
    metrics: dict[str, float]
    data: str


class Trainer:
    """One arm. Raises ValueError for what does not fit together: corpus and steps, model and vocabulary."""

    def __init__(
        self,
        settings: Settings,
        job: Job,
        *,
        implementation: str | Mapping[str, str] = "torch",
        perturbation: Mapping[str, Any] | None = None,
    ) -> None:
        if job.world != settings.dp:
            raise ValueError(f"the mesh has dp {settings.dp}, and {job.world} processes were started")
        self.settings, self.job = settings, job
        self.model = Decoder(
            self.read_model(),
            Operators(implementation),
            dtype=DTYPES[settings.dtype],
            master_dtype=DTYPES[settings.master_dtype],
            profile=settings.profile,
            device=job.device,
        )
        self.model.initialise(settings.seed)
        if perturbation is not None:
            perturb.apply(self.model, perturbation)
        self.optimizer = self.make_optimizer()
        self.corpus = Corpus(settings.corpus or default_corpus(), settings.sequence_length)
        needed = settings.steps * settings.global_batch_size
        if len(self.corpus) < needed:
            wanted = f"{settings.steps} steps of {settings.global_batch_size} need {needed} samples"
            here = f"{self.corpus.folder} has {len(self.corpus)} of {settings.sequence_length} tokens"
            raise ValueError(f"{wanted}, {here}")
        self.order = self.sample_order()

    def run(self) -> Iterator[Row]:
        """Train, step by step."""
        for number in range(1, self.settings.steps + 1):
            yield self.step(number)

    def step(self, number: int) -> Row:
        began = self.job.now()
        self.job.reset_peak()
        settings, batch = self.settings, self.load(number)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(number)
        self.optimizer.zero_grad()
        sums = torch.zeros(2, dtype=torch.float64, device=self.job.device)
        balance = Balance(settings, self.job)
        for micro in batch.micro_batches:
            force = settings.force_balanced_routing and self.model.architecture.num_experts > 0
            output = self.model(micro.tokens, targets=micro.targets, force_balanced=force)
            # In double: the sum's own rounding would be larger than what one ulp of a weight does to it.
            counted = torch.where(micro.mask, output.logprobs.double(), 0.0)
            cross_entropy = -counted.sum() * self.loss_weight(batch, micro)
            loss, sums[0] = cross_entropy, sums[0] + cross_entropy.detach()
            if settings.balanced:
                term = balance.loss(output.router) * self.balance_weight()
                loss, sums[1] = loss + term, sums[1] + term.detach()
            loss.backward()
        self.reduce_gradients()
        norm = self.clip()
        self.optimizer.step()
        losses = self.job.sum(sums).tolist()
        seconds, memory = self.job.maximum((self.job.now() - began, self.job.peak_memory()))
        metrics = {"step-time": seconds, "cross-entropy-loss": losses[0]}
        if settings.balanced:
            metrics["load-balance-loss"] = losses[1] / settings.load_balance_coefficient
        metrics |= {
            "learning-rate": self.optimizer.param_groups[0]["lr"],
            "gradient-norm": norm.item(),
            "tokens-per-second": settings.global_batch_size * settings.sequence_length / seconds,
            "peak-gpu-memory": memory,
        }
        return Row(number, metrics, batch.fingerprint)

    def read_model(self) -> Architecture:
        return architecture.read(self.settings.model)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""
        decayed = [p for p in self.model.parameters() if self.decays(p)]
        others = [p for p in self.model.parameters() if not self.decays(p)]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        decay = self.settings.weight_decay
        return torch.optim.AdamW([g for g in groups if g["params"]], betas=BETAS, eps=EPSILON, weight_decay=decay)

    def decays(self, parameter: Tensor) -> bool:
        """Matrices do, norms and biases do not."""
        return parameter.dim() > 1

    def learning_rate(self, number: int) -> float:
        """A line from the start rate to the end rate, which the last step has."""
        start, end = self.settings.start_learning_rate, self.settings.learning_rate
        return start + (end - start) * number / self.settings.steps

    def sample_order(self) -> Tensor:
        """A permutation of the corpus by the seed, the same on every device and rank."""
        return torch.randperm(len(self.corpus), generator=torch.Generator("cpu").manual_seed(self.settings.seed))

    def load(self, number: int) -> Batch:
        settings, size = self.settings, self.settings.micro_batch_size
        first = (number - 1) * settings.global_batch_size
        table = np.zeros((2, settings.global_batch_size), np.int64)  # of each sample its digest and counted tokens
        micro_batches = []
        for micro_step in range(settings.micro_batches):
            begin = (micro_step * settings.dp + self.job.rank) * size
            samples = [self.corpus[int(self.order[first + place])] for place in range(begin, begin + size)]
            for place, sample in enumerate(samples, begin):
                digest = hashlib.blake2b(sample.tokens.tobytes(), digest_size=8).digest()
                table[:, place] = int.from_bytes(digest, "little", signed=True), sample.counted
            micro_batches.append(self._on_device(np.stack([s.tokens for s in samples]), [s.counted for s in samples]))
        table = self.job.sum(torch.from_numpy(table).to(self.job.device)).cpu().numpy()
        return Batch(number, micro_batches, int(table[1].sum()), hashlib.sha256(table[0].tobytes()).hexdigest()[:16])

    def _on_device(self, ids: np.ndarray[Any, Any], counted: list[int]) -> MicroBatch:
        vocabulary = self.model.architecture.vocab_size
        if ids.max() >= vocabulary:
            raise ValueError(f"{self.corpus.folder} has token id {ids.max()}, the model's vocabulary is {vocabulary}")
        mask = np.arange(ids.shape[1] - 1) < np.asarray(counted)[:, None]
        tokens, targets, where = (
            torch.from_numpy(part).to(self.job.device) for part in (ids[:, :-1], ids[:, 1:], mask)
        )
        return MicroBatch(tokens, targets, where, sum(counted))

    def loss_weight(self, batch: Batch, micro: MicroBatch) -> float:
        """What the sum over a micro-batch's counted tokens is multiplied by."""
        return 1 / batch.counted

    def balance_weight(self) -> float:
        """What the load-balance loss of a micro-batch is multiplied by: all have the same number of tokens."""
        return self.settings.load_balance_coefficient / (self.settings.micro_batches * self.settings.dp)

    def reduce_gradients(self) -> None:
        """Sum over the ranks; each divided by the count of the whole job already."""
        if self.job.world == 1:
            return
        gradients = self._gradients()
        flat = self.job.sum(torch.cat([g.flatten() for g in gradients]))
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def clip(self) -> Tensor:
        """Scale the gradients to the norm `gradient_clip` at most; returns the norm before, fp64."""
        gradients = self._gradients()
        norm = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]).norm()
        scale = (self.settings.gradient_clip / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
        return norm

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


class Balance:
    """The load-balance loss of one step's micro-batches: E · Σ f·P, mean over layers, 1 where the load is even.

    f is the share of choices that went to an expert, P the router's mean score for it; as Σ P = 1, it is computed as
    1 + E · Σ (f - 1/E)·P, which is exactly 1 for an even load whatever the rounding of P. f and P are taken over the
    micro-batch, or over each sequence, or f over all ranks and all micro-batches of the step so far (Qiu et al. 2025,
    arXiv:2501.11873); then it depends on the order of the micro-batches.
    """

    def __init__(self, settings: Settings, job: Job) -> None:
        self.type, self.job = settings.load_balance_type, job
        self.counts: Tensor | int = 0

    def loss(self, router: RouterStatistics) -> Tensor:
        counts, sums = router.counts, router.probability_sums.double()
        if self.type != "sequence":
            counts, sums = counts.sum(1, keepdim=True), sums.sum(1, keepdim=True)
        scores = sums * router.top_k / counts.sum(-1, keepdim=True)
        if self.type == "global-batch":
            self.counts = counts = self.job.sum(counts) + self.counts
        experts = counts.shape[-1]
        excess = counts.double() / counts.sum(-1, keepdim=True) - 1 / experts
        return 1 + experts * (excess * scores).sum(-1).mean()
