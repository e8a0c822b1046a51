"""Escape sequences, by which programs colour, move and rewrite what they print on a terminal."""

from __future__ import annotations

import re

_SEQUENCE = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[()][0-9A-Z]|[@-Z\\^_=>])"

ESCAPES = re.compile(_SEQUENCE)
ESCAPES_IN_BYTES = re.compile(_SEQUENCE.encode())
