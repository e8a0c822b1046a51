"""Mistakes that real trainers have made, each a switch of the embedded trainer: `settings: {fault: NAME}`.

They prove that a judgment can fail. Each is one overridden decision of `Trainer`; the plan says which arms have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rlspec.architecture import Architecture
from rlspec.device.job import Job
from rlspec.device.settings import Settings
from rlspec.device.trainer import Batch, MicroBatch, Row, Trainer


class LocalTokenCount(Trainer):
    """Each rank divides by its own tokens, and the ranks' means are averaged."""

    def loss_weight(self, batch: Batch, micro: MicroBatch) -> float:
        return 1 / (sum(each.counted for each in batch.micro_batches) * self.settings.dp * self.settings.cp)


class MeanOfMeans(Trainer):
    """Each micro-batch is averaged, then the averages are."""

    def loss_weight(self, batch: Batch, micro: MicroBatch) -> float:
        means = self.settings.micro_batches * self.settings.dp * self.settings.cp
        return 1 / (max(1, micro.counted) * means)  # a piece of a sequence may count no token


class LearningRate(Trainer):
    """The learning rate is 5 % too high."""

    def learning_rate(self, number: int) -> float:
        return 1.05 * super().learning_rate(number)


class DroppedMicroBatch(Trainer):
    """The last micro-batch of each step is read and counted, but not trained on."""

    def load(self, number: int) -> Batch:
        batch = super().load(number)
        return batch._replace(micro_batches=batch.micro_batches[:-1])


class LoadBalanceTwice(Trainer):
    """The load-balance coefficient is applied twice."""

    def balance_weight(self) -> float:
        return super().balance_weight() * self.settings.load_balance_coefficient


class RopeBase(Trainer):
    """The base of the rotary embedding is a hundred times too large."""

    def read_model(self) -> Architecture:
        found = super().read_model()
        return replace(found, rope_theta=100 * found.rope_theta)


class GradientsNotAveraged(Trainer):
    """Each rank trains on the gradients of its own samples."""

    def reduce_gradients(self) -> None:
        pass


class GradientNormPerRank(Trainer):
    """Each rank adds the norm of all that it holds, so weights that several ranks hold are counted several times."""

    def counts(self, name: str) -> bool:
        return True


class GradientNormOfOneStage(Trainer):
    """Each stage of the pipeline clips by the norm of its own layers, and the first one prints its own."""

    def gradient_norm(self) -> Tensor:
        return self.mesh.stage.sum(self.own_squares()).sqrt()


class PositionsNotOffset(Trainer):
    """Each rank counts the positions of its pieces of a sequence from 0."""

    def positions(self) -> Tensor:
        return torch.arange(len(self.pieces), device=self.job.device)


class DecayOnNorms(Trainer):
    """Weight decay pulls the norms to zero too."""

    def decays(self, parameter: Tensor) -> bool:
        return True


class NanAtStep7(Trainer):
    """The loss of step 7 is not a number."""

    def loss_weight(self, batch: Batch, micro: MicroBatch) -> float:
        return math.nan if batch.number == 7 else super().loss_weight(batch, micro)


class Truncated(Trainer):
    """The run ends one step early, and says nothing."""

    def run(self) -> Iterator[Row]:
        yield from islice(super().run(), self.settings.steps - 1)


class DataOrder(Trainer):
    """The samples come in the opposite order."""

    def sample_order(self) -> Tensor:
        return super().sample_order().flip(0)


class ConstantMetric(Trainer):
    """Every arm prints the same gradient norm at every step."""

    def step(self, number: int) -> Row:
        row = super().step(number)
        return row._replace(metrics={**row.metrics, "gradient-norm": 1.0})


class ForcedRouting(Trainer):
    """Every arm routes round-robin, so the load-balance loss is pinned at 1."""

    def __init__(self, settings: Settings, job: Job, **options: Any) -> None:
        super().__init__(replace(settings, force_balanced_routing=True), job, **options)


FAULTS: Mapping[str, type[Trainer]] = {
    "local_token_count": LocalTokenCount,
    "mean_of_means": MeanOfMeans,
    "learning_rate_1.05": LearningRate,
    "dropped_micro_batch": DroppedMicroBatch,
    "load_balance_twice": LoadBalanceTwice,
    "rope_base": RopeBase,
    "gradients_not_averaged": GradientsNotAveraged,
    "gradient_norm_per_rank": GradientNormPerRank,
    "gradient_norm_of_one_stage": GradientNormOfOneStage,
    "positions_not_offset": PositionsNotOffset,
    "decay_on_norms": DecayOnNorms,
    "nan_at_step_7": NanAtStep7,
    "truncated": Truncated,
    "data_order": DataOrder,
    "constant_metric": ConstantMetric,
    "forced_routing": ForcedRouting,
}
_RANKS = ("dp 2 or cp 2", lambda settings: settings.dp * settings.cp > 1)
_MICRO_BATCHES = ("two micro-batches a rank", lambda settings: settings.micro_batches > 1)
NEEDS: Mapping[str, tuple[str, Callable[[Settings], bool]]] = {
    "local_token_count": _RANKS,
    "gradients_not_averaged": _RANKS,
    "gradient_norm_per_rank": _RANKS,
    "gradient_norm_of_one_stage": ("pp 2", lambda settings: settings.pp > 1),
    "positions_not_offset": ("cp 2", lambda settings: settings.cp > 1),
    "mean_of_means": _MICRO_BATCHES,
    "dropped_micro_batch": _MICRO_BATCHES,
    "load_balance_twice": ("a mixture of experts with a load-balance loss", lambda settings: settings.balanced),
    "forced_routing": ("a mixture of experts with a load-balance loss", lambda settings: settings.balanced),
    "nan_at_step_7": ("seven steps", lambda settings: settings.steps >= 7),
    "truncated": ("two steps", lambda settings: settings.steps > 1),
}


def trainer(settings: Settings) -> type[Trainer]:
    """The trainer of an arm. Raises ValueError for a fault that is unknown, or that these settings cannot show."""
    name = settings.fault
    if name is None:
        return Trainer
    if name not in FAULTS:
        raise ValueError(f"unknown fault {name!r}; known: {', '.join(FAULTS)}")
    wanted, met = NEEDS.get(name, ("", lambda settings: True))
    if not met(settings):
        raise ValueError(f"fault {name} cannot show here: it needs {wanted}")
    return FAULTS[name]
