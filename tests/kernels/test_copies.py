"""Kernel files stand alone, so small pieces stand in several of them: the copies must be the same."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "kernels"
COPIES = {
    "Launch": {"combine", "det_gemm", "grouped_gemm", "linear_logprob", "rms_norm", "router", "row_reductions"},
    "_on": {"combine", "det_gemm", "grouped_gemm", "linear_logprob", "rms_norm", "router", "row_reductions"},
    "_in_turn": {"attention", "kv_cache", "residual_add", "rms_norm", "rope", "swiglu"},
    "_behind": {"attention", "det_gemm", "kv_cache", "residual_add", "rms_norm", "rope", "swiglu"},
    "_place": {"det_gemm", "linear_logprob"},
    "_check_blocks": {"det_gemm", "linear_logprob", "rms_norm", "router"},
}


def piece(file: str, name: str) -> str:
    """The piece as written, less its docstring."""
    tree = ast.parse((FOLDER / f"{file}.py").read_text(encoding="utf-8"))
    (node,) = [one for one in tree.body if getattr(one, "name", "") == name]
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:]
    return ast.unparse(node)


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_the_same(name: str) -> None:
    assert len({piece(file, name) for file in COPIES[name]}) == 1
