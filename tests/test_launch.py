from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlspec import launch
from rlspec.errors import RunError, SpecError
from rlspec.launch import Interrupted, Outcome, Progress, execute
from rlspec.model import Launch

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
SLEEPER = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], {}); "


def run(tmp_path: Path, code: str, **options: Any) -> Outcome:
    log = options.pop("log", tmp_path / "arm.log")
    return execute([sys.executable, "-c", code], cwd=tmp_path, environment=ENVIRONMENT, log=log, **options)


def text(tmp_path: Path) -> str:
    return (tmp_path / "arm.log").read_text(encoding="utf-8", errors="replace")


def marked(word: str) -> list[int]:
    """Living processes whose command line holds `word`, from /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line, state = (folder / "cmdline").read_bytes(), (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if word.encode() in line and state not in "ZX":
            found.append(int(folder.name))
    return found


@pytest.fixture
def word(tmp_path: Path) -> Iterator[str]:
    """A word in the command lines of a test's processes; what holds it at the end is killed, in any case."""
    word = f"marked-{tmp_path.name}-{os.getpid()}"
    yield word
    for pid in marked(word):
        os.kill(pid, signal.SIGKILL)


# argv


def test_local_is_the_command_itself() -> None:
    assert launch.argv(Launch(), ["python", "x.py", "--n", "1"]) == ("python", "x.py", "--n", "1")


def test_torchrun_command_line() -> None:
    found = launch.argv(Launch(name="torchrun", processes_per_node=8), ["/env/bin/python3.11", "-u", "x.py", "--n"])
    assert " ".join(found) == (
        "/env/bin/python3.11 -m torch.distributed.run --nnodes 1 --nproc-per-node 8 "
        "--rdzv-backend c10d --rdzv-endpoint localhost:0 x.py --n"
    )
    assert launch.argv(Launch(name="torchrun"), ["python", "-m", "pkg.main", "a"])[-3:] == ("-m", "pkg.main", "a")


