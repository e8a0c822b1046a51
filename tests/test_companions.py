"""What lies beside operators of one's own is part of what an arm ran, though no observer sees it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlspec import companions, pipeline
from rlspec.model import Arm
from tests.gitrepo import commit
from tests.tiny import report, rlspec, run_folder

MINE = "import json, pathlib\n\nscale = json.loads(pathlib.Path(__file__).with_name('{}').read_text())\n"
TABLE = (
    "\n\ndef silu(x):\n    return (x.float().sigmoid() * x.float() * scale).to(x.dtype)\n\n\ntable = {'silu': silu}\n"
)
SPEC = """\
kind: operators
question: Is the product what its factor makes it?
model: tiny-dense
workload: tiny
operators: [silu]
arms:
  - {name: one, implementation: "mine:table"}
judgments: [forward_accuracy]
"""
FILES = {"mine.py": MINE, "k.cpp": "1", "libk.so": "1", "tune.json": "1", "below/k.cuh": "1", "notes.txt": "1"}


@pytest.fixture(params=["git", "folder"])
def here(request: pytest.FixtureRequest, repo: Path, tmp_path: Path) -> Path:
    """Operators that git tracks, but for the library, or in a folder that it knows nothing of."""
    if request.param == "git":
        commit(repo, "operators", {name: text for name, text in FILES.items() if not name.endswith(".so")})
    folder = repo if request.param == "git" else tmp_path / "folder"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder.resolve()


ARM = Arm(name="one", role="candidate", implementation="mine:table")


def nothing() -> None:
    pass


def ran(here: Path, meanwhile: Callable[[], object] = nothing, build: bool = False) -> dict[str, Any]:
    """The state of an arm during which something happens."""
    spec: Any = SimpleNamespace(path=here / "spec.yaml", build=(("make",),) if build else ())
    before = companions.take(spec, ARM, {}, [spec.path])
    meanwhile()
    step: Any = SimpleNamespace(arm=ARM, commit=None)
    kept = companions.of(spec, step, before, here, {"files": [str(here / "mine.py")]}, 0, [spec.path])
    return {"arm": "one", "status": "done", **kept}


def again(here: Path, state: dict[str, Any], build: bool = False) -> str | None:
    spec: Any = SimpleNamespace(path=here / "spec.yaml", build=(("make",),) if build else ())
    return companions.changed(spec, ARM, state, here, Path, [spec.path])


def edit(file: Path) -> None:
    file.write_text(file.read_text() + " ")


def test_arms_without_operators_of_their_own_have_nothing_beside_them(here: Path) -> None:
    spec: Any = SimpleNamespace(path=here / "spec.yaml")
    for given in (None, "triton", {"silu": "cuda"}):
        arm = Arm(name="one", role="candidate", implementation=given)
        assert companions.take(spec, arm, {}, []) is None
        assert companions.changed(spec, arm, {}, here, Path, []) is None
    assert again(here, {}) == "what lay beside its operators was not written down"


@pytest.mark.parametrize("name", ["k.cpp", "libk.so", "below/k.cuh", "tune.json", "notes.txt"])
def test_what_changes_after_an_arm_ran(here: Path, name: str) -> None:
    one = ran(here)
    assert again(here, one) is None and companions.apart(one, []) is None
    edit(here / name)
    two = {**ran(here), "arm": "two"}
    found, said = companions.apart(two, [one]), [*companions.remarks(two, [one])]
    if name == "notes.txt":
        assert (found, said, again(here, one)) == (None, [], None)
        return
    assert again(here, one) == f"{name} changed since then"
    if name == "tune.json":
        assert (found, said) == (None, ["tune.json changed after one ran, and two ran with it"])
    else:
        assert found is not None and found.startswith(f"{name} changed after one ran") and not said


@pytest.mark.parametrize("name", ["k.cpp", "libk.so", "tune.json"])
def test_what_changes_while_an_arm_runs(here: Path, name: str) -> None:
    one = ran(here, lambda: edit(here / name))
    found, said = companions.apart(one, []), [*companions.remarks(one, [])]
    if name == "k.cpp":
        assert found is not None and found.startswith("k.cpp changed while the arm ran")
    elif name == "tune.json" and (here / ".git").exists():
        assert (found, said) == (None, ["tune.json changed while one ran"])
    else:
        assert found is None and said[0].startswith(f"{name}, which git does not track, changed while an arm ran")
        assert again(here, one) is None
        edit(here / name)
        assert again(here, one) == f"{name} changed since then"


def test_what_an_arm_builds_itself_is_no_edit(here: Path) -> None:
    def build() -> None:
        (here / "build").mkdir(exist_ok=True)
        (here / "build" / "k.so").write_text("made")
        (here / "build" / "made.cpp").write_text("made")

    one = ran(here, build)
    two = ran(here)
    assert [companions.apart(one, []), companions.apart(two, [one])] == [None, None]
    assert [*companions.remarks(one, []), *companions.remarks(two, [one])] == []
    assert again(here, one) is None and again(here, two) is None
    (here / "other.json").write_text("{}")
    assert again(here, one) == "other.json changed since then"
    (here / "other.json").write_text('{\n  "schema_version": 1,\n  "rlspec": "0.1.0",')
    assert again(here, one) is None, "a report of rlspec's"


def test_of_what_build_commands_make_anew_only_tracked_files_count(here: Path) -> None:
    one = ran(here, build=True)
    edit(here / "libk.so")
    assert companions.apart(ran(here, build=True), [one]) is None and again(here, one, build=True) is None
    edit(here / "k.cpp")
    assert (again(here, one, build=True) is not None) == (here / ".git").exists()


def test_modules_are_looked_for_where_they_are_imported_from(tmp_path: Path) -> None:
    for place in ("spec", "declared/mine", "shell"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "declared" / "mine" / "__init__.py").touch()
    (tmp_path / "spec" / "mine.py").touch()
    (tmp_path / "shell" / "other.py").touch()
    spec: Any = SimpleNamespace(path=tmp_path / "spec" / "spec.yaml")
    arm = Arm(name="one", role="candidate", implementation={"silu": "mine:table", "rope": "other:table"})
    near = companions.take(spec, arm, {"PYTHONPATH": str(tmp_path / "shell")}, [])
    assert near is not None and near.folders == {tmp_path / "spec", tmp_path / "shell"}
    declared = Arm(
        name="one",
        role="candidate",
        implementation="mine:table",
        environment={"PYTHONPATH": str(tmp_path / "declared")},
    )
    near = companions.take(spec, declared, {}, [])
    assert near is not None and near.folders == {tmp_path / "declared" / "mine"}


def test_an_arm_whose_operators_read_another_file_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"mine.py": MINE.format("k.cubin") + TABLE, "k.cubin": "1.0", "spec.yaml": SPEC}.items():
        (tmp_path / name).write_text(text)
    assert rlspec("run", "spec.yaml").code == 0
    first = run_folder().name
    monkeypatch.setattr(pipeline.arms, "run", lambda session, step: pytest.fail("it is as it was"))
    assert rlspec("run", "spec.yaml", "--from", first).code == 0
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "k.cubin").write_text("1.5")
    done = rlspec("run", "spec.yaml", "--from", first)
    assert done.code == 1 and "one: runs again, since k.cubin changed since then" in done.err, done
    assert report()["arms"][0]["status"] == "done"
