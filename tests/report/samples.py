"""Sample reports with what each format must make of them; `python -m tests.report.samples` writes the goldens anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlspec.report import jsonfile, junit, markdown, terminal

FOLDER = Path(__file__).parents[1] / "goldens" / "report"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))
GOLDENS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "80.txt": lambda report: terminal.render(report, width=80, color=False),
    "verbose.txt": lambda report: terminal.render(report, width=80, color=False, verbose=True),
    "md": markdown.render,
    "xml": junit.render,
}


def load(name: str) -> dict[str, Any]:
    return parse((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def parse(text: str) -> dict[str, Any]:
    """The report that `jsonfile.render` wrote, as it was."""
    return jsonfile.restore(json.loads(text))


def golden(name: str, suffix: str) -> str:
    return (FOLDER / f"{name}.{suffix}").read_text(encoding="utf-8")


def verdict(**fields: Any) -> dict[str, Any]:
    """A verdict of the report, PASS unless told otherwise."""
    plain = {"judgment": "drift", "subject": "loss", "status": "PASS", "statistic": 1.0, "reason": "so"}
    return {**plain, "row": None, "evidence": {}, "notes": [], **fields}


if __name__ == "__main__":
    for each in NAMES:
        for ending, render in GOLDENS.items():
            (FOLDER / f"{each}.{ending}").write_text(render(load(each)), encoding="utf-8")
