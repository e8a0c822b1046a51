"""Verdicts of chain specs, from the lines that a device wrote: one a judgment and configuration of an arm.

The device measured; whether its lines are whole, agree with each other and with the spec, and stay within the contract
is decided here, from numbers alone, so that a report can be judged again without a device.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlspec import chains, dlogp, fallbacks, measurements, nodes
from rlspec.cells import Finding
from rlspec.chains import ONLY_GRADIENTS, REFERENCE, RESCORE, Cell, Expected, Sizes
from rlspec.layouts import CANONICAL
from rlspec.model import Row
from rlspec.pairing import Pair
from rlspec.workloads import Chain

PARITY = "train_inference_parity"
GATED = ("max_abs_dlogp", "approx_kl", "clip_fraction")  # of parity, where bits are not asked for
_LOSS = {"layer": None, "name": "loss", "operator": "loss", "phase": "forward"}
Lines = Sequence[Mapping[str, Any]]
Key = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one arm is held against. `resolve(judgment, subject)` gives a row of the contract."""

    chain: Chain
    cells: tuple[Cell, ...]
    sizes: Sizes
    judgments: tuple[str, ...]
    implementation: str | Mapping[str, str] | None
    weights: Mapping[str, Any]
    profile: str
    dtype: str
    device: str | None
    fault: str | None
    resolve: Callable[[str, str], Row]

    def row(self, judgment: str) -> Row:
        """The row of a judgment. Of accuracy: that of a whole model; an absolute one with pinned weights alone."""
        if judgment not in chains.ACCURACY:
            return self.resolve(judgment, "logprob" if judgment.startswith("forward") else "reduction")
        if self.weights["source"] != "seeded":
            own = self.resolve(judgment, "logprob" if judgment.startswith("forward") else "reduction")
            if "atol" in own.limits:
                return own
        return self.resolve(judgment, chains.SUBJECT)

    def limits(self, judgment: str) -> Mapping[str, float]:
        """Of what is measured as an error: those of accuracy, and of attention through a cache."""
        row = self.resolve("forward_accuracy", "attention") if judgment == "kv_cache" else self.row(judgment)
        return dict(row.limits)


def judge(measured: Mapping[str, Any], asked: Asked) -> Iterator[tuple[str, str, Row, Finding]]:
    """(judgment, configuration, row, what it came out as), in the order of the spec."""
    due: dict[tuple[str, str], list[Expected]] = {}
    for one in chains.expected(asked.chain, asked.sizes, asked.judgments, [cell.name for cell in asked.cells[1:]]):
        due.setdefault((one.judgment, one.configuration), []).append(one)
    stopped = _stopped(measured, asked)
    for judgment in asked.judgments:
        row = asked.row(judgment)
        names = chains.EXECUTIONS if judgment == PARITY else [place for kind, place in due if kind == judgment]
        for name in names:
            if row.status in ("out_of_scope", "not_applicable"):
                finding = Finding(category="not_applicable", reason=row.reason)
            else:
                wanted = due.get((judgment, name), [])
                finding = stopped or _finding(measured, judgment, name, wanted, row, asked)
            yield judgment, name, row, replace(finding, evidence={**finding.evidence, **_ran(measured)})


def _stopped(measured: Mapping[str, Any], asked: Asked) -> Finding | None:
    """Why nothing of the arm can be judged, or None."""
    run = measured["run"]
    if run["blocked"]:
        return Finding(category="blocked_hardware", reason=run["blocked"])
    for phase in measured["phases"]:
        if phase["name"] == "weights" and phase["error"]:
            tail = list(phase["error"]["tail"])
            return Finding(category="raised", reason=phase["error"]["message"], evidence={"tail": tail})
    if strange := _strange(measured, asked):
        return Finding(category="red_provenance", reason=strange)
    known = {cell.name: cell.digest for cell in asked.cells}
    if run["cells"] != known:
        return Finding(category="broken", reason="the cells are not those of the workload")
    if run["parameters"] != len(asked.sizes.parameters):
        reason = f"{run['parameters']} parameters, the model has {len(asked.sizes.parameters)}"
        return Finding(category="broken", reason=reason)
    return None


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
    if run["dtype"] != {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}.get(asked.dtype):
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
    errors = {phase["name"]: phase["error"] for phase in measured["phases"] if phase["error"]}
    if "provenance" in errors:  # the same error may stand with what could not be trained or inferred
        return None if len(errors) > 1 else f"what ran was not seen: {errors['provenance']['message']}"
    seen = {line["operator"]: line for line in measured["operators"]}
    if missing := sorted(_needed_operators(asked) - set(seen)):
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
    if measured["kernels"] is None or measured["kernels"]["weights"] != measured["weights"]["digest"]:
        return "the weights are not at the end what they were at the beginning"
    backends = {line["backend"] for line in seen.values()}
    if backends - {None} and len(backends) == 1:  # every kernel of a library is then a fallback
        launched = {name: measured["kernels"][name] for name in ("triton", "native")}
        whole = {**launched, "torch": [], "calls_without_launch": 0, "profiled": profiled}
        return fallbacks.fallback(next(iter(backends)), whole)
    return None


