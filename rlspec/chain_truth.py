"""Are the records of a chain the whole truth: of what was asked for, without a gap, agreeing with each other?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlspec import chains, fallbacks, measurements, nodes
from rlspec.cells import Finding
from rlspec.chain_asked import PARITY, Asked, Lines
from rlspec.chain_records import CALLS
from rlspec.chains import ONLY_GRADIENTS, REFERENCE, Cell, Expected
from rlspec.layouts import CANONICAL

Key = tuple[str, str, str, str]
NAMES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}  # of dtypes, as torch has them
WIDE = ("residual_add", "lm_head", "router")  # whose results profile ws1 keeps in fp32


def ended(measured: Mapping[str, Any], asked: Asked) -> Finding | None:
    """Why nothing of the arm can be judged, or None."""
    run = measured["run"]
    if run["blocked"]:
        return Finding(category="blocked_hardware", reason=run["blocked"])
    for phase in measured["phases"]:
        if phase["name"] == "weights" and (error := phase["error"]):
            refused = error["message"].startswith(
                "ValueError: "
            )  # a sentence of ours: where it was raised helps nobody
            told = error["message"].removeprefix("ValueError: ") if refused else error["message"]
            return Finding(category="raised", reason=told, evidence={} if refused else {"tail": list(error["tail"])})
    if strange := _strange(measured, asked):
        return Finding(category="red_provenance", reason=strange)
    known = {cell.name: cell.digest for cell in asked.cells}
    if run["cells"] != known:
        return Finding(category="broken", reason="the cells are not those of the workload")
    if run["parameters"] != (count := len(asked.model.parameter_shapes())):
        reason = f"{run['parameters']} parameters, the model has {count}"
        return Finding(category="broken", reason=reason)
    if constant := _constant(measured):
        return Finding(category="broken", reason=constant)
    return None


def _constant(measured: Mapping[str, Any]) -> str | None:
    """Why nothing could fail, or None; log-probs that are alike where the reference's are not are a plain error."""
    sides = [one["values"] for one in measured["logprobs"] if one["execution"] in (CANONICAL, REFERENCE)]
    values = {value for side in sides for value in side}
    if len(values) != 1 or min(map(len, sides)) < 2 or not math.isfinite(float(value := values.pop())):
        return None
    return f"every log-prob is {value:g}, a constant: no judgment of this model can fail"


def _strange(measured: Mapping[str, Any], asked: Asked) -> str | None:
    """Why what ran is not what the spec asks for, or None."""
    run, weights, environment = measured["run"], measured["weights"], measured["run"]["environment"]
    here = "cuda" if environment["device"].startswith("cuda") else "cpu"
    if run["implementation"] != (asked.implementation or nodes.DEFAULT):
        return f"implementation {run['implementation']} ran, the arm has {asked.implementation}"
    if asked.device and here != asked.device:
        return f"it ran on {environment['device']}, the spec requires {asked.device}"
    if (run["profile"], run["faulty"]) != (asked.profile, asked.fault):
        return f"profile {run['profile']} and fault {run['faulty']} ran, not {asked.profile} and {asked.fault}"
    if run["dtype"] != NAMES.get(asked.dtype):
        return f"it ran in {run['dtype']}, the spec says {asked.dtype}"
    for switch in ("tf32", "autocast"):
        if environment[switch] is not False:
            return f"{switch} was on"
    if weights is None:
        return "nothing says which weights ran"
    said = {key: weights[key] for key in ("source", "seed", "path")}
    if said != {key: asked.weights.get(key) for key in said}:
        return f"weights {weights['source']} ran, the spec says {asked.weights['source']}"
    return _operators(measured, asked)


def _operators(measured: Mapping[str, Any], asked: Asked) -> str | None:
    if hidden := unseen(measured):  # the same error may stand with what could not be trained or inferred
        return hidden if sum(phase["error"] is not None for phase in measured["phases"]) == 1 else None
    seen = {line["operator"]: line for line in measured["operators"]}
    if missing := sorted(set(chains.operators(asked.model, asked.profile)) - set(seen)):
        return f"{missing[0]} was not seen to run"
    profiled = (measured["profile"] or {}).get("profiled")
    for operator, line in seen.items():
        given = nodes.implementation_of(operator, asked.implementation)
        if line["implementation"] != given:
            return f"{operator}: implementation {line['implementation']} ran, the arm has {given}"
        if given in nodes.OWN_KERNELS and line["backend"] != given:
            return f"{operator}: implementation {given} declares the backend {line['backend']}"
        if problem := fallbacks.fallback(line["backend"], {**line["seen"], "profiled": None}):
            return f"{operator}: {problem}"
        if problem := _rounded(operator, line["dtypes"], asked):
            return problem
    if measured["kernels"] is None or measured["kernels"]["weights"] != measured["weights"]["digest"]:
        return "the weights are not at the end what they were at the beginning"
    backends = {line["backend"] for line in seen.values()}
    if backends - {None} and len(backends) == 1:  # every kernel of a library is then a fallback
        launched = {name: measured["kernels"][name] for name in ("triton", "native")}
        whole = {**launched, "torch": [], "calls_without_launch": 0, "profiled": profiled}
        return fallbacks.fallback(next(iter(backends)), whole)
    return None


