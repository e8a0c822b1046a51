"""Real verdicts in words: what the judges write as evidence is what the reports read."""

from __future__ import annotations

import json
import random
import re
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlspec import dlogp, drift, timing
from rlspec.model import Arm, Judgment, Row, Run, Series, Verdict
from rlspec.report import evidence, terminal
from tests.report import samples


def contract_row(judgment: str, **limits: float) -> Row:
    return Row(
        contract="c",
        judgment=judgment,
        subject="*",
        dtype="*",
        status="applicable" if limits else "measured",
        limits=limits,
        source="measured",
        date="2026-08-21",
        reason="because",
    )


def run(name: str, values: Sequence[float], metric: str = "loss", **fields: Any) -> Run:
    role = "base" if name.startswith("base") else "feature"
    steps = array("q", range(1, len(values) + 1))
    series = Series(arm=name, metric=metric, steps=steps, values=array("d", values), resolution=0.00005)
    return Run(arm=Arm(name=name, role=role), series={metric: series}, **fields)


def plain(verdict: Verdict) -> dict[str, Any]:
    row = verdict.row and {**asdict(verdict.row), "id": verdict.row.id}
    return {**{name: getattr(verdict, name) for name in verdict.__dataclass_fields__}, "row": row}


def drifting(seed: int, scale: float) -> list[float]:
    draw = random.Random(seed)
    return [10.0, *(10.0 - step / 10 + draw.gauss(0, scale) for step in range(1, 32))]


def judged(*runs: Run, metric: str = "loss") -> dict[str, Any]:
    verdict = drift.judge_drift(
        Judgment(check="drift", metric=metric), runs, lambda name: contract_row(name, pass_below=3, fail_above=5)
    )
    return plain(verdict)


STEADY = judged(run("base0", drifting(1, 0.01)), run("base1", drifting(2, 0.01)), run("feat0", drifting(3, 0.01)))


def test_drift_sentences_hold_what_must_always_be_printed() -> None:
    assert STEADY["status"] == "PASS" and not evidence.speaks(STEADY)
    text = " ".join(evidence.sentences(STEADY))
    assert text.startswith("Steady floor: 2 base runs differ on 31 of 31 steps, by 0.0")
    assert re.search(r"; a steady offset of 0\.0\d+ \(\S+ %\) passes about half the time, one of 0\.\d+ \(", text)
    assert " %) is a FAIL 9 times in 10." in text
    earlier = {**STEADY["evidence"], "caught_offset": None}
    assert " %) passes about half the time." in evidence.sentences({**STEADY, "evidence": earlier})[0]
    assert "feat0 is above base0 on " in text
    assert "at step 1 (not gated) the feature differs by 0, the base runs by 0." in text
    assert "Values printed to 0.0001; steps judged 31 of 31" in text
    for figure in ("single ratios ", "lag-1 ", " contributes ", "run-mean t "):
        assert figure in text


def test_drift_figures_hold_every_figure() -> None:
    found = dict(evidence.figures(STEADY))
    names = (
        "base runs",
        "ratio",
        "ratio with the diluted floor",
        "ratios of single pairs",
        "steps judged",
        "kind of floor",
        "base runs differ on",
        "envelope (floor)",
        "envelope over all steps",
        "drift of the feature",
        "steady offset that passes half the time",
        "steady offset that is a FAIL 9 times in 10",
        "lag-1 autocorrelation of the base delta",
        "sign balance",
        "step 1 (not gated)",
        "step 1, feature and base delta",
        "step that contributes most",
        "run means, t",
        "printed to",
        "contract row",
        "its limits",
        "why these",
    )
    assert set(names) == set(found)
    assert found["base runs"] == "2" and found["base runs differ on"] == "31 of 31 steps"
    assert found["step 1 (not gated)"] == "base0 10, base1 10, feat0 10"
    assert found["its limits"] == "pass below 3, fail above 5"
    assert found["run means, t"].count("1 degree of freedom") == 1


def test_a_sparse_floor_says_so() -> None:
    base = drifting(1, 0.01)
    other = [*base[:-1], base[-1] + 0.01]
    one = judged(run("base0", base), run("base1", other), run("feat0", [*base[:-1], base[-1] + 0.02]))
    text = " ".join(evidence.sentences(one))
    assert text.startswith("Sparse floor: 2 base runs differ on 1 of 31 steps, by 0.01 where they differ")
    assert "equal on 30" in text


def test_three_base_runs_say_the_fewest_and_the_most_steps_that_differ() -> None:
    base = drifting(1, 0.01)
    late = [*base[:12], *drifting(2, 0.01)[12:]]
    one = judged(run("base0", base), run("base1", drifting(3, 0.01)), run("base2", late), run("feat0", base))
    assert dict(evidence.figures(one))["base runs differ on"] == "20 to 31 of 31 steps, pair by pair"
    assert "3 base runs differ on 20 to 31 of 31 steps, pair by pair, by 0.0" in evidence.sentences(one)[0]


def test_a_zero_floor_says_so() -> None:
    base = drifting(1, 0.01)
    one = judged(run("base0", base), run("base1", base), run("feat0", base))
    assert one["status"] == "PASS" and evidence.speaks(one)
    text = " ".join(evidence.sentences(one))
    assert text.startswith("Zero floor: 2 base runs are identical to the bit on all 31 judged steps.")
    assert "above" not in text and "offset" not in text


