from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlspec import child, slurm
from rlspec.child import MARK
from rlspec.errors import RunError, SpecError
from rlspec.launch import Interrupted, argv, could_not_run, execute, signals
from rlspec.model import Launch
from tests.processes import ENVIRONMENT, LONG, marked, run, shell, text, time_flies_once, wait_for

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("patient")


# argv


def test_local_is_the_command_itself() -> None:
    assert argv(Launch(), ["python", "x.py", "--n", "1"]) == ("python", "x.py", "--n", "1")


def test_torchrun_command_line() -> None:
    found = argv(Launch(name="torchrun", processes_per_node=8), ["/env/bin/python3.11", "-u", "x.py", "--n"])
    assert " ".join(found) == (
        "/env/bin/python3.11 -m torch.distributed.run --nnodes 1 --nproc-per-node 8 "
        "--rdzv-backend c10d --rdzv-endpoint localhost:0 x.py --n"
    )
    assert argv(Launch(name="torchrun"), ["python", "-m", "pkg.main", "a"])[-3:] == ("-m", "pkg.main", "a")


@pytest.mark.parametrize(
    ("how", "command", "message"),
    [
        (Launch(name="torchrun"), ["bash", "x.sh"], "must begin with a Python interpreter, this one with 'bash'"),
        (Launch(name="torchrun"), ["pythonic", "x.py"], "must begin with a Python interpreter"),
        (Launch(name="torchrun"), ["python"], "names no script"),
        (Launch(name="torchrun"), ["python", "-O", "x.py"], "'-O' would not reach the ranks"),
        (Launch(name="torchrun", nodes=2), ["python", "x.py"], "nodes is 2"),
        (Launch(name="slurm"), ["bash", "x.sh"], "launch slurm: the command must begin with a Python interpreter"),
        (Launch(name="mpi"), ["python", "x.py"], "unknown launcher 'mpi', allowed: local, torchrun, slurm"),
        (Launch(), [], "the command is empty"),
    ],
)
def test_no_way_to_start(how: Launch, command: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        argv(how, command)


# execute


def test_a_good_run(tmp_path: Path) -> None:
    lines: list[bytes] = []
    begun = time.monotonic()
    code = "import os, sys; print(os.getcwd()); print('err', file=sys.stderr); print(repr(sys.stdin.read()))"
    outcome = run(tmp_path, code, on_line=lines.append, log=tmp_path / "deep" / "arm.log")
    assert (outcome.returncode, outcome.reason, outcome.timed_out, outcome.notes) == (0, None, False, ())
    assert outcome.tail == (str(tmp_path), "err", "''")
    assert lines == [os.fsencode(tmp_path), b"err", b"''"]
    assert (tmp_path / "deep" / "arm.log").read_text() == f"{tmp_path}\nerr\n''\n"
    assert 0 < outcome.seconds <= time.monotonic() - begun


def test_child_gets_no_input(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    saved = os.dup(0)
    try:
        os.write(writer, b"typed\n")
        os.dup2(reader, 0)
        assert run(tmp_path, "import sys; print(repr(sys.stdin.readline()))").tail == ("''",)
    finally:
        os.dup2(saved, 0)
        for descriptor in (reader, writer, saved):
            os.close(descriptor)


def test_environment_and_session_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKED", "1")
    run(tmp_path, "import os; print(sorted(os.environ), os.getsid(0) == os.getpid() == os.getpgid(0))")
    names, _, own = text(tmp_path).strip().rpartition(" ")
    assert own == "True"
    assert set(eval(names)) - {"LC_CTYPE"} == {*ENVIRONMENT, MARK}


def test_reason_without_a_traceback_is_the_last_line(tmp_path: Path) -> None:
    outcome = run(tmp_path, "import sys; print('train.py: error: no such option: --stpes'); sys.exit(2)")
    assert outcome.returncode == 2
    assert outcome.reason == "exited with 2; the last line it printed: train.py: error: no such option: --stpes"


def test_reason_with_a_traceback(tmp_path: Path) -> None:
    code = "try:\n    {}['steps']\nexcept KeyError:\n    raise ValueError('5 experts on 4 ranks')\n"
    outcome = run(tmp_path, code)
    assert outcome.reason == "exited with 1: ValueError: 5 experts on 4 ranks"
    assert outcome.traceback is not None
    assert outcome.traceback.startswith("Traceback (most recent call last):")
    assert "KeyError: 'steps'" in outcome.traceback
    assert outcome.traceback.endswith("ValueError: 5 experts on 4 ranks")


def test_killed_by_a_signal(tmp_path: Path) -> None:
    outcome = run(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert (outcome.returncode, outcome.reason) == (-9, "killed by SIGKILL (out of memory?)")


def test_log_is_written_as_it_comes(tmp_path: Path) -> None:
    seen: list[str] = []

    def answer(line: bytes) -> None:
        seen.append(text(tmp_path))
        (tmp_path / "go").touch()

    code = "import os, time\nprint('one', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('two')"
    assert run(tmp_path, code, on_line=answer, time_limit=LONG).returncode == 0
    assert seen[0] == "one\n"


def test_time_limit(tmp_path: Path) -> None:
    with time_flies_once(lambda: "loss" in text(tmp_path)):
        outcome = shell(tmp_path, "echo 'iteration   7/  32 | lm loss: 1.0'; exec sleep 600", time_limit=3600)
    assert outcome.timed_out
    assert outcome.returncode == -signal.SIGTERM
    assert outcome.reason == "time limit 1h reached at step 7"
    assert shell(tmp_path, "sleep 600", time_limit=0.1).reason == "time limit 0.1s reached before any step was printed"


def test_time_limit_ends_those_who_ignore_it_too(tmp_path: Path) -> None:
    script = "trap '' TERM; setsid sleep 600.125 & echo $!; wait"
    with time_flies_once(lambda: text(tmp_path).endswith("\n")):
        outcome = shell(tmp_path, script, time_limit=3600, grace=0.2)
    assert (outcome.returncode, outcome.timed_out) == (-signal.SIGKILL, True)
    assert int(outcome.tail[0]) not in marked("600.125")


def test_good_ending_after_the_time_limit_is_still_a_failure(tmp_path: Path) -> None:
    with time_flies_once(lambda: text(tmp_path) == "1\n"):
        script = "trap 'exit 0' TERM; echo 1; while :; do sleep 0.1; done"
        outcome = shell(tmp_path, script, time_limit=3600, grace=LONG)
    assert outcome.returncode == 0
    assert outcome.reason is not None


@pytest.mark.parametrize(("seconds", "shown"), [(90, "90s"), (1800, "30m"), (7200, "2h"), (0.5, "0.5s"), (5400, "90m")])
def test_duration(seconds: float, shown: str) -> None:
    assert slurm.duration(seconds) == shown


def test_full_disk_stops_the_child(tmp_path: Path, word: str) -> None:
    (tmp_path / "arm.log").symlink_to("/dev/full")
    with pytest.raises(RunError, match="cannot write the log .*No space left"):
        run(tmp_path, f"import signal; signal.signal(15, signal.SIG_IGN)\nwhile 1: print({word!r})", grace=0.2)
    assert not marked(word)


def test_listener_that_raises_stops_the_child(tmp_path: Path, word: str) -> None:
    def bad(line: bytes) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(tmp_path, f"import time; print({word!r}); time.sleep(600)", on_line=bad)
    assert not marked(word)


def test_works_outside_the_main_thread(tmp_path: Path) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run(tmp_path, "raise SystemExit(4)").returncode))
    thread.start()
    thread.join()
    assert codes == [4]


def test_could_not_run_for_real(tmp_path: Path) -> None:
    (tmp_path / "tag-base0.py").write_text("class Cfg: __slots__ = ('lr',)\ncfg = Cfg()\ncfg.max_lr = 1\n")
    command = [sys.executable, "tag-base0.py"]
    outcome = execute(command, cwd=tmp_path, environment=ENVIRONMENT, log=tmp_path / "arm.log")
    assert outcome.traceback is not None
    assert could_not_run(outcome.traceback, tmp_path / "tag-base0.py")
    assert not could_not_run("", tmp_path / "tag-base0.py")


# signals


HOST = """
import os, sys
from pathlib import Path
from rlspec.launch import Interrupted, execute, signals
def say(line):
    print(line.decode(), flush=True)
try:
    with signals():
        try:
            execute(sys.argv[3:], cwd=Path(sys.argv[1]), environment=os.environ, log=Path(sys.argv[1], "arm.log"),
                    grace=float(sys.argv[2]), on_line=say)
        finally:
            print("restored", flush=True)
except Interrupted as stop:
    sys.exit(stop.exit_code)
"""
POLITE = """
import signal, sys, time
def stop(signum, frame):
    print("got", signal.Signals(signum).name, flush=True)
    sys.exit(9)
signal.signal(2, stop); signal.signal(15, stop)
print("ready", flush=True)
time.sleep(600)
"""
STUBBORN = """
import signal, subprocess, sys, time
code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)  # {word}"
signal.signal(2, lambda *_: print("got SIGINT", flush=True)); signal.signal(15, signal.SIG_IGN)
p = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
while True: time.sleep(60)
"""


class Host:
    """`execute` in a process of its own, running `code`, up to the line `ready`."""

    def __init__(self, folder: Path, grace: float, argv: list[str], **options: Any) -> None:
        command = [sys.executable, "-c", HOST, str(folder), str(grace), *argv]
        environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
        self.folder = folder
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, **options)
        assert self.process.stdout is not None
        self.lines = self.process.stdout
        while self.lines.readline() not in ("ready\n", ""):
            pass

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def end(self) -> tuple[int, str]:
        rest = self.lines.read()
        return self.process.wait(LONG), rest