def _needed_operators(asked: Asked) -> set[str]:
    """What no run of the model can do without."""
    always = {"embedding", "rms_norm", "qk_norm", "rope", "det_gemm", "attention", "residual_add", "lm_head", "logprob"}
    activation = "silu" if asked.profile == "hf" else "swiglu"
    return always | {activation} | ({"router", "grouped_gemm", "combine"} if asked.sizes.experts else set())


def _finding(
    measured: Mapping[str, Any], judgment: str, name: str, wanted: Sequence[Expected], row: Row, asked: Asked
) -> Finding:
    if judgment == PARITY:
        return _failed(measured, judgment, missing=not _has(measured, CANONICAL, name)) or _parity(
            measured, name, row, asked
        )
    keys = {_key(one) for one in wanted}
    lines = [line for line in measured["comparisons"] if (line["judgment"], line["configuration"]) == (judgment, name)]
    if failed := _failed(measured, judgment, missing=keys != set(map(_of, lines))):
        return failed
    broken = _broken(measured, lines, wanted, asked)
    if broken is None and judgment in (*chains.INVARIANCE, *chains.ACCURACY):
        broken = _loose(measured, asked)
    if broken:
        return Finding(category="broken", reason=broken)
    return _compared(measured, lines, judgment, name, row, asked)


def _failed(measured: Mapping[str, Any], judgment: str, *, missing: bool) -> Finding | None:
    """What ended the part of the run that a judgment needs, where something of it is missing."""
    parts = ("inference",) if judgment in chains.STATEFUL[1:] else ("training", "inference")[: 1 + (judgment == PARITY)]
    error = next((one["error"] for one in measured["phases"] if one["name"] in parts and one["error"]), None)
    if error is None or not missing:
        return None
    if error["no_backward"]:
        return Finding(category="red_no_backward", reason=f"no backward: {error['message']}")
    return Finding(category="raised", reason=error["message"], evidence={"tail": list(error["tail"])})


# Are the lines the whole truth?


def _key(one: Expected) -> Key:
    return one.judgment, one.configuration, one.tensor, one.against


def _of(line: Mapping[str, Any]) -> Key:
    return line["judgment"], line["configuration"], line["tensor"], line["against"]


def _broken(measured: Mapping[str, Any], lines: Lines, wanted: Sequence[Expected], asked: Asked) -> str | None:
    due = {_key(one): one for one in wanted}
    count: dict[Key, int] = {}
    for line in lines:
        count[_of(line)] = count.get(_of(line), 0) + 1
    for key in due:
        if count.get(key, 0) != 1:
            return f"{key[2]} in {key[1]}: {'no comparison' if not count.get(key) else 'two comparisons'}"
    if extra := set(count) - set(due):
        key = min(extra)
        return f"{key[2]} in {key[1]}: a comparison that nobody asked for"
    for line in lines:
        if problem := _odd(measured, line, due[_of(line)], asked):
            return f"{line['tensor']} in {line['configuration']}: {problem}"
    return None


def _odd(measured: Mapping[str, Any], line: Mapping[str, Any], due: Expected, asked: Asked) -> str | None:
    """What in a line cannot be, or None."""
    if tuple(line["shape"]) != due.shape or line["elements"] != math.prod(due.shape):
        return f"shape {line['shape']}, {list(due.shape)} is due"
    if line["limits"] != (dict(asked.limits(due.judgment)) if due.accuracy else None):
        return f"the limits {line['limits']} are not those of the contract; another contract needs a new run"
    needed = {*_needed(due, asked), *((*measurements.ACCURACY, "yardstick") if due.accuracy else ("differing",))}
    if missing := needed - set(line):
        return f"{', '.join(sorted(missing))} missing"
    if not due.accuracy and line["differing"] == 0 and line["digest"] != line["against_digest"]:
        return "the digests differ, and no element does"
    return _sides(measured, line, due)


