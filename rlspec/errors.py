"""The two exceptions meant for people, and the exit codes. `assert` is for our own bugs."""

from __future__ import annotations

OK = 0
FAIL = 1
USAGE = 2
INVESTIGATE = 3
ERROR = 4
BLOCKED = 5
INTERRUPTED = 130
TERMINATED = 143


class SpecError(Exception):
    """Yours: a spec, a file or an option that cannot be used as it is. Exit 2, nothing ran."""


class RunError(Exception):
    """The machine's: something that was started did not end well. Exit 4."""
