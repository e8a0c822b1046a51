"""Operator specs in words: a table of cells an arm, and under it what is not green."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlspec import layouts
from rlspec.report import rows
from rlspec.report.text import clean, flat, number

COLUMNS = {
    "forward_accuracy": "accuracy",
    "forward_invariance": "bits",
    "gradient_accuracy": "gradient",
    "gradient_invariance": "gradient bits",
}
ORDER = ("operator", "tier", *COLUMNS.values())
WRAPPED = "operator"
ACROSS = ("operator", "forward", "gradient")
_LEGEND = (
    "accuracy, gradient: within the contract's row of the reference. bits, gradient bits: every layout of the workload "
    "equal to one packed batch, to the bit."
)
NAMED = 4


def legend(report: Mapping[str, Any]) -> str:
    """What the columns compare."""
    return _LEGEND


def is_cells(report: Mapping[str, Any]) -> bool:
    """Whether the verdicts are cells of operators."""
    return report["kind"] == "operators" and any("operator" in one["evidence"] for one in report["verdicts"])


def tables(report: Mapping[str, Any]) -> Iterator[tuple[str, list[rows.Cells]]]:
    """(arm, its rows): a row an operator and tier, a column a judgment."""
    for arm in dict.fromkeys(one["evidence"]["arm"] for one in report["verdicts"]):
        lines: dict[tuple[str, str], rows.Cells] = {}
        for one in report["verdicts"]:
            at = one["evidence"]
            if at["arm"] == arm:
                names = {"operator": clean(at["operator"]), "tier": clean(at["tier"])}
                line = lines.setdefault((at["operator"], at["tier"]), names)
                line[COLUMNS[one["judgment"]]] = clean(one["status"])
        yield clean(arm), list(lines.values())


def across(report: Mapping[str, Any]) -> Iterator[tuple[str, list[rows.Cells]]]:
    """(heading, its rows): of each arm after the first, an operator a row, whether its results have the same bits.

    Compared are the digests of the canonical layout, which are there also where no cell asks for it.
    """
    given = (report["measured"] or {}).items()
    measured = {arm: _canonical(found) for arm, found in given if found is not None}  # an arm may have died
    for arm, digests in list(measured.items())[1:]:
        first = next(iter(measured))
        shared = digests.keys() & measured[first].keys()
        lines: dict[str, rows.Cells] = {}
        for column, gradient in (("forward", False), ("gradient", True)):
            for operator in dict.fromkeys(key[0] for key in measured[first]):
                keys = [key for key in shared if key[:2] == (operator, gradient)]
                if keys:
                    apart = sum(digests[key] != measured[first][key] for key in keys)
                    line = lines.setdefault(operator, {"operator": clean(operator)})
                    line[column] = f"{apart} of {len(keys)} differ" if apart else f"all {len(keys)} equal"
        if lines:
            yield f"bits of {clean(arm)} beside those of {clean(first)}", list(lines.values())


def _canonical(measured: Mapping[str, Any]) -> dict[tuple[str, bool, str, str, str, str], str]:
    """The digest of each tensor in the canonical layout; of an implementation that ran in it."""
    found = {}
    for cell in measured["cells"]:
        for line in cell["comparisons"]:
            if line["against"] == layouts.CANONICAL:
                sample = line["configuration"].partition("/")[2].partition("/")[2]
                gradient = line["judgment"].startswith("gradient")
                key = cell["operator"], gradient, cell["tier"], line["variant"], line["tensor"], sample
                found[key] = line["against_digest"]
    return found


def counted(report: Mapping[str, Any]) -> Iterator[str]:
    """How many cells came out as what, those of the published counts apart."""
    for title, wanted in (("cells", True), ("beside them", False)):
        found = Counter(one["status"] for one in report["verdicts"] if one["evidence"]["counted"] is wanted)
        if found:
            said = ", ".join(f"{count} {status}" for status, count in sorted(found.items(), key=lambda item: -item[1]))
            yield f"{title}: {sum(found.values())}: {said}"


def troubles(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str, list[str]]]:
    """(status, cells, reason, tail) of what is neither green nor without meaning; cells of one reason together."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in report["verdicts"]:
        if one["status"] not in ("PASS", "MEASURED", "N/A"):
            groups.setdefault((one["status"], one["reason"]), []).append(one)
    for (status, reason), found in groups.items():
        first = found[0]["evidence"]
        category = clean(first.get("category", "")).replace("_", " ")
        tail = list(map(clean, first.get("tail", ())))
        yield status, f"{_named(found)} ({category})", clean(reason), tail


def _named(found: Sequence[Mapping[str, Any]]) -> str:
    names = [_name(one) for one in found]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _name(one: Mapping[str, Any]) -> str:
    at = one["evidence"]
    return f"{clean(at['arm'])} {clean(at['operator'])} {clean(at['tier'])} {COLUMNS[one['judgment']]}"


def remarks(report: Mapping[str, Any]) -> Iterator[str]:
    """Which green cells a wrong candidate would have passed too, and what is not applicable, in a line each."""
    loose = [one for one in report["verdicts"] if one["notes"] and one["status"] == "PASS"]
    if loose:
        names = ", ".join(dict.fromkeys(f"{one['evidence']['operator']} {COLUMNS[one['judgment']]}" for one in loose))
        yield (
            f"cannot_fail: in {len(loose)} green cells the row would also pass a candidate that is all zero, shuffled "
            f"or of the wrong sign: {clean(names)}"
        )
    for reason in dict.fromkeys(one["reason"] for one in report["verdicts"] if one["status"] == "N/A"):
        of = dict.fromkeys(clean(v["evidence"]["operator"]) for v in report["verdicts"] if v["reason"] == reason)
        yield f"N/A {', '.join(of)}: {clean(reason)}"


def figures(verdict: rows.Verdict) -> Iterator[rows.Figure]:
    """What a cell stands on."""
    get = verdict["evidence"].get
    yield "category", clean(get("category", ""))
    yield "comparisons", f"{number(get('comparisons'))}, outside {number(get('outside'))}" if get("comparisons") else ""
    yield "worst", flat(get("worst", {}))
    yield "fails in", "; ".join(map(clean, get("failing", ())))
    yield "implementation", clean(get("implementation") or "")
    yield "declares", clean(get("backend") or "")
    yield "kernels seen", ", ".join(map(clean, get("kernels") or ()))
    yield "operators of torch seen", ", ".join(map(clean, get("operators_of_torch") or ()))
    yield "device", clean(get("device") or "")
    yield "parameter gradients summed by", ", ".join(map(clean, get("accumulated_by") or ()))
