from __future__ import annotations

import math
import os
import struct
import subprocess
import sys

import pytest

from rlspec.errors import SpecError
from rlspec.logs import read
from rlspec.model import Arm
from rlspec.recordings import crc32c, masked
from tests.log_samples import pith, points
from tests.recorded import VERSION, event, message, number, record, scalar, write_events
from tests.tiny import rlspec

ARM = Arm(name="base0", role="base")
LOSS = "loss_metrics/global_avg_loss"


def test_the_checksum_is_castagnolis():
    assert crc32c(b"123456789") == 0xE3069283 and masked(0) == 0xA282EAD8


def test_events_are_float32_and_say_so(tmp_path):
    rows = [(step, (8.146248817443848 / step, 1.5 / step)) for step in range(1, 6)]
    run = read(write_events(tmp_path / "events.out.tfevents.1", rows), "tensorboard", ARM)
    assert not run.faults and not run.notes and run.steps_expected is None
    assert points(run, LOSS) == {step: struct.unpack("<f", struct.pack("<f", v[0]))[0] for step, v in rows}
    assert run.series[LOSS].resolution == 2.0**-21, "half a unit in the last place of 8.1 in float32"
    assert math.isclose(points(run, "grad_norm")[3], 0.5)


def test_a_folder_is_one_run(tmp_path):
    write_events(tmp_path / "tb" / "events.out.tfevents.1", [(1, (3.0, 1.0)), (2, (2.5, 1.0))])
    write_events(tmp_path / "tb" / "events.out.tfevents.2", [(2, (2.5, 1.0)), (3, (2.0, 1.0))])
    run = read(tmp_path / "tb", "tensorboard", ARM)
    assert list(run.series[LOSS].steps) == [1, 2, 3] and not run.faults
    assert "2 event files" in run.notes[1] and "values 3 and 5" in run.notes[0]
    write_events(tmp_path / "tb" / "events.out.tfevents.3", [(3, (2.25, 1.0))])
    assert "two runs in one folder" in read(tmp_path / "tb", "tensorboard", ARM).faults[LOSS]
    assert "two runs in one folder" in read(tmp_path, "tensorboard", ARM).faults[LOSS], "the only folder below"
    write_events(tmp_path / "other" / "events.out.tfevents.1", [(1, (3.0, 1.0))])
    with pytest.raises(SpecError, match=r"holds no event file .*, but 2 folders with some: .*other"):
        read(tmp_path, "tensorboard", ARM)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError, match=r"holds no event file \(\*tfevents\*\)$"):
        read(tmp_path / "empty", "tensorboard", ARM)


def test_what_is_no_scalar_is_left_out_and_tensors_of_one_number_are_none(tmp_path):
    tensor = message(1, message(1, b"as_tensor") + message(8, b"\x08\x01" + message(4, struct.pack("<f", 0.5))))
    double = message(1, message(1, b"as_double") + message(8, b"\x08\x02" + message(6, struct.pack("<d", 0.25))))
    image = message(1, message(1, b"image") + message(4, b"\x08\x01"))
    odd = event(2, scalar("loss", math.nan), tensor, double, image)
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(VERSION + record(odd) + record(event(0, scalar("loss", -math.inf))))
    run = read(path, "tensorboard", ARM, metrics=["loss", "as_tensor", "as_double", "image"])
    assert points(run, "as_tensor") == {2: 0.5} and points(run, "as_double") == {2: 0.25} and "image" not in run.series
    assert math.isnan(points(run, "loss")[2]) and points(run, "loss")[0] == -math.inf


