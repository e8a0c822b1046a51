"""Reports: from the report dict to text, one writer a format; the suffix of the file picks it."""

from __future__ import annotations

import contextlib
import gzip
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlspec.errors import RunError, SpecError
from rlspec.report import jsonfile, junit, markdown, terminal
from rlspec.report.portable import portable

__all__ = ["known", "portable", "save", "screen", "summary", "write", "writer"]

Report = Mapping[str, Any]
Writer = Callable[..., str]
"""Of one report; Markdown and JUnit also of several."""

ZIPPED = ".gz"
WRITERS: dict[str, Writer] = {
    ".json": jsonfile.render,
    ".md": markdown.render,
    ".xml": junit.render,
}


def writer(path: Path) -> Writer:
    """The writer for a file of this name. Raises SpecError if there is none."""
    suffix = path.with_suffix("").suffix.lower() if path.suffix.lower() == ZIPPED else path.suffix.lower()
    if suffix in WRITERS:
        return WRITERS[suffix]
    what = f"unknown suffix {suffix}" if suffix else "its name has no suffix"
    raise SpecError(f"cannot write a report to {path}: {what}; known are {', '.join(WRITERS)}, and .gz after them")


def known(paths: Iterable[Path], several: bool = False) -> None:
    """Raises SpecError if a report, or several, cannot be written to a path; to be asked before anything runs."""
    for path in paths:
        if writer(path) is jsonfile.render and several:
            why = "holds one report, and here are several specs; .xml and .md hold all, and each run its report.json"
            raise SpecError(f"{path} {why}")


def write(path: Path, *reports: Report) -> None:
    """The reports in the format that the suffix names, whole or not at all, `.gz` after it compressed.

    Raises SpecError and RunError.
    """
    raw = writer(path)(*map(jsonfile.restore, reports)).encode()
    if path.suffix.lower() == ZIPPED:
        raw = gzip.compress(raw, mtime=0)
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(raw)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise RunError(f"cannot write the report to {path}: {error.strerror or error}") from error


def save(report: Report, paths: Iterable[Path], again: bool = True) -> None:
    """The report at each of the paths and, with `again`, as report.json in its run folder. Raises as `write`."""
    own = [Path(report["run"]["folder"]) / "report.json"] if again and report["run"] else []
    for path in [*own, *paths]:
        write(path, report)


def summary(report: Report, environ: Mapping[str, str]) -> None:
    """Append the Markdown report to the job summary, if a GitHub job runs this. Raises RunError."""
    path = environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(markdown.render(jsonfile.restore(report)) + "\n")
    except OSError as error:
        raise RunError(f"cannot write to GITHUB_STEP_SUMMARY {path}: {error.strerror or error}") from error


def screen(report: Report, environ: Mapping[str, str], isatty: bool, verbose: bool = False) -> str:
    """The report for a terminal of which `environ` and `isatty` speak; paths below the current folder are short."""
    return terminal.render(
        _below(jsonfile.restore(report), Path.cwd()),
        width=terminal.width(environ, shutil.get_terminal_size().columns),
        color=terminal.use_color(environ, isatty),
        verbose=verbose,
    )


def _below(report: Report, folder: Path) -> dict[str, Any]:
    def short(path: str | None) -> str | None:
        return str(Path(path).relative_to(folder)) if path and Path(path).is_relative_to(folder) else path

    arms = [{**arm, "log": short(arm["log"])} for arm in report["arms"]]
    run = report["run"] and {**report["run"], "folder": short(report["run"]["folder"])}
    return {**report, "arms": arms, "run": run}
