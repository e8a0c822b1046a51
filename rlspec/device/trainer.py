"""The embedded trainer: a decoder of the catalogue, AdamW, gradient accumulation, a mesh, one row a step.

A step reads `global_batch_size` samples. Replica r of dp takes of each micro-step the micro-batch number r, so the
replicas' micro-batches together are those that one process with dp times the micro-batch size would take. The processes
of a replica share its micro-batches: pp by layers, cp by pieces of the sequences; ep lays experts over the processes of
a stage. The cross-entropy is the sum over all counted tokens divided by their number in the whole job, the load-balance
loss the mean over micro-batches, layers and, by type, sequences; each process adds its own part. Gradients are summed
over all that hold the same weights, and the norm counts each weight once: a mesh moves sums, and nothing else.

`faults` overrides single methods of `Trainer`; that is why each decision has a method of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlspec import architecture
from rlspec.architecture import Architecture
from rlspec.device import perturb
from rlspec.device.adamw import AdamW
from rlspec.device.data import Corpus, default_corpus
from rlspec.device.decoder import RouterStatistics, of_experts
from rlspec.device.dtypes import DTYPES
from rlspec.device.job import Job
from rlspec.device.mesh import Mesh, Peers
from rlspec.device.operators import Operators
from rlspec.device.parallel import ParallelDecoder, attach, zigzag
from rlspec.device.settings import Settings

if TYPE_CHECKING:
    from rlspec.device.pipelining import Pipeline

BETAS, EPSILON = (0.9, 0.95), 1e-8


class MicroBatch(NamedTuple):
    """int64 tokens and targets, bool mask of the targets that count, all [sequences, T / cp], of this process's pieces
    of the sequences; `counted` is the sum of the mask.
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor
    counted: int