@pytest.mark.parametrize(
    ("how", "command", "message"),
    [
        (Launch(name="torchrun"), ["bash", "x.sh"], "must begin with a Python interpreter, this one with 'bash'"),
        (Launch(name="torchrun"), ["pythonic", "x.py"], "must begin with a Python interpreter"),
        (Launch(name="torchrun"), ["python"], "names no script"),
        (Launch(name="torchrun"), ["python", "-O", "x.py"], "'-O' would not reach the ranks"),
        (Launch(name="torchrun", nodes=2), ["python", "x.py"], "nodes is 2"),
        (Launch(name="slurm"), ["python", "x.py"], "this version cannot start slurm jobs yet"),
        (Launch(name="mpi"), ["python", "x.py"], "unknown launcher 'mpi', allowed: local, torchrun, slurm"),
        (Launch(), [], "the command is empty"),
    ],
)
def test_no_way_to_start(how: Launch, command: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        launch.argv(how, command)


# execute


def test_a_good_run(tmp_path: Path) -> None:
    lines: list[bytes] = []
    code = "import os, sys; print(os.getcwd()); print('err', file=sys.stderr); print(repr(sys.stdin.read()))"
    outcome = run(tmp_path, code, on_line=lines.append, log=tmp_path / "deep" / "arm.log")
    assert (outcome.returncode, outcome.reason, outcome.timed_out, outcome.notes) == (0, None, False, ())
    assert outcome.tail == (str(tmp_path), "err", "''")
    assert lines == [os.fsencode(tmp_path), b"err", b"''"]
    assert (tmp_path / "deep" / "arm.log").read_text() == f"{tmp_path}\nerr\n''\n"
    assert 0 < outcome.seconds < 60


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
    assert set(eval(names)) - {"LC_CTYPE"} == {*ENVIRONMENT, launch.MARK}


def test_reason_without_a_traceback_is_the_last_line(tmp_path: Path) -> None:
    outcome = run(tmp_path, "import sys; print('train.py: error: no such option: --stpes'); sys.exit(2)")
    assert outcome.returncode == 2
    assert outcome.reason == "exited with 2; the last line it printed: train.py: error: no such option: --stpes"
    assert run(tmp_path, "import sys; sys.exit(3)").reason == "exited with 3; it printed nothing"
    assert "exited with 137 (as after SIGKILL (out of memory?))" in str(run(tmp_path, "raise SystemExit(137)").reason)


def test_reason_with_a_traceback(tmp_path: Path) -> None:
    code = "try:\n    {}['steps']\nexcept KeyError:\n    raise ValueError('5 experts on 4 ranks')\n"
    outcome = run(tmp_path, code)
    assert outcome.reason == "exited with 1: ValueError: 5 experts on 4 ranks"
    assert outcome.traceback is not None
    assert outcome.traceback.startswith("Traceback (most recent call last):")
    assert "KeyError: 'steps'" in outcome.traceback
    assert outcome.traceback.endswith("ValueError: 5 experts on 4 ranks")


def test_an_old_caught_traceback_is_no_cause(tmp_path: Path) -> None:
    code = "import traceback\ntry:\n    import nosuch\nexcept ImportError:\n    traceback.print_exc()\n"
    code += "for n in range(300): print('step', n)\nraise SystemExit(7)"
    assert run(tmp_path, code).reason == "exited with 7; the last line it printed: step 299"


def test_killed_by_a_signal(tmp_path: Path) -> None:
    outcome = run(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert (outcome.returncode, outcome.reason) == (-9, "killed by SIGKILL (out of memory?)")
    assert run(tmp_path, "import os; os.kill(os.getpid(), 6)").reason == "killed by SIGABRT"


def test_bad_bytes_colours_and_progress_bars(tmp_path: Path) -> None:
    code = r"import os; os.write(1, b'\xff\x00ok\r\n\x1b[31mstep:  4  \x1b[0m\n 1%\r 2%\r 3%\r\x1b[Alast \xc3')"
    lines: list[bytes] = []
    outcome = run(tmp_path, code, on_line=lines.append)
    assert outcome.tail == ("\ufffdok", "step:  4  ", "last \ufffd")
    assert lines[-4:] == [b" 1%", b" 2%", b" 3%", b"\x1b[Alast \xc3"]
    assert outcome.step == 4
    assert (tmp_path / "arm.log").read_bytes().endswith(b"last \xc3")


def test_tail_is_the_last_twenty_lines(tmp_path: Path) -> None:
    assert run(tmp_path, "for n in range(50): print(n)").tail == tuple(map(str, range(30, 50)))


def test_endless_line_is_logged_and_costs_no_memory(tmp_path: Path) -> None:
    lines: list[bytes] = []
    tracemalloc.start()
    try:
        outcome = run(tmp_path, "for _ in range(32): print('x' * 2**20, end='')", on_line=lines.append)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "arm.log").stat().st_size == 32 * 2**20
    assert [len(line) for line in lines] == [launch.LINE]
    assert len(outcome.tail[0]) == launch.LINE
    assert peak < 4 * 2**20


def test_log_is_written_as_it_comes(tmp_path: Path) -> None:
    seen: list[str] = []

    def answer(line: bytes) -> None:
        seen.append(text(tmp_path))
        (tmp_path / "go").touch()

    code = "import os, time\nprint('one', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('two')"
    assert run(tmp_path, code, on_line=answer, time_limit=30).returncode == 0
    assert seen[0] == "one\n"


@pytest.mark.parametrize("how", ["", "env={}", "start_new_session=True"])
def test_grandchild_that_keeps_the_pipe_is_stopped(tmp_path: Path, how: str) -> None:
    outcome = run(tmp_path, SLEEPER.format(how) + "print(p.pid)", grace=0.3)
    pid = outcome.tail[0]
    assert (outcome.returncode, outcome.reason) == (0, None)
    assert len(outcome.notes) == 1
    assert outcome.notes[0].startswith("still running 0.3 s after the command had ended, and stopped: ")
    assert f"(pid {pid})" in outcome.notes[0]
    assert int(pid) not in marked("time.sleep(60)")


def test_hidden_grandchild_that_ignores_everything_is_killed(tmp_path: Path) -> None:
    hidden = (
        "import os, signal, subprocess as s, sys\n"
        "code = 'import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)'\n"
        "p = s.Popen([sys.executable, '-c', code], start_new_session=True, stdout=s.PIPE, stderr=s.DEVNULL)\n"
        "p.stdout.readline()\nprint(p.pid)"
    )
    outcome = run(tmp_path, hidden, grace=0.2)
    assert f"(pid {outcome.tail[0]})" in outcome.notes[0]
    assert int(outcome.tail[0]) not in marked("time.sleep(60)")


def test_grandchild_may_finish_within_the_grace(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(0.3); print(2)'])"
    outcome = run(tmp_path, code)
    assert (outcome.notes, outcome.tail) == ((), ("2",))


def shell(tmp_path: Path, script: str, **options: Any) -> Outcome:
    return execute(["sh", "-c", script], cwd=tmp_path, environment=ENVIRONMENT, log=tmp_path / "arm.log", **options)


def test_time_limit(tmp_path: Path) -> None:
    outcome = shell(tmp_path, "echo 'iteration   7/  32 | lm loss: 1.0'; exec sleep 60", time_limit=1)
    assert outcome.timed_out
    assert outcome.returncode == -signal.SIGTERM
    assert outcome.reason == "time limit 1s reached at step 7"
    assert shell(tmp_path, "sleep 60", time_limit=0.1).reason == "time limit 0.1s reached before any step was printed"


def test_time_limit_ends_those_who_ignore_it_too(tmp_path: Path) -> None:
    script = "trap '' TERM; setsid sleep 60.125 & echo $!; wait"
    outcome = shell(tmp_path, script, time_limit=1, grace=0.2)
    assert (outcome.returncode, outcome.timed_out) == (-signal.SIGKILL, True)
    assert int(outcome.tail[0]) not in marked("60.125")


def test_good_ending_after_the_time_limit_is_still_a_failure(tmp_path: Path) -> None:
    outcome = shell(tmp_path, "trap 'exit 0' TERM; echo 1; while :; do sleep 0.1; done", time_limit=1)
    assert outcome.returncode == 0
    assert outcome.reason is not None


@pytest.mark.parametrize(("seconds", "shown"), [(90, "90s"), (1800, "30m"), (7200, "2h"), (0.5, "0.5s"), (5400, "90m")])
def test_duration(seconds: float, shown: str) -> None:
    assert launch._duration(seconds) == shown


def test_cannot_start(tmp_path: Path) -> None:
    def trouble(command: str, cwd: Path = tmp_path) -> str:
        with pytest.raises(RunError) as caught:
            execute([command], cwd=cwd, environment=ENVIRONMENT, log=tmp_path / "arm.log")
        return str(caught.value)

    (tmp_path / "plain").write_text("echo\n")
    (tmp_path / "orphan").write_text("#!/no/such/shell\n")
    (tmp_path / "orphan").chmod(0o755)
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "text").chmod(0o755)
    assert "cannot start 'nosuchtrainer': no such command on PATH" in trouble("nosuchtrainer")
    assert "no such file" in trouble("./missing")
    assert "it is not executable; chmod +x" in trouble("./plain")
    assert "interpreter named in its first line" in trouble("./orphan")
    assert "it is no program" in trouble("./text")
    assert f"its folder {tmp_path / 'gone'} does not exist" in trouble(sys.executable, tmp_path / "gone")


def test_log_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot write the log .*file/arm.log"):
        run(tmp_path, "", log=tmp_path / "file" / "arm.log")


def test_full_disk_stops_the_child(tmp_path: Path, word: str) -> None:
    (tmp_path / "arm.log").symlink_to("/dev/full")
    with pytest.raises(RunError, match="cannot write the log .*No space left"):
        run(tmp_path, f"import signal; signal.signal(15, signal.SIG_IGN)\nwhile 1: print({word!r})", grace=0.2)
    assert not marked(word)


def test_listener_that_raises_stops_the_child(tmp_path: Path, word: str) -> None:
    def bad(line: bytes) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(tmp_path, f"import time; print({word!r}); time.sleep(60)", on_line=bad)
    assert not marked(word)


def test_works_outside_the_main_thread(tmp_path: Path) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run(tmp_path, "raise SystemExit(4)").returncode))
    thread.start()
    thread.join()
    assert codes == [4]


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
time.sleep(60)
"""
STUBBORN = """
import signal, subprocess, sys, time
code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)  # {word}"
signal.signal(2, lambda *_: print("got SIGINT", flush=True)); signal.signal(15, signal.SIG_IGN)
p = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
while True: time.sleep(60)
"""


class Host:
    """rlspec.launch in a process of its own, running `code`, up to the line `ready`."""

    def __init__(self, folder: Path, grace: float, argv: list[str], ready: int = 1, **options: Any) -> None:
        command = [sys.executable, "-c", HOST, str(folder), str(grace), *argv]
        environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
        self.folder = folder
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, **options)
        assert self.process.stdout is not None
        self.lines = self.process.stdout
        for _ in range(ready):
            while self.lines.readline() not in ("ready\n", ""):
                pass

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def end(self) -> tuple[int, str]:
        rest = self.lines.read()
        return self.process.wait(30), rest


@pytest.mark.parametrize(
    ("sent", "code", "got"),
    [(signal.SIGINT, 130, "SIGINT"), (signal.SIGTERM, 143, "SIGTERM"), (signal.SIGHUP, 143, "SIGTERM")],
)
def test_signal_reaches_the_child_and_comes_back_as_interrupted(
    tmp_path: Path, word: str, sent: signal.Signals, code: int, got: str
) -> None:
    host = Host(tmp_path, 20, [sys.executable, "-c", POLITE, word])
    host.send(sent)
    assert host.end() == (code, "restored\n")
    assert text(tmp_path) == f"ready\ngot {got}\n"
    assert not marked(word)


def test_no_orphan_when_everybody_ignores_the_signal(tmp_path: Path, word: str) -> None:
    host = Host(tmp_path, 0.3, [sys.executable, "-c", STUBBORN.replace("{word}", word), word])
    assert len(marked(word)) == 3
    host.send(signal.SIGINT)
    assert host.end()[0] == 130
    assert not marked(word)


def test_second_signal_kills_at_once(tmp_path: Path, word: str) -> None:
    host = Host(tmp_path, 600, [sys.executable, "-c", STUBBORN.replace("{word}", word), word])
    host.send(signal.SIGINT)
    while "got SIGINT" not in text(tmp_path):
        time.sleep(0.02)
    host.send(signal.SIGINT)
    assert host.end() == (130, "restored\n")
    assert not marked(word)


def test_nohup_is_respected(tmp_path: Path, word: str) -> None:
    hang_up = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    host = Host(tmp_path, 20, [sys.executable, "-c", POLITE, word], **hang_up)
    host.send(signal.SIGHUP)
    host.send(signal.SIGINT)
    assert host.end()[0] == 130
    assert not marked(word)


def test_signals_anywhere_and_handlers_restored() -> None:
    before = [signal.getsignal(signum) for signum in launch.SIGNALS]
    with pytest.raises(Interrupted) as caught, launch.signals():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.exit_code == 143
    assert not isinstance(caught.value, Exception)
    assert [signal.getsignal(signum) for signum in launch.SIGNALS] == before


def test_signal_while_the_child_starts(tmp_path: Path, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = launch._popen

    def interrupted(*args: Any) -> subprocess.Popen[bytes]:
        process = start(*args)
        signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(launch, "_popen", interrupted)
    with pytest.raises(Interrupted), launch.signals():
        run(tmp_path, f"import time; print({word!r}); time.sleep(5)")
    assert not marked(word)


def test_zombies_do_not_count() -> None:
    process = subprocess.Popen(["true"], start_new_session=True)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert launch._members(process.pid, b"no such mark") == {}
    process.wait()


def test_second_signal_does_not_tear_the_clean_up_but_the_third_is_heard() -> None:
    cleaned = []
    with pytest.raises(Interrupted), launch.signals():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            cleaned.append(True)
            with pytest.raises(Interrupted):
                signal.raise_signal(signal.SIGINT)
    assert cleaned


# Why it failed

RECORDED = """\
rank 0
Traceback (most recent call last):
  File "/w/caught.py", line 8, in <module>
    import nosuch
