"""Markdown for a pull request or a job summary: the verdicts as a table, all figures folded away below it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlspec.report import cell_figures, chain_figures, evidence, outcome, rows
from rlspec.report.text import clean, log_line

Report = Mapping[str, Any]

SPECIAL = re.compile(r"[&<>|\\`*\[\]~]|(?<![^\W_])_|_(?![^\W_])")
TAIL, LONGEST = 40, 400


def render(*reports: Report) -> str:
    """Reports in GitHub's Markdown; names and reasons are text in it, whatever characters they hold."""
    return "\n".join(map(_one, reports))


def _one(report: Report) -> str:
    blocks = [
        _header(report),
        *(_matrix(report, cell_figures) if cell_figures.is_cells(report) else ()),
        *(_matrix(report, chain_figures) if chain_figures.is_chain(report) else ()),
        *([] if cell_figures.is_cells(report) or chain_figures.is_chain(report) else [_verdicts(report)]),
        _ending(report),
        [f"- {escape(note)}" for note in report["notes"]],
        _folded("Arms", _table([rows.arm(arm, log=True) for arm in report["arms"]], rows.ARMS)),
        *(_folded(f"{one['status']} {rows.title(one)}: figures", _figures(one)) for one in report["verdicts"]),
        *(_folded(f"End of the log of {clean(arm['name'])}", _tail(arm)) for arm in report["arms"] if arm["tail"]),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def escape(text: object) -> str:
    """Text that no Markdown or HTML reads as anything else; entities, since they also hold inside tables and HTML."""
    return SPECIAL.sub(lambda found: "".join(f"&#{ord(one)};" for one in found[0]), clean(text))


def _header(report: Report) -> list[str]:
    named = [report["model"], report["tag"], *(f"set {text}" for text in report["overrides"])]
    lines = [f"### {escape(report['outcome'])}: {escape(rows.name(report))}"]
    lines += ["", escape(report["question"])] if report["question"] else []
    return lines + (["", ", ".join(escape(value) for value in named if value)] if any(named) else [])


def _verdicts(report: Report) -> list[str]:
    lines = [_cells(one) for one in report["verdicts"]]
    return _table(lines, (*rows.VERDICTS, "reason")) or ["Nothing was judged."]


def _matrix(report: Report, own: Any) -> list[list[str]]:
    """A table an arm, then what is not green."""
    made = []
    for arm, lines in own.tables(report):
        made.append([f"Arm {escape(arm)}", "", *_table(lines, own.ORDER)])
    for title, lines in own.across(report):
        made.append([escape(title).capitalize(), "", *_table(lines, own.ACROSS)])
    made.append([f"- {escape(line)}" for line in (*own.counted(report), *own.remarks(report))])
    wrong = [
        f"- **{status}** {escape(named)}: {escape(reason)}" for status, named, reason, _ in own.troubles(report)
    ]
    return [*made, wrong]


def _cells(verdict: Mapping[str, Any]) -> dict[str, str]:
    return {**rows.verdict(verdict), "reason": clean(verdict["reason"])}


def _table(cells: Sequence[Mapping[str, str]], order: Sequence[str]) -> list[str]:
    shown = [name for name in order if any(row.get(name, rows.EMPTY) != rows.EMPTY for row in cells)]
    if not shown:
        return []
    body = [[escape(row.get(name, rows.EMPTY)) for name in shown] for row in cells]
    return list(map(_row, [map(escape, shown), ["---"] * len(shown), *body]))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ending(report: Report) -> list[str]:
    end, file = outcome.of(report), outcome.report_file(report)
    lines = [f"- **{escape(end.status)}**{escape(end.why)}", *(f"- next: {escape(step)}" for step in end.steps)]
    lines += [f"- report: {escape(file)}"] if file else []
    return [*lines, f"- {escape(end.exit)}"]


def _figures(verdict: Mapping[str, Any]) -> list[str]:
    found = [{"figure": name, "value": value} for name, value in evidence.figures(verdict)]
    notes = [f"- {escape(note)}" for note in verdict["notes"]]
    return [*_table(found, ("figure", "value")), *(["", *notes] if notes else [])]


def _tail(arm: Mapping[str, Any]) -> list[str]:
    lines = [log_line(line)[:LONGEST] for line in arm["tail"][-TAIL:]]
    ticks = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, ticks + 1)
    return [f"{escape(arm['reason'] or '')}", "", f"{fence}text", *lines, fence]


def _folded(summary: str, body: Sequence[str]) -> list[str]:
    if not body:
        return []
    return ["<details>", f"<summary>{escape(summary)}</summary>", "", *body, "", "</details>"]
