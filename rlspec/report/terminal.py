"""The screen: what was asked, what ran, the verdicts, what they stand on, and what to do next."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from types import ModuleType
from typing import Any

from tabulate import tabulate

from rlspec.report import cell_figures, chain_figures, evidence, outcome, rows
from rlspec.report.text import clean, columns, log_line, pieces, wrap

NARROWEST, WIDEST, PROSE, NARROWEST_COLUMN = 40, 200, 100, 11
TAIL, TROUBLES = 12, 12
INDENT = "  "
RIGHT = ("ratio", "base", "feature", "difference", "value", "steps", "time")
COLOURS = {
    "PASS": "32",
    "MEASURED": "36",
    "INVESTIGATE": "33",
    "FAIL": "31",
    "ERROR": "35",
    "BLOCKED": "34",
    "N/A": "2",
}

STATUS = re.compile(rf"^(?:{'|'.join(COLOURS)})(?![\w-])")
WORD = re.compile(rf"(?<![\w-])(?:{'|'.join(COLOURS)})(?![\w-])")

Report = Mapping[str, Any]


def use_color(environ: Mapping[str, str], isatty: bool) -> bool:
    """Whether to colour: NO_COLOR forbids it, then FORCE_COLOR asks for it, else a terminal that is not dumb has it."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return environ["FORCE_COLOR"] != "0"
    return isatty and environ.get("TERM") != "dumb"


def width(environ: Mapping[str, str], terminal: int) -> int:
    """Columns to fill: COLUMNS if it is a number, else those of the terminal; at least 40 and at most 200."""
    given = environ.get("COLUMNS", "")
    wanted = int(given) if given.isascii() and given.isdigit() and int(given) else terminal
    return min(max(wanted, NARROWEST), WIDEST)


def render(report: Report, *, width: int, color: bool, verbose: bool = False) -> str:
    """The report as text of at most `width` columns a line (at least 40); `verbose` prints every figure."""
    width = max(width, NARROWEST)
    own = _own(report)
    cells = own is not None
    blocks = [
        _header(report, width),
        _arms(report, width, verbose),
        *([_painted(table, color, anywhere=True) for table in _cells(report, own, width)] if own else ()),
        _painted(_troubles(report, own, width, verbose), color) if own else _painted(_verdicts(report, width), color),
        _painted(_details(report, width, verbose), color) if verbose or not cells else [],
        _notes(report, width),
        _painted(_ending(report, width), color),
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks if block) + "\n"


def _own(report: Report) -> ModuleType | None:
    """What shows the report of a kind that has many verdicts: a table, then what is not green."""
    if cell_figures.is_cells(report):
        return cell_figures
    return chain_figures if chain_figures.is_chain(report) else None


def _painted(lines: Sequence[str], color: bool, *, anywhere: bool = False) -> list[str]:
    """The status that a line begins with, or any, in its colour; after the layout, so that codes take no columns."""
    if not color:
        return list(lines)
    pattern = WORD if anywhere else STATUS
    return [pattern.sub(lambda found: f"\x1b[1;{COLOURS[found[0]]}m{found[0]}\x1b[0m", line) for line in lines]


def _header(report: Report, width: int) -> list[str]:
    contract = (report["contract"] or {}).get("name")
    named = {"model": report["model"], "tag": report["tag"], "contract": contract}
    overrides = ", ".join(map(clean, report["overrides"]))
    lines = wrap(rows.name(report), width)
    lines += wrap(clean(report["question"]), min(width, PROSE))
    lines += wrap(", ".join(f"{key} {clean(value)}" for key, value in named.items() if value), width)
    lines += wrap(overrides, width, "set ") if overrides else []
    return [line for line in lines if line]


# Tables


def _table(cells: Sequence[Mapping[str, str]], order: Sequence[str], width: int, flexible: str) -> list[str]:
    """Those columns of `order` that hold anything; to fit, `flexible` is wrapped, or else every row is stacked."""
    shown = [name for name in order if any(row.get(name, rows.EMPTY) != rows.EMPTY for row in cells)]
    sizes = {name: max(columns(row.get(name, rows.EMPTY)) for row in [*cells, {name: name}]) for name in shown}
    room = width - 2 * (len(shown) - 1) - sum(sizes[name] for name in shown if name != flexible)
    if room < min(sizes.get(flexible, 0), NARROWEST_COLUMN):
        return [line for row in cells for line in _stacked(row, shown, width)]
    sizes[flexible] = min(sizes.get(flexible, 0), room)
    body = [[_cell(row.get(name, rows.EMPTY), sizes[name]) for name in shown] for row in cells]
    rule = ["-" * sizes[name] for name in shown]
    align = ["right" if name in RIGHT else "left" for name in shown]
    text = tabulate([shown, rule, *body], tablefmt="plain", disable_numparse=True, colalign=align)
    return [piece for line in text.splitlines() for piece in pieces(line.rstrip(), width)]


def _cell(text: str, room: int) -> str:
    return "\n".join(wrap(text, room))