def test_where_a_feature_leaves_a_zero_floor_is_said() -> None:
    base = drifting(1, 0.01)
    one = judged(run("base0", base), run("base1", base), run("feat0", [*base[:8], base[8] + 0.5, *base[9:]]))
    assert one["status"] == "INVESTIGATE"
    assert dict(evidence.figures(one))["first difference"] == "feat0 at step 9 by 0.5"


def test_an_unstable_floor_and_differing_machines_are_among_the_figures() -> None:
    norms = [1.0] * 32
    jumping = [*norms[:20], 40.0, *norms[21:]]
    runs = [
        run(name, values, "grad_norm", machine={"gpu": gpu})
        for name, values, gpu in (("base0", norms, "A"), ("base1", jumping, "A"), ("feat0", norms[:-1] + [1.1], "B"))
    ]
    one = judged(*runs, metric="grad_norm")
    found = dict(evidence.figures(one))
    assert found["kind of floor"].startswith("unstable")
    assert found["gradient norm of a base run"] == "base1 jumps from 1 to 40 at step 21"
    assert found["machines differ in gpu"] == "base0 A, base1 A, feat0 B"


def test_an_error_has_no_figures_that_nobody_measured() -> None:
    base = drifting(1, 0.01)
    one = judged(run("base0", base), run("base1", base[:-3]), run("feat0", base))
    assert one["status"] == "ERROR"
    assert evidence.sentences(one) == []
    assert [name for name, _ in evidence.figures(one)] == ["base runs", "contract row", "its limits", "why these"]


def test_timing_words() -> None:
    runs = [run("base", [2.0, 1.0, 1.2, 1.1], "t"), run("feat", [2.0, 0.9, 1.0, 0.8], "t")]
    one = plain(timing.judge_timing("step_time", runs, "t", 1.0))
    assert evidence.sentences(one) == [
        "Median over steps 2 to 4, measured and not gated.",
        "One run per arm: no interval.",
    ]
    found = dict(evidence.figures(one))
    assert found["base, median"] == "1.1 s" and found["feat, median"] == "0.9 s"
    assert found["metric, as printed"] == "t" and found["steps"] == "2 to 4"


def test_timing_words_of_several_runs() -> None:
    figures = {"base0": 1.0, "feat0": 0.9, "feat1": 0.92, "base1": 1.1}
    runs = [run(name, [2.0, value, value]) for name, value in figures.items()]
    one = plain(timing.judge_timing("step_time", runs, "loss", 1.0))
    text = " ".join(evidence.sentences(one))
    assert "95% interval" in text and "By run: base0 1, feat0 0.9, feat1 0.92, base1 1.1 s." in text


def parity(folder: Path, shift: float) -> list[dict[str, Any]]:
    for side, added in (("rollout", 0.0), ("train", shift)):
        values = [-1.0 - at / 100 + (added if at == 7 else 0.0) for at in range(40)]
        tokens = [
            {"sample": f"s{at // 10}", "position": at % 10, "token": 1000 + at, "logprob": value}
            for at, value in enumerate(values)
        ]
        (folder / f"{side}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in tokens), encoding="utf-8")
    limits = {"max_abs_dlogp": 0.06, "approx_kl": 0.05, "clip_fraction": 0.0}
    verdicts = dlogp.judge(
        folder / "rollout.jsonl",
        folder / "train.jsonl",
        [Judgment(check=check) for check in dlogp.STANDARD],
        lambda name: contract_row(name, **({"max": limits[name]} if name in limits else {})),
    )
    return [plain(one) for one in verdicts]


def test_parity_words(tmp_path: Path) -> None:
    by_name = {one["judgment"]: one for one in parity(tmp_path, 0.05)}
    assert by_name["max_abs_dlogp"]["status"] == "PASS"
    assert evidence.sentences(by_name["max_abs_dlogp"]) == [
        "Worst token: sample s0 position 7 token 1007, rollout -1.07, train -1.02.",
        "40 tokens of 4 sequences compared.",
    ]
    assert evidence.sentences(by_name["sequence_outliers"]) == []
    found = dict(evidence.figures(by_name["max_abs_dlogp"]))
    assert found["compared"] == "40 tokens of 4 sequences" and found["worst sequences"].startswith("s0 0.05")
    assert "compared" not in dict(evidence.figures(by_name["approx_kl"]))


def test_parity_outliers_are_named(tmp_path: Path) -> None:
    by_name = {one["judgment"]: one for one in parity(tmp_path, 0.5)}
    assert by_name["max_abs_dlogp"]["status"] == "FAIL" and evidence.speaks(by_name["max_abs_dlogp"])
    assert evidence.sentences(by_name["max_abs_dlogp"]) == []
    assert evidence.sentences(by_name["sequence_outliers"])[0].endswith(": s0.")
    assert dict(evidence.figures(by_name["sequence_outliers"]))["outliers"] == "s0"
    found = dict(evidence.figures(by_name["clip_fraction"]))
    assert found["tokens with exp(d) outside the clip range"] == "1 (range 0.8 to 1.2)"


def test_a_judgment_of_a_later_kind_shows_what_it_has() -> None:
    one = samples.verdict(judgment="kv_cache", evidence={"cells": 8, "first": {"layer": 3}})
    assert evidence.figures(one) == [("value", "1"), ("cells", "8"), ("first", "layer 3")]
    assert evidence.sentences(one) == []


def test_a_whole_report_of_real_verdicts_renders(tmp_path: Path) -> None:
    report = {**samples.load("correctness-pass"), "verdicts": [STEADY, *parity(tmp_path, 0.5)]}
    assert "Steady floor" in terminal.render(report, width=80, color=False)