class Batch(NamedTuple):
    """This process's micro-batches of step `number`. `counted` and `fingerprint` are over the whole job."""

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
        self.settings, self.job, self.mesh = settings, job, Mesh.of(settings, job)
        self.model = ParallelDecoder(
            self.read_model(),
            Operators(implementation),
            self.mesh,
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
        self.pieces = zigzag(settings.sequence_length, self.mesh.context)
        self.pipeline = self.make_pipeline() if settings.pp > 1 else None

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
        sums = self.accumulate(batch)
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

    def accumulate(self, batch: Batch) -> Tensor:
        """The gradients of a step. Returns fp64 [2]: this process's part of the cross-entropy, and of the load-balance
        loss with its coefficient.
        """
        settings, model = self.settings, self.model
        sums = torch.zeros(2, dtype=torch.float64, device=self.job.device)
        balance = Balance(settings, self.mesh, len(model.part.layers) / model.architecture.num_hidden_layers)
        force = settings.force_balanced_routing and model.architecture.num_experts > 0

        def forward(number: int, stream: Tensor | None) -> Tensor:
            micro = batch.micro_batches[number]
            positions = self.positions().expand_as(micro.tokens)
            out, router = model.stage(
                micro.tokens, micro.targets, stream=stream, positions=positions, force_balanced=force
            )
            if settings.balanced:
                term = balance.loss(router) * self.balance_weight()
                sums[1] += term.detach()
                out = attach(out, term)
            return out

        def loss(number: int, logprobs: Tensor) -> Tensor:
            micro = batch.micro_batches[number]
            # In double: the sum's own rounding would be larger than what one ulp of a weight does to it.
            counted = torch.where(micro.mask, logprobs.double(), 0.0)
            cross_entropy = -counted.sum() * self.loss_weight(batch, micro)
            sums[0] += cross_entropy.detach()
            return cross_entropy

        if self.pipeline is not None:
            self.pipeline.run([micro.tokens for micro in batch.micro_batches], forward, loss)
        else:
            for number in range(len(batch.micro_batches)):
                loss(number, forward(number, None)).backward()
        for parameter in model.parameters():
            if parameter.grad is None:  # of experts to which no token came
                parameter.grad = torch.zeros_like(parameter)
        return sums

    def make_pipeline(self) -> Pipeline:
        # Importing torch's pipelines takes as long as importing torch.
        from rlspec.device.pipelining import Pipeline

        settings, model = self.settings, self.model
        tokens = torch.empty(settings.micro_batch_size, len(self.pieces), dtype=torch.int64, device="meta")
        stream = torch.empty(*tokens.shape, model.architecture.hidden_size, dtype=model.stream_dtype, device="meta")
        return Pipeline(self.mesh.pipeline, stream, tokens, self.job.device)

    def positions(self) -> Tensor:
        """int64 [T / cp]: where this process's tokens stand in their sequences."""
        return self.pieces.to(self.job.device)

    def read_model(self) -> Architecture:
        return architecture.read(self.settings.model)

    def make_optimizer(self) -> AdamW:
        decayed = [p for p in self.model.parameters() if self.decays(p)]
        others = [p for p in self.model.parameters() if not self.decays(p)]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        decay = self.settings.weight_decay
        return AdamW([g for g in groups if g["params"]], betas=BETAS, eps=EPSILON, weight_decay=decay)

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
            begin = (micro_step * settings.dp + self.mesh.replica) * size
            samples = [self.corpus[int(self.order[first + place])] for place in range(begin, begin + size)]
            for place, sample in enumerate(samples, begin):
                digest = hashlib.blake2b(sample.tokens.tobytes(), digest_size=8).digest()
                if self.mesh.pipeline.rank == self.mesh.context.rank == 0:  # one process of a replica tells of it
                    table[:, place] = int.from_bytes(digest, "little", signed=True), sample.counted
            micro_batches.append(self._on_device(np.stack([s.tokens for s in samples]), [s.counted for s in samples]))
        table = self.job.sum(torch.from_numpy(table).to(self.job.device)).cpu().numpy()
        return Batch(number, micro_batches, int(table[1].sum()), hashlib.sha256(table[0].tobytes()).hexdigest()[:16])

    def _on_device(self, ids: np.ndarray[Any, Any], counted: list[int]) -> MicroBatch:
        vocabulary = self.model.architecture.vocab_size
        if ids.max() >= vocabulary:
            raise ValueError(f"{self.corpus.folder} has token id {ids.max()}, the model's vocabulary is {vocabulary}")
        mask = np.arange(ids.shape[1] - 1) < np.asarray(counted)[:, None]
        tokens, targets, where = (torch.from_numpy(part)[:, self.pieces] for part in (ids[:, :-1], ids[:, 1:], mask))
        count = int(where.sum())
        tokens, targets, where = (part.to(self.job.device) for part in (tokens, targets, where))
        return MicroBatch(tokens, targets, where, count)

    def loss_weight(self, batch: Batch, micro: MicroBatch) -> float:
        """What the sum over a process's counted tokens of a micro-batch is multiplied by."""
        return 1 / batch.counted

    def balance_weight(self) -> float:
        """What the load-balance loss of a micro-batch is multiplied by: all have the same number of tokens."""
        return self.settings.load_balance_coefficient / (self.settings.micro_batches * self.settings.dp)

    def reduce_gradients(self) -> None:
        """Sum over those who hold the same weights; each is divided by the count of the whole job already."""
        for experts, peers in ((False, self.mesh.stage), (True, self.mesh.expert_replicas)):
            gradients = [gradient for name, gradient in self._gradients() if of_experts(name) == experts]
            if peers.world == 1 or not gradients:
                continue
            flat = peers.sum(torch.cat([g.flatten() for g in gradients]))
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def replicas(self, name: str) -> Peers:
        """Those who hold the same rows of a parameter."""
        return self.mesh.expert_replicas if of_experts(name) else self.mesh.stage

    def clip(self) -> Tensor:
        """Scale the gradients to the norm `gradient_clip` at most; returns the norm before, fp64."""
        norm = self.gradient_norm()
        scale = (self.settings.gradient_clip / (norm + 1e-6)).clamp(max=1.0)
        for _, gradient in self._gradients():
            gradient.mul_(scale)
        return norm

    def gradient_norm(self) -> Tensor:
        """Of the whole model, fp64."""
        return self.job.sum(self.own_squares()).sqrt()

    def own_squares(self) -> Tensor:
        """The sum of squares of the gradients that this process is the first to hold, fp64."""
        own = [gradient for name, gradient in self._gradients() if self.counts(name)]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in own]
        nothing = torch.zeros((), dtype=torch.float64, device=self.job.device)
        return torch.stack([nothing, *norms]).square().sum()

    def counts(self, name: str) -> bool:
        """Whether this process's copy of a gradient is the one that the norm counts."""
        return self.replicas(name).rank == 0

    def _gradients(self) -> list[tuple[str, Tensor]]:
        return [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]


class Balance:
    """The load-balance loss of one step's micro-batches: E · Σ f·P, mean over layers, 1 where the load is even.

    f is the share of choices that went to an expert, P the router's mean score for it; as Σ P = 1, it is computed as
    1 + E · Σ (f - 1/E)·P, which is exactly 1 for an even load whatever the rounding of P. f and P are taken over the
    micro-batch, or over each sequence, or f over all ranks and all micro-batches of the step so far (Qiu et al. 2025,
    arXiv:2501.11873); then it depends on the order of the micro-batches.

    Each process gives its part: those of its own layers, `share` of all, and in P of its own pieces of the sequences;
    counts are summed over all pieces first. The parts of a replica add up to its loss.
    """

    def __init__(self, settings: Settings, mesh: Mesh, share: float = 1.0) -> None:
        self.type, self.mesh, self.share = settings.load_balance_type, mesh, share
        self.counts: Tensor | int = 0

    def loss(self, router: RouterStatistics) -> Tensor:
        counts, sums = router.counts, router.probability_sums.double()
        if self.type != "sequence":
            counts, sums = counts.sum(1, keepdim=True), sums.sum(1, keepdim=True)
        pieces = self.mesh.context.world
        scores = sums * router.top_k / (counts.sum(-1, keepdim=True) * pieces)
        if self.type == "global-batch":
            self.counts = counts = self.mesh.stage.sum(counts) + self.counts
        else:
            counts = self.mesh.context.sum(counts)
        experts = counts.shape[-1]
        excess = counts.double() / counts.sum(-1, keepdim=True) - 1 / experts
        return self.share * (1 / pieces + experts * (excess * scores).sum(-1).mean())
