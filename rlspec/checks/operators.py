"""Are the operators right, and are their bits free of batch, chunk and padding, forward and backward?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlspec import architecture, catalog, cells, layouts, nodes, plan, schema, workloads
from rlspec import tables as own_tables
from rlspec.checks import common
from rlspec.contract import Contract
from rlspec.document import escape
from rlspec.errors import SpecError
from rlspec.model import Arm, Document, Judgment, Problem, Result, Row, Spec, Verdict
from rlspec.workloads import Workload

TEMPLATE = catalog.SHIPPED.parent / "templates" / "operators" / "run.py.j2"
_TABLE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_NEEDED = ("hidden_size", "heads", "kv_heads", "head_dim", "vocabulary_size", "rope_theta", "rms_norm_eps")


def arms(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    yield from common.unique_names(document, data)
    for index, arm in enumerate(data["arms"]):
        given = arm["implementation"]
        pointer = f"/arms/{index}/implementation"
        if isinstance(given, str):
            yield from implementation(document, pointer, given, nodes.IMPLEMENTATIONS)
            continue
        yield from _uncovered(document, data, index, given)
        yield from mapped(document, pointer, given)


def _uncovered(document: Document, data: dict[str, Any], index: int, given: dict[str, str]) -> Iterator[Problem]:
    """Operators that would be judged as plain torch, since a mapping leaves them out."""
    if missing := [name for name in data.get("operators", ()) if name in nodes.NODES and name not in given]:
        message = f"arm {data['arms'][index]['name']} names no implementation of {', '.join(missing)}"
        hint = f"plain {nodes.DEFAULT} is judged only where it is named"
        yield common.at(document, f"/arms/{index}/implementation", "RL312", message, hint)
    elif "operators" not in data:
        message = "a mapping of implementations needs operators: to be named"
        yield common.at(document, f"/arms/{index}/implementation", "RL312", message, "add operators: with its keys")


def mapped(document: Document, pointer: str, given: Mapping[str, str]) -> Iterator[Problem]:
    """What is wrong with a map from operators to implementations."""
    for operator, name in given.items():
        if operator in nodes.NODES:
            known = nodes.implemented(operator)
            yield from implementation(document, f"{pointer}/{operator}", name, known, f" of {operator}")
        else:
            hint = schema.suggestion(operator, nodes.NODES)
            place = f"{pointer}/{escape(operator)}"
            yield common.at(document, place, "RL311", f"unknown operator {operator!r}", hint)


def implementation(
    document: Document, pointer: str, name: str, known: Sequence[str], what: str = ""
) -> Iterator[Problem]:
    """What is wrong with the name of an implementation."""
    if ":" in name and not _TABLE.fullmatch(name):
        hint = "a module's dotted name, a colon, the name of a table or function in it"
        yield common.at(document, pointer, "RL312", f"{name!r} is no module:table", hint)
    elif ":" not in name and name not in known:
        hint = f"{schema.suggestion(name, known)}, or module:table of your own"
        yield common.at(document, pointer, "RL312", f"unknown implementation {name!r}{what}", hint)


def model(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    try:
        entry = catalog.whole(data["model"], document.path.parent)
    except SpecError as error:
        yield common.unknown(document, "/model", error)
        return
    families = architecture.FAMILIES
    if entry.get("model_type", families[0]) not in families:
        message = f"model {data['model']} is of type {entry['model_type']}"
        yield common.at(document, "/model", "RL313", message, f"operators are judged for {' and '.join(families)}")
    elif missing := [key for key in _NEEDED if not {key, architecture.NAMES[key]} & set(entry)]:
        message = f"model {data['model']} does not say its {', '.join(missing)}"
        yield common.at(document, "/model", "RL313", message, "operators take their widths from the model entry")
    else:
        yield from common.decoder_has(document, data["model"], entry)


def workload(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    try:
        made = workloads.of(catalog.workload(data["workload"], document.path.parent))
        for tier in made.tiers:
            layouts.of(tier)
        yield from _nothing_asked(document, data, made)
    except SpecError as error:
        yield common.unknown(document, "/workload", error)
    except ValueError as error:
        hint = "correct the workload"
        yield common.at(document, "/workload", "RL314", f"workload {data['workload']}: {error}", hint)


def _nothing_asked(document: Document, data: dict[str, Any], made: Workload) -> Iterator[Problem]:
    """Cells in which there would be nothing to compare."""
    if unknown := sorted({name for tier in made.tiers for name in tier.operators} - set(nodes.NODES)):
        message = f"workload {made.name} names an unknown operator {unknown[0]!r}"
        yield common.at(document, "/workload", "RL314", message, schema.suggestion(unknown[0], nodes.NODES))
    names = [name for name in data.get("operators", made.operators) if name in nodes.NODES]
    for name in names:
        if not any(nodes.tiers(name, made.tiers)):
            message = f"workload {made.name} has no tier for operator {name}"
            yield common.at(document, "/workload", "RL314", message, "add it to the workload's operators")
        for tier in nodes.tiers(name, made.tiers):
            for judgment in nodes.judged(tier, data.get("judgments", nodes.JUDGMENTS)):
                empty = not any(nodes.expected(name, tier, judgment, data.get("requires", {}).get("device", "cpu")))
                if empty and not nodes.NODES[name].not_applicable:
                    message = f"workload {made.name}: tier {tier.name} has nothing to compare for {judgment} of {name}"
                    hint = "give the tier more layouts; det_gemm needs projections"
                    yield common.at(document, "/workload", "RL314", message, hint)


def operators(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    entry = _model(document)
    for index, name in enumerate(data.get("operators", ())):
        if name not in nodes.NODES:
            hint = schema.suggestion(name, nodes.NODES)
            yield common.at(document, f"/operators/{index}", "RL311", f"unknown operator {name!r}", hint)
        elif problem := _lacking(data, name):
            hint = "give the operator another implementation"
            yield common.at(document, f"/operators/{index}", "RL312", problem, hint)
        elif nodes.NODES[name].experts and "experts" not in entry:
            message = f"operator {name} belongs to a mixture of experts, and {data['model']} is dense"
            yield common.at(document, f"/operators/{index}", "RL315", message, "leave it out, or name another model")
    if "operators" not in data and "experts" in entry:
        for name, node in nodes.NODES.items():
            if node.experts and (problem := _lacking(data, name)):
                hint = "name the operators: that are to be judged"
                yield common.at(document, "/arms", "RL312", f"{problem}, which {data['model']} needs", hint)
                return


def tables(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    try:
        due = _due(document, data)
    except (SpecError, KeyError):
        return  # said by the rules of the model and the workload
    yield from short_tables(document, data, due, "add them to it, or name under operators: what is to be judged")


def short_tables(document: Document, data: dict[str, Any], due: Sequence[str], remedy: str) -> Iterator[Problem]:
    """Operators of those due that a table of the user's own lacks, as far as its source beside the spec tells."""
    for index, arm in enumerate(data["arms"]):
        for table, asked in _asked(arm["implementation"], due).items():
            if not _TABLE.fullmatch(table) or _elsewhere(data, arm):
                continue
            held = own_tables.keys(table, document.path.parent)
            if held is not None and (missing := [name for name in asked if name not in held]):
                message = f"{table} of arm {arm['name']} has no operator {', '.join(missing)}"
                known = ", ".join(name for name in due if name in held)
                hint = f"{remedy}; it has {known or 'none of these'}"
                yield common.at(document, f"/arms/{index}/implementation", "RL312", message, hint)