def _stacked(row: Mapping[str, str], shown: Sequence[str], width: int) -> list[str]:
    first, second, *rest = (row.get(name, rows.EMPTY) if at < 2 else name for at, name in enumerate(shown))
    said = ", ".join(f"{name} {row[name]}" for name in rest if row.get(name, rows.EMPTY) != rows.EMPTY)
    return [*wrap(f"{first} {second}", width), *(wrap(said, width, INDENT) if said else [])]


def _arms(report: Report, width: int, verbose: bool) -> list[str]:
    arms = report["arms"]
    given = not any(arm["commit"] or arm["revision"] for arm in arms)
    body = [rows.arm(arm, log=given) for arm in arms]
    lines = _table(body, rows.ARMS, width, "log" if given else "revision") if arms else []
    return lines + [line for arm in arms for line in _trouble(arm, width, verbose)]


def _trouble(arm: Mapping[str, Any], width: int, verbose: bool) -> list[str]:
    if not arm["reason"]:
        return []
    lines = wrap(f"{clean(arm['name'])} {clean(arm['status'])}: {clean(arm['reason'])}", width)
    tail = list(map(log_line, arm["tail"]))
    kept = tail if verbose else tail[-TAIL:]
    if kept:
        lines += wrap(f"last {len(kept)} lines of {clean(arm['log'] or 'its log')}:", width, INDENT)
    return lines + [f"{INDENT}{INDENT}{piece}" for line in kept for piece in pieces(line, width - 2 * len(INDENT))]


def _verdicts(report: Report, width: int) -> list[str]:
    verdicts = report["verdicts"]
    lines = _table(list(map(rows.verdict, verdicts)), rows.VERDICTS, width, "judgment") if verdicts else []
    lines += [line for text in rows.legend(verdicts) for line in wrap(text, min(width, PROSE))]
    judged, expected = report["counts"]["judged"], report["counts"]["expected"]
    return lines if judged == expected else [*lines, f"judged: {judged} of {expected} judgments"]


def _cells(report: Report, own: Any, width: int) -> list[list[str]]:
    """A table an arm, and what its arms have in common."""
    found = list(own.tables(report))
    made = []
    for arm, lines in found:
        head = [f"arm {arm}"] if len(found) > 1 else []
        made.append(head + _table(lines, own.ORDER, width, own.WRAPPED))
    made.append(wrap(own.legend(report), min(width, PROSE)))
    for title, lines in own.across(report):
        made.append([*wrap(title, width), *_table(lines, own.ACROSS, width, own.ACROSS[0])])
    return made


def _troubles(report: Report, own: Any, width: int, verbose: bool) -> list[str]:
    lines: list[str] = []
    found = list(own.troubles(report))
    for status, named, reason, tail in found if verbose else found[:TROUBLES]:
        lines += wrap(named, width, f"{status}  ")
        lines += wrap(reason, min(width, PROSE), INDENT)
        lines += [f"{INDENT}{INDENT}{piece}" for line in tail for piece in pieces(line, width - 2 * len(INDENT))]
    if len(found) > TROUBLES and not verbose:
        lines.append(f"... and {len(found) - TROUBLES} more reasons; -v prints all")
    return lines + [line for text in own.counted(report) for line in wrap(text, min(width, PROSE))]


# Below the tables


def _details(report: Report, width: int, verbose: bool) -> list[str]:
    shared = _shared_notes(report)
    said = [(one, _paragraphs(one, shared, verbose)) for one in report["verdicts"]]
    lines: list[str] = []
    for (status, paragraphs), group in groupby(said, key=lambda item: (item[0]["status"], item[1])):
        titles = ", ".join(rows.title(one) for one, _ in group)
        if paragraphs:
            lines += wrap(titles, width, f"{status}  ")
        for label, text in paragraphs:
            lines += wrap(text, min(width, PROSE), INDENT + label)
    return lines


def _paragraphs(verdict: Mapping[str, Any], shared: Sequence[str], verbose: bool) -> list[tuple[str, str]]:
    """(label, text) of what is said of a verdict."""
    said = [("", clean(verdict["reason"]))] if verbose or evidence.speaks(verdict) else []
    if verbose:
        said += [(f"{name}: ", value) for name, value in evidence.figures(verdict)]
    else:
        said.append(("", " ".join(evidence.sentences(verdict))))
    said += [("note: ", note) for note in map(clean, verdict["notes"]) if note not in shared]
    return [(label, text) for label, text in said if text]


def _shared_notes(report: Report) -> list[str]:
    """Notes that stand on several verdicts are said once."""
    count = Counter(note for verdict in report["verdicts"] for note in dict.fromkeys(map(clean, verdict["notes"])))
    return [note for note, times in count.items() if times > 1]


def _notes(report: Report, width: int) -> list[str]:
    own = _own(report)
    shared = own.remarks(report) if own else _shared_notes(report)
    notes = dict.fromkeys([*shared, *map(clean, report["notes"])])
    return [line for note in notes for line in wrap(note, min(width, PROSE), "note: ")]


def _ending(report: Report, width: int) -> list[str]:
    end, file = outcome.of(report), outcome.report_file(report)
    lines = wrap(f"{end.status}{end.why}", width)
    lines += [line for step in end.steps for line in wrap(step, width, "next: ")]
    lines += wrap(file, width, "report: ") if file else []
    return [*lines, *wrap(end.exit, width)]
