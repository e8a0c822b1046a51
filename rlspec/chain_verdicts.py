"""Verdicts of chain specs, from the lines that a device wrote: one a judgment and configuration of an arm.

The device measured; whether its lines are whole, agree with each other and with the spec, and stay within the contract
is decided here, from numbers alone, so that a report can be judged again without a device.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlspec import chains, dlogp
from rlspec.cells import Finding
from rlspec.chain_asked import PARITY, Asked, Lines, bits, has, trace_of, values_of
from rlspec.chain_places import LOSS, divergence, drift, misrouted, parted, place, rerouted, silent, strayed
from rlspec.chain_truth import clash, cut_short, ended, flat, gap, inferred, key_in, key_of, unseen
from rlspec.chains import REFERENCE, RESCORE, Expected
from rlspec.layouts import CANONICAL
from rlspec.model import Row
from rlspec.pairing import Pair

GATED = ("max_abs_dlogp", "approx_kl", "clip_fraction")  # of parity, where bits are not asked for


def judge(measured: Mapping[str, Any], asked: Asked) -> Iterator[tuple[str, str, Row, Finding]]:
    """(judgment, configuration, row, what it came out as), in the order of the spec."""
    due: dict[tuple[str, str], list[Expected]] = {}
    for one in chains.expected(asked.chain, asked.model, asked.judgments, [cell.name for cell in asked.cells[1:]]):
        due.setdefault((one.judgment, one.configuration), []).append(one)
    stopped = ended(measured, asked)
    for judgment in (name for name in asked.judgments if name != chains.ACROSS):
        row = asked.row(judgment)
        names = chains.EXECUTIONS if judgment == PARITY else [place for kind, place in due if kind == judgment]
        for name in names:
            if row.status in ("out_of_scope", "not_applicable"):
                finding = Finding(category="not_applicable", reason=row.reason)
            else:
                wanted = due.get((judgment, name), [])
                finding = stopped or _finding(measured, judgment, name, wanted, row, asked)
                if finding.category in ("green", "unsure", "measured") and (hidden := unseen(measured)):
                    finding = Finding(category="red_provenance", reason=hidden)
            notes = (*finding.notes, *_unsaid(measured))
            yield judgment, name, row, replace(finding, evidence={**finding.evidence, **_ran(measured)}, notes=notes)


def _finding(
    measured: Mapping[str, Any], judgment: str, name: str, wanted: Sequence[Expected], row: Row, asked: Asked
) -> Finding:
    if judgment == PARITY:
        missing = not has(measured, CANONICAL, name)
        if failed := cut_short(measured, judgment, missing=missing):
            return failed
        strange = inferred(measured, name, asked)
        return Finding(category="broken", reason=strange) if strange else _parity(measured, name, row, asked)
    keys = {key_of(one) for one in wanted}
    lines = [line for line in measured["comparisons"] if (line["judgment"], line["configuration"]) == (judgment, name)]
    if failed := cut_short(measured, judgment, missing=keys != set(map(key_in, lines))):
        return failed
    broken = gap(measured, lines, wanted, asked)
    if broken is None and judgment in (*chains.INVARIANCE, *chains.ACCURACY):
        broken = clash(measured, asked)
    if broken is None and judgment in chains.STATEFUL:
        broken = inferred(measured, name, asked)
    if broken is None and judgment == "decode_prefill":
        broken = flat(measured)
    if broken:
        return Finding(category="broken", reason=broken)
    return _compared(measured, lines, judgment, name, row, asked)


def _compared(measured: Mapping[str, Any], lines: Lines, judgment: str, name: str, row: Row, asked: Asked) -> Finding:
    accuracy = judgment in chains.ACCURACY
    if accuracy and row.status != "measured" and (misled := misrouted(measured, judgment, asked)):
        return replace(misled, evidence={"comparisons": len(lines)})
    problems = [(line, _problem(line, row, asked)) for line in lines]
    wrong = [(line, problem) for line, problem in problems if problem is not None]
    statistic = _statistic(lines, accuracy)
    evidence: dict[str, Any] = {"comparisons": len(lines), "outside": len(wrong)}
    if accuracy:
        evidence |= _errors(measured, lines, name, judgment, asked)
    if judgment == "decode_prefill":
        evidence |= _decoded(lines)
    if row.status == "measured":
        return Finding(category="measured", reason="not gated", statistic=statistic, evidence=evidence)
    if not wrong:
        beside = bool(asked.beside(judgment))
        within = f"errors are within the row{', and beside plain torch' * beside}"
        reason = f"all {len(lines)} {within if accuracy else 'are equal to the bit'}"
        if judgment == "decode_prefill" and "max" in row.limits:
            reason = f"no log-prob is farther off than {row.limits['max']:g}"
        notes = tuple(silent(measured, judgment, name))
        if notes:
            evidence["first_divergence"] = divergence(measured, judgment, name, [], asked)
        notes += rerouted(measured, judgment, name)
        loose = [line["tensor"] for line in lines if accuracy and not beside and _passes_zeros(line)]
        if loose:
            zeros = f"the row would also pass zeros in {len(loose)} of {len(lines)} tensors, first {loose[0]}"
            evidence["passes_zeros"] = loose[:20]
            if asked.cannot_fail == "error":
                return Finding(category="cannot_fail", reason=zeros, statistic=statistic, evidence=evidence)
            notes += (f"{judgment} {name}: {zeros}",)
        green = Finding(category="green", reason=reason, statistic=statistic, evidence=evidence, notes=notes)
        return _doubted(green, strayed(measured, judgment, name, asked), judgment, name, asked)
    line, problem = wrong[0]
    first = divergence(measured, judgment, name, [line["tensor"] for line, _ in wrong], asked)
    evidence |= {"failing": [one["tensor"] for one, _ in wrong][:20], "first_divergence": first,
                 "drift": drift(measured, judgment, name)}  # fmt: skip
    said = f"{line['tensor']}: {problem}{_where(line)}; {len(wrong)} of {len(lines)} comparisons are outside"
    said += place(first, accuracy=accuracy)
    notes = rerouted(measured, judgment, name)
    return Finding(category="red_verdict", reason=said, statistic=statistic, evidence=evidence, notes=notes)


def _doubted(green: Finding, why: str, judgment: str, name: str, asked: Asked) -> Finding:
    """No PASS of log-probs that hide an error: little of what a node errs by may reach them, as with small weights."""
    if not why:
        return green
    if not asked.gates_nodes("forward_accuracy"):
        return replace(green, notes=(*green.notes, f"{judgment} {name} is PASS, and {why}"))
    return replace(green, category="unsure", reason=f"{green.reason}; but {why}")


def _statistic(lines: Lines, accuracy: bool) -> float:
    if accuracy:
        return max(float(line["relative_rms"]) for line in lines)
    counts = [line["elements"] if line["differing"] is None else line["differing"] for line in lines
              if "differing" in line]  # fmt: skip
    return float(sum(counts))


def _problem(line: Mapping[str, Any], row: Row, asked: Asked) -> str | None:
    if line["limits"] is not None:
        return asked.problem(line)
    if "max" in row.limits:
        gaps = [abs(float(a) - float(b)) for a, b in line.get("dlogp", [])]
        if not gaps:
            return "no log-prob was compared"
        wrong = [gap for gap in gaps if not gap <= row.limits["max"]]
        return f"a log-prob is {wrong[0]:.6g} off, above {row.limits['max']:g}" if wrong else None
    if line["differing"] is None:  # only the digests are known
        return None if line["digest"] == line["against_digest"] else "its digest differs"
    if line["differing"] <= 0:
        return None
    dtypes = f" ({line['dtype']} against {line['against_dtype']})" if line["dtype"] != line["against_dtype"] else ""
    return f"{line['differing']:,} of {line['elements']:,} elements differ to the bit{dtypes}"


def _passes_zeros(line: Mapping[str, Any]) -> bool:
    """Whether the limits of a line hold for a candidate that is all zero. A ratio to plain torch has a cap below 1."""
    limits, relative = line["limits"], float(line["relative_peak"])
    if "atol" not in limits or not float(line["max_abs"]) > 0:
        return False  # equal to the reference: which size it has, nothing here says
    peak = float(line["max_abs"]) / relative if relative else math.inf
    return bool(peak * (1 - limits["rtol"]) <= limits["atol"])


def _where(line: Mapping[str, Any]) -> str:
    first = line["first"]
    if not first:
        return ""
    names = ("layer", "sample", "position", "element")
    at = " ".join(f"{name} {first[name]}" for name in names if name in first) or f"element {first['index']}"
    if first["got"] == first["want"] == "nan":
        return f", first at {at}: nan on both sides, and nan agrees with nothing"
    # An error has a first element outside only by limits of elements; without, the one that is farthest off is told.
    which = "largest" if line["limits"] is not None and not _outside_by_element(line) else "first"
    return f", {which} at {at}: {first['got']} is not {first['want']}"


def _outside_by_element(line: Mapping[str, Any]) -> bool:
    return bool(line["violations"]) and any(line["limits"].get(name) for name in ("atol", "rtol"))


def _errors(measured: Mapping[str, Any], lines: Lines, name: str, judgment: str, asked: Asked) -> dict[str, Any]:
    """The worst tensor, and of log-probs the aggregates against the fp32 run."""
    worst = max(lines, key=lambda line: float(line["relative_rms"]))
    keys = ("tensor", "max_abs", "rms", "relative_rms", "relative_peak", "cosine")
    found: dict[str, Any] = {"worst": {key: worst[key] for key in keys}}
    ratios = [float(line["rms"]) / float(line["yardstick"]["torch_rms"]) for line in lines
              if float(line["yardstick"]["torch_rms"])]  # fmt: skip
    found["largest_ratio_to_torch"] = max(ratios, default=None)
    if judgment == "forward_accuracy" and name == CANONICAL and has(measured, CANONICAL, REFERENCE):
        made = _pair(measured, asked, CANONICAL, REFERENCE)
        found["aggregates"] = _aggregates(made, asked) if isinstance(made, Pair) else {}
    return found


def _decoded(lines: Lines) -> dict[str, Any]:
    gaps = [abs(float(a) - float(b)) for line in lines for a, b in line.get("dlogp", [])]
    differing = sum(line["differing"] or 0 for line in lines)
    return {"differing_logits": differing, "max_abs_dlogp": max(gaps, default=None), "log_probs": len(gaps)}


def _parity(measured: Mapping[str, Any], name: str, row: Row, asked: Asked) -> Finding:
    made = _pair(measured, asked, CANONICAL, name)
    if isinstance(made, Finding):
        return made
    digests = {one["execution"]: one["digest"] for one in measured["logprobs"]}
    differing = sum(bits(a) != bits(b) for a, b in zip(made.train, made.rollout, strict=True))
    if (differing == 0) != (digests[name] == digests[CANONICAL]):
        return Finding(category="broken", reason=f"the digests of {name} do not say what its log-probs say")
    found = _aggregates(made, asked)
    evidence: dict[str, Any] = {"differing": differing, "tokens": len(made.d), "aggregates": found}
    peak = found["max_abs_dlogp"]["value"]
    if row.status == "measured":
        return Finding(category="measured", reason="not gated", statistic=peak, evidence=evidence)
    wrong = list(_outside(found, differing, len(made.d), row))
    if not wrong:
        near = f"max |d| {peak:.6g}, within {row.limits['max']:g}{_others(found)}" if differing else "equal to the bit"
        why = parted(measured, PARITY, name, asked)
        notes = () if why else tuple(silent(measured, PARITY, name))
        said = f"{len(made.d)} log-probs: {near}"
        green = Finding(category="green", reason=said, statistic=peak, evidence=evidence, notes=notes)
        return _doubted(green, why, PARITY, name, asked)
    trace = trace_of(measured, PARITY, name) or {}
    first = trace.get("first") or (dict(LOSS) if name == RESCORE else None)
    evidence |= {"first_divergence": first, "drift": list(trace.get("depth", ()))}
    numbers = ", ".join(f"{key} {found[key]['value']:.4g}" for key in (*GATED, "mean_abs_dlogp", "sequence_outliers"))
    said = f"{'; '.join(wrong)}; {numbers}{place(first)}"
    return Finding(category="red_verdict", reason=said, statistic=peak, evidence=evidence)


def _outside(found: Mapping[str, Any], differing: int, tokens: int, row: Row) -> Iterator[str]:
    """What leaves the row of the judgment: bits, or the largest |d|; and then the rows of the aggregates."""
    if differing > row.limits.get("differing_elements", tokens):
        yield f"{differing:,} of {tokens:,} log-probs differ to the bit"
    if "max" not in row.limits:
        return
    peak, limit = found["max_abs_dlogp"]["value"], row.limits["max"]
    if not peak <= limit:
        yield f"max |d| {peak:.6g} is above {limit:g}"
    if other := [key for key, one in found.items() if one["status"] == "FAIL" and key != "max_abs_dlogp"]:
        yield f"{', '.join(other)} outside"
    if found["max_abs_dlogp"]["status"] == "FAIL" and peak <= limit:
        yield f"max |d| {peak:.6g} is above that of {found['max_abs_dlogp']['row']}"


def _others(found: Mapping[str, Any]) -> str:
    """Which of the aggregates gate, too."""
    gated, free = ([key for key in GATED if (found[key]["status"] == "PASS") == gates] for gates in (True, False))
    within = f", and {', '.join(gated)} within theirs" if gated else ""
    return within + (f"; {', '.join(free)} reported and not gated" if free else "")


def _pair(measured: Mapping[str, Any], asked: Asked, train: str, rollout: str) -> Pair | Finding:
    """Both executions joined; or why they cannot be: log-probs that are missing are an error, never a shorter list."""
    ours, theirs = values_of(measured, rollout), values_of(measured, train)
    active = asked.chain.tier.active
    for name, values in ((rollout, ours), (train, theirs)):
        if values is None:
            return Finding(category="broken", reason=f"no log-probs of {name}")
        if len(values) != active:
            reason = f"{len(values)} log-probs of {name}, {active} tokens are active"
            return Finding(category="broken", reason=reason)
        if not all(map(math.isfinite, values)):
            at = next(index for index, value in enumerate(values) if not math.isfinite(value))
            return Finding(category="red_verdict", reason=f"log-prob {at} of {name} is {values[at]}")
    assert ours is not None and theirs is not None
    spans, positions, start = {}, array("q"), 0
    for sample in asked.chain.tier.samples:
        spans[sample.id] = (start, start + sample.active)
        positions.extend(range(sample.prompt, sample.length))
        start += sample.active
    d = array("d", (a - b for a, b in zip(theirs, ours, strict=True)))
    size = array("d", map(abs, d))
    return Pair(
        spans=spans,
        positions=positions,
        tokens=array("q", positions),
        rollout=array("d", ours),
        train=array("d", theirs),
        d=d,
        size=size,
        peaks=[(max(size[first:last]), name) for name, (first, last) in spans.items()],
        flips=None,
    )


def _aggregates(pair: Pair, asked: Asked) -> dict[str, Any]:
    return dlogp.aggregates(pair, lambda name: asked.resolve(name, "*"))


def _unsaid(measured: Mapping[str, Any]) -> Iterator[str]:
    """What no verdict says by itself, of any of them; older records always hold a backward."""
    if measured["run"].get("backward") is False and not measured["run"]["blocked"]:
        yield "no judgment of gradients is asked for: no backward ran, and what ran was seen in forwards alone"
    weights = measured["weights"] or {}
    if "config" in weights and weights["config"] is None:
        yield "the folder of weights has no config.json: only the shapes of its tensors say that they are of this model"


def _config(weights: Mapping[str, Any]) -> str:
    """What the files say of their model beside its tensors; older records do not tell."""
    if "config" not in weights:
        return ""
    return f", config.json {weights['config'][:12]}" if weights["config"] else ", no config.json"


def _ran(measured: Mapping[str, Any]) -> dict[str, Any]:
    run, weights, kernels = measured["run"], measured["weights"] or {}, measured["kernels"] or {}
    return {
        "implementation": run["implementation"],
        "device": run["environment"]["device"],
        "weights": f"{weights.get('source', 'none')} {weights.get('digest', '')[:12]}".strip() + _config(weights),
        "kernels": [*kernels.get("triton", ()), *kernels.get("native", ())] or None,
    }
