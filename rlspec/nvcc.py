"""The CUDA compiler, and what it made of `csrc/`: one shared object a source, in a cache of this user.

An object is named after a digest of its source, all that it may include, the flags, the compiler's version and the
architecture, so what has changed is another object, and an old one is never taken for it. For the same reason nvcc sees
nothing of the environment but what it needs to start: `NVCC_APPEND_FLAGS` or `CPATH` would be in no name. A build
writes beside the cache and renames, under a lock that keeps two processes from doing the same work; what a killed one
leaves, the next removes. The record beside an object (`.json`) is renamed last: it holds the object's own digest and
what ptxas said of registers and spills. An object without a record, or with another digest, is built again.
"""

from __future__ import annotations

import contextlib
import errno
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rlspec.errors import RunError

SOURCES = Path(__file__).parent / "csrc"
ARCHITECTURE = "sm_90a"  # wgmma needs the a
CAPABILITY = (9, 0)
FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-Xptxas", "-v"),
    f"-gencode=arch=compute_{ARCHITECTURE.removeprefix('sm_')},code={ARCHITECTURE}",
)
_HOST_COMPILER = "NVCC_CCBIN"  # for machines whose own is too new for nvcc; part of an object's name
_ENVIRONMENT = ("PATH", "HOME", "LD_LIBRARY_PATH", _HOST_COMPILER)
_PATIENCE = 60.0  # seconds for `nvcc --version`, which takes milliseconds
_DRAFTS = ".build-"
_PLACES = ("/usr/local/cuda/bin/nvcc", "/opt/cuda/bin/nvcc")


class Unavailable(RunError):
    """This machine cannot build, keep or run CUDA kernels; the sentence says why. For specs: BLOCKED."""


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
    settings = (FLAGS, version(_compiler()), os.environ.get(_HOST_COMPILER))
    digest = hashlib.sha256(repr(settings).encode())
    for path in (SOURCES / f"{name}.cu", *_included()):
        digest.update(f"\0{path.relative_to(SOURCES)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:20]


def built(name: str) -> Object | None:
    """The object in the cache that belongs to the source as it is, if it is there and whole."""
    path = _path(name)
    with _usable_cache():
        return _whole(path)


def build(name: str) -> Object:
    """The object of a source, from the cache or from nvcc. Raises Unavailable, or CompileError in nvcc's own words."""
    if found := built(name):
        return found
    path = _path(name)
    with _usable_cache():
        _folder()
        with _locked(path.with_suffix(".lock")):
            _sweep(path)
            return _whole(path) or _compile(name, path)


def build_all() -> None:
    """Build every source, as many at a time as there are cores, the largest first. What fails is left to `build`."""
    largest = sorted(names(), key=lambda name: -(SOURCES / f"{name}.cu").stat().st_size)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for future in [pool.submit(build, name) for name in largest]:
            future.exception()


def usage(ptxas: str) -> dict[str, Usage]:
    """Mangled name of each kernel -> what it takes."""
    blocks = re.split(r"Compiling entry function '([^']+)'", ptxas)[1:]
    return {name: _usage(text) for name, text in zip(blocks[::2], blocks[1::2], strict=True)}


def state() -> str:
    """One line for `doctor`."""
    try:
        release = re.search(r"release ([\d.]+)", version(_compiler()))
        ready = sum(built(name) is not None for name in names())
        if ready < len(names()):
            with _usable_cache():
                _folder()
    except Unavailable as error:
        return f"{error}; implementation cuda is BLOCKED here"
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
    """What the compiler says of itself, asked once a process. Raises Unavailable if it cannot be started, or hangs."""
    try:
        done = _run([compiler, "--version"], _environment(), _PATIENCE)
    except OSError as error:
        raise Unavailable(f"{compiler} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{compiler} --version said nothing for {error.timeout:g} s") from error
    if done.returncode:
        raise Unavailable(f"{compiler} --version ended with {done.returncode}: {(done.stdout + done.stderr).strip()}")
    return done.stdout


def _compiler() -> str:
    if found := find():
        return found
    raise Unavailable("CUDA kernels are built with nvcc, and there is none on PATH or in CUDA_HOME")


def _environment() -> dict[str, str]:
    return {"LC_ALL": "C", **{name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}}


def _run(argv: list[str], environment: dict[str, str], patience: float | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment, timeout=patience
    )


def _included() -> list[Path]:
    """All that a source may include: any file but other sources and what is to be read by people."""
    files = (path for path in SOURCES.rglob("*") if path.suffix not in (".cu", ".md") and path.is_file())
    return sorted(path for path in files if not path.name.startswith("."))


def _path(name: str) -> Path:
    return cache() / f"{name}-{key(name)}.so"


def _folder() -> None:
    cache().mkdir(parents=True, exist_ok=True, mode=0o700)
    if not os.access(cache(), os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextlib.contextmanager
def _usable_cache() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = f"{cache()}, where CUDA kernels are kept, cannot be used ({error.strerror}): set XDG_CACHE_HOME"
        raise Unavailable(why) from error


def _whole(path: Path) -> Object | None:
    try:
        record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("sha256") != digest:
        return None
    ptxas = record.get("ptxas")
    return Object(path, ptxas) if isinstance(ptxas, str) else None


def _sweep(path: Path) -> None:
    """Remove the drafts of builds that were killed: those of this object, whose lock is ours, and of unlocked ones."""
    for draft in path.parent.glob(f"{_DRAFTS}*.so-*"):
        stem = draft.name.removeprefix(_DRAFTS).partition(".so-")[0]
        if stem == path.stem or not _busy(path.parent / f"{stem}.lock"):
            shutil.rmtree(draft, ignore_errors=True)  # a compiler that outlived its builder may still write there


def _busy(lock: Path) -> bool:
    with lock.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _compile(name: str, path: Path) -> Object:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{_DRAFTS}{path.name}-") as folder:
        draft = Path(folder) / path.name
        argv = [_compiler(), *FLAGS, "-o", str(draft), str(SOURCES.resolve() / f"{name}.cu")]
        done = _run(argv, {**_environment(), "TMPDIR": folder}, None)  # what a killed nvcc leaves goes with the folder
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
