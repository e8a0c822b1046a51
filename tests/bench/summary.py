"""The summary of a file of bench_kernels.py, in Markdown: `python tests/bench/summary.py FILE [--into README]`.

A line for each family of kernels, with its bars and what Triton and CUDA reached; bold is what misses a bar. `--into`
puts it between the two comments of kernels/README.md that name this file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).with_name("results") / "kernels-h200.json"
COMMENTS = "<!-- by tests/bench/summary.py -->", "<!-- end -->"

Bars = Sequence[tuple[str, float]]  # the first pattern that is found in a row's name has its bar
Row = Mapping[str, Any]


class Family(NamedTuple):
    """`rows`: a pattern that matches whole names of rows, "kernel, shape, beside baseline"."""

    name: str
    bars: str
    rows: str
    triton: Bars = ()
    cuda: Bars = ()
    figure: str = "to the baseline"
    parts: Sequence[str] = ("gemm", "attention", "rows", "cuda_rows", "moe")
    most: int = 3  # figures that are said one by one; of more, the range


TO_BASELINE, TO_FLOOR, THROUGHPUT = "to the baseline", "to the floor", "throughput"
LAYERS = {
    "qkv": "4096→6144",
    "o": "4096→4096",
    "gateup": "4096→24576",
    "down": "12288→4096",
    "lm_head": "4096→151936",
}

FAMILIES = (
    Family(
        "GEMM of Qwen3-8B's five shapes, 1 – 64 rows, cold weights, to cuBLAS (12288→4096 at 1 and 16: 1.30 for CUDA)",
        "1.05; 1.12",
        r"gemm \w+, M=(1|16|32|64), .*",
        triton=[("", 1.05)],
        cuda=[(r"gemm down, M=(1|16),", 1.30), ("", 1.12)],
    ),
    Family(
        "the same, 128 – 512 rows (4096→6144 at 256 and 512: 1.25; at 256: 1.15)",
        "1.15; 1.12",
        r"gemm \w+, M=(128|256|512), .*",
        triton=[(r"gemm qkv, M=(256|512),", 1.25), ("", 1.15)],
        cuda=[(r"gemm qkv, M=256,", 1.15), ("", 1.12)],
    ),
    Family(
        "the same, 1024 and 4096 rows (4096→6144 at 1024: 1.12 for Triton)",
        "1.05; 1.05",
        r"gemm \w+, M=(1024|4096), .*",
        triton=[(r"gemm qkv, M=1024,", 1.12), ("", 1.05)],
        cuda=[("", 1.05)],
    ),
    Family(
        "data gradient at 4096 rows; of 12288→4096 also at 64, 128, 256",
        "1.05; 1.05",
        r"dx .*",
        triton=[("", 1.05)],
        cuda=[("", 1.05)],
    ),
    Family(
        "resumed weight gradient at 4096 rows, to cuBLAS with beta = 1; gathered: to `index_select` and that",
        "1.05; 1.02",
        r"dw .*",
        triton=[("", 1.05)],
        cuda=[("", 1.02)],
    ),
    Family(
        "attention forward, B1 S4096, B4 S4096, B1 S16384, throughput to cuDNN",
        "0.79; 0.96",
        r"attention forward, .*cudnn",
        triton=[("", 0.79)],
        cuda=[("", 0.96)],
        figure=THROUGHPUT,
    ),
    Family(
        "attention backward, the same",
        "0.83",
        r"attention backward, .*cudnn",
        triton=[("", 0.83)],
        cuda=[("", 0.83)],
        figure=THROUGHPUT,
    ),
    Family(
        "attention backward, throughput to flash",
        "1.35",
        r"attention backward, .*flash",
        triton=[("", 1.35)],
        figure=THROUGHPUT,
    ),
    Family(
        "decode B1 L4096, B32 L4096, B1 L32768, time to cuDNN",
        "1.45, 1.10, 1.10",
        r"attention decode, .*cudnn",
        triton=[("B1 L4096 ", 1.45), ("", 1.10)],
        cuda=[("B1 L4096 ", 1.45), ("", 1.10)],
    ),
    Family(
        "log-prob of 4096 × 151936, both variants, forward and with backward, to the floor",
        "1.08; 1.15",
        r"(batch_invariant_)?logprob( forward \+ backward)?, 4096 .*",
        triton=[("forward", 1.15), ("", 1.08)],
        cuda=[("forward", 1.15), ("", 1.08)],
        figure=TO_FLOOR,
    ),
    Family(
        "linear + log-prob, to the logits GEMM alone",
        "1.05; 1.03",
        r"linear_logprob, .*cuBLAS logits",
        triton=[("", 1.05)],
        cuda=[("", 1.03)],
    ),
    Family(
        "rms_norm, QK-norm, swiglu, rope, residual at 16384 rows, forward and data gradient, to the floor",
        "1.12",
        r"(rms_norm|qk_norm|swiglu|rope|residual_add)( data gradient|( forward \+)? backward|, fp32 \+ bf16)?, .*",
        triton=[("", 1.12)],
        cuda=[("", 1.12)],
        figure=TO_FLOOR,
    ),
    Family(
        "rms_norm's weight gradient, to the floor",
        "reported",
        r"rms_norm weight gradient, .*",
        figure=TO_FLOOR,
    ),
    Family(
        "products of 128 experts, 32768 rows, forward and data gradient, to the better of `_grouped_mm` and a loop",
        "1.25",
        r"grouped( dx)?, .*(forced|even|skewed), .*",
        triton=[("", 1.25)],
    ),
    Family("the same, 1 to 256 tokens", "1.25", r"grouped, .* tokens, .*", triton=[("", 1.25)]),
    Family("their weight gradient, bf16 out", "1.25", r"grouped dw, (?!owned).*", triton=[("", 1.25)]),
    Family(
        "their weight gradient, resumed in fp32, to `_grouped_mm` and an addition",
        "1.25",
        r"grouped dw, owned, .*",
        triton=[("", 1.25)],
    ),
    Family(
        "sum over experts, forward; backward, to the floor", "reported", r"combine(, backward)?, .*", figure=TO_FLOOR
    ),
    Family("router, 4096 tokens, to torch in fp32", "reported", r"router, 4096 .*"),
    Family(
        "Liger Kernel, eager: rms_norm, swiglu, rope, log-prob, linear + log-prob; forward with backward",
        "reported",
        r".* forward \+ backward, .*Liger",
        parts=("liger",),
        most=5,
    ),
    Family(
        "`invariant_mode`: a Qwen3 of 4 layers, forward; with backward, to the same outside",
        "reported",
        r"qwen3, 4 layers, forward( \+ backward)?, .*",
        parts=("invariant_mode",),
    ),
    Family(
        "the same forward in a CUDA graph",
        "reported",
        r"qwen3, 4 layers, forward in a graph, .*",
        parts=("invariant_mode",),
    ),
)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--into", type=Path, metavar="README")
    parser.add_argument("--all", action="store_true", help="every row, not the summary")
    given = parser.parse_args(words)
    results = json.loads(given.file.read_text(encoding="utf-8"))
    text = rows(results["timings"]) if given.all else f"{heading(results)}\n\n{table(results['timings'])}"
    if given.into:
        given.into.write_text(filled(given.into.read_text(encoding="utf-8"), text), encoding="utf-8")
    else:
        print(text)
    return 0


def filled(readme: str, text: str) -> str:
    """The README with the text between the comments."""
    before, rest = readme.split(COMMENTS[0])
    _, after = rest.split(COMMENTS[1])
    return f"{before}{COMMENTS[0]}\n{text}\n{COMMENTS[1]}{after}"


def heading(results: Mapping[str, Any]) -> str:
    checks = results["checks"]
    held, bad = sum(checks["held"].values()), len(checks["failed"])
    missing = len(results["not_run"]) + len(results["errors"])
    lines = [
        f"{results['date']}, commit {results['commit']}, {results['device']}, torch {results['torch']}, "
        f"Triton {results['triton']}, nvcc {results['nvcc']}, bf16.",
        results.get("note") or f"One call of {results['seconds']['whole']:.0f} s.",
        f"{held} of {held + bad} checks of bits hold" + (f"; not run: {missing}." if missing else "."),
    ]
    return "\n".join(lines)


def table(timings: Iterable[Row]) -> str:
    """A line for each family that has rows."""
    known = list(timings)
    lines = [("kernel", "bars", "Triton", "CUDA"), ("---",) * 4]
    for family in FAMILIES:
        cells = [_cell(family, bars, _of(family, known, name)) for name, bars in _backends(family)]
        if any(cells):
            lines.append((family.name, family.bars, *cells))  # type: ignore[arg-type]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rows(timings: Iterable[Row]) -> str:
    lines: list[tuple[str, ...]] = [
        ("kernel", "shape", "of", "us", "baseline", "us", "ratio", "floor us", "of floor"),
        ("---",) * 9,
    ]
    for row in timings:
        ours, baseline, floor = row["ours_us"], row.get("baseline_us"), row.get("floor_us")
        beside = (f"{baseline:.1f}", f"{ours / baseline:.2f}") if baseline else ("", "")
        above = (f"{floor:.1f}", f"{ours / floor:.2f}") if floor else ("", "")
        names = row["kernel"], row["shape"], row["backend"], f"{ours:.1f}", row.get("baseline") or ""
        lines.append((*names, *beside, *above))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _backends(family: Family) -> tuple[tuple[str, Bars], ...]:
    return ("triton", family.triton), ("cuda", family.cuda)


def _name(row: Row) -> str:
    return f"{row['kernel']}, {row['shape']}, beside {row.get('baseline') or 'nothing'}"


def _of(family: Family, timings: Iterable[Row], backend: str) -> list[Row]:
    return [
        row
        for row in timings
        if row["backend"] == backend and row["part"] in family.parts and re.fullmatch(family.rows, _name(row))
    ]


def _cell(family: Family, bars: Bars, found: Sequence[Row]) -> str:
    """A few figures one by one; of more, the range of those within their bars and each that is not."""
    figures = [(row, _figure(family, row)) for row in found]
    judged = [(row, f"{value:.2f}", value, _holds(family, value, _bar(bars, row))) for row, value in figures]
    if len(judged) <= family.most:
        return ", ".join(text if ok else f"**{text}**" for _, text, _, ok in judged)
    held = [value for _, _, value, ok in judged if ok]
    missed: dict[str, list[tuple[str, float]]] = {}
    for row, _, value, ok in judged:
        if not ok:
            what, shape = _label(row)
            missed.setdefault(what, []).append((shape, value))
    bad = [
        f"{what} {', '.join(shape for shape, _ in some)}: {_range([v for _, v in some])}"
        for what, some in missed.items()
    ]
    return "; ".join([*([_range(held)] if held else []), *([f"**{'; '.join(bad)}**"] if bad else [])])


def _range(values: Sequence[float]) -> str:
    ends = dict.fromkeys(f"{one:.2f}" for one in (min(values), max(values)))
    return " – ".join(ends)


def _figure(family: Family, row: Row) -> float:
    if family.figure == TO_FLOOR:
        return float(row["ours_us"] / row["floor_us"])
    ratio = row["ours_us"] / row["baseline_us"]
    return float(1 / ratio if family.figure == THROUGHPUT else ratio)


def _holds(family: Family, value: float, bar: float | None) -> bool:
    """As the figure is printed, to two digits."""
    if bar is None:
        return True
    value = round(value, 2)
    return value >= bar if family.figure == THROUGHPUT else value <= bar


def _bar(bars: Bars, row: Row) -> float | None:
    return next((bar for pattern, bar in bars if re.search(pattern, _name(row))), None)


def _label(row: Row) -> tuple[str, str]:
    """What a row is of, and its shape: products by their layer and rows, the rest by kernel and shape."""
    kind, _, layer = row["kernel"].partition(" ")
    layer, *more = layer.split(", ")
    if kind in ("gemm", "dx", "dw") and layer in LAYERS:
        return " ".join([LAYERS[layer], *more, "at"]), row["shape"].removeprefix("M=")
    return f"{row['kernel']} of", row["shape"]


if __name__ == "__main__":
    sys.exit(main())
