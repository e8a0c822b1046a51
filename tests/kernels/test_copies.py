"""Kernel files stand alone, so small pieces stand in several of them: the copies must be the same."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "kernels"
OF_FOLDS = ("combine", "det_gemm", "grouped_gemm", "linear_logprob", "rms_norm", "router", "row_reductions")
# A name may stand for several pieces, each with its own files.
COPIES = (
    ("Launch", OF_FOLDS),
    ("_on", OF_FOLDS),
    ("_in_turn", ("attention", "kv_cache", "residual_add", "rms_norm", "rope", "swiglu")),
    ("_behind", ("attention", "det_gemm", "kv_cache", "residual_add", "rms_norm", "rope", "swiglu")),
    ("_place", ("det_gemm", "linear_logprob")),
    ("_check_blocks", ("det_gemm", "linear_logprob", "rms_norm", "router")),
    ("_described", ("det_gemm", "grouped_gemm")),
    ("_through_tma", ("det_gemm", "grouped_gemm")),
    ("_suits", ("det_gemm", "linear_logprob")),
    ("_rows", ("det_gemm", "logprob", "row_reductions")),
    ("_rows", ("grouped_gemm", "router")),
    ("_rows", ("residual_add", "silu", "swiglu")),
)


def pieces(file: str) -> dict[str, str]:
    """Functions and classes as written, less their docstrings."""
    found = {}
    for node in ast.parse((FOLDER / f"{file}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            found[node.name] = ast.unparse(node)
    return found


@pytest.mark.parametrize(("name", "files"), COPIES)
def test_copies_are_the_same(name: str, files: tuple[str, ...]) -> None:
    assert len({pieces(file)[name] for file in files}) == 1


def test_every_copy_is_listed() -> None:
    places: dict[tuple[str, str], list[str]] = {}
    for file in sorted(path.stem for path in FOLDER.glob("*.py")):
        for name, text in pieces(file).items():
            places.setdefault((name, text), []).append(file)
    assert {(name, *files) for (name, _), files in places.items() if len(files) > 1} <= {(n, *f) for n, f in COPIES}