ModuleNotFoundError: No module named 'nosuch'
Traceback (most recent call last):
  File "/v/torch/distributed/run.py", line 194, in __call__
    return launch_agent(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
============================================================
r.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-29_16:10:00
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 8649)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 8649
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_16:10:00
  host      : localhost
  rank      : 3 (local_rank: 3)
  exitcode  : {code} (pid: 8650) 
  error_file: /tmp/error.json
  traceback : {traceback}
============================================================
"""
BY_RECORD = """\
Traceback (most recent call last):
    File "/v/errors/__init__.py", line 367, in wrapper
      return f(*args, **kwargs)
    File "/w/r.py", line 6, in main
      raise ValueError("bad")
  ValueError: bad expert count
  """


def write(tmp_path: Path, text: str) -> Path:
    log = tmp_path / "x.log"
    log.write_text(text)
    return log


def test_root_cause_of_a_recorded_main(tmp_path: Path) -> None:
    log = write(tmp_path, RECORDED.replace("{code}", "1").replace("{traceback}", BY_RECORD))
    assert launch.root_cause(log) == "rank 3 exited with 1: ValueError: bad expert count"
    failure = launch._failure(log)
    assert failure is not None
    assert failure.lines[-3:] == ['  File "/w/r.py", line 6, in main', '    raise ValueError("bad")', failure.error()]


def test_root_cause_of_a_rank_that_only_exits(tmp_path: Path) -> None:
    block = RECORDED.replace("{code}", "2").replace("{traceback}", "To enable traceback see: https://pytorch.org")
    log = write(tmp_path, block[block.index("Traceback", block.index("nosuch'")) :])
    assert launch.root_cause(log) == "rank 3 exited with 2"


def test_root_cause_of_a_killed_rank(tmp_path: Path) -> None:
    log = write(tmp_path, RECORDED.replace("{code}", "-9").replace("{traceback}", "Signal 9 (SIGKILL) received"))
    assert launch.root_cause(log) == "rank 3 was killed by SIGKILL (out of memory?)"


def raised(rank: int, error: str) -> str:
    lines = ["Traceback (most recent call last):", '  File "t.py", line 3, in f', "    x()", error]
    return "".join(f"[rank{rank}]: {line}\n" for line in lines)


@pytest.mark.parametrize("named", [3, 0])
def test_root_cause_is_the_rank_that_raised_first(tmp_path: Path, named: int) -> None:
    block = RECORDED.replace("{code}", "1").replace("{traceback}", "To enable traceback see: https://pytorch.org")
    block = block.replace("rank      : 3 (local_rank: 3)", f"rank      : {named} (local_rank: {named})")
    ranks = raised(3, "torch.OutOfMemoryError: CUDA out of memory.") + raised(0, "RuntimeError: closed by peer")
    log = write(tmp_path, ranks + "noise\n" * 1000 + block)
    assert launch.root_cause(log) == "rank 3 exited with 1: torch.OutOfMemoryError: CUDA out of memory."


def test_root_cause_is_the_rank_that_left_without_a_traceback(tmp_path: Path) -> None:
    block = RECORDED.replace("{code}", "2").replace("{traceback}", "To enable traceback see: https://pytorch.org")
    block = block[block.index("Traceback", block.index("nosuch'")) :]
    log = write(tmp_path, raised(0, "RuntimeError: closed by peer") + block)
    assert launch.root_cause(log) == "rank 3 exited with 2"


def test_root_cause_of_interleaved_tracebacks(tmp_path: Path) -> None:
    line = 'Traceback (most recent call last):\n  File "/w/run.py", line 2, in <module>\n    from a import b\n'
    both = "".join(f"{part}\nstep 1/3\n{part}\n" for part in line.splitlines())
    log = write(tmp_path, both + "ImportError: cannot import name 'b' from 'a'\n" * 2)
    assert launch.root_cause(log) == "ImportError: cannot import name 'b' from 'a'"


def test_no_root_cause(tmp_path: Path) -> None:
    assert launch.root_cause(write(tmp_path, "step 1/3\nstep 2/3\n")) is None


@pytest.mark.parametrize(
    ("where", "error", "expected"),
    [
        ("run.py", "AttributeError: 'TrainingCfg' object has no attribute 'dataset'", True),
        ("run.py", "ModuleNotFoundError: No module named 'pithtrain.tasks.pretrain_lm'", True),
        ("run.py", "ImportError: cannot import name 'PretrainLMCfg'", True),
        ("run.py", "TypeError: __init__() got an unexpected keyword argument 'lr'", True),
        ("run.py", "ValueError: 3 is no good", False),
        ("trainer.py", "TypeError: unsupported operand", False),
    ],
)
def test_could_not_run(tmp_path: Path, where: str, error: str, expected: bool) -> None:
    inner = f'  File "/w/{where}", line 9, in f\n    x\n'
    found = f'Traceback (most recent call last):\n  File "/w/run.py", line 2, in <module>\n    f()\n{inner}{error}'
    assert launch.could_not_run(found, tmp_path / "run.py") is expected


def test_could_not_run_for_real(tmp_path: Path) -> None:
    (tmp_path / "tag-base0.py").write_text("class Cfg: __slots__ = ('lr',)\ncfg = Cfg()\ncfg.max_lr = 1\n")
    command = [sys.executable, "tag-base0.py"]
    outcome = execute(command, cwd=tmp_path, environment=ENVIRONMENT, log=tmp_path / "arm.log")
    assert outcome.traceback is not None
    assert launch.could_not_run(outcome.traceback, tmp_path / "tag-base0.py")
    assert not launch.could_not_run("", tmp_path / "tag-base0.py")


# torchrun itself

GLOO = """
import torch.distributed as dist
dist.init_process_group("gloo")
print(f"step 1/2 | loss 1.5 | rank {dist.get_rank()}", flush=True)
if dist.get_rank() == 1:
    raise ValueError("expert 7 of 4")
