"""Hand-made records of one operator, then one thing about them changed."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest

from rlspec import cells, contract, measurements, nodes
from rlspec.errors import RunError
from tests import benches

TIER = benches.tier()
WS1 = contract.load("ws1", benches.ROOT)


def whole(operator="rms_norm", **changes):
    return benches.cell(operator, TIER, **changes)


def judge(cell, judgment, *, operator="rms_norm", environment=benches.CPU, row=None, cannot_fail="note", **asked):
    measured = {"environment": environment, "cells": [cell] if cell else []}
    row = row or WS1.resolve(judgment, nodes.NODES[operator].family, "bf16")
    return benches.judge(measured, operator, TIER, judgment, row, cannot_fail, **asked)


def of(cell, judgment, tensor=None, configuration=None):
    """The place of the first such line."""
    lines = cell["comparisons"]
    return next(
        index
        for index, line in enumerate(lines)
        if line["judgment"] == judgment
        and tensor in (None, line["tensor"])
        and configuration in (None, line["configuration"])
    )


def edited(judgment, tensor=None, configuration=None, **changes):
    cell = copy.deepcopy(whole())
    cell["comparisons"][of(cell, judgment, tensor, configuration)] |= changes
    return cell


# Categories


@pytest.mark.parametrize("judgment", nodes.JUDGMENTS)
def test_all_comparisons_within_is_green(judgment):
    found = judge(whole(), judgment)
    count = sum(1 for _ in nodes.expected("rms_norm", TIER, judgment, "cpu"))
    assert (found.category, found.status) == ("green", "PASS") and f"all {count} comparisons are" in found.reason
    assert found.evidence["comparisons"] == count and found.notes == ()


def test_an_element_that_differs_is_named_with_the_size_of_its_call():
    first = {"index": 0, "got": 1.0, "want": 2.0, "sample": "t2", "position": 3, "element": 1, "call": [1, 2]}
    cell = edited("forward_invariance", configuration="B1/full/t2", differing=5, digest="other", first=first)
    found = judge(cell, "forward_invariance")
    assert (found.category, found.status, found.statistic) == ("red_verdict", "FAIL", 5)
    assert found.reason.startswith("out in B1/full/t2: 5 of 8 elements differ to the bit, first in sample t2 ")
    assert "position 3 element 1 in a call of 1 × 2 tokens: 1.0 is not 2.0; 1 of 10 comparisons" in found.reason
    assert found.evidence["first_failure"]["configuration"] == "B1/full/t2"
    assert judge(cell, "forward_accuracy").category == judge(cell, "gradient_invariance").category == "green"


def test_another_dtype_is_red_and_told():
    cell = edited("forward_invariance", differing=22, digest="other", dtype="float32")
    assert "(float32 against bfloat16)" in judge(cell, "forward_invariance").reason


@pytest.mark.parametrize("changes", [{"violations": 1, "excess": 0.1}, {"nonfinite": 1}, {"excess": "nan"}])
def test_an_error_outside_its_row_is_red(changes):
    found = judge(edited("gradient_accuracy", "dweight", **changes), "gradient_accuracy")
    assert (found.category, found.status) == ("red_verdict", "FAIL") and found.reason.startswith("dweight in BN/full: ")


def test_no_backward_is_red_for_gradients_alone():
    cell = whole(no_backward="an output has no gradient function")
    cell["comparisons"] = [line for line in cell["comparisons"] if line["judgment"].startswith("forward")]
    for judgment in nodes.JUDGMENTS:
        found = judge(cell, judgment)
        gradient = judgment.startswith("gradient")
        assert (found.category, found.status) == (("red_no_backward", "FAIL") if gradient else ("green", "PASS"))


def test_another_kernel_than_the_declared_is_an_error():
    found = judge(whole(provenance="the candidate declares triton, and torch computed mm"), "forward_accuracy")
    assert (found.category, found.status) == ("red_provenance", "ERROR") and "torch computed mm" in found.reason


@pytest.mark.parametrize("switch", ["tf32", "autocast"])
@pytest.mark.parametrize("value", [True, None])
def test_a_switch_that_was_on_or_was_not_seen_is_an_error(switch, value):
    found = judge(whole(), "forward_accuracy", environment={**benches.CPU, switch: value})
    assert (found.category, found.status, found.reason) == ("red_provenance", "ERROR", f"{switch} was on")


def test_a_cell_that_nobody_measured_is_missing():
    for cell in (None, whole("silu"), whole(tier="two")):
        found = judge(cell, "forward_accuracy")
        assert (found.category, found.status) == ("missing", "ERROR")


def test_an_operator_that_raised_tells_its_last_lines():
    found = judge(whole(error={"message": "KeyError: 'x'", "tail": ["a", "b"]}), "forward_accuracy")
    assert (found.category, found.status, found.reason) == ("raised", "ERROR", "KeyError: 'x'")
    assert found.evidence["tail"] == ["a", "b"]


def test_no_gpu_is_blocked():
    found = judge(whole(blocked="triton kernels need a CUDA device"), "forward_accuracy")
    assert (found.category, found.status) == ("blocked_hardware", "BLOCKED")


def test_not_applicable_has_a_reason():
    found = judge(None, "forward_accuracy", operator="pack")
    assert (found.category, found.status) == ("not_applicable", "N/A") and "copies rows" in found.reason
    out = judge(whole(), "forward_accuracy", row=WS1.resolve("forward_accuracy", "reduction", "fp8"))
    assert (out.category, out.status) == ("not_applicable", "N/A") and "fp8" in out.reason


def test_a_row_without_limits_is_measured():
    rows = contract.from_rows("c", [{"judgment": "forward_accuracy", "status": "measured", "source": "s",
                                     "date": "2026-11-29", "reason": "r"}])  # fmt: skip
    cell = whole()
    for line in cell["comparisons"]:
        line["limits"] = {}
    found = judge(cell, "forward_accuracy", row=rows.resolve("forward_accuracy"))
    assert (found.category, found.status, found.statistic) == ("measured", "MEASURED", 1e-3)


def test_every_category_has_a_status():
    assert set(cells.CATEGORIES) == {"green", "unsure", "red_verdict", "red_without_gradients", "red_no_backward",
                                     "red_provenance", "cannot_fail", "missing", "broken", "raised", "process",
                                     "blocked_hardware", "not_applicable", "measured"}  # fmt: skip


def test_a_forward_that_has_other_bits_without_gradients_is_red_where_forwards_are_judged():
    cell = whole(without_gradients=["out in BN/full: 3 of 8 elements are others", "out in BN/chunked: 1 of 8"])
    red, bits = (judge(cell, f"forward_{name}") for name in ("accuracy", "invariance"))
    assert {one.category for one in (red, bits)} == {"red_without_gradients"} and red.status == "FAIL"
    assert red.reason.startswith("out in BN/full: 3 of 8") and "1 more" in red.reason
    assert judge(cell, "gradient_accuracy").category == "green"


def test_forwards_without_gradients_may_be_unsaid_in_a_report_of_before_alone():
    cell, asked = whole(), dict(operator="rms_norm", judgment="forward_invariance")
    del cell["without_gradients"]
    assert judge(cell, "forward_invariance").category == "green"
    found = {"environment": benches.CPU, "cells": [cell]}
    row = WS1.resolve("forward_invariance", "reduction", "bf16")
    red = benches.judge(found, tier=dataclasses.replace(TIER, cases=2), row=row, **asked)
    assert red.category == "broken" and "without gradients" in red.reason


# A row that judges nothing


def test_zeros_that_would_pass_are_a_note_or_an_error():
    cell = whole(passed_by={"gradient_accuracy": ["zero dx", "shuffled dx"]})
    noted = judge(cell, "gradient_accuracy")
    (note,) = noted.notes
    assert noted.category == "green" and note.startswith("cannot_fail: ") and "zero dx and 1 more" in note
    strict = judge(cell, "gradient_accuracy", cannot_fail="error")
    assert (strict.category, strict.status) == ("cannot_fail", "ERROR") and "zero dx" in strict.reason
    assert judge(cell, "forward_accuracy", cannot_fail="error").category == "green"


def test_a_row_that_judges_nothing_makes_no_red_less_red():
    cell = edited("gradient_accuracy", violations=1)
    cell["passed_by"] = {"gradient_accuracy": ["zero dx"]}
    assert judge(cell, "gradient_accuracy", cannot_fail="error").category == "red_verdict"


# Lines that were touched, lost or borrowed


@pytest.mark.parametrize("judgment", nodes.JUDGMENTS)
def test_each_line_is_needed_once(judgment):
    base = whole()
    for index, line in enumerate(base["comparisons"]):
        if line["judgment"] != judgment:
            continue
        place = f"{line['tensor']} in {line['configuration']}: "
        for count in (0, 2):
            lines = [*base["comparisons"][:index], *[line] * count, *base["comparisons"][index + 1 :]]
            found = judge({**base, "comparisons": lines}, judgment)
            told = "2 comparisons" if count else "no comparison"
            assert (found.category, found.status, found.reason) == ("broken", "ERROR", place + told)


def test_a_line_that_nobody_asked_for():
    cell = whole()
    cell["comparisons"].append({**cell["comparisons"][0], "configuration": "BN/other"})
    assert "a comparison that nobody asked for" in judge(cell, "forward_accuracy").reason


def test_no_line_at_all_is_no_agreement():
    assert judge({**whole(), "comparisons": []}, "forward_invariance").category == "broken"


BITS = "forward_invariance"


@pytest.mark.parametrize(
    ("judgment", "place", "changes", "message"),
    [
        (BITS, {}, {"digest": "d9"}, "the digests differ, and no element does"),
        (BITS, {}, {"against_digest": "d9"}, "the digests differ, and no element does"),
        (BITS, {}, {"digest": "d9", "differing": float("nan")}, "the digests differ, and no element does"),
        (
            BITS,
            {"configuration": "BN/permuted"},
            {"digest": "d9", "against_digest": "d9"},
            "compared with another tensor",
        ),
        (
            "gradient_invariance",
            {"tensor": "dweight", "configuration": "BN/repeated"},
            {"digest": "d9", "against_digest": "d9"},
            "dweight in BN/repeated: compared with another tensor than in the lines before",
        ),
        (BITS, {}, {"against": "reference"}, "compared with reference"),
        ("forward_accuracy", {}, {"against": "BN/full"}, "compared with BN/full"),
        ("forward_accuracy", {}, {"limits": {"atol": 1.0, "rtol": 0.02}}, "are not those of ws1/forward_accuracy"),
        ("forward_accuracy", {}, {"limits": None}, "are not those of ws1/forward_accuracy"),
        (BITS, {}, {"limits": {"differing_elements": 3.0}}, "are not those of ws1/forward_invariance"),
        (BITS, {}, {"elements": 0}, "0 elements of shape"),
        (BITS, {}, {"elements": 10}, "10 elements of shape"),
        (BITS, {}, {"elements": 0, "shape": [0, 2]}, "0 elements of shape"),
        (BITS, {}, {"tokens": 10}, "10 tokens, 11 are due"),
        (BITS, {}, {"shape": [22, 1]}, "11 tokens, 11 are due"),
    ],
)
def test_a_line_that_was_edited(judgment, place, changes, message):
    found = judge(edited(judgment, **place, **changes), judgment)
    assert (found.category, found.status) == ("broken", "ERROR") and message in found.reason, found.reason


@pytest.mark.parametrize("lost", ["nonfinite", "violations", "excess", "cosine", "ulps"])
def test_a_number_that_was_lost(lost):
    cell = whole()
    del cell["comparisons"][0][lost]
    assert judge(cell, "forward_accuracy").reason == f"out in BN/full: {lost} missing"
    cell = whole()
    del cell["comparisons"][of(cell, BITS)]["differing"]
    assert judge(cell, BITS).reason == "out in BN/chunked: differing missing"


def test_a_yardstick_that_was_lost():
    strict = contract.load("strict", benches.ROOT)
    row = strict.resolve("forward_accuracy", "reduction", "bf16")
    cell = whole(name="strict")
    assert judge(cell, "forward_accuracy", row=row).reason == "out in BN/full: yardstick missing"
    figures = {"torch_max_abs": 1.0, "torch_rms": 1.0, "rounding_max_abs": 1.0, "rounding_rms": 1.0}
    for line in cell["comparisons"]:
        line["yardstick"] = figures
    assert judge(cell, "forward_accuracy", row=row).category == "green"


def test_layouts_of_another_workload():
    other = {**whole()["layouts"], "BN/chunked": "0" * 64}
    short = {name: value for name, value in whole()["layouts"].items() if name != "BN/repeated"}
    for layouts in (other, short, {}):
        found = judge(whole(layouts=layouts), BITS)
        assert (found.category, found.reason) == ("broken", "the layouts are not those of the workload")


# Records


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "records.jsonl"
    return path, benches.written(path, [whole("silu"), whole()])


def refused(path, lines):
    benches.save(path, lines)
    with pytest.raises(RunError) as told:
        measurements.read(path, "a")
    return str(told.value).removeprefix(str(path))


def test_records_come_back_as_they_were_written(records):
    found = measurements.read(records[0], "a")
    assert found["environment"] == benches.CPU and found["cells"][1]["comparisons"] == [
        {key: value for key, value in line.items() if key != "record"} for line in whole()["comparisons"]
    ]


def test_records_that_break_off(records):
    path, lines = records
    for count in range(1, len(lines), 7):
        told = f": the records break off after {cells_of(lines[:-count])} cells"
        assert refused(path, lines[:-count]) == f"{told}: the process left early, with exit code 0"
    path.write_text("")
    with pytest.raises(RunError, match="break off"):
        measurements.read(path, "a")


def test_a_last_line_that_was_cut(records):
    path, _ = records
    path.write_text(path.read_text()[:-9])
    with pytest.raises(RunError, match="no JSON"):
        measurements.read(path, "a")


def test_one_line_less_than_the_end_says(records):
    path, lines = records
    told = refused(path, lines[:5] + lines[6:])
    assert f"2 cells and {len(lines) - 5} comparisons are here, the end disagrees" in told


def test_records_of_another_arm_or_version(records):
    path, lines = records
    assert "the records of arm 'b', not of a" in refused(path, [{**lines[0], "arm": "b"}, *lines[1:]])
    assert "of another version" in refused(path, [{**lines[0], "schema_version": 2}, *lines[1:]])


def test_lines_where_none_is_due(records):
    path, lines = records
    assert "a 'comparison' line is not due here" in refused(path, lines[1:])
    assert "a 'run' line is not due here" in refused(path, [*lines[:3], lines[0], *lines[3:]])
    assert "a 'cell' line is not due here" in refused(path, [*lines, lines[-2]])
    assert "unknown record 'note'" in refused(path, [*lines[:3], {"record": "note"}, *lines[3:]])


def test_comparisons_of_another_cell(records):
    path, lines = records
    strange = {**lines[1], "operator": "rope"}
    assert "comparisons of another cell stand with this one" in refused(path, [lines[0], strange, *lines[2:]])


def test_keys_that_are_missing_or_unknown(records):
    path, lines = records
    assert refused(path, [lines[0], {k: v for k, v in lines[1].items() if k != "digest"}]) == ":2: digest missing"
    assert refused(path, [lines[0], {**lines[1], "verdict": "PASS"}]) == ":2: unknown verdict; is it of a newer rlspec?"


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_what_is_no_object(records, text):
    path, lines = records
    path.write_text(json.dumps(lines[0]) + "\n" + text + "\n")
    with pytest.raises(RunError, match=":2: no JSON"):
        measurements.read(path, "a")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(RunError, match="cannot be read"):
        measurements.read(tmp_path / "none.jsonl", "a")


def cells_of(lines):
    return sum(line["record"] == "cell" for line in lines)


def report_of(measured):
    rest = dict.fromkeys(("kind", "operators", "contract", "workload"), "")
    return {**rest, "spec": {"data": {}}, "measured": measured}


def test_the_seal_is_over_every_number():
    measured = {"a": {"environment": benches.CPU, "cells": [whole()]}}
    seal = measurements.seal(report_of(measured))
    assert measurements.seal(report_of(json.loads(json.dumps(measured)))) == seal
    for path in (("comparisons", 0, "digest"), ("comparisons", 3, "violations"), ("no_backward",)):
        changed = copy.deepcopy(measured)
        place = changed["a"]["cells"][0]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = "x"
        assert measurements.seal(report_of(changed)) != seal


def test_another_implementation_than_the_arms_is_no_green():
    found = judge(whole("silu"), "forward_accuracy", operator="silu", implementation="triton")
    assert found.category == "red_provenance" and "ran, the arm has triton" in found.reason


def test_a_kernel_of_ours_without_its_backend_is_no_green():
    cell = {**whole("silu"), "implementation": "triton", "backend": None}
    found = judge(cell, "forward_accuracy", operator="silu")
    assert found.category == "red_provenance" and "declares the backend None" in found.reason


def test_another_device_than_the_one_required_is_no_green():
    found = judge(whole("silu"), "forward_accuracy", operator="silu", device="cuda")
    assert found.category == "red_provenance" and "requires cuda" in found.reason


def test_bits_are_compared_with_the_run_whose_accuracy_was_measured():
    cell = whole("silu")
    for line in cell["comparisons"]:
        if line["judgment"] == "forward_invariance" and line["configuration"].count("/") < 2:
            line["digest"] = line["against_digest"] = "another"
    found = judge(cell, "forward_invariance", operator="silu")
    assert found.category == "broken" and "is another one than that of forward_accuracy" in found.reason
