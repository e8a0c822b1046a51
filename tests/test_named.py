from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlspec import named, pipeline
from tests.gitrepo import commit
from tests.tiny import report, rlspec, run_folder, statuses, training

# A run file as a shell starts it, whose log and last step go to files that outlive the run; feat0 may edit.
SCRIPT = "{python} -S $1 | tee train.log; date +%N > last.json; [ -z $EDIT ] || printf ' ' >> $EDIT\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spec(folder: Path, edited: str = "", edits: str = "") -> Path:
    """Three arms that run `train.sh` with `cfg.json` and name their outputs; base1 writes `edits`, all `edited`."""
    arms = [{"name": name, "role": "base", "environment": {"EDIT": edited}} for name in ("base0", "base1")]
    arms[1]["environment"] = {"EDIT": edits or edited}
    arms.append({"name": "feat0", "role": "feature", "environment": {"EDIT": edited}})
    path = training(folder, arms=arms)
    words = "[bash, train.sh, '{run_file}', --config=cfg.json, --out, last.json, --log, train.log]"
    lines = path.read_text().replace("  - '{python}'\n  - -S\n  - '{run_file}'\n", "")
    path.write_text(lines.replace("  command:\n", f"  command: {words}\n"))
    (folder / "train.sh").write_text(SCRIPT.replace("{python}", shlex.quote(sys.executable)))
    for name in ("cfg.json", "last.json", "train.log"):
        (folder / name).write_text("of another day\n")
    return path


@pytest.mark.parametrize("name", ["train.sh", "cfg.json"])
def test_what_the_command_names_is_the_same_for_all_arms_or_it_is_an_error(
    here: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = spec(here, edits=name)
    assert rlspec("run", path).code == 4
    reason = report()["arms"][1]["reason"]
    assert reason.startswith(f"{name}, which the command names, changed while base1 ran, and not while base0"), reason
    (here / "spec.yaml").write_text(path.read_text().replace(f"EDIT: {name}", "EDIT: ''"))
    real = pipeline.arms.run

    def run(session: Any, step: Any) -> Any:
        state = real(session, step)
        if step.arm.name == "base0" and len(session.spec.arms) == 3:
            (here / name).write_text((here / name).read_text() + "\n")
        return state

    with monkeypatch.context() as patch:
        patch.setattr(pipeline.arms, "run", run)
        assert rlspec("run", path).code == 4
    assert report()["arms"][1]["reason"].startswith(f"{name}, which the command names, changed after base0 ran")
    done = rlspec("run", path, "--retry-errors")
    assert (
        done.code == 0 and f"base0: runs again, since {name}, which the command names, changed since then" in done.err
    )
    assert set(statuses(report()).values()) == {"done"}, "though each arm wrote its log and its last step"


@pytest.mark.parametrize("tree", ["git", "folder"])
def test_an_arm_is_used_again_only_with_what_its_command_names(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: str
) -> None:
    folder = repo if tree == "git" else tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    path = spec(folder)
    if tree == "git":
        commit(repo, "what is ignored is no part of it", {".gitignore": "*.json\n*.log\n*.sh\nworkspace\nlogging\n"})
    rlspec("run", path)
    rlspec("run", path, "--from", run_folder().name)
    assert set(statuses(report()).values()) == {"reused"}, "the log and the last step are what the arms wrote"
    (folder / "cfg.json").write_text("{}\n")
    done = rlspec("run", path, "--from", run_folder().name)
    assert done.err.count("runs again, since cfg.json, which the command names, changed since then") == 3, done.err


def test_what_each_arm_writes_is_no_edit(here: Path) -> None:
    assert rlspec("run", spec(here, edited="cfg.json")).code == 0


def test_the_files_that_a_command_names(tmp_path: Path) -> None:
    for name in ("a.sh", "b c.json", "d.yaml", "e.log", "own/f", "g", "h", "big"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    os.truncate(tmp_path / "big", named.SMALL + 1)
    (tmp_path / "link").symlink_to("g")
    text = "python3 -u a.sh 'b c.json'|tee e.log>/dev/null; it's"
    argv = (
        sys.executable,
        "bash",
        "-c",
        text[:-6],
        "--config=d.yaml",
        "@h",
        str(tmp_path / "link"),
        "own/f",
        "big",
        ".",
    )
    given: Any = SimpleNamespace(build=(), isolation="worktree")
    step: Any = SimpleNamespace(argv=argv, commit=None)
    found = named.take(given, step, tmp_path, tmp_path, [tmp_path / "own"])
    assert set(found) == {"a.sh", "b c.json", "d.yaml", "e.log", "h", "link", "big"}
    assert found["big"][0].startswith(str(named.SMALL + 1))
    step.argv = ("bash", "-c", text, "a\0b", "x" * 5000)
    assert set(named.take(given, step, tmp_path, tmp_path, [])) == {"a.sh"}, "a quote that nobody closed"
    given.build = (("make",),)
    assert named.take(given, step, tmp_path, tmp_path, []) == {}, "a build may have made it"
    given.build, step.commit = (), "of which it is a tree"
    assert named.take(given, step, tmp_path, tmp_path, []) == {}
    assert set(named.take(given, step, tmp_path, tmp_path / "own", [])) == {str(tmp_path / "a.sh")}, "beside the tree"
    given.isolation = "checkout"
    assert set(named.take(given, step, tmp_path, tmp_path, [])) == {"a.sh"}, "what git does not track, all arms share"