def _needed(due: Expected, asked: Asked) -> tuple[str, ...]:
    """Decoded log-probs, where the contract judges by them."""
    judged = due.judgment == "decode_prefill" and "max" in asked.row(due.judgment).limits
    return ("dlogp",) if judged else ()


def _sides(measured: Mapping[str, Any], line: Mapping[str, Any], due: Expected) -> str | None:
    """Each side is the run that it says: log-probs by their digests, gradients by those of the canonical cell."""
    said = {one["execution"]: one["digest"] for one in measured["logprobs"]}
    if due.tensor == "logprob":
        right = REFERENCE if due.accuracy else CANONICAL
        if line["against_digest"] != said.get(right):
            return f"compared with another run than {right}"
        if due.accuracy and due.configuration == CANONICAL and line["digest"] != said.get(CANONICAL):
            return "another run than the one whose log-probs stand here"
    return None


def _loose(measured: Mapping[str, Any], asked: Asked) -> str | None:
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
    for trace in measured["traces"]:
        if trace["judgment"] == "forward_invariance":
            equal = cells[trace["configuration"]]["digest"] == cells[CANONICAL]["digest"]
            if equal != (trace["differing"] == 0):
                return f"the trace of {trace['configuration']} does not say what its digest says"
    return None


def _due(cell: Cell, asked: Asked) -> bool:
    if cell.name == CANONICAL:
        return True
    if cell.name == ONLY_GRADIENTS:
        return "gradient_invariance" in asked.judgments
    return bool(set(chains.INVARIANCE) & set(asked.judgments))


# What they came out as


def _compared(measured: Mapping[str, Any], lines: Lines, judgment: str, name: str, row: Row, asked: Asked) -> Finding:
    problems = [(line, _problem(line, row)) for line in lines]
    wrong = [(line, problem) for line, problem in problems if problem is not None]
    accuracy = judgment in chains.ACCURACY
    statistic = _statistic(lines, accuracy)
    evidence: dict[str, Any] = {"comparisons": len(lines), "outside": len(wrong)}
    if accuracy:
        evidence |= _errors(measured, lines, name, judgment, asked)
    if judgment == "decode_prefill":
        evidence |= _decoded(lines)
    if row.status == "measured":
        return Finding(category="measured", reason="not gated", statistic=statistic, evidence=evidence)
    if not wrong:
        reason = f"all {len(lines)} {'errors are within the row' if accuracy else 'are equal to the bit'}"
        if judgment == "decode_prefill" and "max" in row.limits:
            reason = f"no log-prob is farther off than {row.limits['max']:g}"
        notes = tuple(_silent(measured, judgment, name))
        if notes:
            evidence["first_divergence"] = _divergence(measured, judgment, name, [], asked)
        return Finding(category="green", reason=reason, statistic=statistic, evidence=evidence, notes=notes)
    line, problem = wrong[0]
    first = _divergence(measured, judgment, name, [line["tensor"] for line, _ in wrong], asked)
    evidence |= {"failing": [one["tensor"] for one, _ in wrong][:20], "first_divergence": first,
                 "drift": _drift(measured, judgment, name)}  # fmt: skip
    said = f"{line['tensor']}: {problem}{_where(line)}; {len(wrong)} of {len(lines)} comparisons are outside"
    return Finding(category="red_verdict", reason=f"{said}{place(first)}", statistic=statistic, evidence=evidence)


def _statistic(lines: Lines, accuracy: bool) -> float:
    if accuracy:
        return max(float(line["relative_rms"]) for line in lines)
    counts = [line["elements"] if line["differing"] is None else line["differing"] for line in lines
              if "differing" in line]  # fmt: skip
    return float(sum(counts))


def _problem(line: Mapping[str, Any], row: Row) -> str | None:
    if line["limits"] is not None:
        return nodes.accuracy_problem(line, line["limits"])
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


def _where(line: Mapping[str, Any]) -> str:
    first = line["first"]
    if not first:
        return ""
    names = ("layer", "sample", "position", "element")
    at = " ".join(f"{name} {first[name]}" for name in names if name in first) or f"element {first['index']}"
    return f", first at {at}: {first['got']} is not {first['want']}"


