"""report.json: the report as it is, in JSON that every reader accepts.

JSON has no word for a number that is not finite. Such a number is written as null, and the top-level key `nonfinite`
maps its JSON pointer to `nan`, `inf` or `-inf`; `parse` puts it back.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from typing import Any

from rlspec.document import escape

NONFINITE = "nonfinite"


def render(report: Mapping[str, Any]) -> str:
    """The text of report.json. Keys keep their order; lone surrogates become U+FFFD. Raises TypeError on objects."""
    nonfinite: dict[str, str] = {}
    plain = _finite(restore(report), "", nonfinite)
    text = json.dumps({**plain, NONFINITE: nonfinite}, indent=2, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") + "\n"


def restore(report: Mapping[str, Any]) -> dict[str, Any]:
    """A report in which the nulls that `nonfinite` names are numbers again. Raises ValueError on other places."""
    named = report.get(NONFINITE) or {}
    if not isinstance(named, Mapping):
        raise ValueError(f"{NONFINITE} must map pointers to nan, inf or -inf")
    plain = {key: value for key, value in report.items() if key != NONFINITE}
    plain = copy.deepcopy(plain) if named else plain
    for pointer, word in named.items():
        _put(plain, pointer, float(word))
    return plain


def _finite(value: Any, pointer: str, nonfinite: dict[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item, f"{pointer}/{escape(key)}", nonfinite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item, f"{pointer}/{index}", nonfinite) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite[pointer] = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
        return None
    return value


def _put(report: dict[str, Any], pointer: str, number: float) -> None:
    *way, last = (part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:])
    place: Any = report
    try:
        for key in way:
            place = place[int(key)] if isinstance(place, list) else place[key]
        at: Any = int(last) if isinstance(place, list) else last
        held = place[at]
    except (KeyError, IndexError, TypeError, ValueError):
        raise ValueError(f"{NONFINITE} names {pointer}, which the report does not hold") from None
    if held is not None:
        raise ValueError(f"{NONFINITE} names {pointer}, where {held!r} stands, not null")
    place[at] = number
