"""Tolerance contracts: load, check, resolve. A missing row is an error, never a default."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from rlspec import catalog, schema
from rlspec.chains import STATEFUL
from rlspec.errors import SpecError
from rlspec.model import Row

DTYPES = {
    "fp32": ("fp32", "float32", "float"),
    "bf16": ("bf16", "bfloat16"),
    "fp16": ("fp16", "float16", "half"),
    "fp8": ("fp8", "float8"),
}
CANNOT_FAIL = ("note", "error")
OPERATORS = ("_accuracy", "_invariance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """A named set of rows, looked up by (judgment, subject, dtype); `*` in a row holds for any.

    `cannot_fail` says what becomes of a cell whose accuracy row zeros, a shuffle or a flipped sign would pass:
    `note` prints so beside the verdict, `error` makes it ERROR.
    """

    name: str
    rows: tuple[Row, ...]
    cannot_fail: str = "note"

    @property
    def digest(self) -> str:
        rows = [plain(row) for row in self.rows]
        whole = rows if self.cannot_fail == "note" else {"cannot_fail": self.cannot_fail, "rows": rows}
        text = json.dumps(whole, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def resolve(self, judgment: str, subject: str = "*", dtype: str = "*") -> Row:
        """The most exact row that holds; `dtype` may be any name that `dtype_name` knows.

        Raises SpecError where there is none, and where a row of accuracy or invariance has not the limits it needs.
        """
        dtype = dtype_name(dtype)
        for at in ((subject, dtype), (subject, "*"), ("*", dtype), ("*", "*")):
            for row in self.rows:
                if row.judgment == judgment and (row.subject, row.dtype) == at:
                    if judgment.endswith(OPERATORS) and (problem := limits_problem(row)):
                        raise SpecError(f"contract {problem}")
                    return row
        wanted = f"{self.name}/{judgment}/{subject}/{dtype}"
        keys = {f"{row.subject}/{row.dtype}" for row in self.rows if row.judgment == judgment}
        hint = schema.suggestion(f"{subject}/{dtype}", keys) if keys else self._nearest(judgment)
        raise SpecError(f"contract {self.name} has no row for {wanted}; {hint}")

    def _nearest(self, judgment: str) -> str:
        return schema.suggestion(judgment, {row.judgment for row in self.rows})


def whole(contract: Contract) -> dict[str, Any]:
    """As a plan and a report hold it; `from_rows` reads it back."""
    rows = [{key: value for key, value in plain(row).items() if key != "id"} for row in contract.rows]
    return {"name": contract.name, "digest": contract.digest, "cannot_fail": contract.cannot_fail, "rows": rows}


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
    return from_rows(data["name"], data["rows"], data.get("cannot_fail", "note"))


def from_rows(name: str, rows: Iterable[Mapping[str, Any]], cannot_fail: str = "note") -> Contract:
    """A contract from plain rows, as a file or a plan.json holds them.

    Raises SpecError on two rows for one key and on an unknown `cannot_fail`.
    """
    if cannot_fail not in CANNOT_FAIL:
        raise SpecError(f"contract {name}: unknown cannot_fail {cannot_fail!r}; known: {', '.join(CANNOT_FAIL)}")
    made = tuple(_row(name, row) for row in rows)
    seen: set[tuple[str, str, str]] = set()
    for row in made:
        key = (row.judgment, row.subject, row.dtype)
        if key in seen:
            raise SpecError(f"contract {name}: two rows for {row.id}")
        seen.add(key)
    return Contract(name=name, rows=made, cannot_fail=cannot_fail)


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


def dtype_name(text: str) -> str:
    """The contract's name of a dtype given as torch, numpy or a config.json write it; all kinds of fp8 are one.

    Raises SpecError on an unknown name. `*` stays `*`.
    """
    plain_name = re.sub(r"^((?:fp|float)8)_\w+$", r"\1", text.lower().removeprefix("torch."))
    names = {"*": "*"} | {alias: name for name, aliases in DTYPES.items() for alias in aliases}
    if plain_name not in names:
        raise SpecError(f"unknown dtype {text!r}; {schema.suggestion(plain_name, DTYPES)}")
    return names[plain_name]


def limits_of(row: Row) -> Mapping[str, float]:
    """The limits of a row that is to be held against numbers; those of a measured row may be empty.

    Raises SpecError with the row's reason where it is out of scope or not applicable, and where its limits are amiss.
    """
    if row.status in ("out_of_scope", "not_applicable"):
        raise SpecError(f"contract {row.id} is {row.status.replace('_', ' ')}: {row.reason}")
    if problem := limits_problem(row):
        raise SpecError(f"contract {problem}")
    return row.limits


def limits_problem(row: Row) -> str | None:
    """Why no judgment could be held against the row, or None: a limit that is missing, or that cannot be violated."""
    limits = row.limits
    if row.status not in ("applicable", "optional"):
        return None
    if row.judgment.endswith("_accuracy"):
        return _accuracy_problem(row)
    if row.judgment.endswith("_invariance"):
        bitwise = dict(limits) == {"differing_elements": 0.0}
        return None if bitwise else f"{row.id} needs the one limit differing_elements 0: bits are equal or they are not"
    if row.judgment in STATEFUL and "max" not in limits:
        bitwise = dict(limits) == {"differing_elements": 0.0}
        return None if bitwise else f"{row.id} needs the one limit differing_elements 0, or a limit max"
    if row.judgment.split("_")[0] == "drift":
        lower, upper = limits.get("pass_below", 0.0), limits.get("fail_above", 0.0)
        return None if 0 < lower <= upper else f"{row.id} needs limits with 0 < pass_below ≤ fail_above"
    if "max" not in limits:
        return f"{row.id} needs a limit max"
    if row.judgment == "clip_fraction" and not 0 < limits.get("low", 0.0) < limits.get("high", 0.0):
        return f"{row.id} needs limits with 0 < low < high"
    return None


def _accuracy_problem(row: Row) -> str | None:
    # From 1 on, rtol and relative_rms would pass zeros whatever the reference is.
    limits, keys = row.limits, set(row.limits)
    if keys == {"atol", "rtol"}:
        fine = 0 <= limits["atol"] < inf and 0 <= limits["rtol"] < 1 and limits["atol"] + limits["rtol"] > 0
        return None if fine else f"{row.id} needs atol ≥ 0 and 0 ≤ rtol < 1, not both 0"
    if keys == {"baseline_ratio", "relative_rms"}:
        fine = 1 <= limits["baseline_ratio"] < inf and 0 < limits["relative_rms"] < 1
        return None if fine else f"{row.id} needs baseline_ratio ≥ 1 and 0 < relative_rms < 1"
    return f"{row.id} needs limits atol and rtol, or baseline_ratio and relative_rms, and no other"


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