@pytest.mark.parametrize(
    ("sent", "code", "got"),
    [(signal.SIGINT, 130, "SIGINT"), (signal.SIGTERM, 143, "SIGTERM"), (signal.SIGHUP, 143, "SIGTERM")],
)
def test_signal_reaches_the_child_and_comes_back_as_interrupted(
    tmp_path: Path, word: str, sent: signal.Signals, code: int, got: str
) -> None:
    host = Host(tmp_path, LONG, [sys.executable, "-c", POLITE, word])
    host.send(sent)
    assert host.end() == (code, "restored\n")
    assert text(tmp_path) == f"ready\ngot {got}\n"
    assert not marked(word)


def test_no_orphan_when_everybody_ignores_the_signal(tmp_path: Path, word: str) -> None:
    host = Host(tmp_path, 0.2, [sys.executable, "-c", STUBBORN.replace("{word}", word), word])
    assert len(marked(word)) == 3
    host.send(signal.SIGINT)
    assert host.end()[0] == 130
    assert not marked(word)


def test_second_signal_kills_at_once(tmp_path: Path, word: str) -> None:
    host = Host(tmp_path, 600, [sys.executable, "-c", STUBBORN.replace("{word}", word), word])
    host.send(signal.SIGINT)
    wait_for(lambda: "got SIGINT" in text(tmp_path))
    host.send(signal.SIGINT)
    assert host.end() == (130, "restored\n")
    assert not marked(word)


