"""Launch the CUDA kernels of `csrc/` from torch, through ctypes: no torch headers, no extension to build.

    library = native.load("rms_norm")                      # csrc/rms_norm.cu, built by `rlspec.nvcc` if need be
    library.call("rms_norm_forward", x, weight, y, x.dtype, rows, width, eps)

A launcher in csrc is `extern "C" int name(<one parameter an argument>, cudaStream_t stream)` and returns a cudaError:

    argument             parameter in C
    Tensor               pointer to its data (`void const*`, `float*`, ...): on the device, strides are yours to pass
    None                 the null pointer
    int, bool            int64_t
    float                float (single precision)
    torch.dtype          int64_t: `native.DTYPES`, which is `enum Dtype` of csrc/launch.cuh

`call` appends the current stream of the tensors' device, makes that device current around the launch, raises RunError
with the error's name if the launcher returns one, and tells `rlspec.device.observe.native` the launcher's name. It
looks at no value on the device and waits for nothing, so a launch can be captured in a CUDA graph; the tensors must
outlive it as torch's own do. Kernels (`__global__`) live in `namespace rlspec`: the profiler's list of what ran is
held against that name.

Each source includes csrc/launch.cuh, which gives the names of errors, `RLSPEC_TRY`, and a TMA descriptor encoder that
needs no libcuda when linking. A launcher returns the first error it meets, that of the launch itself too.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rlspec import nvcc
from rlspec.device import observe
from rlspec.errors import RunError

DTYPES: Mapping[torch.dtype, int] = MappingProxyType({torch.bfloat16: 0, torch.float16: 1, torch.float32: 2})


class Library:
    """The launchers of one source."""

    def __init__(self, name: str, built: nvcc.Object) -> None:
        self.name = name
        self.ptxas = built.ptxas
        self._library = ctypes.CDLL(str(built.path))
        self._error_name = self._library.rlspec_error_name
        self._error_name.argtypes, self._error_name.restype = [ctypes.c_int], ctypes.c_char_p
        self._launchers: dict[str, Any] = {}

    def call(self, launcher: str, *arguments: Tensor | torch.dtype | float | None) -> None:
        """Launch on the current stream of the tensors' device; see the head of the module.

        Raises ValueError without a CUDA tensor, for tensors on different devices and for an unknown launcher or dtype,
        nvcc.Unavailable for a GPU that is not Hopper, RunError for what the launcher returns.
        """
        device = _device_of(launcher, arguments)
        with torch.cuda.device(device):
            stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
            code = self._launcher(launcher)(*map(_argument, arguments), stream)
        if code:
            name = self._error_name(code).decode()
            raise RunError(f"{launcher} of csrc/{self.name}.cu: {name} (cudaError {code})")
        observe.native(launcher)

    def _launcher(self, name: str) -> Any:
        if name not in self._launchers:
            try:
                found = getattr(self._library, name)
            except AttributeError:
                raise ValueError(f"csrc/{self.name}.cu has no launcher {name!r}") from None
            found.restype = ctypes.c_int
            self._launchers[name] = found
        return self._launchers[name]


def missing(device: torch.device | None = None) -> str | None:
    """Why CUDA kernels cannot be built or run here, as a sentence, or None. With a device, that device is looked at."""
    if device is not None and device.type != "cuda":
        return f"cuda kernels need a CUDA device, not {device}"
    if not torch.cuda.is_available():
        return "cuda kernels need a CUDA device, and there is none here"
    found = _capability(torch.device("cuda", torch.cuda.current_device()) if device is None else device)
    # sm_90a code runs on 9.0 alone, on nothing newer.
    if found != nvcc.CAPABILITY:
        need, here = (".".join(map(str, one)) for one in (nvcc.CAPABILITY, found))
        return f"cuda kernels are for compute capability {need}, and this GPU has {here}"
    return None if nvcc.find() else "cuda kernels are built with nvcc, and there is none on PATH or in CUDA_HOME"


def prepare(device: torch.device, implementations: Iterable[str | None]) -> None:
    """Build all sources at once where one of these implementations runs on CUDA kernels, so that no call waits."""
    if {"cuda", "fastest"} & set(implementations) and missing(device) is None:
        nvcc.build_all()


@functools.cache
def load(name: str) -> Library:
    """The library of csrc/<name>.cu, built if it is not in the cache, loaded once a process.

    Raises nvcc.Unavailable without nvcc, nvcc.CompileError with the compiler's words, ValueError for an unknown name.
    """
    return Library(name, nvcc.build(name))


def _device_of(launcher: str, arguments: tuple[Any, ...]) -> torch.device:
    devices = {one.device for one in arguments if isinstance(one, Tensor)}
    if len(devices) != 1:
        told = ", ".join(sorted(map(str, devices))) or "none"
        raise ValueError(f"{launcher} takes tensors on one CUDA device; theirs: {told}")
    (device,) = devices
    if device.type != "cuda":
        raise ValueError(f"{launcher} runs on a CUDA device, not on {device}")
    if (found := _capability(device)) != nvcc.CAPABILITY:
        raise nvcc.Unavailable(f"{launcher} is built for {nvcc.ARCHITECTURE}, and this GPU has capability {found}")
    return device


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _argument(value: Any) -> Any:
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, int):
        return ctypes.c_int64(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    if value in DTYPES:
        return ctypes.c_int64(DTYPES[value])
    raise ValueError(f"a launcher takes tensors, numbers, bf16, fp16, fp32 and None, not {value!r}")
