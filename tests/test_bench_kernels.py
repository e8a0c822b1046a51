"""The bench of the kernels with parts and a torch made for the test, and the table that is made of its results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import bench_kernels, summary
from tests.processes import LONG

BENCH = Path(bench_kernels.__file__).parent
TORCH = """
__version__ = "9.9"
device = str
Tensor = object
class cuda:
    is_available = staticmethod(lambda: True)
    synchronize = empty_cache = staticmethod(lambda: None)
    get_device_name = staticmethod(lambda device: "a chip")
"""
PART = """
import time
def one(device): yield "one", True, ""
def two(device): yield "two", {ok}, "as told"
KINDS = (one, two)
def checks(device):
    for kind in KINDS:
        yield from kind(device)
def timings(device):
    from tests.bench import clock
    for rows in (1, 16, 32):
        if rows > 1 and not clock._rehearsing.get():
            time.sleep({seconds})
        figures = dict(ours_us=12.0, baseline="cuBLAS", baseline_us=10.0, floor_us=6.0)
        yield dict(kernel="gemm o", shape=f"M={{rows}}", **figures)
"""


@pytest.fixture
def bench(tmp_path):
    """A tree of its own, in which the parts `gemm` and `rows` are made up."""

    def run(*words, ok=True, seconds=0, rows=PART):
        folder = tmp_path / "tests" / "bench"
        folder.mkdir(parents=True)
        for name in ("bench_kernels.py", "clock.py", "gpu.py", "summary.py"):
            shutil.copy(BENCH / name, folder)
        (folder / "kernels_gemm.py").write_text(PART.format(ok=ok, seconds=0))
        (folder / "kernels_rows.py").write_text(rows.format(ok=True, seconds=seconds))
        (tmp_path / "torch.py").write_text(TORCH)
        (tmp_path / "triton.py").write_text('__version__ = "8.8"\n')
        (tmp_path / "rlspec").mkdir()
        (tmp_path / "rlspec" / "nvcc.py").write_text("names, find = list, lambda: None\n")
        path = tmp_path / "results.json"
        command = [sys.executable, folder / "bench_kernels.py", "--json", path, *words]
        environment = {**os.environ, "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, env=environment)
        return done, json.loads(path.read_text())

    return run


def test_all_of_it(bench):
    done, found = bench("--only", "gemm", "--only", "rows", "--commit", "abc")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1.20" in done.stdout and "4 of 4 checks hold; 6 timings" in done.stdout
    assert (found["commit"], found["torch"], found["triton"], found["device"]) == ("abc", "9.9", "8.8", "a chip")
    assert found["checks"] == {"held": {"gemm": 2, "rows": 2}, "failed": []}
    assert [(row["part"], row["backend"]) for row in found["timings"]] == [
        *[("rows", "triton")] * 3,
        *[("gemm", "triton")] * 3,
    ]
    assert {"beforehand", "gemm", "rows", "whole"} <= set(found["seconds"])


def test_a_check_that_fails(bench):
    done, found = bench("--only", "gemm", ok=False)
    assert done.returncode == 1 and "FAILED two: as told" in done.stdout
    assert (
        found["checks"]["failed"] == [{"part": "gemm", "name": "two", "detail": "as told"}]
        and len(found["timings"]) == 3
    )


@pytest.mark.slow
def test_what_the_budget_leaves_out_is_named(bench):
    done, found = bench("--only", "gemm", "--only", "rows", "--budget", "10", seconds=600)
    assert done.returncode == 1
    assert len(found["timings"]) == 1
    assert found["not_run"] == [
        *("triton gemm o, M=16", "triton gemm o, M=32"),
        *(f"triton gemm o, M={rows}" for rows in (1, 16, 32)),
    ]
    assert "not run: triton gemm o, M=16" in done.stdout


def test_a_part_that_breaks_harms_no_other(bench):
    done, found = bench("--only", "gemm", "--only", "rows", rows="import nothing_like_it\n")
    assert done.returncode == 1
    assert len(found["timings"]) == 3 and "rows timings: not rehearsed" in found["not_run"]
    assert "No module named 'nothing_like_it'" in found["errors"]["rows rehearsal"]


def bare(folder, name, *words):
    """A bench in a Python that has no package but what lies in the folder."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-S", BENCH / name, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LONG, env=environment)


@pytest.mark.parametrize("name", [path.name for path in (*sorted(BENCH.glob("bench_*.py")), BENCH / "sanitize.py")])
def test_every_bench_says_what_it_does_without_any_package(tmp_path, name):
    done = bare(tmp_path, name, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {name}") and not done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [("bench_kernels.py", []), ("bench_chain.py", []), ("sanitize.py", []), ("bench_identical.py", ["train", "runs"])],
)
def test_a_bench_without_a_gpu_says_so_in_a_line(tmp_path, name, words):
    assert bare(tmp_path, name, *words).stderr.endswith(" CUDA device, and torch is not installed\n")
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    done = bare(tmp_path, name, *words)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count("\n") == 1 and "CUDA device, and torch sees none here" in done.stderr


def test_every_part_has_an_entry():
    assert {path.stem.removeprefix("kernels_") for path in BENCH.glob("kernels_*.py")} == set(bench_kernels.PARTS)


def row(shape, ours, **changes):
    made = {"part": "gemm", "backend": "triton", "kernel": "gemm o", "shape": shape, "ours_us": ours}
    return {**made, "baseline": "cuBLAS", "baseline_us": 100.0, "floor_us": 50.0, **changes}


def line(*rows):
    return [one.strip() for one in summary.table(rows).splitlines()[2].strip("|").split("|")][2:]


def test_what_misses_its_bar_is_bold_and_named():
    assert line(row("M=1", 90.0), row("M=16", 105.4)) == ["0.90, 1.05", ""]
    assert line(row("M=1", 90.0), row("M=16", 106.0)) == ["0.90, **1.06**", ""]
    many = [row("M=1", 90.0), row("M=16", 104.0), row("M=32", 106.0), row("M=64", 107.0)]
    assert line(*many) == ["0.90 – 1.04; **4096→4096 at 32, 64: 1.06 – 1.07**", ""]
    assert line(row("M=16", 112.0, backend="cuda"), row("M=32", 113.0, backend="cuda")) == ["", "1.12, **1.13**"]


def test_bars_that_hold_for_one_shape_alone():
    wide = {"kernel": "gemm qkv"}
    assert line(row("M=256", 124.0, **wide), row("M=128", 116.0, **wide)) == ["1.24, **1.16**", ""]
    deep = {"kernel": "gemm down", "backend": "cuda"}
    assert line(row("M=16", 129.0, **deep), row("M=32", 129.0, **deep)) == ["", "1.29, **1.29**"]


def test_throughput_must_not_be_lower():
    rows = [
        row("B1 S4096", us, kernel="attention forward", part="attention", baseline="cudnn") for us in (126.0, 128.0)
    ]
    assert line(*rows) == ["0.79, **0.78**", ""]
    assert line(*(one | {"backend": "cuda"} for one in rows)) == ["", "**0.79**, **0.78**"]


def test_the_readme_has_the_table_of_the_results():
    results = json.loads(summary.RESULTS.read_text(encoding="utf-8"))
    text = f"{summary.heading(results)}\n\n{summary.table(results['timings'])}"
    readme = (BENCH.parents[1] / "kernels" / "README.md").read_text(encoding="utf-8")
    assert summary.filled(readme, text) == readme
