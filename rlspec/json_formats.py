"""Step lines that are JSON objects or Python dicts, and the trainer state of a checkpoint."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from rlspec.formats import PREFIX, BadLine, Format, Line, repeated
from rlspec.printed import Quoted, Token, is_absent
from rlspec.shapes import JSON_NUMBER, Shape, at_most, shape_of

_JSON_STEP = r"(0|[1-9]\d{0,17})"
_STRING = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_BARE_NONFINITE = re.compile(rf"{_STRING}|(?<![\w.])-?(?:nan|inf|infinity)(?![\w.(])", re.I | re.ASCII)
_JSON_STRING = r'"[^"\\\x00-\x1f]*"'


class JsonLines(Format):
    """One JSON object a line with a field `step`; what lies in an object in it is named `train/loss`."""

    stripped = True

    def __init__(self) -> None:
        self._chatter = 0
        self._stepless = 0

    def parse(self, text: str) -> Line | None:
        text = PREFIX.sub("", text, count=1).strip()
        if not text.startswith("{"):
            self._chatter += bool(text)
            return None
        whole = _pairs(text)
        pairs = list(_flat(whole))
        if all(name != "step" for name, _ in pairs):
            self._stepless += 1
            return None
        fields = {name: _scalar(value) for name, value in pairs}
        faults = {}
        if len(fields) < len(pairs):
            if len({name for name, _ in whole}) < len(whole):
                raise BadLine("*", f"has the key {repeated(name for name, _ in whole)!r} twice in one object")
            name = repeated(name for name, _ in pairs)
            faults[name] = f"has {name!r} as a key and by the path of an object"
        return Line(fields.pop("step") or "", fields, faults=faults or None)

    def shape(self, text: str, decimals: Mapping[str, int]) -> Shape | None:
        pairs = _pairs(text) if text.startswith("{") else []
        parts: list[tuple[str, str]] = []
        values: dict[str, str] = {}
        empty = [name for name, value in pairs if value is None or (isinstance(value, str) and is_absent(value))]
        for name, value in pairs:
            pattern = _JSON_STEP if name == "step" else _json_pattern(value, decimals.get(name))
            if pattern is None:
                return None
            if isinstance(value, Token) and (name == "step" or name in decimals):
                values[name] = value
            parts.append((re.escape(json.dumps(name)), pattern))
        for comma, colon in ((", ", ": "), (",", ":")):
            if text == "{" + comma.join(json.dumps(name) + colon + _json_text(value) for name, value in pairs) + "}":
                inside = comma.join(name + colon + pattern for name, pattern in parts)
                return shape_of(text, [r"\{", inside, r"\}"], values, empty)
        return None

    def notes(self) -> list[str]:
        said = []
        if self._chatter:
            said.append(f"{self._chatter} lines that are no JSON object were skipped")
        if self._stepless:
            said.append(f"{self._stepless} JSON objects without the field step were skipped")
        return said


def _pairs(text: str) -> list[tuple[str, object]]:
    """The pairs of one JSON object, numbers as Token. Raises BadLine."""
    try:
        return _decode(text)
    except (ValueError, RecursionError) as error:
        failure = error
    try:
        return _decode(_BARE_NONFINITE.sub(lambda found: _json_constant(found[0]), text))
    except (ValueError, RecursionError):
        raise BadLine("*", f"begins a JSON object that does not parse ({failure}): one whole object a line") from None


def _flat(pairs: Iterable[tuple[str, object]], above: str = "") -> Iterator[tuple[str, object]]:
    for name, value in pairs:
        if isinstance(value, _Pairs):
            yield from _flat(value, f"{above}{name}/")
        else:
            yield above + name, value


def _decode(text: str) -> list[tuple[str, object]]:
    pairs = json.loads(text, parse_float=Token, parse_int=Token, parse_constant=Token, object_pairs_hook=_Pairs)
    assert isinstance(pairs, _Pairs)
    return pairs


class _Pairs(list[tuple[str, object]]):
    """A JSON object, told from a JSON list."""


def _json_constant(text: str) -> str:
    if text[0] in "'\"":
        return text
    return "NaN" if "nan" in text.lower() else "-Infinity" if text[0] == "-" else "Infinity"


def _json_text(value: object) -> str:
    if isinstance(value, Token):
        return value
    return json.dumps(value)


def _json_pattern(value: object, decimals: int | None) -> str | None:
    if value is None:
        return "null"
    if isinstance(value, Token):
        known = at_most(value, decimals) if decimals is not None else JSON_NUMBER
        return f"({known})" if known is not None and decimals is not None else known
    if decimals is not None:
        return None
    if isinstance(value, str):
        return re.escape(json.dumps(value)) if is_absent(value) else _JSON_STRING
    return "(?:true|false)" if isinstance(value, bool) else None


def _scalar(value: object) -> str | None:
    """A value as text; what is neither number nor text becomes text that no number can be."""
    return value if value is None or isinstance(value, str) else f"({type(value).__name__})"


class Dicts(Format):
    """Dicts with a key `loss`, as Python or JSON prints them; they are counted, unless all of them have a step."""

    stripped = True
    _dict = re.compile(r"\{[^{}]*\}")
    _loss = re.compile(r"""\{[^{}]*?(['"])loss\1\s*:""")

    def __init__(self) -> None:
        self._own: list[str | None] = []

    def parse(self, text: str) -> Line | None:
        starts = len(self._loss.findall(text))
        if not starts:
            return None
        found = [pairs for pairs in map(dict_pairs, self._dict.findall(text)) if "loss" in pairs]
        if len(found) != starts or starts > 1:
            raise BadLine("*", "has a dict with a loss that cannot be read, so the steps cannot be counted")
        fields = found[0]
        self._own.append(own := fields.pop("step", None))
        self.counted |= own is None
        return Line(str(len(self._own)), fields)

    def recognises(self, head: str) -> bool:
        """Whether this is a trainer_state.json."""
        return head.lstrip().startswith("{") and '"log_history"' in head

    def steps(self) -> Sequence[str]:
        return [step for step in self._own if step is not None]


def dict_pairs(text: str) -> dict[str, str | None]:
    """The pairs of a flat dict in Python's or JSON's writing; empty where it is neither."""
    text = re.sub(r"\bnp\.\w+\(([^()]*)\)", r"\1", text)
    quote = "'" if "'" in text else '"'
    text = _BARE_NONFINITE.sub(lambda found: found[0] if found[0][0] in "'\"" else quote + found[0] + quote, text)
    pairs = _literal(text)
    return {str(name): _dict_value(value) for name, value in pairs.items()} if isinstance(pairs, dict) else {}


def _literal(text: str) -> object:
    if "\\" not in text and ('"' not in text or "'" not in text):
        with suppress(ValueError, RecursionError):
            return json.loads(text.replace("'", '"'), parse_float=Token, parse_int=Token)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _dict_value(value: object) -> str | None:
    if isinstance(value, str):
        return value if isinstance(value, Token) else Quoted(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Token(repr(value))
    return _scalar(value)


def trainer_state(text: str) -> tuple[list[Line], list[str]]:
    """Step lines and notes from the text of a trainer_state.json. Raises BadLine."""
    try:
        state = json.loads(text, parse_float=Token, parse_int=Token, parse_constant=Token)
    except (ValueError, RecursionError) as error:
        raise BadLine("*", f"trainer_state.json is not whole: {error}") from error
    history = state.get("log_history")
    if not isinstance(history, list):
        raise BadLine("*", "log_history is no list")
    lines = []
    for entry in history:
        if isinstance(entry, dict) and "loss" in entry:
            fields = {name: _scalar(value) for name, value in entry.items()}
            lines.append(Line(fields.pop("step", None) or "null", fields))
    saved, last = state.get("global_step"), state.get("max_steps")
    return lines, [f"the trainer state was saved at step {saved} of {last}"] if saved != last else []
