"""What the host knows of a chain's model: its architecture, and the memory that a run of it needs. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlspec import architecture, chains
from rlspec.architecture import Architecture
from rlspec.workloads import Chain

_NEEDED = ("layers", "hidden_size", "heads", "kv_heads", "head_dim", "vocabulary_size")


def of(model: Mapping[str, Any]) -> Architecture:
    """From a model entry or a config.json. Raises ValueError for sizes, Unimplemented for a family or a key."""
    families = architecture.FAMILIES
    if model.get("model_type", families[0]) not in families:
        told = f"it is of type {model['model_type']}; our decoder runs {' and '.join(families)}"
        raise architecture.Unimplemented(told)
    needed = (*_NEEDED, *(() if architecture.experts(model) else ("intermediate_size",)))
    found = {name: model.get(name, model.get(architecture.NAMES[name])) for name in needed}
    if missing := sorted(name for name, value in found.items() if not isinstance(value, int)):
        raise ValueError(f"it does not say its {', '.join(missing)}")
    return architecture.read(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the device, from above: `calls` and `alone` are the graphs of the largest call and of one sample."""

    weights: int
    gradients: int
    calls: int
    alone: int

    @property
    def least(self) -> int:
        """At the highest point: the gradients of a cell, or those of a sample beside the reference's."""
        return self.weights + max(self.gradients + self.calls, 2 * self.gradients + self.alone)

    @property
    def resident(self) -> int:
        """The same with the gradients of the reference and of the canonical cell kept all the while."""
        return self.weights + 3 * self.gradients + self.calls


def memory(chain: Chain, model: Architecture, *, bits: int = 16, backward: bool = True) -> Memory:
    """What training needs: weights, one fp32 accumulator a weight if there is a `backward`, and a graph."""
    size, count = bits // 8, model.parameter_count()
    slots = max(call.slots for cell in chains.cells(chain) for call in cell.layout.calls)
    longest = max(sample.length for sample in chain.tier.samples)
    return Memory(
        weights=count * size,
        gradients=4 * count if backward else 0,
        calls=_graph(model, slots, size),
        alone=_graph(model, longest, 4),  # of the reference, in fp32
    )


def _graph(model: Architecture, slots: int, size: int) -> int:
    width = model.moe_intermediate_size * 8 if model.num_experts else model.intermediate_size
    attention = (2 * model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    kept = 6 * model.hidden_size + 2 * attention + 3 * width  # elements a token and layer that the graph holds on to
    return slots * model.num_hidden_layers * kept * size + 3 * 4 * slots * model.vocab_size + (1 << 30)