dist.barrier()
"""


def test_torchrun_names_the_rank_and_its_error(tmp_path: Path) -> None:
    (tmp_path / "gloo.py").write_text(GLOO)
    command = launch.argv(Launch(name="torchrun", processes_per_node=2), [sys.executable, "gloo.py"])
    environment = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    outcome = execute(command, cwd=tmp_path, environment=environment, log=tmp_path / "arm.log", time_limit=120)
    assert outcome.returncode == 1
    assert outcome.reason == "rank 1 exited with 1: ValueError: expert 7 of 4"
    assert outcome.traceback is not None
    assert outcome.traceback.count("gloo.py") == 1
    assert (outcome.step, outcome.notes) == (1, ())


def test_torchrun_ranks_that_ignore_signals_do_not_outlive_rlspec(tmp_path: Path, word: str) -> None:
    (tmp_path / f"{word}.py").write_text(
        "import os, signal, time\nsignal.signal(2, signal.SIG_IGN)\nsignal.signal(15, signal.SIG_IGN)\n"
        "assert os.getsid(0) == os.getpid()\nos.write(1, b'ready\\n')\ntime.sleep(60)\n"
    )
    command = launch.argv(Launch(name="torchrun", processes_per_node=2), [sys.executable, f"{word}.py"])
    host = Host(tmp_path, 600, list(command), ready=2)
    host.send(signal.SIGINT)
    while "closing signal SIGINT" not in text(tmp_path):
        time.sleep(0.05)
    host.send(signal.SIGINT)
    assert host.end()[0] == 130
    assert not marked(word)


# Progress

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
    assert launch.step_of(line.encode()) == (step, of)
    stream = io.StringIO()
    progress = Progress("feat0", None, stream)
    progress.feed(line.encode())
    progress.end("done")
    shown = f"step {step}/{of}" if of else f"step {step}"
    assert stream.getvalue() == "  ".join(["feat0", shown, *([f"loss {loss}"] if loss else []), "done"]) + "\n"


@pytest.mark.parametrize("line", NO_STEP)
def test_lines_without_a_step(line: str) -> None:
    assert launch.step_of(line.encode()) is None


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
    assert launch._clock_text(3725) == "1:02:05"


def test_dicts_without_a_step_are_counted() -> None:
    stream = io.StringIO()
    progress = Progress("hf", 32, stream)
    for line in (b"{'loss': '3.5', 'epoch': '0.1'}", b"noise loss: 9", b"{'loss': '3.4'}", b"{'eval_loss': '3'}"):
        progress.feed(line)
    progress.end("done")
    assert stream.getvalue() == "hf  step 2/32  loss 3.4000  done\n"


def test_progress_survives_weird_bytes_and_a_closed_stream() -> None:
    progress = Progress("a", None, io.StringIO())
    for line in (b"", b"\xff\xfe step \xff/3 loss", bytes(range(256)) * 100, b"loss: 1e999999", b"step: 0/0 loss inf"):
        progress.feed(line)
    stream = io.StringIO()
    broken = Progress("a", 3, stream, every=0.0)
    stream.close()
    broken.feed(b"step 1/3")
    broken.end("done")
