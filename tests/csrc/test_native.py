"""Building csrc/: what an object is named after, who builds it, what is never loaded; and what a launch says."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlspec import machine, nvcc
from rlspec.device import native, observe
from rlspec.errors import RunError

ROOT = Path(__file__).parents[2]
COMPILER = """#!/bin/sh
# Stands in for nvcc: says a version, notes each call, "compiles" a source by copying it, and refuses one with an error.
if [ "$1" = --version ]; then cat "{folder}/version"; exit 0; fi
env > "{folder}/environment"
for word; do [ "$before" = -o ] && out=$word; before=$word; source=$word; done
echo "$source" >> "{folder}/calls"
if grep -q broken "$source"; then echo "$source(1): error: identifier \\"broken\\" is undefined" >&2; exit 2; fi
if grep -q gated "$source"; then cat "{folder}/gate" > /dev/null; fi
head -c 10 "$source" > "$out"
if grep -q killed "$source"; then kill -9 $$; fi
cp "$source" "$out"
echo "ptxas info : Used 8 registers" >&2
"""

needs_nvcc = pytest.mark.skipif(nvcc.find() is None, reason="needs nvcc, to compile csrc/")


class Workshop:
    """Sources, a cache and a compiler of one's own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sources = folder, folder / "csrc"
        self.sources.mkdir()
        self.write("one.cu", "int one();  // a source\n")
        self.write("shared.cuh", "// a header\n")
        self.say("Cuda compilation tools, release 13.0, V13.0.88")
        compiler = folder / "cuda" / "bin" / "nvcc"
        compiler.parent.mkdir(parents=True)
        compiler.write_text(COMPILER.format(folder=folder))
        compiler.chmod(0o755)

    def write(self, name: str, text: str) -> None:
        (self.sources / name).parent.mkdir(exist_ok=True)
        (self.sources / name).write_text(text)

    def say(self, version: str) -> None:
        (self.folder / "version").write_text(version)
        nvcc.version.cache_clear()

    @property
    def calls(self) -> int:
        calls = self.folder / "calls"
        return len(calls.read_text().splitlines()) if calls.exists() else 0


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    made = Workshop(tmp_path)
    monkeypatch.setattr(nvcc, "SOURCES", made.sources)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield made
    nvcc.version.cache_clear()


def test_an_object_is_built_once(shop: Workshop) -> None:
    made = nvcc.build("one")
    assert made.path.read_text() == "int one();  // a source\n" and "8 registers" in made.ptxas
    assert nvcc.build("one") == made == nvcc.built("one")
    assert shop.calls == 1
    assert nvcc.state().startswith("1 of 1 sources built in ") and "nvcc 13.0 for sm_90a" in nvcc.state()
    assert dict(machine.facts())["kernels"] == nvcc.state()


