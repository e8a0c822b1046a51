"""The CUDA compiler, and what it made of `csrc/`: one shared object a source, in a cache of this user.

An object is named after a digest of its source, all headers, the flags, the compiler's version and the architecture,
so what has changed is another object, and an old one is never taken for it. A build writes beside the cache and
renames, under a lock that keeps two processes from doing the same work. The record beside an object (`.json`) is
renamed last: it holds the object's own digest and what ptxas said of registers and spills. An object without a record,
or with another digest, is built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlspec.errors import RunError

SOURCES = Path(__file__).parent / "csrc"
ARCHITECTURE = "sm_90a"  # wgmma needs the a
CAPABILITY = (9, 0)
FLAGS = (
    *("-O3", "-std=c++17", "-lineinfo", "-shared", "-Xcompiler", "-fPIC", "-Xptxas", "-v"),
    f"-gencode=arch=compute_{ARCHITECTURE.removeprefix('sm_')},code={ARCHITECTURE}",
)
_PLACES = ("/usr/local/cuda/bin/nvcc", "/opt/cuda/bin/nvcc")


class Unavailable(RunError):
    """This machine cannot build or run CUDA kernels; the sentence says why. For specs: BLOCKED."""


class CompileError(RunError):
    """nvcc refused a source. The message ends with the compiler's own words."""


@dataclass(frozen=True, slots=True)
class Object:
    """A built source: the shared object, and what ptxas told of its kernels."""

    path: Path
    ptxas: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What one kernel takes, as ptxas tells it: registers a thread, bytes spilled and on the stack."""

    registers: int
    spilled: int
    stack: int


def find() -> str | None:
    """The compiler: $CUDA_HOME/bin, then PATH, then the usual folders."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    asked = [f"{home}/bin/nvcc"] if home else []
    known = filter(None, (shutil.which(place) for place in (*asked, "nvcc", *_PLACES)))
    return next(known, None)


def names() -> list[str]:
    """The sources: `rms_norm` is csrc/rms_norm.cu."""
    return sorted(path.stem for path in SOURCES.glob("*.cu"))


def cache() -> Path:
    """Where objects are kept: $XDG_CACHE_HOME/rlspec/native, else below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlspec" / "native"


def key(name: str) -> str:
    """Digest of all that an object follows from. Raises Unavailable without nvcc, ValueError for an unknown source."""
    if name not in names():
        raise ValueError(f"csrc has no {name}.cu; it has: {', '.join(names()) or 'nothing'}")
    digest = hashlib.sha256(repr((FLAGS, version(_compiler()))).encode())
    for path in (SOURCES / f"{name}.cu", *sorted(SOURCES.glob("*.cuh"))):
        digest.update(f"\0{path.name}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:20]


def built(name: str) -> Object | None:
    """The object in the cache that belongs to the source as it is, if it is there and whole."""
    path = _path(name)
    try:
        record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        whole = record["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    except (FileNotFoundError, ValueError, KeyError):
        return None
    return Object(path, record["ptxas"]) if whole else None


def build(name: str) -> Object:
    """The object of a source, from the cache or from nvcc. Raises Unavailable, or CompileError in nvcc's own words."""
    if found := built(name):
        return found
    path = _path(name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(path.with_suffix(".lock")):
        return built(name) or _compile(name, path)


def usage(ptxas: str) -> dict[str, Usage]:
    """Mangled name of each kernel -> what it takes."""
    blocks = re.split(r"Compiling entry function '([^']+)'", ptxas)[1:]
    return {name: _usage(text) for name, text in zip(blocks[::2], blocks[1::2], strict=True)}


def state() -> str:
    """One line for `doctor`."""
    try:
        release = re.search(r"release ([\d.]+)", version(_compiler()))
    except Unavailable as error:
        return f"{error}; implementation cuda is BLOCKED here"
    ready = sum(built(name) is not None for name in names())
    compiler = f"nvcc {release[1]}" if release else "nvcc"
    return f"{ready} of {len(names())} sources built in {cache()}, by {compiler} for {ARCHITECTURE}"


def _usage(text: str) -> Usage:
    def number(pattern: str) -> int:
        return sum(int(found) for found in re.findall(pattern, text))

    return Usage(
        registers=number(r"Used (\d+) registers"),
        spilled=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack=number(r"(\d+) bytes stack frame"),
    )


@functools.cache
def version(compiler: str) -> str:
    """What the compiler says of itself, asked once a process. Raises Unavailable if it cannot be started."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise Unavailable(f"{compiler} cannot be started: {error.strerror}") from error
    if done.returncode:
        raise Unavailable(f"{compiler} --version ended with {done.returncode}: {(done.stdout + done.stderr).strip()}")
    return done.stdout


def _compiler() -> str:
    if found := find():
        return found
    raise Unavailable("CUDA kernels are built with nvcc, and there is none on PATH or in CUDA_HOME")


def _path(name: str) -> Path:
    return cache() / f"{name}-{key(name)}.so"


def _compile(name: str, path: Path) -> Object:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
        draft = Path(folder) / path.name
        argv = [_compiler(), *FLAGS, "-o", str(draft), str(SOURCES.resolve() / f"{name}.cu")]
        environment = {**os.environ, "TMPDIR": folder}  # what a killed nvcc leaves goes with the folder
        done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment)
        said = (done.stdout + done.stderr).strip()
        if done.returncode:
            raise CompileError(f"nvcc refused csrc/{name}.cu (exit {done.returncode}):\n{said}")
        record = {"sha256": hashlib.sha256(draft.read_bytes()).hexdigest(), "ptxas": said}
        told = draft.with_suffix(".json")
        told.write_text(json.dumps(record), encoding="utf-8")
        for file, final in ((draft, path), (told, path.with_suffix(".json"))):
            _settle(file)
            file.replace(final)
    return Object(path, said)


def _settle(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
