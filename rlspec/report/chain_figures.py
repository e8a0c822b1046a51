"""Chain specs in words: a row a judgment, what is not green and where it begins, trained against inferred log-probs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlspec import chain_across, chains, verdicts
from rlspec.layouts import CANONICAL
from rlspec.report import rows
from rlspec.report.text import clean, flat, number

ORDER = ("judgment", "status", "of", "compared", "largest")
WRAPPED = "largest"
PARITY = "train_inference_parity"
AGGREGATES = {  # heading -> name
    "max |d|": "max_abs_dlogp",
    "mean |d|": "mean_abs_dlogp",
    "approx_kl": "approx_kl",
    "clipped": "clip_fraction",
    "outliers": "sequence_outliers",
}
ACROSS = ("train against", "of", "differing", *AGGREGATES)
_INVARIANCE = "forward_ and gradient_invariance: every layout equal to BN/full, to the bit."
_ACCURACY = "accuracy: within the row of the same model in fp32."
COMPARED = {
    "forward_invariance": _INVARIANCE,
    "gradient_invariance": _INVARIANCE,
    "forward_accuracy": _ACCURACY,
    "gradient_accuracy": _ACCURACY,
    PARITY: "parity: log-probs as trained against those of prefill and decode.",
    "decode_prefill": "decode_prefill: logits of decoded tokens against one prefill.",
    "kv_cache": "kv_cache: what is read against what was written.",
    chains.ACROSS: f"{chains.ACROSS}: the canonical cell of an arm against that of the first arm, to the bit.",
}
NAMED = 4
BARS = "▁▂▃▄▅▆▇█"


def is_chain(report: Mapping[str, Any]) -> bool:
    """Whether the verdicts are of configurations of a whole model."""
    return bool(report["kind"] == "chain" and any("configuration" in one["evidence"] for one in report["verdicts"]))


def legend(report: Mapping[str, Any]) -> str:
    """What the judgments of the report compare."""
    judged = _judgments(report["verdicts"])
    return " ".join(dict.fromkeys(text for name, text in COMPARED.items() if name in judged))


def tables(report: Mapping[str, Any]) -> Iterator[tuple[str, list[rows.Cells]]]:
    """(arm, its rows): a row a judgment, whatever its configurations."""
    for arm in dict.fromkeys(one["evidence"]["arm"] for one in report["verdicts"]):
        mine = [one for one in report["verdicts"] if one["evidence"]["arm"] == arm]
        yield clean(arm), [_row(name, [one for one in mine if one["judgment"] == name]) for name in _judgments(mine)]


def _judgments(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(one["judgment"] for one in found))


def _row(judgment: str, found: Sequence[Mapping[str, Any]]) -> rows.Cells:
    status = verdicts.worst([one["status"] for one in found])
    same = sum(one["status"] == status for one in found)
    count = sum(one["evidence"].get("comparisons") or one["evidence"].get("tokens") or 0 for one in found)
    return {
        "judgment": clean(judgment),
        "status": clean(status),
        "of": f"{same} of {len(found)}" if same != len(found) else str(len(found)),
        "compared": f"{count:,}" + (" log-probs" if judgment == PARITY else "") if count else rows.EMPTY,
        "largest": _largest(judgment, found),
    }


def _largest(judgment: str, found: Sequence[Mapping[str, Any]]) -> str:
    values = [one["statistic"] for one in found if one["statistic"] is not None]
    if not values:
        return rows.EMPTY
    # What failed without a figure of its own: else a row would say FAIL and "equal to the bit" at once.
    silent = any(one["statistic"] is None for one in found if one["status"] in ("FAIL", "ERROR"))
    return ("the others: " if silent else "") + _figure(judgment, found, values)


def _figure(judgment: str, found: Sequence[Mapping[str, Any]], values: Sequence[float]) -> str:
    value = number(max(values))
    if judgment == PARITY:
        return f"max |d| {value}"
    if judgment.endswith("accuracy"):
        ratios = [one["evidence"].get("largest_ratio_to_torch") for one in found]
        known = [ratio for ratio in ratios if ratio is not None]
        return f"error {value} of RMS" + (f", {number(max(known), digits=2)} × torch's" if known else "")
    if max(values):
        return f"{number(sum(values))} differing"
    outside = sum(one["evidence"].get("outside", 0) for one in found if one["status"] == "FAIL")
    return f"no bit differs, errors outside: {outside}" if outside else "equal to the bit"


def across(report: Mapping[str, Any]) -> Iterator[tuple[str, list[rows.Cells]]]:
    """(heading, its rows): log-probs as trained against those of inference where one differs; then arm against arm."""
    for arm in dict.fromkeys(one["evidence"]["arm"] for one in report["verdicts"]):
        found = [one for one in report["verdicts"] if one["judgment"] == PARITY and one["evidence"]["arm"] == arm]
        if any(one["evidence"].get("differing") for one in found):
            lines = [_execution(one["evidence"]) for one in found if "aggregates" in one["evidence"]]
            yield f"log-probs of {clean(arm)} as trained, against those of inference", lines
    measured = {arm: one for arm, one in (report.get("measured") or {}).items() if one}
    for arm in list(measured)[1:]:
        first = next(iter(measured))
        lines = list(_beside(measured[arm], measured[first]))
        if lines:
            yield f"{clean(arm)} beside {clean(first)}, {CANONICAL}", lines


def _beside(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[rows.Cells]:
    """Whether two arms have the same bits: log-probs, then gradients by tensor."""
    ours, others = (_logprobs(one) for one in (mine, theirs))
    if ours and len(ours) == len(others):
        gaps = [abs(a - b) for a, b in zip(ours, others, strict=True)]
        yield {"of": "log-probs", "differing": f"{sum(map(bool, gaps)):,} of {len(gaps):,}",
               "max |d|": number(max(gaps), digits=3)}  # fmt: skip
    digests, known = chain_across.gradients(mine), chain_across.gradients(theirs)
    if shared := digests.keys() & known.keys():
        apart = sum(digests[name] != known[name] for name in shared)
        yield {"of": "gradients", "differing": f"{apart:,} of {len(shared):,}"}


def _logprobs(arm: Mapping[str, Any]) -> list[float]:
    line = next((one for one in arm["logprobs"] if one["execution"] == CANONICAL), None)
    return [float(value) for value in line["values"]] if line else []


def _execution(evidence: Mapping[str, Any]) -> rows.Cells:
    said = {"train against": clean(evidence["configuration"]),
            "differing": f"{evidence['differing']:,} of {evidence['tokens']:,}"}  # fmt: skip
    return said | {head: number(evidence["aggregates"][name]["value"], digits=3) for head, name in AGGREGATES.items()}


def troubles(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str, list[str]]]:
    """(status, what, reason, more lines) of what is not green, together where it parts at one place or has one reason.

    Where the numbers of those together differ, the reason names the one that it is of.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in report["verdicts"]:
        if one["status"] not in ("PASS", "MEASURED", "N/A"):
            first = one["evidence"].get("first_divergence") or {}
            place = (one["judgment"], *(first.get(name) for name in ("layer", "name", "phase")))
            at = place if first else one["reason"]
            groups.setdefault((one["status"], one["evidence"]["arm"], at), []).append(one)
    for (status, arm, _), found in groups.items():
        names = [clean(one["evidence"]["configuration"]) for one in found]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        judgments = ", ".join(dict.fromkeys(clean(one["judgment"]) for one in found))
        places = "" if "," in judgments else f" {', '.join(names[:NAMED])}{more}"
        category = clean(found[0]["evidence"].get("category", "")).replace("_", " ")
        reason, alike = clean(found[0]["reason"]), len({one["reason"] for one in found}) == 1
        yield (
            status,
            f"{clean(arm)} {judgments}{places} ({category})",
            reason if alike else f"{names[0]}: {reason}",
            _more(found[0]["evidence"]),
        )


