"""Run kernels without a GPU: on CPU tensors through the interpreter, or only through the compiler for Hopper.

Whether a kernel is interpreted is decided when its module is imported, so marked tests run in a child process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

ROOT = Path(__file__).parents[2]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Decorate a test, below its parametrizations: it runs on CPU tensors in one child process for its whole file."""
    if INTERPRETING:
        return pytest.mark.interpreted(test)

    def outcome(request: pytest.FixtureRequest, **_: object) -> None:
        failure = _outcomes(request.node.path).get(request.node.name, "it did not run in the child process")
        assert failure is None, failure

    outcome.__name__, outcome.__doc__, outcome.__module__ = test.__name__, test.__doc__, test.__module__
    # pytest gives a test the parameters and fixtures that its signature names.
    kept = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in signature(test).parameters.values()]
    outcome.__signature__ = Signature([Parameter("request", Parameter.KEYWORD_ONLY), *kept])
    return outcome


@contextlib.contextmanager
def swift() -> Iterator[None]:
    """Within, the interpreter takes half of its time, with the results that it has without.

    A launch has the language patched once, not again at every call of a helper; dtypes are looked up; and no checks
    for overflow are worked out, whose outcome Triton drops without `debug`. All of it is private to Triton.
    """
    from triton.runtime import interpreter

    patch, dtype_of, patched = interpreter._patch_lang, interpreter._get_np_dtype, set()

    def once(function: Any) -> Any:
        languages = frozenset(id(one) for one in function.__globals__.values() if one is tl or one is tl.core)
        if languages in patched:
            return None
        scope = patch(function)
        if not patched:  # the kernel itself, the only one whose scope is restored
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        patched.add(languages)
        return scope

    numbers = functools.cache(dtype_of)

    def looked_up(dtype: tl.dtype) -> Any:
        element = dtype.scalar
        return dtype_of(element) if element.is_ptr() else numbers(element)

    builder = interpreter.interpreter_builder
    checked, unchecked = builder.options, replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang, interpreter._get_np_dtype, builder.options = once, looked_up, unchecked
    try:
        yield
    finally:
        interpreter._patch_lang, interpreter._get_np_dtype, builder.options = patch, dtype_of, checked


def compiled(test: Callable[..., None]) -> Callable[..., None]:
    """Decorate a test that compiles for Hopper: the interpreting child leaves it out."""
    return pytest.mark.skipif(INTERPRETING, reason="kernels are interpreted")(test)


def gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Decorate a test that launches kernels on a CUDA device."""
    missing = INTERPRETING or not torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(missing, reason="needs a CUDA device")(test))


@contextlib.contextmanager
def hopper() -> Iterator[None]:
    """Within, `kernel.warmup(..., grid=(1,))` compiles for sm_90; nothing can be launched.

    What it returns has `asm["sass"]`, where STL and LDL are spills, and `metadata.shared` in bytes.
    """
    drivers = triton.runtime.driver
    before = drivers._active  # `active` would look for a GPU
    drivers.set_active(_Hopper())
    try:
        yield
    finally:
        drivers.set_active(before)


def spills(kernel: Any) -> int:
    """Stores and loads of registers in local memory, in a kernel compiled under `hopper`."""
    return len(re.findall(r"\b(?:STL|LDL)\b", kernel.asm["sass"]))


class _Hopper:
    """What the compiler asks a driver for."""

    launcher_cls = staticmethod(lambda *_: None)
    utils = SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": 232448},
        load_binary=lambda *_: (None, None, 0, 0, 1024),
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int = 0) -> int:
        return 0

    def get_device_capability(self, _: int = 0) -> tuple[int, int]:
        return 9, 0


@functools.cache
def _outcomes(path: Path) -> dict[str, str | None]:
    """The failure, or None, of each test of the file in an interpreting child process."""
    # Plugins of other packages take a while to load, and are not used.
    plain = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {**os.environ, **plain}
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        marked = ["-m", "interpreted", "-q", "-p", "xdist", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={report}"]
        words = ["-m", "pytest", *marked, str(path)]
        done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert report.exists(), done.stdout + done.stderr
        cases = list(ElementTree.parse(report).iter("testcase"))
    return {case.get("name", ""): _failure(case) for case in cases}


def _failure(case: ElementTree.Element) -> str | None:
    found = [part for part in case if part.tag in ("failure", "error", "skipped")]
    return "\n".join(part.text or part.get("message", part.tag) for part in found) if found else None


def behind(kernel: Any) -> dict[str, bool]:
    """The options with which a kernel that may start behind another one is launched on a GPU."""
    return {"BEHIND": True, "launch_pdl": True} if "BEHIND" in kernel.arg_names else {}


def waits(kernel: Any) -> bool:
    """Whether the machine code waits for the kernel before it."""
    return "ACQBULK" in kernel.asm["sass"]