def test_nohup_is_respected(tmp_path: Path, word: str) -> None:
    hang_up = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    host = Host(tmp_path, LONG, [sys.executable, "-c", POLITE, word], **hang_up)
    host.send(signal.SIGHUP)
    host.send(signal.SIGINT)
    assert host.end()[0] == 130
    assert not marked(word)


def test_signal_while_the_child_starts(tmp_path: Path, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = child._popen

    def interrupted(*args: Any) -> subprocess.Popen[bytes]:
        process = start(*args)
        signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(child, "_popen", interrupted)
    with pytest.raises(Interrupted), signals():
        run(tmp_path, f"import time; print({word!r}); time.sleep(600)")
    assert not marked(word)


# torchrun itself


GLOO = """
import os
import torch.distributed as dist
assert os.getsid(0) == os.getpid() and "RLSPEC_CHILD" in os.environ
dist.init_process_group("gloo")
print(f"step 1/2 | loss 1.5 | rank {dist.get_rank()}", flush=True)
if dist.get_rank() == 1:
    raise ValueError("expert 7 of 4")
dist.barrier()
"""


def test_torchrun_names_the_rank_and_its_error(tmp_path: Path) -> None:
    """Its ranks leave the session, like STUBBORN's grandchild, and are found by the mark."""
    (tmp_path / "gloo.py").write_text(GLOO)
    command = argv(Launch(name="torchrun", processes_per_node=2), [sys.executable, "gloo.py"])
    environment = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    outcome = execute(command, cwd=tmp_path, environment=environment, log=tmp_path / "arm.log", grace=LONG)
    assert outcome.returncode == 1
    assert outcome.reason == "rank 1 exited with 1: ValueError: expert 7 of 4"
    assert outcome.traceback is not None
    assert outcome.traceback.count("gloo.py") == 1
    assert (outcome.step, outcome.notes) == (1, ())