def _asked(given: str | dict[str, str], due: Sequence[str]) -> dict[str, list[str]]:
    """Implementation -> the operators that an arm takes from it."""
    asked: dict[str, list[str]] = {}
    for operator in due:
        if (name := given if isinstance(given, str) else given.get(operator)) is not None:
            asked.setdefault(name, []).append(operator)
    return asked


def _due(document: Document, data: dict[str, Any]) -> list[str]:
    """The operators of a spec that are called."""
    experts = "experts" in catalog.model(data["model"], document.path.parent)
    named = data.get("operators") or catalog.workload(data["workload"], document.path.parent)["operators"]
    known = [(name, nodes.NODES[name]) for name in named if name in nodes.NODES]
    return [name for name, node in known if not node.not_applicable and (experts or not node.experts)]


def _elsewhere(data: dict[str, Any], arm: dict[str, Any]) -> bool:
    """Whether the module may be another one than that beside the spec."""
    return "revision" in arm or "repository" in data or "PYTHONPATH" in arm.get("environment", {})


def _lacking(data: dict[str, Any], operator: str) -> str:
    """Which arm asks for an implementation that does not have the operator."""
    for arm in data["arms"]:
        given = arm["implementation"]
        if isinstance(given, str) and given in nodes.IMPLEMENTATIONS and given not in nodes.implemented(operator):
            return f"implementation {given} of arm {arm['name']} does not have {operator}"
    return ""


