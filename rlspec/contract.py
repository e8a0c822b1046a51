"""Tolerance contracts: load, check, resolve. A missing row is an error, never a default."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlspec import catalog, schema
from rlspec.errors import SpecError
from rlspec.model import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """A named set of rows, looked up by (judgment, subject, dtype); `*` in a row holds for any."""

    name: str
    rows: tuple[Row, ...]

    @property
    def digest(self) -> str:
        text = json.dumps([plain(row) for row in self.rows], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def resolve(self, judgment: str, subject: str = "*", dtype: str = "*") -> Row:
        """The most exact row that holds. Raises SpecError where there is none."""
        for at in ((subject, dtype), (subject, "*"), ("*", dtype), ("*", "*")):
            for row in self.rows:
                if row.judgment == judgment and (row.subject, row.dtype) == at:
                    return row
        wanted = f"{self.name}/{judgment}/{subject}/{dtype}"
        known = sorted({row.judgment for row in self.rows})
        raise SpecError(f"contract {self.name} has no row for {wanted}; {schema.suggestion(judgment, known)}")


def load(name: str, near: Path) -> Contract:
    """The contract called `name`, or at that path. Raises SpecError."""
    path = catalog.find("contracts", name, near)
    if path is None:
        known = catalog.entries("contracts", near)
        raise SpecError(f"unknown contract {name!r}; {schema.suggestion(name, known)}")
    data, problems = catalog.checked("contracts", path)
    if problems:
        first = problems[0]
        raise SpecError(f"{first.path}:{first.line}:{first.column}: {first.rule} {first.message}")
    return from_rows(data["name"], data["rows"])


def from_rows(name: str, rows: Iterable[Mapping[str, Any]]) -> Contract:
    """A contract from plain rows, as a file or a plan.json holds them. Raises SpecError on two rows for one key."""
    made = tuple(_row(name, row) for row in rows)
    seen: set[tuple[str, str, str]] = set()
    for row in made:
        key = (row.judgment, row.subject, row.dtype)
        if key in seen:
            raise SpecError(f"contract {name}: two rows for {row.id}")
        seen.add(key)
    return Contract(name=name, rows=made)


def _row(contract: str, row: Mapping[str, Any]) -> Row:
    return Row(
        contract=contract,
        judgment=row["judgment"],
        subject=row.get("subject", "*"),
        dtype=row.get("dtype", "*"),
        status=row.get("status", "applicable"),
        limits={key: float(value) for key, value in row.get("limits", {}).items()},
        source=row["source"],
        date=row["date"],
        reason=row["reason"],
        published_id=row.get("published_id"),
    )


def limits_problem(row: Row) -> str | None:
    """Why no judgment could be held against the row, or None: a limit that is missing, or that cannot be violated."""
    limits = row.limits
    if row.status not in ("applicable", "optional"):
        return None
    if row.judgment.split("_")[0] == "drift":
        lower, upper = limits.get("pass_below", 0.0), limits.get("fail_above", 0.0)
        return None if 0 < lower <= upper else f"{row.id} needs limits with 0 < pass_below ≤ fail_above"
    if "max" not in limits:
        return f"{row.id} needs a limit max"
    if row.judgment == "clip_fraction" and not 0 < limits.get("low", 0.0) < limits.get("high", 0.0):
        return f"{row.id} needs limits with 0 < low < high"
    return None


def plain(row: Row) -> dict[str, Any]:
    """A row as a report and a plan.json hold it."""
    return {
        "id": row.id,
        "judgment": row.judgment,
        "subject": row.subject,
        "dtype": row.dtype,
        "status": row.status,
        "limits": dict(row.limits),
        "source": row.source,
        "date": row.date,
        "reason": row.reason,
        "published_id": row.published_id,
    }
