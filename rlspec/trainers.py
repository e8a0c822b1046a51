"""The trainers that a spec can name, as one literal dict."""

from __future__ import annotations

from dataclasses import dataclass

_PITHTRAIN = ("cross-entropy-loss", "load-balance-loss", "gradient-norm", "learning-rate", "step-time",
              "tokens-per-second", "peak-gpu-memory")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerEntry:
    """`metrics` are all that its log can hold (empty: whatever the user's reader finds).

    `template` is the shipped run file below `templates/<kind>/`, `axes` the mesh axes that it can be larger than one in
    beside dp. A trainer with `own_records` writes records.jsonl itself, at full precision.
    """

    about: str
    reader: str = ""
    metrics: tuple[str, ...] = ()
    pipeline: bool = False
    fp8: bool = False
    perturbs: bool = False
    runs: bool = False
    template: str | None = None
    axes: tuple[str, ...] = ("pp", "cp", "ep")
    own_records: bool = False
    global_batch_size: int | None = None


TRAINERS: dict[str, TrainerEntry] = {
    "command": TrainerEntry(about="your own program, template and reader", runs=True),
    "embedded": TrainerEntry(
        about="the small trainer inside rlspec: decoders of the Qwen3 family, dense and mixture-of-experts",
        reader="pithtrain",
        metrics=_PITHTRAIN,
        perturbs=True,
        runs=True,
        template="embedded.py.j2",
        axes=(),
        own_records=True,
        global_batch_size=8,
    ),
    "pithtrain": TrainerEntry(
        about="pith-train: mixture-of-experts pre-training (lints and plans; runs in a later version)",
        reader="pithtrain",
        metrics=_PITHTRAIN,
        pipeline=True,
        fp8=True,
    ),
    "torchtitan": TrainerEntry(
        about="torchtitan (lints and plans; runs in a later version)",
        reader="torchtitan",
        metrics=("loss", "grad_norm", "memory", "tps", "tflops", "mfu"),
    ),
    "huggingface": TrainerEntry(
        about="transformers.Trainer (lints and plans; runs in a later version)",
        reader="huggingface",
        metrics=("loss", "grad_norm", "learning_rate", "epoch"),
    ),
}

# What the fixture of a kind sets; a setting that differs is another fixture and shows in the tag.
FIXTURES: dict[str, dict[str, object]] = {
    "correctness": {
        "micro_batch_size": 1,
        "max_steps": 32,
        "start_learning_rate": 1e-6,
        "learning_rate": 1e-5,
        "force_balanced_routing": False,
    },
    "performance": {
        "micro_batch_size": 1,
        "max_steps": 8,
        "start_learning_rate": 1e-6,
        "learning_rate": 1e-6,
        "force_balanced_routing": True,
    },
}