def _rounded(operator: str, told: Sequence[str], asked: Asked) -> str | None:
    """Why a result is not in the dtype that the profile says, or None. Behind its result an operator may give more."""
    if operator == "router" and asked.profile != "ws1":
        return None
    wide = operator == "logprob" or (operator in WIDE and asked.profile == "ws1")
    due = "float32" if wide else NAMES[asked.dtype]
    for call in told:
        made = call.rpartition("-> ")[2].split(", ")[: 2 if operator == "router" else 1]
        if set(made) != {due}:
            return f"{operator}: a result is in {' and '.join(made)}, {due} is due in profile {asked.profile}"
    return None


def flat(measured: Mapping[str, Any]) -> str | None:
    """Why decode against prefill could not fail, or None: all that the cache was asked for has one value."""
    lines = [line for line in measured["comparisons"] if line["judgment"] == "decode_prefill"]
    values = [value for line in lines for pair in line.get("dlogp", ()) for value in pair]
    if len(values) < 4 or len(set(values)) != 1 or not math.isfinite(float(values[0])):
        return None
    return f"every log-prob that was decoded is {values[0]:g}, a constant: decode against prefill cannot fail"


def unseen(measured: Mapping[str, Any]) -> str | None:
    """Why nobody looked at what ran, or None."""
    error = next((phase["error"] for phase in measured["phases"] if phase["name"] == "provenance"), None)
    return f"what ran was not seen: {error['message']}" if error else None


def cut_short(measured: Mapping[str, Any], judgment: str, *, missing: bool) -> Finding | None:
    """What ended the part of the run that a judgment needs, where something of it is missing."""
    error = next((one["error"] for one in measured["phases"] if one["name"] in _parts(judgment) and one["error"]), None)
    if error is None or not missing:
        return None
    if error["no_backward"]:
        return Finding(category="red_no_backward", reason=f"no backward: {error['message']}")
    return Finding(category="raised", reason=error["message"], evidence={"tail": list(error["tail"])})


def _parts(judgment: str) -> tuple[str, ...]:
    """The parts of a run that a judgment needs."""
    if judgment == PARITY:
        return "training", "inference"
    return ("inference",) if judgment in chains.STATEFUL else ("training",)


def key_of(one: Expected) -> Key:
    """What names a comparison that is due."""
    return one.judgment, one.configuration, one.tensor, one.against


def key_in(line: Mapping[str, Any]) -> Key:
    """The same of a line."""
    return line["judgment"], line["configuration"], line["tensor"], line["against"]


def gap(measured: Mapping[str, Any], lines: Lines, wanted: Sequence[Expected], asked: Asked) -> str | None:
    """Why the lines of a configuration are not all that is due, and no more, each as it must be; or None."""
    due = {key_of(one): one for one in wanted}
    count = Counter(map(key_in, lines))
    for key in due:
        if count[key] != 1:
            return f"{key[2]} in {key[1]}: {'two comparisons' if count[key] else 'no comparison'}"
    if extra := set(count) - set(due):
        key = min(extra)
        return f"{key[2]} in {key[1]}: a comparison that nobody asked for"
    for line in lines:
        if problem := _odd(measured, line, due[key_in(line)], asked):
            return f"{line['tensor']} in {line['configuration']}: {problem}"
    return None


def _odd(measured: Mapping[str, Any], line: Mapping[str, Any], due: Expected, asked: Asked) -> str | None:
    """What in a line cannot be, or None."""
    if tuple(line["shape"]) != due.shape or line["elements"] != math.prod(due.shape):
        return f"shape {line['shape']}, {list(due.shape)} is due"
    if line["limits"] != (dict(asked.limits(due.judgment)) if due.accuracy else None):
        return f"the limits {line['limits']} are not those of the contract; another contract needs a new run"
    if (dtype := _dtype(due, asked)) and line["dtype"] != dtype:
        return f"it is in {line['dtype']}, {dtype} is due"
    needed = {*_needed(due, asked), *((*measurements.ACCURACY, "yardstick") if due.accuracy else ("differing",))}
    if missing := needed - set(line):
        return f"{', '.join(sorted(missing))} missing"
    if not due.accuracy and line["differing"] == 0 and line["digest"] != line["against_digest"]:
        return "the digests differ, and no element does"
    return _sides(measured, line, due)


