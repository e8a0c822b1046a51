"""Pick the JSON Schema of a document, validate, and turn every finding into a `Problem` with its place."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jsonschema.validators import Draft7Validator, extend

from rlspec.document import TOP, escape
from rlspec.errors import SpecError
from rlspec.model import Document, Problem

FOLDER = Path(__file__).parent / "schemas"
KINDS = ("correctness", "performance", "operators", "chain", "parity")
TYPES = {
    "object": "a mapping",
    "array": "a list",
    "string": "text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "null": "nothing",
}


def nearest(word: object, known: Iterable[str]) -> str | None:
    """The known word that was probably meant."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def suggestion(word: object, known: Iterable[str]) -> str:
    """`did you mean x? known: a, b` — the second half of most messages about names."""
    names = sorted(known)
    close = nearest(word, names)
    listed = f"known: {', '.join(names)}" if names else "none is known here"
    return f"did you mean {close!r}? {listed}" if close else listed


@functools.cache
def load(name: str) -> dict[str, Any]:
    """A schema by name, self-contained: references into `common` are copied in."""
    schema = _read(name)
    common = _read("common")["definitions"]
    text = json.dumps(schema).replace("common.schema.json#/", "#/")
    bundled: dict[str, Any] = json.loads(text)
    if "#/definitions/" in text:
        used = _used(bundled, common)
        bundled["definitions"] = {
            **{key: common[key] for key in common if key in used},
            **bundled.get("definitions", {}),
        }
    return bundled


def _read(name: str) -> dict[str, Any]:
    path = FOLDER / f"{name}.schema.json"
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"no schema {name!r}") from None
    except NotADirectoryError:
        raise SpecError(
            f"{FOLDER} is a text file, not a link: this checkout was made without symbolic links; "
            "clone again with `git clone -c core.symlinks=true`, or install a wheel"
        ) from None
    return data


def _used(schema: Any, common: dict[str, Any]) -> set[str]:
    found: set[str] = set()
    pending: list[Any] = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            name = str(node.get("$ref", "")).removeprefix("#/definitions/")
            if name in common and name not in found:
                found.add(name)
                pending.append(common[name])
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)
    return found


@functools.cache
def _validator(name: str) -> Any:
    # JSON Schema counts 2048.0 as an integer; a spec does not.
    strict = Draft7Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
    )
    return extend(Draft7Validator, type_checker=strict)(load(name))  # type: ignore[no-untyped-call]


def check_spec(document: Document) -> list[Problem]:
    """All problems of a spec against the schema of its kind."""
    data = document.data
    if not isinstance(data, dict):
        return [_at(document, "", "RL103", f"a spec is a mapping, not {_what(data)}", "begin with `kind:`")]
    kind = data.get("kind")
    if kind is None:
        return [_at(document, "", "RL102", "'kind' is missing", f"one of {', '.join(KINDS)}")]
    if kind not in KINDS:
        return [_at(document, "/kind", "RL106", f"unknown kind {kind!r}", suggestion(kind, KINDS))]
    return check(document, str(kind))


def check(document: Document, name: str) -> list[Problem]:
    """All problems of a document against the schema called `name`."""
    errors = _validator(name).iter_errors(document.data)
    problems = [problem for error in errors for problem in _problems(document, error, name)]
    return sorted(problems, key=lambda p: (p.line, p.column, p.rule))


def check_value(value: Any, name: str) -> list[str]:
    """One line per problem of a value that is in no file, such as a report."""
    errors = sorted(_validator(name).iter_errors(value), key=lambda error: list(map(str, error.absolute_path)))
    return [f"{'/'.join(map(str, error.absolute_path)) or 'top'}: {error.message[:200]}" for error in errors]