def test_what_an_object_follows_from_names_it(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [nvcc.key("one")]
    shop.write("one.cu", "int one();  // another source\n")
    keys.append(nvcc.key("one"))
    shop.write("shared.cuh", "// another header\n")
    keys.append(nvcc.key("one"))
    for name in ("more.cuh", "more.h", "below/more.inc"):
        shop.write(name, "")
        keys.append(nvcc.key("one"))
    shop.say("Cuda compilation tools, release 13.1, V13.1.1")
    keys.append(nvcc.key("one"))
    monkeypatch.setattr(nvcc, "FLAGS", (*nvcc.FLAGS, "-G"))
    keys.append(nvcc.key("one"))
    monkeypatch.setenv("NVCC_CCBIN", "g++-13")
    keys.append(nvcc.key("one"))
    assert len(set(keys)) == len(keys)
    shop.write("other.cu", "int other();\n")
    shop.write("README.md", "")
    assert nvcc.key("one") == keys[-1] != nvcc.key("other")


def test_what_names_no_object_is_kept_from_the_compiler(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    unnamed = {
        "NVCC_APPEND_FLAGS": "-use_fast_math",
        "NVCC_PREPEND_FLAGS": "-G",
        "CPATH": "/else",
        "INCLUDES": "-I/else",
    }
    for name, value in {**unnamed, "NVCC_CCBIN": "g++-13"}.items():
        monkeypatch.setenv(name, value)
    nvcc.build("one")
    seen = dict(line.split("=", 1) for line in (shop.folder / "environment").read_text().splitlines() if "=" in line)
    assert not unnamed.keys() & seen.keys() and {"PATH", "TMPDIR", "NVCC_CCBIN"} <= seen.keys()


def test_a_compiler_that_refuses_is_quoted(shop: Workshop) -> None:
    shop.write("one.cu", "broken\n")
    with pytest.raises(nvcc.CompileError, match=r"(?s)nvcc refused csrc/one.cu \(exit 2\):\n.*\"broken\" is undefined"):
        nvcc.build("one")
    assert nvcc.built("one") is None


def test_a_killed_compiler_leaves_nothing(shop: Workshop) -> None:
    shop.write("one.cu", "killed in the middle of a source\n")
    with pytest.raises(nvcc.CompileError):
        nvcc.build("one")
    assert nvcc.built("one") is None
    assert {path.suffix for path in nvcc.cache().iterdir()} == {".lock"}


def test_what_a_killed_builder_leaves_goes_with_the_next_build(shop: Workshop) -> None:
    shop.write("other.cu", "int other();\n")
    paths = [nvcc._path(name) for name in ("one", "other")]
    left = [path.parent / f".build-{path.name}-left" for path in (*paths, paths[1].with_stem("other-old"))]
    for folder in left:
        folder.mkdir(parents=True)
        (folder / "half.o").touch()
    with paths[1].with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        nvcc.build("one")
    assert [folder.exists() for folder in left] == [False, True, False]


@pytest.mark.parametrize("damage", ["cut", "changed", "no record", "half a record", "no object", "[]", "null", "{}"])
def test_a_damaged_object_is_built_again(shop: Workshop, damage: str) -> None:
    path = nvcc.build("one").path
    record = path.with_suffix(".json")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:5])
    elif damage == "changed":
        path.write_bytes(path.read_bytes().replace(b"a", b"b"))
    elif damage == "half a record":
        record.write_text(record.read_text()[:20])
    elif damage in ("[]", "null"):
        record.write_text(damage)
    elif damage == "{}":
        record.write_text(json.dumps({"sha256": json.loads(record.read_text())["sha256"]}))
    else:
        (record if damage == "no record" else path).unlink()
    assert nvcc.built("one") is None
    assert nvcc.build("one").path.read_text() == "int one();  // a source\n"
    assert shop.calls == 2


def test_two_processes_build_at_once(shop: Workshop) -> None:
    code = "import sys; from pathlib import Path; from rlspec import nvcc; nvcc.SOURCES = Path(sys.argv[1])"
    code += "; print(nvcc.build('one').path)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(_: int) -> str:
        argv = [sys.executable, "-c", code, str(shop.sources)]
        return subprocess.run(argv, env=environment, check=True, capture_output=True, text=True).stdout

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(run, range(4)))) == 1
    assert shop.calls == 1


def test_a_build_holds_the_lock(shop: Workshop) -> None:
    shop.write("one.cu", "gated: the compiler waits for the other end of a pipe\n")
    os.mkfifo(shop.folder / "gate")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        made = pool.submit(nvcc.build, "one")
        with (shop.folder / "gate").open("w"):  # opens when the compiler runs
            (lock,) = nvcc.cache().glob("*.lock")
            with lock.open("w") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert made.result().path.exists()


def test_without_a_compiler_it_is_blocked(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcc, "find", lambda: None)
    with pytest.raises(nvcc.Unavailable, match="built with nvcc, and there is none on PATH"):
        nvcc.build("one")
    assert nvcc.state().endswith("implementation cuda is BLOCKED here")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(native, "_capability", lambda device: (9, 0))
    assert (
        native.missing(torch.device("cuda", 0))
        == "cuda kernels are built with nvcc, and there is none on PATH or in CUDA_HOME"
    )


