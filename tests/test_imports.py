"""The import rules of the house: a module imports only from rows before its own, heavy packages nowhere on the host."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rlspec"
ROWS = (
    {"errors", "model", "mounts", "escapes", "interrupts", "printed", "workloads", "wire", "slurm"}
    | {"config_json", "tables"},
    {"architecture", "git", "locks", "nvcc", "progress", "failure", "shapes", "compare", "logprob_lines", "layouts"},
    {"changes", "journal", "output", "formats", "columns", "joining", "student", "logprobs", "nodes", "chains"}
    | {"weight_folders", "chain_backward"},
    {"checkout", "child", "json_formats", "pairing", "fallbacks", "measurements", "recordings"},
    {"trainer_formats"},
    {"trees", "readers", "hints", "dilution", "dlogp_statistics", "cells", "chain_records"},
    {"document", "rules"},
    {"schema", "trainers", "engines", "token_files"},
    {"catalog", "records"},
    {"contract", "plan", "machine", "verdicts", "runs", "chain_sizes"},
    {"logs", "envelope", "timing", "dlogp", "chain_asked"},
    {"copies", "drift_findings", "drift_evidence", "chain_places", "chain_truth"},
    {"drift_doubts"},
    {"drift", "chain_verdicts", "chain_across"},
    {"checks.common"},
    {"checks.training"},
    {"checks.training_rules"},
    {"checks.correctness", "checks.performance", "checks.operators", "checks.parity"},
    {"checks.chain"},
    {"checks"},
    {"linting", "render", "launch", "repository", "provenance"},
    {"reports", "differing", "unasked"},
    {"collecting", "inputs", "snapshot", "surroundings"},
    {"checkouts"},
    {"named", "companions"},
    {"arms"},
    {"resuming"},
    {"reuse"},
    {"pipeline", "report.text", "report.portable"},
    {"report.rows"},
    {
        "report.drift_figures",
        "report.timing_figures",
        "report.parity_figures",
        "report.cell_figures",
        "report.chain_figures",
    },
    {"report.evidence", "report.outcome"},
    {"report.jsonfile", "report.junit", "report.markdown", "report.terminal", "report.tracking"}
    | {"planning", "judging", "listing", "cleaning", "preparing"},
    {"report"},
    {"bisecting"},
    {"cli"},
    {"__main__"},
)
ONLY = {
    "click": {"cli"},
    "yaml": {"document"},
    "jsonschema": {"schema"},
    "jinja2": {"render", "report"},
    "tabulate": {"report.terminal", "report.markdown"},
    "wandb": {"report.tracking"},
    "torch": set(),
    "triton": set(),
    "numpy": set(),
}
APART = ("device", "kernels", "csrc", "specs", "schemas", "templates", "observer")


def name_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "__init__"


MODULES = {name_of(p): p for p in sorted(PACKAGE.rglob("*.py")) if p.relative_to(PACKAGE).parts[0] not in APART}


def imports(path):
    """Every module named by an import anywhere in a file, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(imported):
    name = imported.removeprefix("rlspec.")
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def row(name):
    return next(number for number, names in enumerate(ROWS) if name in names)


def test_every_module_has_a_row():
    assert set(MODULES) - {"__init__"} == {name for names in ROWS for name in names}


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"__init__"}))
def test_imports_go_down(name):
    below = {ours(i) for i in imports(MODULES[name]) if i.startswith("rlspec.")} - {"", name}
    upward = [other for other in below if row(other) >= row(name)]
    assert not upward


@pytest.mark.parametrize("name", sorted(MODULES))
def test_packages_stay_where_they_belong(name):
    found = {imported.split(".")[0] for imported in imports(MODULES[name])} & set(ONLY)
    assert not [package for package in found if name not in ONLY[package]]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_the_host_imports_nothing_of_the_device(name):
    assert not [one for one in imports(MODULES[name]) if one.startswith(("rlspec.device", "rlspec.kernels"))]


def test_kernels_import_no_rlspec():
    for path in (ROOT / "kernels").rglob("*.py"):
        assert not [i for i in imports(path) if i.startswith("rlspec")]


@pytest.mark.parametrize("folder", [PACKAGE, PACKAGE / "device"], ids=lambda folder: folder.name)
def test_readme_names_every_module(folder):
    told = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [path.stem for path in sorted(folder.glob("[!_]*.py")) if f"`{path.stem}`" not in told] == []


def test_lint_imports_nothing_heavy():
    code = (
        "import sys; from rlspec.cli import main\n"
        "try: main(['lint', 'specs'])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "print(sorted({'torch', 'triton', 'numpy', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr


def test_one_word_names_one_thing():
    kinds = set(_kinds())
    assert {p.name.removesuffix(".schema.json") for p in (ROOT / "schemas").glob("*.schema.json")} >= kinds
    for folder in (ROOT / "specs", ROOT / "templates"):
        assert {p.name for p in folder.iterdir() if p.is_dir()} >= kinds, folder
    assert {p.stem.removeprefix("test_") for p in (ROOT / "tests" / "checks").glob("test_*.py")} >= kinds


def _kinds():
    from rlspec.checks import CHECKS
    from rlspec.schema import KINDS

    assert set(KINDS) == set(CHECKS)
    return KINDS
