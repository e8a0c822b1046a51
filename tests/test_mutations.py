"""300 seeded mutations of valid specs, logs and log-prob files, read in this process.

Whatever stands in a file, only SpecError and RunError may come out; and where a verdict is PASS, a naive reading of the
same mutated files, written here and sharing no code with rlspec, must come to the same number.
"""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from itertools import combinations
from pathlib import Path

import pytest

from rlspec import judging, linting, planning
from rlspec.errors import RunError, SpecError

ROOT = Path(__file__).parents[1]
COUNT, STEPS = 100, 12
SPECS = sorted(path for path in (ROOT / "specs").rglob("*.yaml") if "workspace" not in path.parts)
VALUES = (
    "nan",
    "inf",
    "-inf",
    "NaN",
    "null",
    "none",
    "",
    "1e999",
    "-1",
    "0",
    "1,0",
    "1e-5",
    "0x10",
    "٣",
    "true",
    "'",
    "[]",
)
NUMBER = re.compile(rb"-?\d[\d.,]*(?:[eE][-+]?\d+)?")


# Mutations


def mutated(raw, draw):
    """Up to three changes of bytes, lines or values."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        raw = draw.choice((byte, byte, line, line, value, value))(raw, draw) or b" "
    return raw


def byte(raw, draw):
    at, new = (
        draw.randrange(len(raw)),
        bytes([draw.choice((0, 9, 10, 13, 27, 34, 39, 58, 92, 127, 255, draw.randrange(256)))]),
    )
    return draw.choice((raw[:at] + new + raw[at + 1 :], raw[:at] + new + raw[at:], raw[:at] + raw[at + 1 :], raw[:at]))


def line(raw, draw):
    lines = raw.splitlines(keepends=True)
    one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    how = draw.randrange(5)
    if how == 0:
        del lines[one]
    elif how == 1:
        lines.insert(other, lines[one])
    elif how == 2:
        lines[one], lines[other] = lines[other], lines[one]
    elif how == 3:
        lines[one] = lines[one][: draw.randrange(len(lines[one]) + 1)]
    else:
        lines[one] = lines[one].rstrip(b"\n") + lines[other]
    return b"".join(lines)


def value(raw, draw):
    found = list(NUMBER.finditer(raw))
    if not found:
        return raw
    one = draw.choice(found)
    new = draw.choice(VALUES) if draw.random() < 0.6 else repr(draw.choice((10.0, 1.001, -1.0, 0.0)) * draw.random())
    return raw[: one.start()] + new.encode() + raw[one.end() :]


# Specs


@pytest.mark.parametrize("number", range(COUNT))
def test_specs(tmp_path, number):
    draw = random.Random(f"spec {number}")
    source = draw.choice(SPECS)
    place = tmp_path / source.relative_to(ROOT)
    place.parent.mkdir(parents=True)
    for beside in source.parent.glob("*.j*"):  # templates and records that it names
        shutil.copy(beside, place.parent)
    place.write_bytes(mutated(source.read_bytes(), draw))
    sound, problems = linting.lint([place])
    assert sound or problems or linting.is_data(place)
    for problem in problems:
        assert problem.line >= 1 and problem.column >= 1 and problem.message
    for document in sound:
        try:
            planning.text(document)
        except SpecError as error:
            assert str(error)


# Logs


def values(arm):
    """Loss and gradient norm of an arm: two base runs and a feature that are about equally far apart."""
    draw = random.Random(arm)
    for step in range(1, STEPS + 1):
        wobble = (step > 1) * draw.uniform(0.01, 0.02) * draw.choice((-1, 1))
        yield step, 8 / step + 3 + wobble, 2 / step + 1 + wobble


def pithtrain(step, loss, norm):
    return (
        f"2026-10-03 11:20:{step:02d} | INFO | step {step:08d}/{STEPS:08d} | step-time 4.743 sec | cross-entropy-loss "
        f"{loss:.4f} | learning-rate 1.562500e-06 | gradient-norm {norm:.4f} | tokens-per-second 110,538 | "
        "peak-gpu-memory 61.23 GB"
    )


def torchtitan(step, loss, norm):
    return (
        f"[titan] 2026-10-05 10:14:27,415 - root - INFO - step: {step:2d}  loss: {loss:8.5f}  grad_norm: {norm:7.4f}  "
        "memory: 24.31GiB(30.71%)  tps: 12,728  tflops: 1,414.22  mfu: 38.62%"
    )


def megatron(step, loss, norm):
    return (
        f" [2026-10-07 07:15:40.484878] iteration {step:8d}/{STEPS:8d} | consumed samples: {16 * step:12d} | elapsed "
        f"time per iteration (ms): 4106.1 | lm loss: {loss:.6E} | grad norm: {norm:.3f} | number of nan iterations: 0 |"
    )


def huggingface(step, loss, norm):
    return f"{{'loss': '{loss:.4g}', 'grad_norm': '{norm:.4g}', 'learning_rate': '2e-05', 'epoch': '{step / 16:.4g}'}}"


def jsonl(step, loss, norm):
    return f'{{"step": {step}, "loss": {loss!r}, "grad_norm": {norm!r}}}'


def csv(step, loss, norm):
    return f"{step},{loss!r},{norm!r}"


def regex(step, loss, norm):
    return f"step {step} loss={loss!r} grad_norm={norm!r}"


# Reader: how a line is written, the metric judged, and how a naive reader finds step and value in a line.
FORMATS = {
    "pithtrain": (pithtrain, "cross-entropy-loss", r"step\s+(\d+)/.*?\|\s+cross-entropy-loss\s+([^|]*)"),
    "torchtitan": (torchtitan, "loss", r"step:\s*(\d+).*?\sloss:\s*(\S*)"),
    "megatron": (megatron, "lm loss", r"iteration\s+(\d+)/.*?\|\s*lm loss\s*:\s*([^|]*)"),
    "huggingface": (huggingface, "loss", r"()['\"]loss['\"] *: *['\"]?([^'\",}]*)"),
    "jsonl": (jsonl, "loss", r"\"step\" *: *(\d+).*?\"loss\" *: *([^,}]*)"),
    "csv": (csv, "loss", r"^ *(\d+) *,([^,]*),"),
    "regex": (regex, "loss", r"step (\d+) loss=(\S+) grad_norm=\S"),
}
PATTERN = r"step (?P<step>\d+) loss=(?P<loss>\S+) grad_norm=(?P<grad_norm>\S+)"


@pytest.mark.parametrize("number", range(COUNT))
def test_logs(tmp_path, number):
    draw = random.Random(f"log {number}")
    reader = draw.choice(sorted(FORMATS))
    write, metric, pattern = FORMATS[reader]
    logs = [tmp_path / f"{arm}.log" for arm in ("base0", "base1", "feat0")]
    for log in logs:
        head = "step,loss,grad_norm\n" if reader == "csv" else "hello\n"
        log.write_text(head + "".join(write(*row) + "\n" for row in values(log.stem)))
    assert judged(logs, reader, metric)["status"] == "PASS" and naive_drift(logs, pattern) is not None
    victim = draw.choice(logs)
    victim.write_bytes(mutated(victim.read_bytes(), draw))
    try:
        verdict = judged(logs, reader, metric)
    except (SpecError, RunError) as error:
        assert str(error)
        return
    assert verdict["reason"]
    if verdict["status"] == "PASS":
        assert naive_drift(logs, pattern) == pytest.approx(verdict["statistic"], rel=1e-9), victim.read_bytes()
        assert verdict["statistic"] < 3


def judged(logs, reader, metric):
    report = judging.judge(
        files=logs,
        reader=reader,
        kind="correctness",
        metrics=[metric],
        pattern=PATTERN if reader == "regex" else None,
        contract=None,
        bases=(),
        features=(),
    )
    (verdict,) = report["verdicts"]
    return verdict


def naive_drift(logs, pattern):
    """The ratio, or None if a step is missing, doubled with another value, or not a finite number."""
    base0, base1, feature = [naive_series(log.read_bytes().decode("utf-8", "replace"), pattern) for log in logs]
    if not set(base0) == set(base1) == set(feature) == set(range(1, STEPS + 1)):
        return None
    if not all(math.isfinite(v) for series in (base0, base1, feature) for v in series.values()):
        return None
    judged_steps = range(2, STEPS + 1)
    floor = [abs(base1[step] - base0[step]) for step in judged_steps if base1[step] != base0[step]]
    if 2 * len(floor) >= len(judged_steps):
        floor += [0.0] * (len(judged_steps) - len(floor))
    drift = sum(abs(feature[step] - base0[step]) for step in judged_steps) / len(judged_steps)
    return drift / (sum(floor) / len(floor)) if floor else None


def naive_series(text, pattern):
    found = {}
    for row in re.split(r"[\r\n]", text):
        match = re.search(pattern, row)
        if match:
            step = int(match[1] or len(found) + 1)
            number = naive_number(match[2])
            found[step] = number if found.get(step, number) == number else math.nan
    return found


def naive_number(text):
    try:
        return float(text.strip(" \t'\"").replace(",", ""))
    except ValueError:
        return math.nan


# Log-probs


def rows(shift):
    draw = random.Random(7)
    for sample in range(4):
        for position in range(8):
            logprob = -draw.uniform(0.1, 5) - shift * draw.random()
            yield {"sample": f"s{sample}", "position": position, "token": draw.randrange(1000), "logprob": logprob}


def packed(tokens):
    """The same as one line a sequence."""
    by_sample = {}
    for token in tokens:
        entry = by_sample.setdefault(
            token["sample"], {"sample": token["sample"], "position": [], "token": [], "logprob": []}
        )
        for key in ("position", "token", "logprob"):
            entry[key].append(token[key])
    return list(by_sample.values())


@pytest.mark.parametrize("number", range(COUNT))
def test_log_probs(tmp_path, number):
    draw = random.Random(f"log-probs {number}")
    files = [tmp_path / "rollout.jsonl", tmp_path / "train.jsonl"]
    for file, shift in zip(files, (0.0, 0.01), strict=True):
        lines = list(rows(shift))
        lines = packed(lines) if draw.random() < 0.4 else lines
        file.write_text("".join(json.dumps({**one, "temperature": 1.0}) + "\n" for one in lines))
    before = parity(files)
    assert before["max_abs_dlogp"]["status"] == "PASS" and naive_parity(files) is not None
    victim = draw.choice(files)
    victim.write_bytes(mutated(victim.read_bytes(), draw))
    try:
        found = parity(files)
    except (SpecError, RunError) as error:
        assert str(error)
        return
    passed = {name: v["statistic"] for name, v in found.items() if v["status"] in ("PASS", "MEASURED")}
    if passed:
        naive = naive_parity(files)
        assert naive is not None, victim.read_bytes()
        assert passed == {name: pytest.approx(naive[name], rel=1e-9, abs=1e-15) for name in passed}
        limits = {"max_abs_dlogp": 0.06, "approx_kl": 0.05, "clip_fraction": 0}
        assert all(value <= limits.get(name, math.inf) for name, value in passed.items())


def parity(files):
    report = judging.judge(
        files=files, reader=None, kind="parity", metrics=(), pattern=None, contract=None, bases=(), features=()
    )
    return {verdict["judgment"]: verdict for verdict in report["verdicts"]}


def naive_parity(files):
    """All five statistics, or None if the two files are not of the same tokens."""
    sides = [naive_tokens(file) for file in files]
    if None in sides or sides[0].keys() != sides[1].keys():
        return None
    rollout, train = sides
    if any(rollout[key][0] != train[key][0] for key in rollout):
        return None
    d = {key: train[key][1] - rollout[key][1] for key in rollout}
    if not d or not all(math.isfinite(x) and side[key][1] <= 1e-6 for key, x in d.items() for side in sides):
        return None
    samples = {sample for sample, _ in d}
    return {
        "max_abs_dlogp": max(map(abs, d.values())),
        "mean_abs_dlogp": math.fsum(map(abs, d.values())) / len(d),
        "approx_kl": math.fsum(math.expm1(min(x, 700.0)) - x for x in d.values()) / len(d),
        "clip_fraction": sum(not math.log(0.8) <= x <= math.log(1.2) for x in d.values()) / len(d),
        "sequence_outliers": sum(any(abs(d[key]) > 0.06 for key in d if key[0] == sample) for sample in samples),
    }


def naive_tokens(file):
    """(sample, position) to (token, log-prob); None if a line cannot be read or a position is given twice."""
    found = {}
    for text in file.read_bytes().decode("utf-8", "replace").split("\n"):
        if not text.strip():
            continue
        try:
            entry = json.loads(text)
            columns = [entry[key] for key in ("position", "token", "logprob")]
            columns = [column if isinstance(column, list) else [column] for column in columns]
            for position, token, logprob in zip(*columns, strict=True):
                key = (str(entry["sample"]), int(position))
                if key in found:
                    return None
                found[key] = (int(token), float(logprob))
        except (ValueError, KeyError, TypeError):
            return None
    return found


def test_the_naive_readers_can_say_no(tmp_path):
    """Else a test above would pass with any verdict."""
    logs = [tmp_path / f"{arm}.log" for arm in ("base0", "base1", "feat0")]
    for log in logs:
        log.write_text("".join(jsonl(*row) + "\n" for row in values(log.stem)))
    pattern = FORMATS["jsonl"][2]
    assert naive_drift(logs, pattern) < 3
    whole = logs[2].read_text()
    for broken in (whole.replace('"loss": 5', '"loss": 50'), whole.replace('"step": 7', '"step": 17'), whole[:-60]):
        logs[2].write_text(broken)
        ratio = naive_drift(logs, pattern)
        assert ratio is None or ratio > 3, broken
    assert len({tuple(values(arm)) for arm in ("base0", "base1", "feat0")}) == 3
    assert all(a != b for a, b in combinations([list(values(arm)) for arm in ("base0", "base1", "feat0")], 2))
