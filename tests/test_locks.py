"""Locks on a shared file system: two processes of one machine, and another machine as its file would show it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading

import pytest

from rlspec import locks
from rlspec.errors import RunError, SpecError
from tests.gitrepo import Child
from tests.processes import LONG

HOLD = "import sys, pathlib; from rlspec import locks\n"
HOLD += "with locks.held(pathlib.Path(sys.argv[1]), 'run', pathlib.Path('/repo')): print('ready', flush=True); "
HOLD += "sys.stdin.read()"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "state" / "lock"


def hold(file, what="run"):
    return locks.held(file, what, file.parent.parent)


def holder(file):
    return json.loads(file.read_text())


def elsewhere(file, silent, **changes):
    """The lock of a process on another machine that gave its last sign of life `silent` seconds ago, in file time."""
    with hold(file):
        text = file.read_text()
    file.write_text(json.dumps({**json.loads(text), "host": "gpu-b", "pid": 7, **changes}))
    given = file.stat().st_mtime - silent
    os.utime(file, (given, given))
    return file.read_bytes()


def test_a_lock_is_there_while_it_is_held_and_then_nothing_is(file):
    with hold(file, "run specs/a.yaml"):
        assert holder(file)["pid"] == os.getpid() and len(list(file.parent.iterdir())) == 1
        assert holder(file)["boot"] and holder(file)["namespace"].startswith("pid:")
        words = rf"run specs/a.yaml \(pid {os.getpid()} on .*since 20.*`kill {os.getpid()}` \(its lock is {file}\)"
        with pytest.raises(SpecError, match=words), hold(file):
            pass
    assert list(file.parent.iterdir()) == []


def test_a_living_process_of_this_machine_keeps_its_lock_however_silent_it_is(file):
    with Child(HOLD, file) as child:
        os.kill(child.pid, signal.SIGSTOP)
        os.utime(file, (1, 1))
        with pytest.raises(SpecError, match=f"pid {child.pid}"), hold(file):
            pass
        os.kill(child.pid, signal.SIGCONT)
        assert holder(file)["pid"] == child.pid


@pytest.mark.parametrize("reap", [True, False])
def test_the_lock_of_a_killed_process_of_this_machine_is_void_at_once(file, reap):
    with Child(HOLD, file) as child:
        child.kill()
        if reap:
            child.wait()
        else:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie still has its number
        assert holder(file)["pid"] == child.pid
        with hold(file):
            assert holder(file)["pid"] == os.getpid()


def test_a_number_that_is_another_process_by_now_holds_nothing(file):
    elsewhere(file, 0, host=locks.signature()["host"], pid=os.getpid(), began="12")
    with hold(file):
        assert holder(file)["began"] != "12"


def test_another_machine_keeps_its_lock_up_to_the_stated_silence(file):
    kept = elsewhere(file, locks.SILENT - 100)
    with pytest.raises(SpecError) as refused, hold(file):
        pass
    assert file.read_bytes() == kept and len(list(file.parent.iterdir())) == 1
    text = str(refused.value)
    assert "(pid 7 on gpu-b, since 20" in text and f"delete {file}" in text and "void 5 min after" in text
    assert re.search(r"sign of life is 2\d\d s old", text)  # 200, and what this machine took since


@pytest.mark.parametrize("change", [{"boot": "other"}, {"namespace": "pid:[1]"}])
def test_a_host_of_the_same_name_or_another_container_is_another_machine(file, change):
    """A pid that is nowhere here says nothing about a process there."""
    elsewhere(file, 10, host=locks.signature()["host"], pid=2**22 + 1, **change)
    with pytest.raises(SpecError, match="is using"), hold(file):
        pass


def test_a_machine_that_is_silent_for_longer_has_lost_its_lock(file):
    elsewhere(file, locks.SILENT + 100)
    with hold(file):
        assert holder(file)["pid"] == os.getpid()
    assert list(file.parent.iterdir()) == []


@pytest.mark.parametrize("ahead", [-7200, 7200])
def test_the_clock_of_this_machine_does_not_count(file, ahead, monkeypatch):
    """Files have the server's time, which is hours off; the ages of files are the same."""
    real = os.utime

    def touch(path, times=None):
        real(path)
        if times is None:
            now = os.stat(path).st_mtime + ahead
            real(path, (now, now))

    monkeypatch.setattr(locks.os, "utime", touch)
    elsewhere(file, 0)
    real(file, (file.stat().st_mtime + ahead - 100,) * 2)
    with pytest.raises(SpecError, match=r"is 1\d\d s old"), hold(file):
        pass
    real(file, (file.stat().st_mtime - locks.SILENT,) * 2)
    with hold(file):
        pass


