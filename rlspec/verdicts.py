"""From many statuses to one, and to an exit code."""

from __future__ import annotations

from collections.abc import Iterable

from rlspec import errors
from rlspec.model import Status

WORST_FIRST: tuple[Status, ...] = ("ERROR", "FAIL", "INVESTIGATE", "BLOCKED", "PASS", "MEASURED", "N/A")
EXIT_CODES: dict[Status, int] = {
    "ERROR": errors.ERROR,
    "FAIL": errors.FAIL,
    "INVESTIGATE": errors.INVESTIGATE,
    "BLOCKED": errors.BLOCKED,
    "PASS": errors.OK,
    "MEASURED": errors.OK,
    "N/A": errors.BLOCKED,
}
CODES_WORST_FIRST = (
    errors.TERMINATED,
    errors.INTERRUPTED,
    errors.USAGE,
    errors.ERROR,
    errors.FAIL,
    errors.INVESTIGATE,
    errors.BLOCKED,
    errors.OK,
)


def worst(statuses: Iterable[Status]) -> Status:
    """The status that speaks for all; BLOCKED for none at all, since nothing judged is never a pass."""
    return min(statuses, key=WORST_FIRST.index, default="BLOCKED")


def exit_code(statuses: Iterable[Status]) -> int:
    """What one spec exits with. N/A alone is nothing judged, so it exits as BLOCKED does."""
    return EXIT_CODES[worst(statuses)]


def combine(exit_codes: Iterable[int]) -> int:
    """What several specs exit with together: the worst in the order 4, 1, 3, 5, 0 (before them 143, 130, 2)."""
    return min(exit_codes, key=CODES_WORST_FIRST.index, default=errors.BLOCKED)
