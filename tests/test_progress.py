from __future__ import annotations

import io

import pytest

from rlspec.progress import Progress, _clock_text, step_of

LINES = [
    ("2026 | INFO | step 00000003/00000032 | step-time 4.812 sec | cross-entropy-loss 11.8731 | "
     "load-balance-loss 1.034512 | gradient-norm 37.4", 3, 32, "11.8731"),
    ("[titan] \x1b[31mstep:  3  \x1b[32mloss:  8.14625  \x1b[38;2;180;60;0mgrad_norm:  1.5771", 3, None, "8.1463"),
    (" [2026] iteration        3/      32 | learning rate: 1.8E-06 | lm loss: 1.087310E+01 | load_balancing_loss: "
     "1.034512E+00 | loss scale: 1.0 |", 3, 32, "10.8731"),
    ("iteration: 3 / 32 | consumed_samples:  48 | lm_loss: 1.087310E+01 | lr: 1.844E-06", 3, 32, "10.8731"),
    ('{"step": 3, "loss": 3.4529621557985757, "grad_norm": 1.6}', 3, None, "3.4530"),
    ("{'global_step': 3, 'loss': '5.616', 'epoch': '0.06'}", 3, None, "5.6160"),
    ("INFO [step=3/32,epoch=1,eta=0:00:31]", 3, 32, None),
    ("step:3 - actor/entropy:0.3231 - actor/pg_loss:0.0012", 3, None, None),
    ("step 3/32 | load-balance-loss 1.03 | loss nan", 3, 32, "nan"),
    ("step 3/32  train/loss=-0.5", 3, 32, "-0.5000"),
]  # fmt: skip
NO_STEP = [
    "launch(cfg=PretrainLMCfg(max_steps=32, step_log=True))",
    "step-time 4.812 sec",
    "Training starts at step 1",
    "\x1b[31mvalidate step:  3  \x1b[32mloss:  8.1",
    "step " + "9" * 5000,
    "step: " + "9" * 5000,
]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("line", "step", "of", "loss"), LINES)
def test_step_and_loss_of_any_trainer(line: str, step: int, of: int | None, loss: str | None) -> None:
    assert step_of(line.encode()) == (step, of)
    stream = io.StringIO()
    progress = Progress("feat0", None, stream)
    progress.feed(line.encode())
    progress.end("done")
    shown = f"step {step}/{of}" if of else f"step {step}"
    assert stream.getvalue() == "  ".join(["feat0", shown, *([f"loss {loss}"] if loss else []), "done"]) + "\n"


@pytest.mark.parametrize("line", NO_STEP)
def test_lines_without_a_step(line: str) -> None:
    assert step_of(line.encode()) is None


def test_plain_lines_at_start_now_and_then_and_at_the_end() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress("base0", 32, stream, clock=clock)
    progress.start()
    clock.now = 31.0
    progress.tick()
    for step in range(1, 13):
        clock.now += 2.0 if step > 1 else 20.0
        progress.feed(b"step %d/32 | loss 11.8731" % step)
        progress.feed(b"step %d/32 | loss 11.8731" % step)
    progress.end("failed")
    assert stream.getvalue().splitlines() == [
        "base0  starting",
        "base0  no step yet",
        "base0  step 6/32  loss 11.8731  eta 0:52",
        "base0  step 12/32  loss 11.8731  failed",
    ]


def test_terminal_rewrites_one_line_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "25")
    monkeypatch.setenv("TERM", "xterm")
    clock, stream = Clock(), Terminal()
    progress = Progress("base0", 32, stream, clock=clock)
    progress.start()
    for step in (1, 2):
        clock.now += 1.0
        progress.feed(b"step: %d loss: 2.5" % step)
    clock.now += 0.2
    progress.tick()  # nothing new to show
    progress.feed(b"step: 3 loss: 2.5")  # too soon after the last one to be shown
    progress.end("done in 0:02")
    assert stream.getvalue() == (
        "\rbase0  starting"
        "\rbase0  step 1/32  loss 2"
        "\rbase0  step 2/32  loss 2"
        "\rbase0  step 3/32  loss 2.5000  done in 0:02\n"
    )


def test_terminal_line_covers_a_longer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = Progress("a", None, stream)
    progress.start()
    progress.end("x")
    assert stream.getvalue() == "\ra  starting\ra  x" + " " * 7 + "\n"


def test_eta_counts_down_and_starts_again_after_a_restart() -> None:
    clock = Clock()
    progress = Progress("a", 10, io.StringIO(), clock=clock)
    assert progress._eta() is None
    for step in (3, 4, 5):
        progress.feed(b"step: %d" % step)
        clock.now += 60.0
    progress.feed(b"step: 5")  # of another rank
    assert progress._eta() == "4:00"
    clock.now += 3600.0
    assert progress._eta() == "0:00"
    progress.feed(b"step: 1")
    assert progress._eta() is None
    clock.now += 60.0
    progress.feed(b"step: 2")
    assert progress._eta() == "8:00"
    assert _clock_text(3725) == "1:02:05"


def test_dicts_without_a_step_are_counted() -> None:
    stream = io.StringIO()
    progress = Progress("hf", 32, stream)
    for line in (b"{'loss': '3.5', 'epoch': '0.1'}", b"noise loss: 9", b"{'loss': '3.4'}", b"{'eval_loss': '3'}"):
        progress.feed(line)
    progress.end("done")
    assert stream.getvalue() == "hf  step 2/32  loss 3.4000  done\n"


def test_progress_survives_weird_bytes_and_a_closed_stream() -> None:
    weird = io.StringIO()
    progress = Progress("a", None, weird)
    for line in (b"", b"\xff\xfe step \xff/3 loss", bytes(range(256)) * 100, b"loss: 1e999999", b"step: 0/0 loss inf"):
        progress.feed(line)
    progress.end("done")
    assert weird.getvalue().replace("\n", "").isprintable()
    assert weird.getvalue().endswith("done\n")
    stream = io.StringIO()
    broken = Progress("a", 3, stream, every=0.0)
    stream.close()
    broken.feed(b"step 1/3")
    broken.end("done")
    assert stream.closed
