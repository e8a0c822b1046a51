"""The readers of logs: for each its format, its metrics, and where it prints time, throughput and memory."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlspec.errors import SpecError
from rlspec.formats import BadLine, Csv, Format, Regex, Text
from rlspec.json_formats import Dicts, JsonLines
from rlspec.printed import whole_number
from rlspec.recordings import EventFiles, WandbFiles
from rlspec.trainer_formats import MLLog, Nanotron, Olmo, Slime, Verl

GRADIENT_NORMS = (
    *("gradient-norm", "grad_norm", "grad norm", "grad-norm", "gradient_norm"),
    *("train/gradient-norm", "train/grad_norm", "actor/grad_norm", "optim/total grad norm"),
)
NAN_COUNTERS = ("number of nan iterations",)
LOSSES = ("loss", "cross-entropy-loss", "lm loss", "lm_loss", "CE loss", "pg_loss", "global_avg_loss", "train_loss")
_UNITS = {"step_time": "s", "throughput": "tokens/s", "peak_memory": "GiB"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A log format. `timing` maps a judgment to the metric that holds it and the factor to s, tokens/s or GiB.

    `resolution` says with how many digits its metrics are printed or stored.
    `throughput_scope` says what the tokens/s are of: `job`, `device`, or empty where the format does not say.
    `counters` count bad steps and ought to stay 0; `sentinel` is a metric that is -1 on ranks that do not have it;
    `folders` says that a folder is a log, too.
    """

    name: str
    about: str
    resolution: str
    form: Callable[[str | None], Format]
    metrics: tuple[str, ...] = ()
    timing: Mapping[str, tuple[str, float]]
    throughput_scope: str = ""
    counters: tuple[str, ...] = ()
    sentinel: str = ""
    folders: bool = False
    repeats: str = "several ranks, an evaluation, a progress bar or a resumed run: keep one line of each step"

    @property
    def losses(self) -> tuple[str, ...]:
        """Those of `metrics` of which a run has at least one: the training losses, by the names of several trainers."""
        return tuple(metric for metric in self.metrics if metric.rpartition("/")[2] in LOSSES)

    @property
    def units(self) -> str:
        """What the reader finds of time, throughput and memory, in the units of the reports."""
        units = {judgment: unit for judgment, unit in _UNITS.items() if judgment in self.timing}
        if self.throughput_scope and "throughput" in units:
            units["throughput"] += {"job": " of the job", "device": " a device"}[self.throughput_scope]
        return ", ".join(units.values()) or "no times"


