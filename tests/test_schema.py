from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft7Validator

from rlspec import document, schema
from rlspec.errors import SpecError

NAMES = sorted(path.name.removesuffix(".schema.json") for path in schema.FOLDER.glob("*.schema.json"))
SPEC = """\
kind: parity
question: Alike?
arms:
  - {name: a, role: rollout, records: a.jsonl}
  - {name: b, role: train, records: b.jsonl}
"""


def problems(text):
    read, found = document.parse(text.encode(), Path("s.yaml"))
    assert not found, found
    return schema.check_spec(read)


def said(text):
    return [(p.rule, p.line, p.column, p.message) for p in problems(text)]


@pytest.mark.parametrize("name", NAMES)
def test_every_schema_is_draft_7_and_self_contained(name):
    loaded = schema.load(name)
    Draft7Validator.check_schema(loaded)
    assert "common.schema.json" not in json.dumps(loaded)
    for reference in references(loaded):
        assert reference.removeprefix("#/definitions/") in loaded["definitions"], reference


def references(node):
    if isinstance(node, dict):
        yield from [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        node = list(node.values())
    for child in node if isinstance(node, list) else ():
        yield from references(child)


@pytest.mark.parametrize("kind", schema.KINDS)
def test_every_key_of_a_spec_is_explained_and_no_other_is_allowed(kind):
    loaded = schema.load(kind)
    assert loaded["additionalProperties"] is False
    for key, node in loaded["properties"].items():
        target = loaded["definitions"].get(node.get("$ref", "").rpartition("/")[2], {})
        text = node.get("description") or target.get("description")
        assert text or key in ("judgments", "arms"), key


def test_a_good_spec_has_no_problem_and_may_name_its_schema():
    assert problems(SPEC) == [] and problems('"$schema": x.json\n' + SPEC) == []


@pytest.mark.parametrize(
    ("text", "rule", "message"),
    [
        ("", "RL103", "a spec is a mapping, not nothing"),
        ("[1]", "RL103", "a spec is a mapping, not a list"),
        ("1", "RL103", "a spec is a mapping, not the number 1"),
        ("a: 1", "RL102", "'kind' is missing"),
        ("kind: paritee", "RL106", "unknown kind 'paritee'"),
        ("kind: [parity]", "RL106", "unknown kind ['parity']"),
        ("kind: {a: 1}", "RL106", "unknown kind {'a': 1}"),
        ("kind: 1", "RL106", "unknown kind 1"),
    ],
)
def test_without_a_kind_nothing_else_is_checked(text, rule, message):
    (problem,) = problems(text)
    assert (problem.rule, problem.message) == (rule, message) and problem.hint


def test_all_problems_with_the_place_of_each():
    text = SPEC.replace("question", "qestion").replace("role: train", "role: trainer").replace("name: a", "name: 'a b'")
    assert said(text) == [
        ("RL101", 2, 1, "unknown key 'qestion'"),
        ("RL105", 4, 12, "arms.0.name: 'a b' does not have the right form"),
        ("RL104", 5, 21, "arms.1.role: unknown 'trainer'"),
    ]
    assert "did you mean 'question'? allowed: " in problems(text)[0].hint


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("dtype: 16", "dtype: unknown 16", "known: bf16, fp16, fp32, fp8"),
        ("time_limit: 30", "time_limit: text is due, not the number 30", "per arm: 90s, 30m or 2h"),
        ("name: true", "name: text is due, not true", 'write "true", in quotes'),
        (
            "requires: {gpus: '8'}",
            "requires.gpus: an integer is due, not the text '8'",
            "write 8, without quotes and units",
        ),
        ("requires: {gpus: 8.0}", "requires.gpus: an integer is due, not the number 8.0", ""),
        ("requires: {gpus: true}", "requires.gpus: an integer is due, not true", ""),
        ("requires: {memory_gib: 80x}", "requires.memory_gib: a number is due, not the text '80x'", "write 80,"),
        ("requires: {memory_gib: much}", "requires.memory_gib: a number is due, not the text 'much'", "write a number"),
        ("requires: {memory_gib: 0}", "requires.memory_gib: 0 is not above 0", ""),
        ("requires: {gpus: 0}", "requires.gpus: 0 is below 1", ""),
        ("requires: []", "requires: a mapping is due, not a list", ""),
        ("requires:", "requires: a mapping is due, not nothing", ""),
        ("judgments: []", "judgments: 0 entries, at least 1 are due", ""),
        ("judgments: [approx_kl, approx_kl]", "judgments: an entry stands twice", ""),
        ("contract: ''", "contract: an empty text", ""),
        ("expect: pass", "expect: unknown 'pass'", "known: BLOCKED"),
        ("expect: {judgments: {}}", "'status' is missing in expect", ""),
    ],
)
def test_one_message_a_mistake_and_what_to_write(line, message, hint):
    (problem,) = problems(SPEC + line + "\n")
    assert problem.message == message and hint in problem.hint and problem.hint
    assert problem.line == 6


def test_a_missing_key_stands_at_its_mapping():
    assert said(SPEC.replace("role: train, ", "")) == [("RL102", 5, 5, "'role' is missing in arms.1")]


def test_suggestions():
    assert schema.suggestion("drfit", ["drift", "b"]) == "did you mean 'drift'? known: b, drift"
    assert schema.suggestion("zzz", ["drift"]) == "known: drift" and schema.suggestion("x", []) == "none is known here"
    assert schema.nearest(3, ["drift"]) is None


def test_values_that_are_in_no_file():
    assert schema.check_value({"kind": "parity"}, "parity") == ["top: 'arms' is a required property"]
    (text,) = schema.check_value({"kind": "parity", "arms": [{"name": "a", "role": "x"}] * 2}, "parity")[:1]
    assert text.startswith("arms/0/role: 'x' is not one of")


def test_a_place_that_the_file_does_not_have_is_the_nearest_above():
    read, _ = document.parse(SPEC.encode(), Path("s.yaml"))
    assert schema.place(read, "/arms/1/records") == (5, 37)
    assert schema.place(read, "/arms/1/nothing/at/all") == (5, 5)
    assert schema.place(read, "/nothing") == (1, 1)


def test_an_unknown_schema():
    with pytest.raises(SpecError, match="no schema 'x'"):
        schema.load("x")


def test_a_checkout_without_links_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "schemas").write_text("../schemas")
    monkeypatch.setattr(schema, "FOLDER", tmp_path / "schemas")
    with pytest.raises(SpecError, match="core.symlinks=true"):
        schema.load.__wrapped__("parity")
