"""The readers of logs: for each its format, its metrics, and where it prints time, throughput and memory."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlspec.errors import SpecError
from rlspec.formats import BadLine, Csv, Format, Regex, Text
from rlspec.json_formats import Dicts, JsonLines, is_trainer_state
from rlspec.printed import whole_number

GRADIENT_NORMS = ("gradient-norm", "grad_norm", "grad norm", "grad-norm", "gradient_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A log format. `timing` maps a judgment to the metric that holds it and the factor to s, tokens/s or GiB.

    `throughput_scope` says what the tokens/s are of: `job`, `device`, or empty where the format does not say.
    `counters` count bad steps and ought to stay 0; `sentinel` is a metric that is -1 on ranks that do not have it.
    """

    name: str
    about: str
    form: Callable[[str | None], Format]
    metrics: tuple[str, ...] = ()
    timing: Mapping[str, tuple[str, float]]
    throughput_scope: str = ""
    counters: tuple[str, ...] = ()
    sentinel: str = ""
    repeats: str = "a resumed run: keep one copy of these steps"


_CUSTOM = {
    "step_time": ("step_time", 1.0),
    "throughput": ("tokens_per_second", 1.0),
    "peak_memory": ("peak_memory_gib", 1.0),
}
READERS: dict[str, Reader] = {
    "pithtrain": Reader(
        name="pithtrain",
        about="`… | INFO | step 00000003/00000032 | step-time 4.812 sec | cross-entropy-loss 11.8731 | …`",
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
        form=lambda _: Text(
            head=r"iteration\s+([+-]?\d[^\s/|]*)\s*/\s*([^\s|]+)\s*(?=\|)",
            fields=r"\|\s*([^\s:|](?:[^:|]*[^\s:|])?)\s*:\s*([^|]*?)\s*(?=\||$)",
        ),
        metrics=("lm loss", "load_balancing_loss", "grad norm"),
        timing={"step_time": ("elapsed time per iteration (ms)", 0.001)},
        counters=("number of skipped iterations", "number of nan iterations"),
    ),
    "huggingface": Reader(
        name="huggingface",
        about="a dict a step, `{'loss': '5.616', 'grad_norm': '0.7746', …}`, counted from 1; or trainer_state.json",
        form=lambda _: Dicts(),
        metrics=("loss", "grad_norm"),
        timing={},
    ),
    "jsonl": Reader(
        name="jsonl",
        about='a JSON object a step with a field step, `{"step": 3, "loss": 8.0404}`',
        form=lambda _: JsonLines(),
        timing=_CUSTOM,
    ),
    "csv": Reader(
        name="csv", about="a header with a column step, then a row a step", form=lambda _: Csv(), timing=_CUSTOM
    ),
    "regex": Reader(
        name="regex",
        about="lines in which --pattern RE is found: named groups step, one a metric, and steps if there is one",
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
    if isinstance(form, Dicts) and is_trainer_state("\n".join(lines)):
        return True
    for text in lines:
        try:
            line = form.parse(text)
            if line is not None and line.fields and whole_number(line.step) >= 0:
                return True
        except (BadLine, ValueError):
            continue
    return False