def place(first: Mapping[str, Any] | None) -> str:
    """Where two runs part, as the end of a sentence."""
    if not first:
        return ""
    layer = "" if first["layer"] is None else f"layer {first['layer']}, "
    at = f", sample {first['sample']} position {first['position']}" if "sample" in first else ""
    way = {"backward": "; on the way back they part at ", "weight gradient": "; they part in the sum of "}
    return f"{way.get(first.get('phase', ''), '; they part at ')}{layer}{first['name']} ({first['operator']}){at}"


def _traces(measured: Mapping[str, Any], judgment: str, name: str) -> Mapping[str, Any] | None:
    found = (one for one in measured["traces"] if (one["judgment"], one["configuration"]) == (judgment, name))
    return next(found, None)


def _drift(measured: Mapping[str, Any], judgment: str, name: str) -> list[Any]:
    """By layer: how far the residual stream is off, relative to itself."""
    if judgment in chains.ACCURACY:
        nodes_ = (measured["depth"] or {}).get("nodes", [])
        return [_over(error, size) for _, node, _, error, _, size in nodes_ if node == "mlp.residual"]
    trace = _traces(measured, judgment, name)
    return list(trace["depth"]) if trace else []


def _over(error: Any, size: float) -> float:
    return float(error) / size if size else float(error)


def _silent(measured: Mapping[str, Any], judgment: str, name: str) -> Iterator[str]:
    trace = _traces(measured, judgment, name)
    if trace and trace["first"] and judgment not in (*chains.ACCURACY, "gradient_invariance"):
        count = f"{judgment} {name} is green, and {trace['differing']} of {trace['nodes']} nodes differ to the bit"
        yield f"{count}{place(trace['first'])}"


def _divergence(
    measured: Mapping[str, Any], judgment: str, name: str, tensors: Sequence[str], asked: Asked
) -> dict[str, Any] | None:
    """The node at which a failing configuration leaves what it is compared with, if that is known."""
    if judgment not in chains.ACCURACY:
        trace = _traces(measured, judgment, name)
        return dict(trace["first"]) if trace and trace["first"] else None
    trace = _traces(measured, "forward_invariance", name)
    if trace and trace["first"]:  # the cell has left the canonical one, of which the depth tells
        return dict(trace["first"])
    ratio = asked.limits(judgment).get("baseline_ratio")
    for layer, node, operator, error, theirs, size in (measured["depth"] or {}).get("nodes", ()):
        allowed = float(theirs) * (ratio or 2) + size * 2**-9  # an exact node may still round
        if not float(error) <= allowed:
            return {"layer": layer, "name": node, "operator": operator, "phase": "forward"}
    return _of_parameter(tensors[-1]) if judgment == "gradient_accuracy" else dict(_LOSS)


def _of_parameter(name: str) -> dict[str, Any]:
    """The node of a parameter whose gradient alone is wrong; the backward meets the last parameter first."""
    parts = name.removeprefix("model.layers.").removesuffix(".weight")
    number, _, rest = parts.partition(".")
    layer, short = (int(number), rest) if number.isdigit() else (None, parts)
    known = (("q_norm", "qk_norm"), ("k_norm", "qk_norm"), ("norm", "rms_norm"), ("embed", "embedding"),
             ("lm_head", "lm_head"), ("experts", "grouped_gemm"), ("mlp.gate_proj", "det_gemm"),
             ("mlp.gate", "router"))  # fmt: skip
    operator = next((operator for part, operator in known if part in short), "det_gemm")
    return {"layer": layer, "name": short, "operator": operator, "phase": "weight gradient"}


def _errors(measured: Mapping[str, Any], lines: Lines, name: str, judgment: str, asked: Asked) -> dict[str, Any]:
    """The worst tensor, and of log-probs the aggregates against the fp32 run."""
    worst = max(lines, key=lambda line: float(line["relative_rms"]))
    keys = ("tensor", "max_abs", "rms", "relative_rms", "relative_peak", "cosine")
    found: dict[str, Any] = {"worst": {key: worst[key] for key in keys}}
    ratios = [float(line["rms"]) / float(line["yardstick"]["torch_rms"]) for line in lines
              if float(line["yardstick"]["torch_rms"])]  # fmt: skip
    found["largest_ratio_to_torch"] = max(ratios, default=None)
    if judgment == "forward_accuracy" and name == CANONICAL and _has(measured, CANONICAL, REFERENCE):
        made = _pair(measured, asked, CANONICAL, REFERENCE)
        found["aggregates"] = _aggregates(made, asked) if isinstance(made, Pair) else {}
    return found