@pytest.mark.parametrize("place", ["file", "/proc"])
def test_a_cache_that_cannot_be_is_blocked(shop: Workshop, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (shop.folder / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(shop.folder / place))
    with pytest.raises(nvcc.Unavailable, match=r"CUDA kernels are kept, cannot be used \(.*\): set XDG_CACHE_HOME"):
        nvcc.build("one")
    assert nvcc.state().endswith("set XDG_CACHE_HOME; implementation cuda is BLOCKED here")


def test_a_compiler_that_hangs_is_named(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = shop.folder / "cuda" / "bin" / "nvcc"
    compiler.write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(nvcc, "_PATIENCE", 0.05)
    assert nvcc.state() == f"{compiler} --version said nothing for 0.05 s; implementation cuda is BLOCKED here"


def test_a_gpu_that_is_not_hopper_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(native, "_capability", lambda device: (8, 0))
    assert (
        native.missing(torch.device("cuda", 0)) == "cuda kernels are for compute capability 9.0, and this GPU has 8.0"
    )
    assert native.missing(torch.device("cpu")) == "cuda kernels need a CUDA device, not cpu"


def test_an_unknown_source_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"csrc has no rms\.cu; it has: .*rms_norm"):
        nvcc.key("rms")


def test_ptxas_is_read() -> None:
    said = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3onev' for 'sm_90a'
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers
ptxas info    : Compiling entry function '_Z3twov' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers"""
    assert nvcc.usage(said) == {"_Z3onev": nvcc.Usage(40, 16, 8), "_Z3twov": nvcc.Usage(255, 0, 0)}


def test_all_sources_are_built_side_by_side_and_a_bad_one_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, begun = threading.Barrier(2, timeout=60), []

    def build(name: str) -> None:
        begun.append(name)
        both.wait()
        raise nvcc.CompileError(name)

    for name, size in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.cu").write_text(" " * size)
    monkeypatch.setattr(nvcc, "SOURCES", tmp_path)
    monkeypatch.setattr(nvcc, "build", build)
    monkeypatch.setattr(nvcc.os, "cpu_count", lambda: 2)
    nvcc.build_all()
    assert begun == ["b", "a"]


@pytest.mark.parametrize(
    ("implementations", "why", "builds"),
    [(["triton", "cuda"], None, 1), (["fastest"], None, 1), (["triton", None], None, 0), (["cuda"], "no nvcc", 0)],
)
def test_what_runs_on_cuda_kernels_has_all_of_them_built(
    implementations: list[str | None], why: str | None, builds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(native, "missing", lambda device: why)
    monkeypatch.setattr(nvcc, "build_all", lambda: calls.append(1))
    native.prepare(torch.device("cuda", 0), implementations)
    assert len(calls) == builds


@needs_nvcc
def test_all_of_csrc_compiles() -> None:
    nvcc.build_all()
    built = {name: nvcc.build(name) for name in nvcc.names()}
    assert set(built) == {path.stem for path in nvcc.SOURCES.glob("*.cu")} >= {"rms_norm", "det_gemm", "attention"}
    assert all(nvcc.usage(one.ptxas) for one in built.values())


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a launcher be called with CPU tensors, as if they were on a device."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, which a launch on CPU memory would break")
    monkeypatch.setattr(native, "_device_of", lambda launcher, arguments: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))


@needs_nvcc
@pytest.mark.usefixtures("no_gpu")
def test_the_code_of_a_launcher_is_named() -> None:
    x = torch.zeros(8)
    with (
        observe.watch() as seen,
        pytest.raises(RunError, match=r"residual_add_forward of csrc/.*: cudaError\w+ \(cudaError \d+\)"),
    ):
        native.load("residual_add").call("residual_add_forward", x, x, x, x.dtype, x.dtype, 1, 8, 8, 8)
    assert seen.native == []
    with pytest.raises(RunError, match="cudaErrorInvalidValue"):
        native.load("residual_add").call("residual_add_forward", x, x, x, torch.bfloat16, torch.float32, 1, 8, 8, 8)


@needs_nvcc
@pytest.mark.usefixtures("no_gpu")
def test_what_is_no_launcher_or_no_argument_is_refused() -> None:
    library = native.load("residual_add")
    with pytest.raises(ValueError, match=r"csrc/residual_add\.cu has no launcher 'residual_sub'"):
        library.call("residual_sub", torch.zeros(8))
    with pytest.raises(ValueError, match="a launcher takes tensors, numbers"):
        library.call("residual_add_forward", torch.zeros(8), torch.float64)


@needs_nvcc
def test_tensors_must_be_on_one_cuda_device() -> None:
    library = native.load("residual_add")
    with pytest.raises(ValueError, match="runs on a CUDA device, not on cpu"):
        library.call("residual_add_forward", torch.zeros(8))
    with pytest.raises(ValueError, match="theirs: cpu, meta"):
        library.call("residual_add_forward", torch.zeros(8), torch.zeros(8, device="meta"))
    with pytest.raises(ValueError, match="theirs: none"):
        library.call("residual_add_forward", 8)
