from __future__ import annotations

from typing import Any

import pytest

from rlspec.report import rows
from tests.report import samples


def row(status: str = "applicable", **limits: float) -> dict[str, Any]:
    return {"status": status, "limits": limits, "reason": "r", "source": "s", "date": "d", "id": "a/b/c/d"}


def test_title_leaves_out_what_says_nothing() -> None:
    assert rows.title(samples.verdict(subject="loss")) == "drift loss"
    assert rows.title(samples.verdict(subject="*")) == "drift"
    assert rows.title(samples.verdict(judgment="approx_kl", subject="logprob")) == "approx_kl"
    assert rows.title(samples.verdict(judgment="step_time", subject="step-time")) == "step_time"


@pytest.mark.parametrize(
    ("statistic", "text"), [(2.99999, "2.99999"), (3.0, "3.00"), (5.0001, "5.0001"), (8.19, "8.19"), (None, "-")]
)
def test_a_ratio_never_seems_to_be_on_the_other_side(statistic: float | None, text: str) -> None:
    one = samples.verdict(statistic=statistic, row=row(pass_below=3.0, fail_above=5.0), evidence={"floor": "steady"})
    cells = rows.verdict(one)
    assert cells["ratio"] == text
    assert cells["limits"] == ("-" if statistic is None else "3 / 5")
    assert cells["floor"] == "steady"


def test_limits_of_other_rows() -> None:
    def limit(**of: Any) -> str:
        return rows.verdict(samples.verdict(judgment="approx_kl", **of))["limit"]

    assert limit(row=row(max=0.05)) == "<= 0.05"
    assert limit(row=row("measured", max=0.05)) == "not gated"
    assert limit(row=row("out_of_scope")) == "out of scope"
    assert limit(row=row(low=0.8, high=1.2)) == "low 0.8, high 1.2"
    assert limit(row=None) == "-"


def test_timing_cells_have_units() -> None:
    cells = rows.verdict(samples.load("performance")["verdicts"][1])
    assert (cells["base"], cells["feature"]) == ("436,725 tokens/s", "476,409 tokens/s")
    assert cells["difference"] == "+9.09 %"
    of_device = {**samples.load("performance")["verdicts"][1]["evidence"], "scope": "device"}
    assert rows.unit(of_device) == "tokens/s per device"
    assert rows.verdict(samples.verdict(judgment="step_time", status="ERROR")).keys() == {"status", "judgment"}


def test_arm_cells() -> None:
    arm = samples.load("correctness-error")["arms"][2]
    cells = rows.arm(arm, log=False)
    assert cells["commit"] == "9f8e7d6" and cells["status"] == "failed" and cells["time"] == "14m 21s"
    assert cells["log"] == "-" and rows.arm(arm, log=True)["log"] == arm["log"]
    assert set(rows.ARMS) == set(cells)


def test_the_legend_explains_the_columns_that_are_there() -> None:
    drift = rows.legend(samples.load("correctness-fail")["verdicts"])
    assert drift == [rows.RATIO, "limits 3 / 5: PASS below 3, FAIL above 5, INVESTIGATE between."]
    assert rows.legend(samples.load("parity-pass")["verdicts"]) == [rows.DLOGP]
    assert rows.legend(samples.load("correctness-zero")["verdicts"]) == []
    two = [samples.verdict(row=row(pass_below=a, fail_above=b)) for a, b in ((3.0, 5.0), (3.2, 5.8), (3.0, 5.0))]
    assert [text.partition(":")[0] for text in rows.legend(two)] == ["ratio", "limits 3 / 5", "limits 3.2 / 5.8"]


def test_name_says_the_kind_once() -> None:
    assert rows.name({"kind": "parity", "name": "parity/vllm"}) == "parity: vllm"
    assert rows.name({"kind": "correctness", "name": "controls/lr"}) == "correctness: controls/lr"