def contract_rows(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    try:
        default = catalog.workload(data["workload"], document.path.parent)["operators"]
    except (SpecError, KeyError):
        return  # said by the rule of the workload
    named = [name for name in data.get("operators", default) if name in nodes.NODES]
    families = sorted({nodes.NODES[name].family for name in named if not nodes.NODES[name].not_applicable})
    yield from common.contract_rows(document, data, subjects=families)


RULES: tuple[tuple[common.Rule, tuple[str, ...]], ...] = (
    (arms, ("arms",)),
    (model, ("model",)),
    (workload, ("workload",)),
    (operators, ("operators", "model", "arms")),
    (tables, ("operators", "model", "arms", "workload")),
    (contract_rows, ("judgments", "contract", "dtype", "workload", "operators")),
    (common.question, ("question",)),
)


def lint(document: Document, broken: Iterable[str]) -> list[Problem]:
    absent = {key for key in ("arms", "model", "workload") if key not in document.data}
    return common.apply(document, RULES, {*broken, *absent})


def _model(document: Document) -> dict[str, Any]:
    try:
        return catalog.model(document.data["model"], document.path.parent)
    except SpecError:
        return {"experts": {}}  # said by the rule of the model


def parse(document: Document) -> Spec:
    data = document.data
    return Spec(
        **common.shared(document),
        model=data["model"],
        dtype=data.get("dtype", "bf16"),
        arms=tuple(Arm(**{"role": "candidate", **arm}) for arm in data["arms"]),
        judgments=tuple(Judgment(check=name) for name in data.get("judgments", nodes.JUDGMENTS)),
        contract=data.get("contract", common.CONTRACTS["operators"]),
        repository=document.path.parent / data["repository"] if "repository" in data else None,
        template=TEMPLATE,
        workload=_workload(data["workload"], document),
    )


def _workload(given: str | dict[str, Any], document: Document) -> dict[str, Any]:
    """By name, or the data itself where a run is judged again, in the forms that it was judged in then."""
    if isinstance(given, dict):
        return given
    return {**catalog.workload(given, document.path.parent), "cases": workloads.CASES}


expand = plan.steps


def chosen(spec: Spec) -> tuple[str, ...]:
    """The operators that a spec judges: those that it names, else those of the workload that its model has."""
    if "operators" in spec.data:
        return tuple(spec.data["operators"])
    experts = "experts" in catalog.model(spec.model, spec.path.parent)
    return tuple(name for name in spec.workload["operators"] if experts or not nodes.NODES[name].experts)


def context(spec: Spec, contract: Contract) -> dict[str, Any]:
    """What the run file is told: all that is the same for all arms."""
    named = chosen(spec)
    judgments = [judgment.check for judgment in spec.judgments]
    families = sorted({nodes.NODES[name].family for name in named})
    return {
        "kind": spec.kind,
        "model": catalog.whole(spec.data["model"], spec.path.parent),
        "workload": dict(spec.workload),
        "operators": list(named),
        "judgments": judgments,
        "limits": {
            name: {one: _limits(contract.resolve(name, one, spec.dtype)) for one in families} for name in judgments
        },
        "dtype": spec.dtype,
        "device": spec.requires.get("device"),
        "spec_dir": str(spec.path.parent.resolve()),
    }


def _limits(row: Row) -> dict[str, float] | None:
    return dict(row.limits) if row.status in ("applicable", "optional", "measured") else None


def judge(spec: Spec, results: Sequence[Result], contract: Contract) -> list[Verdict]:
    """One verdict a cell, arm by arm."""
    made = workloads.of(spec.workload)
    return [verdict for result in results for verdict in _of_arm(spec, result, made, contract)]


def _of_arm(spec: Spec, result: Result, workload: Workload, contract: Contract) -> Iterator[Verdict]:
    judgments = [judgment.check for judgment in spec.judgments]
    for operator in chosen(spec):
        for tier in nodes.tiers(operator, workload.tiers):
            for judgment in nodes.judged(tier, judgments):
                row = contract.resolve(judgment, nodes.NODES[operator].family, spec.dtype)
                if result.measured is None and not nodes.NODES[operator].not_applicable:
                    reason = result.failure or "the arm left no records"
                    found = cells.Finding(category="process", reason=f"arm {result.arm.name}: {reason}")
                else:
                    asked = cells.Asked(
                        operator=operator,
                        tier=tier,
                        judgment=judgment,
                        row=row,
                        implementation=nodes.implementation_of(operator, result.arm.implementation),
                        device=spec.requires.get("device"),
                    )
                    found = cells.judge(result.measured or {}, asked, cannot_fail=contract.cannot_fail)
                place = {"arm": result.arm.name, "operator": operator, "tier": tier.name, "counted": tier.counted}
                yield Verdict(
                    judgment=judgment,
                    subject=f"{result.arm.name}/{operator}/{tier.name}",
                    status=found.status,
                    reason=found.reason,
                    statistic=found.statistic,
                    row=row,
                    evidence={**place, "category": found.category, **found.evidence},
                    notes=found.notes,
                )


def more(spec: Spec, verdicts: Sequence[Verdict]) -> Arm | None:
    return None
