"""The trainers that a spec can name, as one literal dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FAULTS_OF_ALL = ("constant_metric", "forced_routing")  # of the embedded trainer, in arms of every role

_PITHTRAIN = ("cross-entropy-loss", "load-balance-loss", "gradient-norm", "learning-rate", "step-time",
              "tokens-per-second", "peak-gpu-memory")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a run file leaves at full precision, `<stem><suffix>` for `reader`; `names` maps its tags to the log's."""

    suffix: str
    reader: str
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerEntry:
    """`metrics` are all that its log can hold (empty: whatever the user's reader finds).

    `template` is the shipped run file below `templates/`, `axes` the mesh axes that it can be larger than one in
    beside dp; `torchrun` says that it does not start without one. A trainer with `own_records` writes records.jsonl
    itself, at full precision.
    """

    about: str
    reader: str = ""
    metrics: tuple[str, ...] = ()
    pipeline: bool = False
    fp8: bool = False
    perturbs: bool = False
    template: str | None = None
    axes: tuple[str, ...] = ("pp", "cp", "ep")
    own_records: bool = False
    beside: Beside | None = None
    forces_routing: bool = True
    torchrun: bool = False
    global_batch_size: int | None = None


TRAINERS: dict[str, TrainerEntry] = {
    "command": TrainerEntry(about="your own program, template and reader"),
    "embedded": TrainerEntry(
        about="the small trainer inside rlspec: decoders of the Qwen3 family, dense and mixture-of-experts",
        reader="pithtrain",
        metrics=_PITHTRAIN,
        perturbs=True,
        template="{kind}/embedded.py.j2",
        own_records=True,
        global_batch_size=8,
    ),
    "pithtrain": TrainerEntry(
        about="pith-train: mixture-of-experts pre-training, whichever generation of its configuration a revision has",
        reader="pithtrain",
        metrics=_PITHTRAIN,
        pipeline=True,
        fp8=True,
        template="training/pithtrain.py.j2",
        torchrun=True,
    ),
    "torchtitan": TrainerEntry(
        about="torchtitan 0.2 (TOML) and 0.3 (Python configuration), judged from TensorBoard's float32",
        reader="torchtitan",
        metrics=("loss", "grad_norm", "memory", "tps", "tflops", "mfu"),
        template="training/torchtitan.py.j2",
        beside=Beside(
            suffix=".tensorboard",
            reader="tensorboard",
            names={
                "loss_metrics/global_avg_loss": "loss",
                "memory/max_reserved(GiB)": "memory",
                "throughput(tps)": "tps",
                "mfu(%)": "mfu",
                "time_metrics/end_to_end(s)": "step_time",
            },
        ),
    ),
    "huggingface": TrainerEntry(
        about="transformers.Trainer over data parallelism, judged from its trainer_state.json",
        reader="huggingface",
        metrics=("loss", "grad_norm", "learning_rate", "epoch"),
        template="training/huggingface.py.j2",
        axes=(),
        beside=Beside(suffix=".trainer_state.json", reader="huggingface"),
        forces_routing=False,
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