def _more(evidence: Mapping[str, Any]) -> list[str]:
    drift = evidence.get("drift") or []
    said = [f"drift of the residual stream by layer: {bars(drift)}  {_ends(drift)}"] if any(map(_float, drift)) else []
    return said + list(map(clean, evidence.get("tail", ())))


def bars(values: Sequence[Any]) -> str:
    """A bar a value, the largest full, on a scale of six decades; nothing for 0."""
    sizes = list(map(_float, values))
    peak = max((size for size in sizes if math.isfinite(size)), default=0.0)
    return "".join(_bar(size, peak) for size in sizes)


def _bar(size: float, peak: float) -> str:
    if not size or not peak:
        return "·"
    if not math.isfinite(size):
        return "!"
    return BARS[max(0, min(7, 7 + int(math.log10(size / peak) * 8 / 6)))]


def _ends(values: Sequence[Any]) -> str:
    known = [(layer, value) for layer, value in enumerate(values) if _float(value)]
    (first, low), (last, high) = known[0], known[-1]
    return f"layer {first} {number(_float(low), digits=2)}, layer {last} {number(_float(high), digits=2)}"


def _float(value: Any) -> float:
    return float(value)


def counted(report: Mapping[str, Any]) -> Iterator[str]:
    """How many judgments came out as what, and how long the parts of each arm took."""
    count: dict[str, int] = {}
    for one in report["verdicts"]:
        count[one["status"]] = count.get(one["status"], 0) + 1
    said = ", ".join(f"{number} {status}" for status, number in sorted(count.items(), key=lambda item: -item[1]))
    yield f"judgments: {sum(count.values())}: {said}"
    for arm, one in (report.get("measured") or {}).items():
        parts = [phase for phase in (one or {}).get("phases", ()) if phase["seconds"] >= 0.05]
        if parts:
            yield f"{clean(arm)} took: {', '.join(map(_phase, parts))}"


