from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlspec import failure

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


def cause(log: Path) -> str:
    found = failure.find(log)
    assert found is not None
    return found.text


def test_root_cause_of_a_recorded_main(tmp_path: Path) -> None:
    log = write(tmp_path, RECORDED.replace("{code}", "1").replace("{traceback}", BY_RECORD))
    assert cause(log) == "rank 3 exited with 1: ValueError: bad expert count"
    found = failure.find(log)
    assert found is not None
    assert found.traceback[-3:] == ['  File "/w/r.py", line 6, in main', '    raise ValueError("bad")', found.error]


def test_root_cause_of_a_rank_that_only_exits(tmp_path: Path) -> None:
    block = RECORDED.replace("{code}", "2").replace("{traceback}", "To enable traceback see: https://pytorch.org")
    log = write(tmp_path, block[block.index("Traceback", block.index("nosuch'")) :])
    assert cause(log) == "rank 3 exited with 2"


def test_root_cause_of_a_killed_rank(tmp_path: Path) -> None:
    log = write(tmp_path, RECORDED.replace("{code}", "-9").replace("{traceback}", "Signal 9 (SIGKILL) received"))
    assert cause(log) == "rank 3 was killed by SIGKILL (out of memory?)"


def raised(rank: int, error: str) -> str:
    lines = ["Traceback (most recent call last):", '  File "t.py", line 3, in f', "    x()", error]
    return "".join(f"[rank{rank}]: {line}\n" for line in lines)


@pytest.mark.parametrize("named", [3, 0])
def test_root_cause_is_the_rank_that_raised_first(tmp_path: Path, named: int) -> None:
    block = RECORDED.replace("{code}", "1").replace("{traceback}", "To enable traceback see: https://pytorch.org")
    block = block.replace("rank      : 3 (local_rank: 3)", f"rank      : {named} (local_rank: {named})")
    ranks = raised(3, "torch.OutOfMemoryError: CUDA out of memory.") + raised(0, "RuntimeError: closed by peer")
    log = write(tmp_path, ranks + "noise\n" * 1000 + block)
    assert cause(log) == "rank 3 exited with 1: torch.OutOfMemoryError: CUDA out of memory."


def test_the_rank_that_raised_first_has_its_own_exit_code(tmp_path: Path) -> None:
    block = RECORDED.replace("{code}", "1").replace("{traceback}", "To enable traceback see: https://pytorch.org")
    block = block.replace("exitcode  : -15 ", "exitcode  : 7 ")
    log = write(tmp_path, raised(0, "SystemError: 7") + raised(3, "RuntimeError: closed by peer") + block)
    assert cause(log) == "rank 0 exited with 7: SystemError: 7"


def test_root_cause_is_the_rank_that_left_without_a_traceback(tmp_path: Path) -> None:
    block = RECORDED.replace("{code}", "2").replace("{traceback}", "To enable traceback see: https://pytorch.org")
    block = block[block.index("Traceback", block.index("nosuch'")) :]
    log = write(tmp_path, raised(0, "RuntimeError: closed by peer") + block)
    assert cause(log) == "rank 3 exited with 2"


def test_root_cause_of_interleaved_tracebacks(tmp_path: Path) -> None:
    line = 'Traceback (most recent call last):\n  File "/w/run.py", line 2, in <module>\n    from a import b\n'
    both = "".join(f"{part}\nstep 1/3\n{part}\n" for part in line.splitlines())
    log = write(tmp_path, both + "ImportError: cannot import name 'b' from 'a'\n" * 2)
    assert cause(log) == "ImportError: cannot import name 'b' from 'a'"


def test_an_old_caught_traceback_is_no_cause(tmp_path: Path) -> None:
    caught = 'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\nImportError: nosuch\n'
    assert cause(write(tmp_path, caught + "step\n" * 100)) == "ImportError: nosuch"
    assert failure.find(write(tmp_path, caught + "step\n" * 300)) is None


def test_chained_tracebacks_are_one(tmp_path: Path) -> None:
    one = 'Traceback (most recent call last):\n  File "t.py", line 3, in f\n    x()\n'
    during = "\nDuring handling of the above exception, another exception occurred:\n\n"
    found = failure.find(write(tmp_path, f"{one}KeyError: 'steps'\n{during}{one}ValueError: 5 experts on 4 ranks\n"))
    assert found is not None and found.text == "ValueError: 5 experts on 4 ranks"
    assert "KeyError: 'steps'" in found.traceback


@pytest.mark.parametrize("before", ["step 1/2 | loss 1.5", "\r  3%|   | 1/32 [00:01<00:31,  1.02it/s]"])
def test_a_traceback_may_begin_behind_a_line_without_an_end(tmp_path: Path, before: str) -> None:
    plain = raised(1, "ValueError: 3").replace("[rank1]: ", "")
    for text in (raised(1, "ValueError: 3"), plain):
        found = failure.find(write(tmp_path, before + text))
        assert found is not None and "\n".join(found.traceback) + "\n" == plain


def test_no_root_cause(tmp_path: Path) -> None:
    assert failure.find(write(tmp_path, "step 1/3\nstep 2/3\n")) is None


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
    assert failure.could_not_run(found, tmp_path / "run.py") is expected


RAISED = failure.Failure(traceback=["ValueError: 3"])


@pytest.mark.parametrize(
    ("returncode", "found", "tail", "expected"),
    [
        (-9, None, [], "killed by SIGKILL (out of memory?)"),
        (-6, RAISED, [], "killed by SIGABRT"),
        (-50, None, [], "killed by signal 50"),
        (137, None, [], "exited with 137 (as after SIGKILL (out of memory?)); it printed nothing"),
        (2, None, ["a", " b "], "exited with 2; the last line it printed: b"),
        (1, None, ["error: b", "error: " + 300 * "a"], "exited with 1: " + 300 * "a"),
        (1, RAISED, ["b"], "exited with 1: ValueError: 3"),
        (1, replace(RAISED, rank=1, exitcode=2), ["b"], "rank 1 exited with 2: ValueError: 3"),
    ],
)
def test_reason(returncode: int, found: failure.Failure | None, tail: list[str], expected: str) -> None:
    assert failure.reason(returncode, found, tail) == expected
