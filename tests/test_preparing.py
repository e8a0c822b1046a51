from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from rlspec import linting, preparing
from rlspec.cli import main

pytest.importorskip("numpy")


def test_a_prepared_corpus_has_a_manifest_that_lint_reads(tmp_path, capfd):
    (tmp_path / "a.txt").write_text("one\n\ntwo and more\n")
    assert preparing.prepare(tmp_path / "c", [tmp_path / "a.txt"], "byte", None) == 0
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert manifest["documents"] == 2 and json.loads(capfd.readouterr().out)["tokens"] == manifest["tokens"]
    (tmp_path / "spec.yaml").write_text(
        "kind: correctness\nquestion: q\nmodel: tiny-moe\nmesh: {}\nsequence_length: 4\n"
        "trainer: {name: embedded, settings: {corpus: c}}\narms:\n  - {name: base0, role: base}\n"
        "  - {name: base1, role: base, perturb: {weights: 1ulp}}\n"
        "  - {name: feat0, role: feature, implementation: reference}\n"
    )
    _, problems = linting.lint([tmp_path / "spec.yaml"])
    assert [p.rule for p in problems] == ["RL209"] and "the corpus has 4" in problems[0].message


def test_what_is_wrong_is_said_by_the_child(tmp_path, capfd):
    assert preparing.prepare(tmp_path / "c", [tmp_path / "nowhere.txt"], "byte", None) == 2
    assert "nowhere.txt" in capfd.readouterr().err and not (tmp_path / "c").exists()
    done = CliRunner().invoke(main, ["prepare", str(tmp_path / "c"), "--tokenizer", "bpe:x"])
    assert done.exit_code == 2