def _phase(phase: Mapping[str, Any]) -> str:
    peak = "" if phase["peak_gib"] is None else f" ({phase['peak_gib']:.1f} GiB)"
    return f"{clean(phase['name'])} {phase['seconds']:.1f} s{peak}"


def remarks(report: Mapping[str, Any]) -> Iterator[str]:
    """What to know of what is green, and what is not applicable, in a line each."""
    for note in dict.fromkeys(note for one in report["verdicts"] for note in one["notes"]):
        yield clean(note)
    for reason in dict.fromkeys(one["reason"] for one in report["verdicts"] if one["status"] == "N/A"):
        yield f"N/A: {clean(reason)}"


def figures(verdict: rows.Verdict) -> Iterator[rows.Figure]:
    """What a verdict stands on."""
    get = verdict["evidence"].get
    yield "category", clean(get("category", ""))
    yield "comparisons", f"{number(get('comparisons'))}, outside {number(get('outside'))}" if get("comparisons") else ""
    yield "log-probs", f"{number(get('tokens'))}, differing {number(get('differing'))}" if get("tokens") else ""
    for name, one in (get("aggregates") or {}).items():
        yield clean(name), f"{number(one['value'], digits=6)} ({clean(one['status'])}; {clean(one['detail'])})"
    yield "worst", flat(get("worst", {}))
    if get("largest_ratio_to_torch") is not None:
        yield "largest RMS error over plain torch's", number(get("largest_ratio_to_torch"))
    if get("log_probs"):
        yield "largest |d| of decoded log-probs", number(get("max_abs_dlogp"))
        yield "logits that differ to the bit", number(get("differing_logits"))
    if first := get("first_divergence"):
        yield "first divergence", flat({key: value for key, value in first.items() if value is not None})
    if any(map(_float, get("drift") or ())):
        yield "drift by layer", ", ".join(number(_float(value), digits=2) for value in get("drift"))
    yield "fails in", ", ".join(map(clean, get("failing", ())))
    yield "implementation", flat(get("implementation")) if get("implementation") else ""
    yield "weights", clean(get("weights") or "")
    yield "kernels seen", ", ".join(map(clean, get("kernels") or ()))
    yield "device", clean(get("device") or "")