def _dtype(due: Expected, asked: Asked) -> str | None:
    """What a tensor is in: log-probs and sums of gradients in fp32, logits too in profile ws1. None: integers."""
    if due.tensor in ("cursor", "strays"):
        return None
    narrow = due.judgment == "kv_cache" or (due.tensor == "logits" and asked.profile != "ws1")
    return NAMES[asked.dtype] if narrow else "float32"


def _needed(due: Expected, asked: Asked) -> tuple[str, ...]:
    """Decoded log-probs, where the contract judges by them."""
    judged = due.judgment == "decode_prefill" and "max" in asked.row(due.judgment).limits
    return ("dlogp",) if judged else ()


def _sides(measured: Mapping[str, Any], line: Mapping[str, Any], due: Expected) -> str | None:
    """Each side of log-probs is the run that it says, by the digests; for gradients see `clash`."""
    said = {one["execution"]: one["digest"] for one in measured["logprobs"]}
    if due.tensor == "logprob":
        right = REFERENCE if due.accuracy else CANONICAL
        if line["against_digest"] != said.get(right):
            return f"compared with another run than {right}"
        if due.accuracy and due.configuration == CANONICAL and line["digest"] != said.get(CANONICAL):
            return "another run than the one whose log-probs stand here"
    return None


def clash(measured: Mapping[str, Any], asked: Asked) -> str | None:
    """What does not agree between lines: one tensor, one right side; a cell's trace, its digest."""
    sides: dict[tuple[str, ...], str] = {}
    for line in measured["comparisons"]:
        if line["judgment"] not in (*chains.INVARIANCE, *chains.ACCURACY):
            continue
        key = (line["judgment"], line["tensor"])
        if sides.setdefault(key, line["against_digest"]) != line["against_digest"]:
            return f"{line['tensor']} in {line['configuration']}: compared with another tensor than in the cells before"
        if line["judgment"] == "gradient_accuracy" and line["configuration"] == CANONICAL:
            known = sides.setdefault(("gradient_invariance", line["tensor"]), line["digest"])
            if known != line["digest"]:
                return f"{line['tensor']}: the canonical gradient is another one than that whose error was measured"
    cells = {cell["name"]: cell for cell in measured["cells"]}
    ended = any(phase["name"] == "training" and phase["error"] for phase in measured["phases"])
    if not ended and (missing := [cell.name for cell in asked.cells if _due(cell, asked) and cell.name not in cells]):
        return f"cell {missing[0]} did not run"
    for cell in asked.cells:
        if cell.name in cells and (cells[cell.name]["layout"], cells[cell.name]["chunk"]) != (
            cell.layout.digest,
            cell.chunk,
        ):
            return f"cell {cell.name} ran in another layout"
    if strange := _trained(measured, asked):
        return strange
    for trace in measured["traces"]:
        if trace["judgment"] == "forward_invariance":
            equal = cells[trace["configuration"]]["digest"] == cells[CANONICAL]["digest"]
            if equal != (trace["differing"] == 0):
                return f"the trace of {trace['configuration']} does not say what its digest says"
    return None


def _trained(measured: Mapping[str, Any], asked: Asked) -> str | None:
    """Which cell its decoder did not meet as the workload lays it out, or None; older records do not tell."""
    if not measured["run"].get(CALLS):
        return None
    ran = {cell["name"]: cell.get("ran") for cell in measured["cells"]}
    for cell in asked.cells:
        due = [
            [call.rows, call.width, -(-call.width // (cell.chunk or call.width)),
             [[run.row, run.column, run.length] for run in call.runs]]
            for call in cell.layout.calls
        ]  # fmt: skip
        if cell.name in ran and ran[cell.name] != due:
            return f"cell {cell.name}: its decoder was not called as the workload says"
    return None


def inferred(measured: Mapping[str, Any], name: str, asked: Asked) -> str | None:
    """Why an execution is another one than its name says, or None; older records do not tell."""
    if not measured["run"].get(CALLS) or name.endswith(f"/{chains.PREFIX}"):
        return None
    line = next((one for one in measured["executions"] if one["name"] == name), None)
    if line is None:
        return f"nothing says how {name} was called"
    due, page = chains.execution(asked.chain, name), asked.chain.page_size
    if [call[:2] for call in line["calls"]] != [list(call[:2]) for call in due.calls]:
        return f"{name}: its decoder was not called as the workload says"
    for (*_, blocks, places), (_, _, longest) in zip(line["calls"], due.calls, strict=True):
        held = {None: not blocks, "paged": places == page}.get(due.cache, places >= longest)
        if not held:
            given = f"a cache of blocks of {places} positions" if blocks else "no cache"
            return f"{name}: the decoder was given {given}, and {due.cache or 'none'} is due"
    return None


def _due(cell: Cell, asked: Asked) -> bool:
    if cell.name == CANONICAL:
        return True
    if cell.name == ONLY_GRADIENTS:
        return "gradient_invariance" in asked.judgments
    return bool(set(chains.INVARIANCE) & set(asked.judgments))