@pytest.mark.parametrize("text", ["", "[1]", "no JSON", "{}"])
def test_what_is_no_lock_of_ours_is_void_by_its_age_alone(file, text):
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(SpecError, match=f"it has not said which.*delete {file}"), hold(file):
        pass
    os.utime(file, (file.stat().st_mtime - locks.SILENT - 1,) * 2)
    with hold(file):
        pass


def test_signs_of_life_are_given_while_a_lock_is_held(file, monkeypatch):
    monkeypatch.setattr(locks, "BEAT", 0.01)
    beaten = threading.Event()
    real = os.utime
    with hold(file):
        os.utime(file, (1, 1))
        monkeypatch.setattr(locks.os, "utime", lambda *given: (real(*given), beaten.set()))
        assert beaten.wait(LONG) and file.stat().st_mtime > 1e9
    assert not [one for one in threading.enumerate() if one.name.endswith("(_beat)")]


@pytest.mark.parametrize("taken", [True, False])
def test_who_has_lost_its_lock_stops_and_leaves_the_other_ones(file, taken, monkeypatch):
    monkeypatch.setattr(locks, "BEAT", 0.01)
    told = threading.Event()
    former = signal.signal(signal.SIGTERM, lambda number, frame: told.set())
    try:
        with pytest.raises(RunError, match="was taken from this process.*or deleted"), hold(file):
            text = json.dumps({**holder(file), "token": "another's"})
            file.write_text(text) if taken else file.unlink()
            assert told.wait(LONG)
    finally:
        signal.signal(signal.SIGTERM, former)
    assert file.exists() == taken and (not taken or file.read_text() == text)


def test_of_many_that_find_a_void_lock_one_gets_it(file):
    elsewhere(file, locks.SILENT + 100)
    code = HOLD.replace("'ready'", "'held'").replace(
        "with locks", "print('ready', flush=True); sys.stdin.readline()\nwith locks"
    )
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(code, file)) for _ in range(4)]
        for child in children:
            child.stdin.write("go\n")
            child.stdin.flush()
        assert sorted(child.stdout.readline() for child in children) == ["", "", "", "held\n"]
    assert [path.name for path in file.parent.iterdir()] in ([], ["lock"])


def test_a_lock_is_not_deleted_while_another_one_deletes(file):
    kept = elsewhere(file, locks.SILENT + 100)
    (file.parent / "lock.break").touch()
    with pytest.raises(SpecError, match=f"cannot be locked; .*delete {file} and {file}.break"), hold(file):
        pass
    assert file.read_bytes() == kept


def test_a_lock_that_changed_hands_meanwhile_is_not_deleted(file, monkeypatch):
    """Between the look at a void lock and its deletion another one has deleted it and made its own."""
    elsewhere(file, locks.SILENT + 100)
    real = locks._now

    def slow(path):
        now = real(path)
        path.unlink()
        elsewhere(path, 0, pid=8)
        return now

    monkeypatch.setattr(locks, "_now", slow)
    monkeypatch.setattr(locks, "TRIES", 1)
    with pytest.raises(SpecError), hold(file):
        pass
    assert holder(file)["pid"] == 8


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "state").write_text("")
    with (
        pytest.raises(SpecError, match="cannot be made to lock .*make its folder writable"),
        hold(tmp_path / "state/lock"),
    ):
        pass
