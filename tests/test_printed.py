from __future__ import annotations

import math

import pytest

from rlspec import printed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-1.5", -1.5), ("+1.5e-3", 0.0015), ("1E+01", 10.0), (".5", 0.5), ("5.", 5.0), ("1,234,567.5", 1234567.5),
        ("'3.5'", 3.5), ("np.float64(0.3)", 0.3), ("tensor(2.5)", 2.5),
        ("inf", math.inf), ("-inf", -math.inf), ("Infinity", math.inf), ("-1.#INF", -math.inf), ("1e999", math.inf),
        ("N/A", None), ("", None), ("None", None),
    ],
)  # fmt: skip
def test_numbers(text, value):
    assert printed.number(text) == value


@pytest.mark.parametrize("text", ["nan", "NaN", "-nan", "1.#QNAN", "-1.#IND", "nan(ind)", "np.float64(nan)"])
def test_nan_forms(text):
    assert math.isnan(printed.number(text))


@pytest.mark.parametrize(
    "text",
    [
        "1,23",
        "0,947",
        "-0,947",
        "1,2345",
        "12345,678",
        "1.2.3",
        "1_000",
        "0x10",
        "١٢",
        "1.5x",
        "nano",
        "e5",
        "1 2",
        "(1)",
    ],
)
def test_what_is_no_number(text):
    with pytest.raises(ValueError):
        printed.number(text)
