"""Cells of operator specs: arm × operator × tier × judgment, from the lines that a device wrote to a verdict each.

The device measured; whether its lines are whole, agree with each other and stay within the contract is decided here,
from numbers alone, so that a report can be judged again without a device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlspec import fallbacks, layouts, measurements, nodes
from rlspec.model import Row, Status
from rlspec.workloads import Tier

CATEGORIES: Mapping[str, Status] = {
    "green": "PASS",
    "unsure": "INVESTIGATE",
    "red_verdict": "FAIL",
    "red_without_gradients": "FAIL",
    "red_no_backward": "FAIL",
    "red_provenance": "ERROR",
    "cannot_fail": "ERROR",
    "missing": "ERROR",
    "broken": "ERROR",
    "raised": "ERROR",
    "process": "ERROR",
    "blocked_hardware": "BLOCKED",
    "not_applicable": "N/A",
    "measured": "MEASURED",
}
MEANING: Mapping[str, str] = {
    "green": "every comparison of the cell is within its row, or equal to the bit",
    "unsure": "log-probs of a whole model are within their row, and results on the way to them are not, or those "
    "of inference err by more than trained ones may",
    "red_verdict": "a comparison is outside its row, or differs to the bit",
    "red_without_gradients": "a forward without gradients, as an engine runs it, has other bits than one with them",
    "red_no_backward": "a gradient is asked for, and none flows through the operator",
    "red_provenance": "what ran is not what the arm or the candidate declares: another implementation or device, a "
    "fallback to torch, TF32, autocast, or state of the process that the operator changed",
    "cannot_fail": "the row would also pass a candidate that is all zero, shuffled or of the wrong sign",
    "missing": "the arm measured no such cell",
    "broken": "the records of the cell are not whole, or do not agree with each other, the workload or the contract",
    "raised": "the operator raised, gave a result of a wrong form, wrote into what it was given, or breaks a "
    "promise of its attributes",
    "process": "the process of the arm failed",
    "blocked_hardware": "the machine lacks what the spec or the kernels need",
    "not_applicable": "declared not applicable, with a written reason",
    "measured": "reported, by design not gated",
}
Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One cell of a spec: what is judged, by which row, of what; `device` is the one that the spec requires, if any."""

    operator: str
    tier: Tier
    judgment: str
    row: Row
    implementation: str
    device: str | None = None

    @property
    def accuracy(self) -> bool:
        return self.judgment.endswith("accuracy")

    @property
    def gradient(self) -> bool:
        return self.judgment.startswith("gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a cell came out as. `reason` is one sentence."""

    category: str
    reason: str
    statistic: float | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        return CATEGORIES[self.category]


def judge(measured: Mapping[str, Any], asked: Asked, *, cannot_fail: str) -> Finding:
    """One cell from what an arm measured, as `measurements.read` gives it."""
    node = nodes.NODES[asked.operator]
    if node.not_applicable:
        return Finding(category="not_applicable", reason=node.not_applicable)
    if asked.row.status in ("out_of_scope", "not_applicable"):
        return Finding(category="not_applicable", reason=asked.row.reason)
    name = (asked.operator, asked.tier.name)
    cell = next((one for one in measured["cells"] if (one["operator"], one["tier"]) == name), None)
    if cell is None:
        return Finding(category="missing", reason="the arm measured no such cell")
    environment = measured["environment"]
    finding = _stopped(cell, environment, asked)
    if finding is None:
        lines = [line for line in cell["comparisons"] if line["judgment"] == asked.judgment]
        broken = _broken(cell, lines, asked, environment)
        finding = Finding(category="broken", reason=broken) if broken else _compared(lines, asked)
        finding = _also_without_gradients(finding, cell, asked)
    passed = cell["passed_by"].get(asked.judgment, [])
    if passed and finding.category == "green" and cannot_fail == "error":
        finding = Finding(category="cannot_fail", reason=f"the row would also pass a candidate that is {passed[0]}")
    evidence = {**finding.evidence, **_ran(cell, environment)}
    return replace(finding, evidence=evidence, notes=tuple(_cannot_fail(passed)))


def _device(environment: Mapping[str, Any]) -> str:
    return "cuda" if environment["device"].startswith("cuda") else "cpu"


def _stopped(cell: Mapping[str, Any], environment: Mapping[str, Any], asked: Asked) -> Finding | None:
    """Why there is nothing to compare, if there is not."""
    if cell["blocked"]:
        return Finding(category="blocked_hardware", reason=cell["blocked"])
    if error := cell["error"]:
        return Finding(category="raised", reason=error["message"], evidence={"tail": list(error["tail"])})
    if strange := _strange(cell, environment, asked):
        return Finding(category="red_provenance", reason=strange)
    if asked.gradient and cell["no_backward"]:
        return Finding(category="red_no_backward", reason=f"no backward: {cell['no_backward']}")
    return None


def _strange(cell: Mapping[str, Any], environment: Mapping[str, Any], asked: Asked) -> str | None:
    """Why what ran is not what the spec asks for, or None."""
    if cell["implementation"] != asked.implementation:
        return f"implementation {cell['implementation']} ran, the arm has {asked.implementation}"
    if asked.device and _device(environment) != asked.device:
        return f"it ran on {environment['device']}, the spec requires {asked.device}"
    if asked.implementation in nodes.OWN_KERNELS and cell["backend"] != asked.implementation:
        return f"implementation {asked.implementation} declares the backend {cell['backend']}"
    for switch in ("tf32", "autocast"):
        if environment[switch] is not False:
            return f"{switch} was on"
    return cell["provenance"] or fallbacks.fallback(cell["backend"], cell["seen"])


def _broken(cell: Mapping[str, Any], lines: Lines, asked: Asked, environment: Mapping[str, Any]) -> str | None:
    """Why the lines are not the whole truth of the cell, or None."""
    tier, device = asked.tier, _device(environment)
    known = {one.name: one.digest for one in layouts.of(tier) if not nodes.left_out(one, device)}
    if cell["layouts"] != known:
        return "the layouts are not those of the workload"
    if asked.tier.cases >= 2 and "without_gradients" not in cell:
        return "nothing is said of forwards without gradients"
    wanted = {_key(one): one for one in nodes.expected(asked.operator, tier, asked.judgment, device)}
    if not wanted:
        return "the workload asks for no comparison here, so nothing was judged"
    keys = Counter(map(_key, lines))
    for key in wanted:
        if keys[key] != 1:
            return f"{_place(key)}: {'no comparison' if not keys[key] else f'{keys[key]} comparisons'}"
    if extra := set(keys) - set(wanted):
        return f"{_place(sorted(extra)[0])}: a comparison that nobody asked for"
    for line in lines:
        if problem := _odd(line, wanted[_key(line)].tokens, asked):
            return f"{_place(_key(line))}: {problem}"
    return _one_right_side(lines) or _one_run(cell["comparisons"], lines, asked)


def _key(one: Any) -> tuple[str, str, str]:
    if isinstance(one, nodes.Expected):
        return one.variant, one.tensor, one.configuration
    return one["variant"], one["tensor"], one["configuration"]


def _place(key: tuple[str, str, str]) -> str:
    variant, tensor, configuration = key
    return " ".join(filter(None, (variant, tensor, "in", configuration)))


def _odd(line: Mapping[str, Any], tokens: int, asked: Asked) -> str | None:
    """What in a line cannot be, or None."""
    if not math.prod(line["shape"]) == line["elements"] > 0:
        return f"{line['elements']} elements of shape {line['shape']}"
    if line["tokens"] != tokens or (tokens and line["shape"][0] != tokens):
        return f"{line['tokens']} tokens, {tokens} are due"
    if line["limits"] != dict(asked.row.limits):
        return f"the limits {line['limits']} are not those of {asked.row.id}; another contract needs a new run"
    if line["against"] != ("reference" if asked.accuracy else layouts.CANONICAL):
        return f"compared with {line['against']}"
    if missing := _needed(line, asked) - set(line):
        return f"{', '.join(sorted(missing))} missing"
    agrees = asked.accuracy or line["differing"] is None or line["differing"] > 0
    if not agrees and line["digest"] != line["against_digest"]:
        return "the digests differ, and no element does"
    return None


def _needed(line: Mapping[str, Any], asked: Asked) -> set[str]:
    if not asked.accuracy:
        return set(measurements.INVARIANCE)
    yardstick = "baseline_ratio" in asked.row.limits and _floating(line)
    return {*measurements.ACCURACY, *(["yardstick"] if yardstick else [])}


def _floating(line: Mapping[str, Any]) -> bool:
    return line["dtype"].startswith(("float", "bfloat"))  # type: ignore[no-any-return]


def _sample(line: Mapping[str, Any]) -> str:
    """The sample of a configuration in which each runs alone, else nothing."""
    return line["configuration"].partition("/")[2].partition("/")[2]  # type: ignore[no-any-return]


def _one_right_side(lines: Lines) -> str | None:
    """All layouts are compared with one reference, or one canonical run: a tensor has one digest on the right side."""
    seen: dict[tuple[str, str, str, str], str] = {}
    for line in lines:
        key = (line["variant"], line["tensor"], str(line["shape"]), _sample(line))
        if seen.setdefault(key, line["against_digest"]) != line["against_digest"]:
            return f"{_place(_key(line))}: compared with another tensor than in the lines before"
    return None


def _one_run(whole: Lines, lines: Lines, asked: Asked) -> str | None:
    """The canonical run that bits are compared with is the one whose accuracy was measured."""
    if asked.accuracy:
        return None
    twin = f"{asked.judgment.removesuffix('invariance')}accuracy"
    canonical = {
        (line["variant"], line["tensor"]): line["digest"]
        for line in whole
        if line["judgment"] == twin and line["configuration"] == layouts.CANONICAL
    }
    for line in lines:
        known = canonical.get((line["variant"], line["tensor"]), line["against_digest"])
        if not _sample(line) and known != line["against_digest"]:
            return f"{_place(_key(line))}: the canonical run is another one than that of {twin}"
    return None


def _compared(lines: Lines, asked: Asked) -> Finding:
    problems = [(line, _problem(line, asked)) for line in lines]
    wrong = [(line, problem) for line, problem in problems if problem is not None]
    if asked.accuracy:
        statistic = max(float(line["relative_rms"]) for line in lines)
    else:
        statistic = float(sum(line["elements"] if line["differing"] is None else line["differing"] for line in lines))
    evidence = {"comparisons": len(lines), "outside": len(wrong), **_worst(lines, asked.accuracy)}
    if asked.row.status == "measured":
        return Finding(category="measured", reason="not gated", statistic=statistic, evidence=evidence)
    if not wrong:
        reason = f"all {len(lines)} comparisons are {'within the row' if asked.accuracy else 'equal to the bit'}"
        return Finding(category="green", reason=reason, statistic=statistic, evidence=evidence)
    line, problem = wrong[0]
    first = {key: line[key] for key in ("variant", "tensor", "configuration", "first")}
    return Finding(
        category="red_verdict",
        reason=f"{_place(_key(line))}: {problem}{_where(line)}; {len(wrong)} of {len(lines)} comparisons are outside",
        statistic=statistic,
        evidence={**evidence, "first_failure": first, "failing": _failing(wrong)},
    )


def _also_without_gradients(finding: Finding, cell: Mapping[str, Any], asked: Asked) -> Finding:
    """Compared are forwards without gradients; those with them must be the same, or nothing is known of them."""
    apart = cell.get("without_gradients") or ()
    if asked.gradient or not apart or finding.category != "green":
        return finding
    more = f"; {len(apart) - 1} more such calls or layouts" if len(apart) > 1 else ""
    evidence = {**finding.evidence, "failing": list(apart)}
    return replace(finding, category="red_without_gradients", reason=f"{apart[0]}{more}", evidence=evidence)


def _problem(line: Mapping[str, Any], asked: Asked) -> str | None:
    if asked.accuracy:
        return nodes.accuracy_problem(line, asked.row.limits if _floating(line) else {})
    if line["differing"] is None:
        return None if line["digest"] == line["against_digest"] else "its digest differs"
    if line["differing"] <= asked.row.limits["differing_elements"]:
        return None
    dtypes = f" ({line['dtype']} against {line['against_dtype']})" if line["dtype"] != line["against_dtype"] else ""
    return f"{line['differing']:,} of {line['elements']:,} elements differ to the bit{dtypes}"


def _where(line: Mapping[str, Any]) -> str:
    first = line["first"]
    if not first:
        return ""
    values = f"{first['got']} is not {first['want']}"
    if "sample" not in first:
        return f", first at element {first['index']}: {values}"
    place = f"sample {first['sample']} position {first['position']} element {first['element']}"
    size = f" in a call of {first['call'][0]} × {first['call'][1]} tokens" if "call" in first else ""
    return f", first in {place}{size}: {values}"


def _worst(lines: Lines, accuracy: bool) -> dict[str, Any]:
    if not accuracy:
        return {}
    worst = max(lines, key=lambda line: float(line["relative_rms"]))
    keys = ("variant", "tensor", "configuration", "max_abs", "rms", "relative_rms", "relative_peak", "cosine", "ulps")
    return {"worst": {key: worst[key] for key in keys}}


def _failing(wrong: Sequence[tuple[Mapping[str, Any], str]]) -> list[str]:
    """Tensor and the configurations in which it fails."""
    groups: dict[str, list[str]] = {}
    for line, _ in wrong:
        groups.setdefault(" ".join(filter(None, (line["variant"], line["tensor"]))), []).append(line["configuration"])
    return [f"{name}: {', '.join(dict.fromkeys(places))}" for name, places in groups.items()]


def _ran(cell: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    seen = cell["seen"]
    kernels = seen["profiled"] or [*seen["triton"], *seen["native"]] or None
    return {
        "implementation": cell["implementation"],
        "backend": cell["backend"],
        "kernels": kernels,
        "operators_of_torch": seen["torch"],
        "device": environment["device"],
        "accumulated_by": sorted({line["accumulated_by"] for line in cell["comparisons"] if "accumulated_by" in line}),
    }


def _cannot_fail(passed: Sequence[str]) -> Iterator[str]:
    if passed:
        more = f" and {len(passed) - 1} more" if len(passed) > 1 else ""
        yield f"cannot_fail: the row would also pass a candidate that is {passed[0]}{more}"
