"""The operators that a table names: read from a dict that is written out, and unknown where it may get more keys."""

from __future__ import annotations

import pytest

from rlspec import tables


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ("table = {'silu': 1, 'rope': 2}\n", ("silu", "rope")),
        ("table: dict[str, object] = {'silu': 1}\n", ("silu",)),
        ("table = {}\n", ()),
        ("table = {'silu': 1}\ntable['rope'] = 2\n", None),
        ("table = {'silu': 1}\ntable = {'rope': 1}\n", None),
        ("table = {**other, 'silu': 1}\n", None),
        ("table = {name: 1}\n", None),
        ("table = made()\n", None),
        ("table = {'silu'\n", None),
        ("other = {'silu': 1}\n", None),
        ("other = table = {'silu': 1}\nother['rope'] = 2\n", None),
    ],
)
def test_keys(tmp_path, source, keys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kernels.py").write_text(source, encoding="utf-8")
    assert tables.keys("mine.kernels:table", tmp_path) == keys


def test_a_module_that_is_not_here(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert tables.keys("mine:table", tmp_path) is None
