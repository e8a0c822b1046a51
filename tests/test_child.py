from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlspec.child import members
from rlspec.errors import RunError
from rlspec.launch import execute
from tests.processes import ENVIRONMENT, LONG, marked, run

pytestmark = pytest.mark.usefixtures("patient")

SLEEPER = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], {}); "


@pytest.mark.parametrize("how", ["", "env={}", "start_new_session=True"])
def test_grandchild_that_keeps_the_pipe_is_stopped(tmp_path: Path, how: str) -> None:
    outcome = run(tmp_path, SLEEPER.format(how) + "print(p.pid)", grace=0.2)
    pid = outcome.tail[0]
    assert (outcome.returncode, outcome.reason) == (0, None)
    assert len(outcome.notes) == 1
    assert outcome.notes[0].startswith("still running 0.2 s after the command had ended, and stopped: ")
    assert f"(pid {pid})" in outcome.notes[0]
    assert int(pid) not in marked("time.sleep(600)")


def test_hidden_grandchild_that_ignores_everything_is_killed(tmp_path: Path) -> None:
    hidden = (
        "import os, signal, subprocess as s, sys\n"
        "code = 'import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)'\n"
        "p = s.Popen([sys.executable, '-c', code], start_new_session=True, stdout=s.PIPE, stderr=s.DEVNULL)\n"
        "p.stdout.readline()\nprint(p.pid)"
    )
    outcome = run(tmp_path, hidden, grace=0.2)
    assert f"(pid {outcome.tail[0]})" in outcome.notes[0]
    assert int(outcome.tail[0]) not in marked("time.sleep(600)")


def test_grandchild_may_finish_within_the_grace(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(0.1); print(2)'])"
    outcome = run(tmp_path, code, grace=LONG)
    assert (outcome.notes, outcome.tail) == ((), ("2",))


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
    assert "interpreter in its first line does not exist; correct it" in trouble("./orphan")
    assert "it is no program" in trouble("./text")
    assert f"its folder {tmp_path / 'gone'} does not exist" in trouble(sys.executable, tmp_path / "gone")


def test_zombies_do_not_count() -> None:
    process = subprocess.Popen(["true"], start_new_session=True)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert members(process.pid, b"no such mark") == {}
    process.wait()
