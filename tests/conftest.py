"""Fixtures of tests that start processes, need a git repository or read logs."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlspec import child
from rlspec.logs import read
from rlspec.model import Arm, Run
from tests import gitrepo
from tests.processes import LONG, marking

if "PYTEST_XDIST_WORKER" in os.environ or os.environ.get("TRITON_INTERPRET") == "1":
    gc.disable()  # until all is imported

# A worker takes a file at a time, so that the longest come first and none of them alone at the end. What SLURM's tests
# wait for takes no core, and controls can use two.
LONGEST = ("controls", "slurm", "operator_controls", "end_to_end", "chain_controls", "mesh", "invariant_mode")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files come first; tests that take minutes are skipped, and seen to be, unless `-m` names them."""
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    if "slow" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="run with -m slow"))


def pytest_xdist_auto_num_workers() -> int:
    """A worker a core, eight at most: each holds torch in memory, and so do the processes that tests start."""
    return int(os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS") or min(8, len(os.sched_getaffinity(0))))


def pytest_collection_finish() -> None:
    """The garbage collector does not look through torch and the tests again."""
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """One thread, here and in what tests start: as many workers as cores compute at once, and threads would wait."""
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def swiftly() -> Iterator[None]:
    """In the process of interpreted tests."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from tests.kernels.interpreted import swift

    with swift():
        yield


@pytest.fixture
def word(tmp_path: Path) -> Iterator[str]:
    """A word for the command lines of a test's processes; what holds it at the end is killed, in any case."""
    with marking(tmp_path) as word:
        yield word


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stopped gets as long as a busy machine may take to end it and to hand over its last words."""
    monkeypatch.setattr(child, "KILL_WAIT", LONG)
    monkeypatch.setattr(child, "LAST_WORDS", LONG)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template") / "repo"
    gitrepo.make(root)
    return root


@pytest.fixture
def repo(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one's own, see `gitrepo.make`; git takes no setting of whoever runs the tests."""
    for name in os.environ.keys() - gitrepo.configured(os.environ).keys():
        monkeypatch.delenv(name)
    for name, value in gitrepo.CONFIGURATION.items():
        monkeypatch.setenv(name, value)
    root = tmp_path / "re po"
    shutil.copytree(template, root)
    gitrepo.git(root, "update-index", "-q", "--refresh")
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run folder"


@pytest.fixture
def log(tmp_path: Path) -> Callable[..., Run]:
    """Write a log of lines, text or bytes, and read it as the run of base0."""

    def write_and_read(text: list[str] | str | bytes, reader: str, **options: Any) -> Run:
        path = tmp_path / "base0.log"
        whole = "\n".join(text) + "\n" if isinstance(text, list) else text
        path.write_bytes(whole if isinstance(whole, bytes) else whole.encode())
        return read(path, reader, Arm(name="base0", role="base"), **options)

    return write_and_read
