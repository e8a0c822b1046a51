from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from rlspec import catalog, cells, chains, contract, listing, logs, nodes
from rlspec.checks import CHECKS, common
from rlspec.errors import SpecError
from rlspec.rules import RULES
from rlspec.trainers import TRAINERS
from tests.tiny import rlspec, run_folder, save, training

ROOT = Path(__file__).parents[1]
ROWS = [row.id for name in catalog.entries("contracts", ROOT) for row in contract.load(name, ROOT).rows]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(what):
    return [line.split()[0] for line in listing.table(what, Path.cwd()).splitlines()]


def test_every_noun(here):
    assert {"qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-120b", "char-gpt"} <= set(names("models"))
    assert names("contracts") == ["strict", "training", "ws1"]
    assert names("trainers") == list(TRAINERS) and names("readers") == list(logs.READERS)
    standard = {check for checks in common.STANDARD.values() for check in checks}
    assert set(names("judgments")) == standard | {chains.ACROSS}
    assert set(names("workloads")) >= {"long", "tiny", "tiny-chain", "wide", "ws1", "ws1-chain"}
    assert set(names("operators")) == set(nodes.NODES)
    assert listing.table("runs", here) == "no runs"


def test_a_line_says_something_about_its_entry(here):
    models = listing.table("models", here)
    assert "128 experts" in models and "dense" in models and "layers" in models
    assert "bring your own" not in models and "your own program" in listing.table("trainers", here)
    for what in ("models", "contracts", "trainers", "readers", "judgments"):
        assert all(len(line.split()) > 1 for line in listing.table(what, here).splitlines()), what


def test_own_entries_come_beside_the_shipped_ones(here):
    (here / "models").mkdir()
    (here / "models" / "mine.yaml").write_text("name: mine\n")
    assert "mine" in names("models") and "qwen3-8b" in names("models")


def test_runs_with_what_they_came_out_as(here):
    path = training(here / "work")
    rlspec("run", path)
    rlspec("run", path, "--arm", "base0")
    first, second = (line.split() for line in rlspec("list", "runs").out.splitlines())
    assert second == [run_folder().name, "correctness", "char-gpt", "ERROR"] and first[3] == "PASS"
    (run_folder() / "report.json").write_text("{")
    assert rlspec("list", "runs").out.splitlines()[1].endswith("unreadable")
    (run_folder() / "report.json").unlink()
    assert rlspec("list", "runs").out.splitlines()[1].endswith("unfinished")


@pytest.mark.parametrize("rule", RULES)
def test_explain_every_rule(rule):
    found = listing.explain(rule.lower(), ROOT)
    assert found.startswith(f"{rule}: {RULES[rule].title}") and "refused" in found and "better" in found
    assert RULES[rule].why.split()[0] in found


@pytest.mark.parametrize("judgment", listing.JUDGMENTS)
def test_explain_every_judgment_with_its_rows(judgment):
    found = listing.explain(judgment, ROOT)
    kind, about = listing.JUDGMENTS[judgment]
    assert found.startswith(f"{judgment} (kind {kind}): ") and f"/{judgment}/" in found and "source:" in found


@pytest.mark.parametrize("row", ROWS)
def test_explain_every_row_with_source_and_reason(row):
    name, judgment, subject, dtype = row.split("/")
    made = contract.load(name, ROOT).resolve(judgment, subject, dtype)
    found = listing.explain(row, ROOT)
    assert made.source in found and made.date in found and " ".join(made.reason.split())[:60] in " ".join(found.split())
    assert listing.explain(f"{name}/{judgment}", ROOT).count("source:") >= 1


def test_explain_a_whole_contract():
    assert listing.explain("ws1", ROOT).count("source:") == len([row for row in ROWS if row.startswith("ws1/")])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("RL999", "nothing is called 'RL999'"),
        ("RL20", "did you mean 'RL2"),
        ("drif", "did you mean 'drift'"),
        ("trainin", "did you mean 'training'"),
        ("training/drif", "no row 'training/drif'; did you mean 'drift'"),
        ("trainin/drift", "unknown contract 'trainin'; did you mean 'training'"),
        ("", "nothing is called ''"),
    ],
)
def test_explain_what_is_not_there(here, name, words):
    with pytest.raises(SpecError, match=words):
        listing.explain(name, here)
    assert rlspec("explain", name).code == 2


def test_doctor_says_what_is_here_and_which_specs_would_be_blocked(here, monkeypatch):
    done = rlspec("doctor")
    assert done.code == 0 and {line.split()[0] for line in done.out.splitlines()} >= {"GPU", "torch", "git", "slurm"}
    training(here / "a", requires={"commands": ["no-such-program"]})
    training(here / "b", launch={"name": "slurm", "nodes": 1, "gpus_per_node": 1})
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    training(here / "c")
    save(here / "d.yaml", {"kind": "nonsense"})
    lines = rlspec("doctor", ".").out.splitlines()[-4:]
    assert lines[0] == "a/spec.yaml: BLOCKED: program 'no-such-program' is not on PATH"
    assert lines[1] == "b/spec.yaml: BLOCKED: program 'srun' is not on PATH"
    assert lines[2].startswith("c/spec.yaml: not BLOCKED") and "rlspec lint d.yaml" in lines[3]


def test_doctor_of_a_path_that_is_not_there(here):
    assert rlspec("doctor", "nowhere").code == 2


@pytest.mark.parametrize("kind", CHECKS)
def test_explain_every_kind(kind):
    told = listing.explain(kind, ROOT)
    assert told.startswith(f"{kind}, a kind of spec: whether ") and f"`rlspec schema {kind}`" in told
    assert all(judgment in told for judgment in common.STANDARD[kind])
    (example,) = re.findall(r"example: `rlspec (?:run|init) ([^ `]+)", told)
    assert example == kind or (ROOT / example).exists()


def test_explain_a_category_of_cells(here):
    assert set(cells.MEANING) == set(cells.CATEGORIES)
    told = listing.explain("red_provenance", here)
    assert "ERROR" in told and "fallback" in told