def _problems(document: Document, error: Any, schema: str) -> Iterator[Problem]:
    pointer = "".join(f"/{escape(token)}" for token in error.absolute_path)
    name = ".".join(str(token) for token in error.absolute_path) or ("spec" if schema in KINDS else schema)
    expected, about = error.validator_value, _about(error.schema)
    if error.validator == "additionalProperties":
        allowed = sorted(error.schema.get("properties", {}))
        for key in error.instance:
            if key not in allowed:
                below = f"{pointer}/{escape(key)}"
                yield _at(document, below, "RL101", f"unknown key {key!r}", _keys(key, allowed), key=True)
    elif error.validator == "required":
        key = error.message.split("'")[1]
        node = error.schema.get("properties", {}).get(key, {})
        known = load(schema).get("definitions", {}).get(str(node.get("$ref", "")).rpartition("/")[2], {})
        where = f" in {name}" if pointer else ""
        yield _at(document, pointer, "RL102", f"'{key}' is missing{where}", _about(node) or _about(known) or "add it")
    elif error.validator == "type":
        due = " or ".join(TYPES[t] for t in ([expected] if isinstance(expected, str) else expected))
        message = f"{name}: {due} is due, not {_what(error.instance)}"
        yield _at(document, pointer, "RL103", message, _rewrite(error, about))
    elif error.validator in ("enum", "const"):
        known_words = [str(v) for v in expected] if isinstance(expected, list) else [str(expected)]
        message = f"{name}: unknown {error.instance!r}"
        yield _at(document, pointer, "RL104", message, suggestion(error.instance, known_words))
    elif error.validator == "propertyNames" or "propertyNames" in error.absolute_schema_path:
        message = f"{name}: {error.instance!r} cannot be a name in here"
        yield _at(document, pointer, "RL105", message, about or "letters, digits and underscores")
    else:
        yield _at(
            document, pointer, "RL105", f"{name}: {_range(error)}", about or f"`rlspec schema {schema}` has the form"
        )


def _at(document: Document, pointer: str, rule: str, message: str, hint: str = "", *, key: bool = False) -> Problem:
    line, column = place(document, pointer, key=key)
    return Problem(rule=rule, path=document.path, line=line, column=column, message=message, pointer=pointer, hint=hint)


def place(document: Document, pointer: str, *, key: bool = False) -> tuple[int, int]:
    """Line and column of a pointer, or of the nearest thing above it that the file has."""
    marks = document.keys if key else document.values
    while pointer and pointer not in marks:
        pointer, marks = pointer.rpartition("/")[0], document.values
    return marks.get(pointer, TOP)


def _keys(key: object, allowed: list[str]) -> str:
    close = nearest(key, allowed)
    listed = f"allowed: {', '.join(allowed)}"
    return f"did you mean {close!r}? {listed}" if close else listed


def _about(node: Any) -> str:
    return str(node.get("description", "")) if isinstance(node, dict) else ""


def _rewrite(error: Any, about: str) -> str:
    due = error.validator_value
    if isinstance(error.instance, str) and due in ("integer", "number"):
        plain = error.instance.strip().rstrip("x%")
        return f"write {plain}, without quotes and units" if plain.replace(".", "", 1).isdigit() else "write a number"
    if due == "string" and isinstance(error.instance, (int, float)):
        text = str(error.instance).lower()
        if re.search(error.schema.get("pattern", ""), text):
            return f'write "{text}", in quotes'
    return about or f"write {TYPES.get(str(due), 'one of these')}"


def _what(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= 40 else "a text"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else "nothing"


def _range(error: Any) -> str:
    limit = error.validator_value
    texts = {
        "minimum": f"{error.instance} is below {limit}",
        "maximum": f"{error.instance} is above {limit}",
        "exclusiveMinimum": f"{error.instance} is not above {limit}",
        "minItems": f"{_length(error.instance)} entries, at least {limit} are due",
        "minLength": "an empty text",
        "minProperties": "an empty mapping",
        "uniqueItems": "an entry stands twice",
        "pattern": f"{error.instance!r} does not have the right form",
        "not": "it has no meaning here",
    }
    return texts.get(str(error.validator), str(error.message))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0
