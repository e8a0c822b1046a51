"""What a record tells of an exception. The log has all of it, and whole paths stand there alone."""

from __future__ import annotations

import re
import sys
import traceback
from typing import Any

_TAIL = 6
_FILE = re.compile(r'File "(?:[^"]*/)?([^"/]+)"')


def told(error: Exception, place: str) -> dict[str, Any]:
    """`message`: the exception's first line, and `place` if there is one; `tail`: the end of its traceback."""
    text = "".join(traceback.format_exception(error)).rstrip()
    print(text, file=sys.stderr, flush=True)
    lines = [_FILE.sub(r'File "\1"', line) for line in text.splitlines()]
    message = f"{type(error).__name__}: {error}".splitlines()[0] + (f" ({place})" if place else "")
    return {"message": message, "tail": lines[-_TAIL:]}