_CUSTOM = {
    "step_time": ("step_time", 1.0),
    "throughput": ("tokens_per_second", 1.0),
    "peak_memory": ("peak_memory_gib", 1.0),
}
READERS: dict[str, Reader] = {
    "pithtrain": Reader(
        name="pithtrain",
        about="`… | INFO | step 00000003/00000032 | step-time 4.812 sec | cross-entropy-loss 11.8731 | …`",
        resolution="4 decimals, load balance 6",
        form=lambda _: Text(
            head=r"\| +INFO +\| +step +([+-]?\d[^\s/|]*)/([^\s|]+)",
            fields=r"\| +([^\s|]+) +([^|]*?) *(?=\||$)",
            units=r"(?: +(?:sec|GB))?",
        ),
        metrics=("cross-entropy-loss", "load-balance-loss", "gradient-norm"),
        timing={
            "step_time": ("step-time", 1.0),
            "throughput": ("tokens-per-second", 1.0),
            "peak_memory": ("peak-gpu-memory", 1.0),
        },
        throughput_scope="job",
    ),
    "torchtitan": Reader(
        name="torchtitan",
        about="`… - INFO - step:  3  loss:  8.04040  grad_norm:  1.2345  memory: 12.34GiB(15.60%)  tps: 12,345  …`",
        resolution="loss 5 decimals, norm 4",
        form=lambda _: Text(
            head=r"- +INFO +- +step:\s*([+-]?\d\S*)",
            fields=r"\s(\w+):\s*(\S+)",
            units=r"(?:GiB(?:\([^()]*\))?|%)?",
        ),
        metrics=("loss", "grad_norm"),
        timing={"throughput": ("tps", 1.0), "peak_memory": ("memory", 1.0)},
        throughput_scope="device",
        sentinel="loss",
        repeats="several ranks print: set LOG_RANK and --local-ranks-filter to one that has the loss; or a resumed run",
    ),
    "megatron": Reader(
        name="megatron",
        about="` iteration        3/      32 | elapsed time per iteration (ms): 812.4 | lm loss: 1.087310E+01 | …`",
        resolution="loss 7 digits, norm 3 decimals",
        form=lambda _: Text(
            head=r"iteration\s+([+-]?\d[^\s/|]*)\s*/\s*([^\s|]+)\s*(?=\|)",
            fields=r"\|\s*([^\s:|](?:[^:|]*[^\s:|])?)\s*:\s*([^|]*?)\s*(?=\||$)",
        ),
        metrics=("lm loss", "load_balancing_loss", "grad norm"),
        timing={"step_time": ("elapsed time per iteration (ms)", 0.001)},
        counters=("number of skipped iterations", *NAN_COUNTERS),
    ),
    "huggingface": Reader(
        name="huggingface",
        about="dicts, `{'loss': '5.616', 'grad_norm': '0.7746', …}`, counted and all judged; or trainer_state.json",
        resolution="4 digits; the trainer state all",
        form=lambda _: Dicts(),
        metrics=("loss", "grad_norm"),
        timing=_CUSTOM,
        throughput_scope="job",
    ),
    "nanotron": Reader(
        name="nanotron",
        about="`… iteration: 3 / 32 | consumed_samples: 48 | lm_loss: 1.087310E+01 | grad_norm: 37.441 | …`",
        resolution="loss 7 digits, norm 3 decimals; or 3 digits",
        form=lambda _: Nanotron(),
        metrics=("lm_loss", "grad_norm"),
        timing={
            "step_time": ("elapsed_time_per_iteration_ms", 0.001),
            "throughput": ("tokens_per_sec", 1.0),
        },
        throughput_scope="job",
    ),
    "olmo": Reader(
        name="olmo",
        about="OLMo-core: `[step=3/32,epoch=1]`, then indented lines `train/CE loss=10.87`",
        resolution="about 4 digits",
        form=lambda _: Olmo(),
        metrics=("train/CE loss", "train/load balancing loss", "optim/total grad norm"),
        timing={
            "throughput": ("throughput/device/TPS", 1.0),
            "peak_memory": ("system/GPU active mem (GiB)", 1.0),
        },
        throughput_scope="device",
    ),
    "verl": Reader(
        name="verl",
        about="`step:3 - actor/pg_loss:0.0012 - actor/grad_norm:0.0201 - timing_s/step:162.3 - …`",
        resolution="all digits, once 3 decimals",
        form=lambda _: Verl(),
        metrics=("actor/pg_loss", "actor/entropy", "actor/grad_norm"),
        timing={
            "step_time": ("timing_s/step", 1.0),
            "throughput": ("perf/throughput", 1.0),
            "peak_memory": ("perf/max_memory_allocated_gb", 1.0),
        },
        throughput_scope="device",
    ),
    "slime": Reader(
        name="slime",
        about="`… step 3: {'train/loss': 0.0012, 'train/grad_norm': 0.4471, …}`",
        resolution="all digits",
        form=lambda _: Slime(),
        metrics=("train/loss", "train/entropy_loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff"),
        timing={},
    ),
    "mllog": Reader(
        name="mllog",
        about='MLPerf: `:::MLLOG {"key": "train_loss", "value": 8.0404, "metadata": {"step_num": 3, …}, …}`',
        resolution="as written",
        form=lambda _: MLLog(),
        metrics=("train_loss",),
        timing={},
    ),
    "tensorboard": Reader(
        name="tensorboard",
        about="an event file (*tfevents*) or the folder of one run: scalars by tag",
        resolution="float32",
        form=lambda _: EventFiles(),
        folders=True,
        metrics=(
            *("loss_metrics/global_avg_loss", "grad_norm"),  # torchtitan
            *("lm loss", "grad-norm"),  # Megatron-LM
            *("train/loss", "train/grad_norm"),  # Hugging Face
        ),
        timing={  # as torchtitan writes them
            "step_time": ("time_metrics/end_to_end(s)", 1.0),
            "throughput": ("throughput(tps)", 1.0),
            "peak_memory": ("memory/max_reserved(GiB)", 1.0),
        },
        throughput_scope="device",
        repeats="a resumed run, or two runs in one folder: name one event file",
    ),
    "wandb": Reader(
        name="wandb",
        about="W&B's run-<id>.wandb, or a folder above it: the history by key, W&B's own step",
        resolution="as logged",
        form=lambda _: WandbFiles(),
        folders=True,
        metrics=(
            *("train/cross-entropy-loss", "train/load-balance-loss", "train/gradient-norm"),  # pith-train
            *("train/loss", "train/grad_norm"),  # Hugging Face
            *("loss_metrics/global_avg_loss", "grad_norm"),  # torchtitan
        ),
        timing={  # as pith-train logs them
            "step_time": ("infra/step-time", 1.0),
            "throughput": ("infra/tokens-per-second", 1.0),
            "peak_memory": ("infra/peak-gpu-memory", 1.0),
        },
        throughput_scope="job",
    ),
    "jsonl": Reader(
        name="jsonl",
        about='a JSON object a step with a field step, `{"step": 3, "loss": 8.0404}`',
        resolution="as written",
        form=lambda _: JsonLines(),
        timing=_CUSTOM,
    ),
    "csv": Reader(
        name="csv",
        about="a header with a column step, then a row a step",
        resolution="as written",
        form=lambda _: Csv(),
        timing=_CUSTOM,
    ),
    "regex": Reader(
        name="regex",
        about="lines in which --pattern RE is found: named groups step, one a metric, and steps if there is one",
        resolution="as written",
        form=Regex,
        timing=_CUSTOM,
    ),
}


def find(reader: str) -> Reader:
    """The reader of a name. SpecError with the nearest and all names."""
    if reader in READERS:
        return READERS[reader]
    near = difflib.get_close_matches(reader, READERS, n=1)
    meant = f", did you mean {near[0]}?" if near else ""
    raise SpecError(f"no reader is named {reader!r}{meant} (readers: {', '.join(READERS)})")


def understanding(lines: Sequence[str], but: str) -> str:
    """The name of another reader that finds a step line, empty if none does."""
    names = sorted(READERS.keys() - {but, "regex"}, key=lambda name: (name == "huggingface", name))
    return next((name for name in names if _understands(READERS[name].form(None), lines)), "")


def _understands(form: Format, lines: Sequence[str]) -> bool:
    if form.recognises("\n".join(lines)):
        return True
    for text in (*lines, None):
        try:
            line = form.end() if text is None else form.parse(text)
            if line is not None and line.fields and whole_number(line.step) >= 0:
                return True
        except (BadLine, ValueError):
            continue
    return False
