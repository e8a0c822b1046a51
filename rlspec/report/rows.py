"""What the tables show: one row of cells a verdict and a row an arm, by column name.

Reads evidence leniently: a figure that is not there leaves its cell empty, it is never made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlspec.report.text import clean, duration, flat, number, percent, ratio

Verdict = Mapping[str, Any]
Cells = dict[str, str]
Figure = tuple[str, str]

VERDICTS = ("status", "judgment", "ratio", "base", "feature", "difference", "value", "limits", "limit", "floor")
ARMS = ("arm", "role", "revision", "commit", "status", "steps", "time", "log")
PARITY = ("max_abs_dlogp", "mean_abs_dlogp", "approx_kl", "clip_fraction", "sequence_outliers")
TIMING = ("step_time", "throughput", "peak_memory")
WHOLE = ("", "*", "logprob")
EMPTY = "-"
UNGATED = {"measured": "not gated", "out_of_scope": "out of scope", "not_applicable": "not applicable"}
SCOPES = {"job": "", "device": "per device"}
RATIO = "ratio: how far the feature is from base, over how far two runs of base are apart (the floor)."
DLOGP = (
    "d: log-prob of train minus that of rollout, a token each. approx_kl: mean of exp(d) - 1 - d. clip_fraction: share "
    "of tokens with exp(d) outside the clip range. sequence_outliers: sequences in which a |d| exceeds max_abs_dlogp."
)


def title(verdict: Verdict) -> str:
    """The judgment and what it is about."""
    judgment, subject = clean(verdict["judgment"]), clean(verdict["subject"])
    return judgment if subject in WHOLE or judgment in TIMING else f"{judgment} {subject}"


def name(report: Mapping[str, Any]) -> str:
    """Kind and name of the spec, the kind once."""
    kind, given = clean(report["kind"]), clean(report["name"])
    return f"{kind}: {given.removeprefix(f'{kind}/')}"


def limit_values(verdict: Verdict) -> list[Any]:
    """The numbers that the verdict's statistic is held against."""
    return list((verdict["row"] or {}).get("limits", {}).values())


def band(verdict: Verdict) -> tuple[str, str] | None:
    """Below what a ratio passes and above what it fails."""
    row = verdict["row"] or {"status": "", "limits": {}}
    given = row["limits"]
    if row["status"] in UNGATED or not {"pass_below", "fail_above"} <= set(given):
        return None
    return number(given["pass_below"]), number(given["fail_above"])


def legend(verdicts: Sequence[Verdict]) -> list[str]:
    """What the columns mean, for those who read them the first time."""
    judged = [one for one in verdicts if one["statistic"] is not None]
    drifts = [one for one in judged if one["judgment"] == "drift"]
    said = [RATIO] if drifts else []
    said += [
        f"limits {below} / {above}: PASS below {below}, FAIL above {above}, INVESTIGATE between."
        for below, above in dict.fromkeys(filter(None, map(band, drifts)))
    ]
    return said + ([DLOGP] if any(one["judgment"] in PARITY for one in judged) else [])


def verdict(one: Verdict) -> Cells:
    """The row of a verdict."""
    made = {"status": clean(one["status"]), "judgment": title(one)}
    return made | _CELLS.get(one["judgment"], _gate)(one, one["evidence"])


def arm(one: Mapping[str, Any], log: bool) -> Cells:
    """The row of an arm; `log` names its log too."""
    return {
        "arm": clean(one["name"]),
        "role": clean(one["role"]),
        "revision": clean(one["revision"] or EMPTY),
        "commit": clean((one["commit"] or EMPTY)[:7]),
        "status": clean(one["status"]),
        "steps": EMPTY if one["steps"] is None else str(one["steps"]),
        "time": duration(one["seconds"]) or EMPTY,
        "log": clean(one["log"] or EMPTY) if log else EMPTY,
    }


def _limit(one: Verdict) -> str:
    row = one["row"]
    if row is None:
        return EMPTY
    if row["status"] in UNGATED:
        return UNGATED[row["status"]]
    if found := band(one):
        return " / ".join(found)
    if "max" in row["limits"]:
        return f"<= {number(row['limits']['max'])}"
    return ", ".join(f"{clean(key)} {number(value)}" for key, value in row["limits"].items())


def _drift(one: Verdict, evidence: Mapping[str, Any]) -> Cells:
    value = one["statistic"]
    return {
        "ratio": EMPTY if value is None else ratio(value, limit_values(one)),
        "limits": EMPTY if value is None else _limit(one),
        "floor": clean(evidence.get("floor") or EMPTY),
    }


def _timing(one: Verdict, evidence: Mapping[str, Any]) -> Cells:
    if "base" not in evidence:
        return {}
    return {
        "base": f"{number(evidence['base'])} {unit(evidence)}",
        "feature": f"{number(evidence['feature'])} {unit(evidence)}",
        "difference": percent(evidence["difference_percent"]),
    }


def unit(evidence: Mapping[str, Any]) -> str:
    """The unit of a timing figure."""
    return clean(f"{evidence.get('unit', '')} {SCOPES.get(evidence.get('scope', ''), evidence.get('scope', ''))}")


def machines(differing: Mapping[str, Mapping[str, Any]] | None) -> Iterator[Figure]:
    """In what the machines of the arms differ."""
    for key, values in (differing or {}).items():
        yield f"machines differ in {clean(key)}", flat(values)


def _gate(one: Verdict, evidence: Mapping[str, Any]) -> Cells:
    return {"value": number(one["statistic"], limit_values(one)), "limit": _limit(one)}


_CELLS: Mapping[str, Callable[[Verdict, Mapping[str, Any]], Cells]] = {
    "drift": _drift,
    **dict.fromkeys(TIMING, _timing),
}