def _decoded(lines: Lines) -> dict[str, Any]:
    gaps = [abs(float(a) - float(b)) for line in lines for a, b in line.get("dlogp", [])]
    differing = sum(line["differing"] or 0 for line in lines)
    return {"differing_logits": differing, "max_abs_dlogp": max(gaps, default=None), "log_probs": len(gaps)}


# Train against inference


def _has(measured: Mapping[str, Any], *names: str) -> bool:
    return set(names) <= {line["execution"] for line in measured["logprobs"]}


def _values(measured: Mapping[str, Any], name: str) -> list[float] | None:
    line = next((one for one in measured["logprobs"] if one["execution"] == name), None)
    return None if line is None else [float(value) for value in line["values"]]


def _pair(measured: Mapping[str, Any], asked: Asked, train: str, rollout: str) -> Pair | str:
    """Both executions joined; or why they cannot be: log-probs that are missing are an error, never a shorter list."""
    ours, theirs = _values(measured, rollout), _values(measured, train)
    active = asked.chain.tier.active
    for name, values in ((rollout, ours), (train, theirs)):
        if values is None:
            return f"no log-probs of {name}"
        if len(values) != active:
            return f"{len(values)} log-probs of {name}, {active} tokens are active"
        if not all(map(math.isfinite, values)):
            at = next(index for index, value in enumerate(values) if not math.isfinite(value))
            return f"log-prob {at} of {name} is {values[at]}"
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


def _parity(measured: Mapping[str, Any], name: str, row: Row, asked: Asked) -> Finding:
    made = _pair(measured, asked, CANONICAL, name)
    if isinstance(made, str):
        red = "is nan" in made or "inf" in made
        return Finding(category="red_verdict" if red else "broken", reason=made)
    digests = {one["execution"]: one["digest"] for one in measured["logprobs"]}
    differing = sum(_bits(a) != _bits(b) for a, b in zip(made.train, made.rollout, strict=True))
    if (differing == 0) != (digests[name] == digests[CANONICAL]):
        return Finding(category="broken", reason=f"the digests of {name} do not say what its log-probs say")
    found = _aggregates(made, asked)
    wanted = ["differing"] if "differing_elements" in row.limits else list(GATED)
    evidence: dict[str, Any] = {"differing": differing, "tokens": len(made.d), "aggregates": found}
    wrong = [key for key in found if found[key]["status"] == "FAIL"]
    if wanted == ["differing"]:
        wrong = ["differing"] if differing > row.limits["differing_elements"] else []
    peak = found["max_abs_dlogp"]["value"]
    if row.status == "measured":
        return Finding(category="measured", reason="not gated", statistic=peak, evidence=evidence)
    if not wrong:
        reason = "equal to the bit" if not differing else f"max |d| {peak:.6g}, within the rows"
        notes = tuple(_silent(measured, PARITY, name))
        said = f"{len(made.d)} log-probs: {reason}"
        return Finding(category="green", reason=said, statistic=peak, evidence=evidence, notes=notes)
    trace = _traces(measured, PARITY, name) or {}
    first = trace.get("first") or (dict(_LOSS) if name == RESCORE else None)
    evidence |= {"first_divergence": first, "drift": list(trace.get("depth", ()))}
    said = f"{differing:,} of {len(made.d):,} log-probs differ to the bit; " if "differing" in wrong else ""
    numbers = ", ".join(f"{key} {found[key]['value']:.4g}" for key in (*GATED, "mean_abs_dlogp", "sequence_outliers"))
    return Finding(category="red_verdict", reason=f"{said}{numbers}{place(first)}", statistic=peak, evidence=evidence)


def _bits(value: float) -> tuple[float, float]:
    return value, math.copysign(1.0, value)


# What to know of an arm


def _ran(measured: Mapping[str, Any]) -> dict[str, Any]:
    run, weights, kernels = measured["run"], measured["weights"] or {}, measured["kernels"] or {}
    return {
        "implementation": run["implementation"],
        "device": run["environment"]["device"],
        "weights": f"{weights.get('source', 'none')} {weights.get('digest', '')[:12]}".strip(),
        "kernels": [*kernels.get("triton", ()), *kernels.get("native", ())] or None,
    }
