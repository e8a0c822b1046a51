from __future__ import annotations

import json

import pytest

from rlspec import logs
from rlspec.errors import RunError, SpecError
from rlspec.logs import GRADIENT_NORMS, read
from rlspec.model import Arm
from tests.log_samples import TITAN, megatron, pith, points


@pytest.mark.parametrize(
    ("reader", "pattern", "words"),
    [
        ("pithtran", None, "did you mean pithtrain?"),
        ("regex", None, "needs a pattern"),
        ("regex", "", "needs a pattern"),
        ("regex", "(?P<step>", "no regular expression"),
        ("regex", r"a{99999999999}(?P<step>\d)", "no regular expression"),
        ("regex", r"(\d+)", "no group named step"),
        ("jsonl", "x", "takes no pattern"),
    ],
)
def test_what_cannot_be_used_is_refused(log, reader, pattern, words):
    with pytest.raises(SpecError, match=r".*" + words.replace("?", r"\?")):
        log(["x"], reader, pattern=pattern)


def test_files_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(SpecError, match="does not exist"):
        read(tmp_path / "none.log", "pithtrain", Arm(name="base0", role="base"))
    with pytest.raises(SpecError, match="is a folder"):
        read(tmp_path, "pithtrain", Arm(name="base0", role="base"))


def test_reading_that_breaks_off_is_the_machines_fault(log, monkeypatch):
    def break_off(path):
        yield "\n".join(pith([1])), True
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(logs, "_blocks", break_off)
    with pytest.raises(RunError, match="beyond line 1: Input/output error"):
        log(["x"], "pithtrain")


def test_lines_that_disagree_on_the_number_of_steps(log):
    run = log(pith([1, 2]) + pith([3], total=64), "pithtrain")
    assert run.faults["*"] == "base0.log says that there are 32 steps at line 1 and 64 steps at line 3"


def test_line_ends_and_bad_bytes(log):
    raw = ("\r\n".join(pith(range(1, 6))) + "\r\n").encode()
    first, second, rest = raw.split(b"\r\n", 2)
    run = log(b"\r\n".join([first, b"bad \x97 bytes \xff", second, rest, b"half \xe2\x96"]), "pithtrain")
    assert list(run.series["gradient-norm"].steps) == [1, 2, 3, 4, 5] and not run.faults
    broken = raw.replace(b"cross-entropy-loss 11.0002", b"cross-entropy-loss 11.\x9702")
    assert "line 2 has cross-entropy-loss" in log(broken, "pithtrain").faults["cross-entropy-loss"]


def test_a_carriage_return_ends_a_line(log):
    run = log("\r".join(pith([1, 2])) + "\r\r\n" + "\n".join(pith([3])) + "\r\n", "pithtrain")
    assert list(run.series["gradient-norm"].steps) == [1, 2, 3] and not run.faults


def test_line_numbers_are_those_of_an_editor(log):
    lines = pith([1, 2, 2])
    lines[2] = lines[2].replace("11.0002", "11.5000")
    run = log(["bar 1%\rbar 2%\rbar 3%", "", *lines], "pithtrain")
    assert "11.0002 at line 4 and 11.5 at line 5" in run.faults["cross-entropy-loss"]


@pytest.mark.parametrize(
    ("losses", "read", "said"),
    [
        (["9,947", "8,031"], {1: 9947, 2: 8031}, True),
        (["9,947", "8,031"] * 40, {1: 9947, 80: 8031}, True),
        (["nan", "8,031"], {2: 8031}, True),
        (["9,947", "947"], {1: 9947, 2: 947}, False),
        (["9,947", *["947"] * 40], {1: 9947, 41: 947}, False),
        (["9,947", "8,031.5"], {1: 9947, 2: 8031.5}, False),
        (["1,119,947", "8,031"], {1: 1119947, 2: 8031}, False),
    ],
)
def test_a_comma_that_may_be_a_decimal_one_is_told(log, losses, read, said):
    lines = [f"Schritt {at}: Verlust {loss}" for at, loss in enumerate(losses, 1)]
    run = log(lines, "regex", pattern=r"Schritt (?P<step>\d+): Verlust (?P<loss>\S+)")
    assert read.items() <= points(run, "loss").items()
    told = "base0.log: loss is printed like {0}, which is read as {1}: where that is a decimal comma, print a point"
    first = next(loss for loss in losses if "," in loss)
    assert run.notes == ((told.format(first, first.replace(",", "")),) if said else ())


def test_a_decimal_comma_below_1_is_no_thousand_and_a_rate_has_thousands(log):
    lines = [f"step {at} loss {loss}" for at, loss in enumerate(["2,947", "1,031", "0,947"], 1)]
    run = log(lines, "regex", pattern=r"step (?P<step>\d+) loss (?P<loss>\S+)")
    assert "line 3 has loss '0,947', which is no number" in run.faults["loss"]
    assert not log([TITAN.format(1)], "torchtitan").notes


def test_the_gradient_norm_comes_with_any_choice(log):
    assert set(log(pith([1, 2]), "pithtrain", metrics=["learning-rate"]).series) == {"learning-rate", "gradient-norm"}
    assert set(log([TITAN.format(1)], "torchtitan", metrics=["loss", "nowhere"]).series) == {"loss", "grad_norm"}
    assert set(log(megatron([1]), "megatron", metrics=["lm loss"]).series) == {"lm loss", "grad norm"}
    for name in GRADIENT_NORMS:
        line = json.dumps({"step": 1, "loss": 1.5, "other": 2, name: 0.5})
        assert set(log([line], "jsonl", metrics=["loss"]).series) == {"loss", name}
