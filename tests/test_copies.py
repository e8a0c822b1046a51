"""What two runs cannot have in common: clocks, however they are written, and no fewer readings than chance excludes."""

from __future__ import annotations

import json

import pytest

from rlspec import copies

ROWS = [{"step": step, "loss": 2.5 - step / 8} for step in range(6)]
TIMED = (
    *("step_time", "perf/iter_time_ms", "elapsed", "time/update_s", "timing_s/gen", "elapsed time per iteration (ms)"),
    *("tokens_per_second", "tok/s", "samples_per_sec", "ms", "tflops", "mfu", "mfu(%)", "time_metrics/end_to_end(s)"),
)
OTHER = (
    *("time_step", "timestep", "duration_loss", "audio_duration", "diffusion_time_mean", "time", "lifetime", "atoms"),
    *("timesteps/x_s", "step_times_loss", "elapsed_loss", "items_per_second_token"),
)


@pytest.mark.parametrize(
    ("more", "count", "held"),
    [
        (lambda step: {"at": f"2026-10-03 11:20:0{step}"}, 6, "6 clock times"),
        (lambda step: {"at": f"Oct 3, 2026 11:20:0{step}"}, 6, "6 clock times"),
        (lambda step: {"at": f"2026-10-03 11:20:0{step}"}, 3, ""),
        (lambda step: {"at": "2026-10-03 11:20:00"}, 6, ""),
        (lambda step: {"valid": f"2026-10-03T11:{step}0:00"}, 6, ""),  # dates of the data
        (lambda step: {"elapsed": f"0:00:0{step}"}, 6, ""),
        (lambda step: {"elapsed": 3 * step}, 6, ""),
        (lambda step: {"_timestamp": 1790000000.5 + step}, 6, "6 time stamps"),
        (lambda step: {"timestamp": 1790000000 + step}, 6, ""),
        (lambda step: {"timesteps_total": 2048000000 * step}, 6, ""),
        (lambda step: {"note": f"{step}.251 it/s"}, 6, "6 rates"),
        (lambda step: {"note": f"{step}.25 it/s"}, 6, ""),
        *((lambda step, name=name: {name: step + 1 / 8}, 6, f"6 values of {name}") for name in TIMED),
        *((lambda step, name=name: {name: step + 1 / 8}, 6, "") for name in OTHER),
        (lambda step: {"step_time": step + 1 / 4}, 6, ""),
        (lambda step: {"step_time": step % 2 + 1 / 8}, 6, ""),
        (lambda step: {"timestep": step}, 6, ""),
    ],
)
def test_what_cannot_repeat(tmp_path, more, count, held):
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({**row, **more(row["step"])}) + "\n" for row in ROWS[:count]))
    assert copies.unrepeatable(log, "jsonl", None) == held


def test_dates_on_a_few_lines_of_many_steps_are_of_something_else(tmp_path):
    log = tmp_path / "log.jsonl"
    dates = "".join(f"2026-10-03 11:20:0{at} +0000 commit {at}\n" for at in range(6))
    for steps, held in ((6, "6 clock times"), (32, "")):
        rows = ({"step": step, "loss": 2.5 - step / 64} for step in range(steps))
        log.write_text(dates + "".join(json.dumps(row) + "\n" for row in rows))
        assert copies.unrepeatable(log, "jsonl", None) == held


def test_event_files_hold_the_time_of_every_value(tmp_path):
    assert copies.unrepeatable(tmp_path, "tensorboard", None) == "the time at which each value was written"