def test_damaged_and_torn_event_files(tmp_path):
    path = write_events(tmp_path / "events.out.tfevents.1", [(step, (3.0, 1.0)) for step in (1, 2, 3)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    run = read(path, "tensorboard", ARM)
    assert list(run.series["grad_norm"].steps) == [1, 2] and not run.faults and "cut off" in run.notes[0]
    path.write_bytes(whole[:120] + bytes([whole[120] ^ 1]) + whole[121:])
    assert "checksum" in read(path, "tensorboard", ARM).faults["*"]
    path.write_bytes(VERSION + record(b"\x08"))
    assert "is no event" in read(path, "tensorboard", ARM).faults["*"]
    path.write_bytes(VERSION + record(b"\x10" + number(-1) + message(5, scalar(LOSS, 1.0))))
    assert "step number '-1'" in read(path, "tensorboard", ARM).faults["*"]


def test_the_reader_that_would_understand_a_file_is_named(log, tmp_path):
    path = write_events(tmp_path / "events.out.tfevents.1", [(1, (3.0, 1.0))])
    assert "(--reader tensorboard)" in read(path, "pithtrain", ARM).faults["*"]
    said = log(pith([1, 2]), "tensorboard").faults["*"]
    assert "is no event file" in said and "(--reader pithtrain)" in said
    assert "is no file of W&B" in log(pith([1, 2]), "wandb").faults["*"]
    assert "(--reader wandb)" in log(b":W&B\xe1\xbe\x00" + bytes(40), "pithtrain").faults["*"]


def test_judging_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, offset in (("base0", 0.0), ("base1", 1e-4), ("feat0", 2e-4)):
        rows = [(step, (3.0 - step / 10 + offset * (-1) ** step, 1.0 + offset * step)) for step in range(1, 10)]
        write_events(tmp_path / name / "events.out.tfevents.1", rows)
    done = rlspec("judge", "base0", "base1", "feat0", "--reader", "tensorboard", "-o", "r.json")
    assert done.code == 0 and "global_avg_loss" in done.out, done.out + done.err
    assert rlspec("judge", "r.json").code == 0
    twice = rlspec("judge", "--base", "base0", "--base", "base0/events.out.tfevents.1", "--feature", "feat0",
                   "--reader", "tensorboard")  # fmt: skip
    assert twice.code == 2 and "stands twice" in twice.err
    assert rlspec("judge", "base0", "base1", "feat0", "--reader", "jsonl", "--metric", "loss").code == 2
    write_events(tmp_path / "base1" / "events.out.tfevents.1", [(1, (1.0, 1.0))])
    assert "digest differs" in rlspec("judge", "r.json").err


WANDB = """
import math, wandb
with wandb.init(project="p", mode="offline") as run:
    for step in range(1, 2001):
        run.log({"train/loss": math.exp(-step / 1000), "nested": {"norm": step}, "text": "x" * 30}, step=step)
    run.log({"train/loss": float("nan"), "whole": 7, "late": float("inf")}, step=2001)
"""


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """What wandb itself writes without a server: 2001 steps, more than one block of 32 KiB."""
    pytest.importorskip("wandb")
    place = tmp_path_factory.mktemp("wandb")
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(place)}
    subprocess.run([sys.executable, "-c", WANDB], cwd=place, env=environment, check=True, stdin=subprocess.DEVNULL)
    (folder,) = (place / "wandb").glob("offline-run-*")
    return folder


def test_wandb(offline):
    run = read(offline, "wandb", ARM, metrics=["train/loss", "nested.norm", "nested/norm", "whole", "late", "text"])
    values = points(run, "train/loss")
    assert len(values) == 2001 and values[1000] == math.exp(-1) and math.isnan(values[2001]) and not run.faults
    norm = "nested/norm" if "nested/norm" in run.series else "nested.norm"
    assert points(run, norm)[7] == 7 and points(run, "whole") == {2001: 7} and points(run, "late") == {2001: math.inf}
    assert "text" not in run.series and run.series["train/loss"].resolution == 0.0
    assert set(read(offline, "wandb", ARM).series) == {"train/loss"}
    assert (offline.parent / "latest-run").is_symlink(), "and yet it is one run"
    above = read(offline.parents[1], "wandb", ARM)
    assert len(points(above, "train/loss")) == 2001, "of the folder that it was given"


def test_wandb_files_that_are_cut_off_or_damaged(offline, tmp_path):
    (file,) = offline.glob("run-*.wandb")
    whole, path = file.read_bytes(), tmp_path / "run-x.wandb"
    path.write_bytes(whole[:70000])
    run = read(path, "wandb", ARM)
    assert 1 < len(run.series["train/loss"].steps) < 2001 and not run.faults and "cut off" in run.notes[0]
    at = 7
    while at < 60000:  # to the first record behind it
        left = 32768 - at % 32768
        at += left if left < 7 or not whole[at + 6] else 7 + int.from_bytes(whole[at + 4 : at + 6], "little")
    for place, told in ((at + 6, "no kind"), (at + 9, "checksum")):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert told in read(path, "wandb", ARM).faults["*"]
    path.write_bytes(whole[:7])
    assert "no step line" in read(path, "wandb", ARM).faults["*"]
    (tmp_path / "run-y.wandb").write_bytes(whole)
    with pytest.raises(SpecError, match="2 files"):
        read(tmp_path, "wandb", ARM)
