"""YAML text to plain data, with the line and column of every key and value.

Scalars follow the YAML 1.2 core schema (`1e-5` is a number, `on` and `no` are strings, `010` is ten). Duplicate
keys, tags, anchors, aliases and non-finite numbers are refused; a spec is data and nothing else.
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import Any

import yaml

from rlspec.model import Document, Problem

MAX_BYTES = 1 << 20
MAX_DEPTH = 100
TOP = (1, 1)
HINT = "an infinite limit is a gate that cannot fail"


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(f"^(?:{text})$")


class _Loader(yaml.CSafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


_CORE = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
)
for _name, _text, _first in _CORE:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern(_text), _first)


def escape(key: object) -> str:
    """One reference token of a JSON pointer."""
    return str(key).replace("~", "~0").replace("/", "~1")


def read(path: Path) -> tuple[Document | None, list[Problem]]:
    """The document, or None with the problems that prevent one."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        return None, [Problem(rule="RL001", path=path, line=1, column=1, message=f"cannot be read: {error.strerror}")]
    return parse(raw, path)


def parse(raw: bytes, path: Path) -> tuple[Document | None, list[Problem]]:
    if len(raw) > MAX_BYTES:
        return None, [_problem(path, "RL001", TOP, f"{len(raw)} bytes; a spec has at most {MAX_BYTES}")]
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        return None, [_problem(path, "RL001", (line, 1), f"byte {raw[error.start]:#04x} is not UTF-8")]
    if problem := _too_deep(text, path):
        return None, [problem]
    try:
        problems = _refused(text, path)
        if any(problem.rule == "RL003" for problem in problems):
            return None, problems  # building what the aliases stand for could double the data with each line
        node = _compose(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = (mark.line + 1, mark.column + 1) if mark else TOP
        message = f"not valid YAML: {error.problem or error.context}"
        return None, [_problem(path, "RL001", at, message, hint="the parser could not get past this place")]
    except yaml.YAMLError as error:
        return None, [_problem(path, "RL001", TOP, f"not valid YAML: {' '.join(str(error).split())}")]
    builder = _Builder(path, problems)
    data = None if node is None else builder.build(node, "", 0)
    if any(problem.severity == "error" for problem in problems):
        return None, sorted(problems, key=lambda p: (p.line, p.column))
    digest = hashlib.sha256(raw).hexdigest()
    return Document(path=path, data=data, keys=builder.keys, values=builder.values, digest=digest), []


def _problem(path: Path, rule: str, at: tuple[int, int], message: str, pointer: str = "", hint: str = "") -> Problem:
    return Problem(rule=rule, path=path, line=at[0], column=at[1], message=message, pointer=pointer, hint=hint)


def _too_deep(text: str, path: Path) -> Problem | None:
    # The C parser recurses without a guard, so nesting is bounded before it sees the text.
    depth = 0
    for number, line in enumerate(text.splitlines(), 1):
        dashes = re.match(r"(?:\s*[-?]\s)+", line)
        if dashes and dashes.group().count("-") > MAX_DEPTH:
            return _problem(path, "RL001", (number, 1), f"nested deeper than {MAX_DEPTH} levels")
        if "[" in line or "{" in line or "]" in line or "}" in line:
            for character in line:
                depth += (character in "[{") - (character in "]}")
                if depth > MAX_DEPTH:
                    return _problem(path, "RL001", (number, 1), f"nested deeper than {MAX_DEPTH} levels")
            depth = max(depth, 0)
    return None


def _compose(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _refused(text: str, path: Path) -> list[Problem]:
    """Tags, anchors and aliases: composed nodes no longer show them, so look at the events, where it can matter."""
    problems: list[Problem] = []
    if not any(sign in text for sign in "&*!"):
        return problems
    event: Any
    for event in yaml.parse(text, Loader=_Loader):
        at = (event.start_mark.line + 1, event.start_mark.column + 1)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            message = f"anchors and aliases are not part of the language ({event.anchor})"
            problems.append(_problem(path, "RL003", at, message, hint="write the value out at each place"))
        elif getattr(event, "tag", None) and event.tag != "!":
            problems.append(
                _problem(path, "RL003", at, f"tags are not part of the language ({event.tag})", hint="leave it out")
            )
    return problems


def _mark(node: Any) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


class _Builder:
    def __init__(self, path: Path, problems: list[Problem]) -> None:
        self.path = path
        self.problems = problems
        self.keys: dict[str, tuple[int, int]] = {}
        self.values: dict[str, tuple[int, int]] = {}

    def build(self, node: yaml.Node, pointer: str, depth: int) -> Any:
        at = _mark(node)
        self.values[pointer] = at
        if depth > MAX_DEPTH:
            self.problems.append(_problem(self.path, "RL001", at, f"nested deeper than {MAX_DEPTH} levels"))
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, pointer, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, f"{pointer}/{i}", depth + 1) for i, item in enumerate(node.value)]
        return self._scalar(node, pointer, at)

    def _mapping(self, node: yaml.MappingNode, pointer: str, depth: int) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            at = _mark(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(_problem(self.path, "RL001", at, "a key must be a plain word", pointer))
                continue
            key = key_node.value  # keys are text, whatever they look like
            below = f"{pointer}/{escape(key)}"
            if key in data:
                first = self.keys[below]
                message = f"key {key!r} stands here and already in line {first[0]}"
                self.problems.append(_problem(self.path, "RL002", at, message, below, "keep one of the two"))
                continue
            self.keys[below] = at
            data[key] = self.build(value_node, below, depth + 1)
        return data

    def _scalar(self, node: yaml.Node, pointer: str, at: tuple[int, int]) -> Any:
        text = str(node.value)
        kind = node.tag.rpartition(":")[2]
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "int":
            if len(text) > 40:
                self.problems.append(_problem(self.path, "RL004", at, f"a number of {len(text)} digits", pointer, HINT))
                return None
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if kind == "float":
            value = float(text) if text[-1] in "0123456789." else math.nan
            if not math.isfinite(value):
                self.problems.append(_problem(self.path, "RL004", at, f"{text} is not a finite number", pointer, HINT))
                return None
            return value
        if "\0" in text:
            message = "a text with a NUL byte, which no command, variable or path can hold"
            self.problems.append(_problem(self.path, "RL006", at, message, pointer, "leave \\0 out"))
            return None
        return text
