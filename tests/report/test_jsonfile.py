from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jsonschema
import pytest

from rlspec.report import jsonfile
from tests.report import samples

SCHEMA = json.loads((Path(__file__).parents[2] / "schemas" / "report.schema.json").read_text(encoding="utf-8"))


def faults(report: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(report)]


@pytest.mark.parametrize("name", samples.NAMES)
def test_samples_fit_the_schema_and_survive_the_way_out_and_back(name: str) -> None:
    report = samples.load(name)
    text = jsonfile.render(report)
    assert faults(json.loads(text)) == []
    assert samples.parse(text) == report
    assert text.endswith("}\n")
    assert list(json.loads(text))[: len(report)] == list(report)


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)


OPTIONAL = {"source", "nonfinite", "workload", "operators", "chain", "measured", "seal"}


def required(schema: dict[str, Any], report: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    yield from ((key,) for key in schema["properties"] if key not in OPTIONAL)
    for kind in ("arm", "verdict"):
        yield from ((f"{kind}s", 0, key) for key in schema["definitions"][kind]["properties"])
    for key in ("counts", "mesh", "contract", "spec", "run"):
        yield from ((key, inner) for inner in report[key])
    yield from (("verdicts", 0, "row", key) for key in report["verdicts"][0]["row"])


@pytest.mark.parametrize("way", list(required(SCHEMA, samples.load("correctness-fail"))))
def test_no_field_may_be_missing(way: tuple[Any, ...]) -> None:
    report = samples.load("correctness-fail")
    place: Any = report
    for key in way[:-1]:
        place = place[key]
    del place[way[-1]]
    assert faults(report)


@pytest.mark.parametrize(
    ("way", "value"),
    [
        (("outcome",), "OK"),
        (("verdicts", 0, "status"), "pass"),
        (("verdicts", 0, "status"), "UNKNOWN"),
        (("verdicts", 0, "statistic"), "1.3"),
        (("verdicts", 0, "extra"), 1),
        (("verdicts", 0, "row", "status"), "gated"),
        (("arms", 0, "status"), "ok"),
        (("schema_version",), 2),
        (("exit_code",), 2),
        (("kind",), "training"),
        (("created",), "yesterday"),
        (("extra",), 1),
        (("nonfinite",), {"/a": "NaN"}),
        (("expect",), {"status": "FAIL"}),
    ],
)
def test_what_the_schema_refuses(way: tuple[Any, ...], value: Any) -> None:
    report = samples.load("correctness-fail")
    place: Any = report
    for key in way[:-1]:
        place = place[key]
    place[way[-1]] = value
    assert faults(report)


def test_numbers_that_are_not_finite_are_null_with_their_place_named() -> None:
    report = samples.load("correctness-fail")
    report["verdicts"][0]["statistic"] = math.inf
    report["verdicts"][0]["evidence"] = {"a/b~c": [1.0, math.nan, {"low": -math.inf}], "pair": (math.nan, 2)}
    text = jsonfile.render(report)
    written = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert written["verdicts"][0]["statistic"] is None
    assert written["nonfinite"] == {
        "/verdicts/0/statistic": "inf",
        "/verdicts/0/evidence/a~1b~0c/1": "nan",
        "/verdicts/0/evidence/a~1b~0c/2/low": "-inf",
        "/verdicts/0/evidence/pair/0": "nan",
    }
    assert faults(written) == []
    back = samples.parse(text)
    assert back["verdicts"][0]["statistic"] == math.inf
    assert math.isnan(back["verdicts"][0]["evidence"]["a/b~c"][1])
    assert back["verdicts"][0]["evidence"]["a/b~c"][2]["low"] == -math.inf


def test_a_report_read_as_plain_json_keeps_its_nonfinite_places() -> None:
    report = samples.load("correctness-fail")
    report["verdicts"][0]["statistic"] = math.nan
    loaded = json.loads(jsonfile.render(report))
    untouched = copy.deepcopy(loaded)
    assert jsonfile.render(loaded) == jsonfile.render(report)
    assert loaded == untouched


@pytest.mark.parametrize(
    "nonfinite",
    [{"/nowhere": "nan"}, {"/status": "nan"}, {"/arms/99/seconds": "nan"}, {"/model": "much"}, {"": "nan"}, ["/model"]],
)
def test_a_nonfinite_that_does_not_fit_is_refused(nonfinite: Any) -> None:
    report = {**samples.load("parity-pass"), "tag": None, "nonfinite": nonfinite}
    if nonfinite == {"/model": "much"}:
        report["model"] = None
    with pytest.raises(ValueError):
        jsonfile.restore(report)


def test_mappings_and_odd_text_are_written_and_objects_are_refused() -> None:
    assert json.loads(jsonfile.render({"a": MappingProxyType({1: "\udc80 µ"})}))["a"] == {"1": "\ufffd\ufffd\ufffd µ"}
    with pytest.raises(TypeError):
        jsonfile.render({"a": object()})
