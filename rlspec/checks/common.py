"""Lint rules and parsing that every kind shares."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import PurePath
from typing import Any

from rlspec import architecture, catalog, chain_sizes, chains, contract, dlogp, nodes, plan, schema
from rlspec.document import escape
from rlspec.errors import SpecError
from rlspec.model import Document, Expect, Problem, Severity

TO_THE_LETTER = "our decoder runs what it implements to the letter, and nothing as something else"
Rule = Callable[[Document, dict[str, Any]], Iterator[Problem]]
PLACEHOLDER = re.compile(r"<[A-Za-z][A-Za-z0-9 _.,'/-]*>")
CONTRACTS = {"correctness": "training", "performance": "training", "operators": "ws1", "chain": "ws1",
             "parity": "ws1"}  # fmt: skip
STANDARD: dict[str, tuple[str, ...]] = {
    "correctness": ("drift",),
    "performance": ("step_time", "throughput", "peak_memory"),
    "operators": nodes.JUDGMENTS,
    "chain": chains.JUDGMENTS,
    "parity": dlogp.STANDARD,
}


def at(
    document: Document, pointer: str, rule: str, message: str, hint: str = "", *, severity: Severity = "error"
) -> Problem:
    line, column = schema.place(document, pointer)
    return Problem(
        rule=rule,
        path=document.path,
        line=line,
        column=column,
        message=message,
        pointer=pointer,
        hint=hint,
        severity=severity,
    )


def hinted(error: SpecError) -> tuple[str, str]:
    """A message and the suggestion that follows it."""
    message, _, hint = re.sub(r"; (did you mean|known:|none is known)", r"\0\1", str(error)).partition("\0")
    return message, hint


def unknown(document: Document, pointer: str, error: SpecError) -> Problem:
    """What the catalog does not have, or has with a mistake."""
    message, hint = hinted(error)
    return at(document, pointer, "RL201", message, hint)


def apply(document: Document, rules: Sequence[tuple[Rule, tuple[str, ...]]], broken: set[str]) -> list[Problem]:
    """Findings of the rules that read no broken key, and of leftover placeholders anywhere."""
    problems = list(placeholders(document, document.data, ""))
    for rule, keys in rules:
        if not broken & set(keys):
            problems += rule(document, document.data)
    return problems


def placeholders(document: Document, value: Any, pointer: str) -> Iterator[Problem]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key != "pattern":  # the named groups of a regular expression look alike
                yield from placeholders(document, item, f"{pointer}/{escape(key)}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from placeholders(document, item, f"{pointer}/{index}")
    elif isinstance(value, str) and (found := PLACEHOLDER.search(value)):
        yield at(document, pointer, "RL005", f"leftover placeholder {found.group()}", "fill it in")


def unique_names(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, arm in enumerate(data["arms"]):
        # File systems may fold case.
        if arm["name"].lower() in seen:
            yield at(
                document,
                f"/arms/{index}/name",
                "RL202",
                f"arm {arm['name']} stands twice",
                "an arm's files carry its name",
            )
        seen.add(arm["name"].lower())


def question(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    if "question" not in data:
        hint = "one sentence, shown at the top of every report"
        yield at(document, "", "RL228", "no question is asked", hint, severity="warning")


def contract_rows(document: Document, data: dict[str, Any], subjects: Sequence[str] = ("*",)) -> Iterator[Problem]:
    name = data.get("contract", CONTRACTS[data["kind"]])
    try:
        rows = contract.load(name, document.path.parent)
    except SpecError as error:
        yield unknown(document, "/contract", error)
        return
    for index, given in enumerate(data.get("judgments", STANDARD[data["kind"]])):
        for check, subject in product(row_names(given), subjects):
            try:
                row = rows.resolve(check, subject, data.get("dtype", "bf16"))
                contract.limits_of(row)
                if problem := contract.limits_problem(row):
                    yield at(document, f"/judgments/{index}", "RL224", f"contract {problem}", "correct the row")
            except SpecError as error:
                message, hint = hinted(error)
                yield at(document, f"/judgments/{index}", "RL224", message, hint)


def decoded(document: Document, name: str, hint: str, unimplemented: str) -> Iterator[Problem]:
    """What is wrong with a model that our decoder is to build from an entry or a config.json alone.

    `unimplemented`: the hint for a model that asks for what the decoder does not do.
    """
    try:
        chain_sizes.of(catalog.whole(name, document.path.parent))
    except SpecError as error:
        yield unknown(document, "/model", error)
    except ValueError as error:
        hint = unimplemented if isinstance(error, architecture.Unimplemented) else hint
        yield at(document, "/model", "RL313", f"model {name}: {error}", hint)


def decoder_has(document: Document, name: str, entry: Mapping[str, Any]) -> Iterator[Problem]:
    """What of a model our decoder does not do, by the key's name."""
    try:
        architecture.read(entry)
    except ValueError as error:
        yield at(document, "/model", "RL313", f"model {name}: {error}", TO_THE_LETTER)


def row_names(given: str | dict[str, Any]) -> list[str]:
    """The contract rows that a judgment needs."""
    if isinstance(given, str):
        return [given]
    if given.get("judge") == "calibrated":
        return [f"{given['check']}_calibrated_{count}" for count in (3, 4, 5)]
    return [given["check"]]


def shared(document: Document) -> dict[str, Any]:
    """The fields of a Spec that all kinds fill in the same way."""
    data = document.data
    expect = data.get("expect")
    return {
        "kind": data["kind"],
        "name": data.get("name") or default_name(document),
        "path": document.path,
        "digest": document.digest,
        "question": data.get("question", ""),
        "data": data,
        "time_limit": plan.seconds(data.get("time_limit")),
        "requires": data.get("requires", {}),
        "expect": None if expect is None else Expect(**({"status": expect} if isinstance(expect, str) else expect)),
    }


def default_name(document: Document) -> str:
    """The path below `specs/` without suffix, or the file's stem."""
    parts = document.path.resolve().with_suffix("").parts
    if "specs" in parts:
        below = parts[len(parts) - parts[::-1].index("specs") :]
        return "/".join(below) or parts[-1]
    return parts[-1]


def is_python(word: str) -> bool:
    return word == "{python}" or PurePath(word).name.startswith("python")
