"""Does a whole model give the same log-probs and gradients trained and inferred, in every layout, to the bit?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlspec import (
    architecture,
    catalog,
    chain_across,
    chain_sizes,
    chain_verdicts,
    chains,
    dlogp,
    machine,
    nodes,
    plan,
    weight_folders,
    workloads,
)
from rlspec.cells import Finding
from rlspec.chain_asked import PARITY, Asked
from rlspec.checks import common, operators
from rlspec.contract import Contract
from rlspec.errors import SpecError
from rlspec.layouts import CANONICAL
from rlspec.model import Arm, Document, Judgment, Problem, Result, Row, Spec, Verdict

TEMPLATE = catalog.SHIPPED.parent / "templates" / "chain" / "run.py.j2"
PINNED = ("index_sha256", "shards", "content_hash")
PROFILE = "ws1"


def arms(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    yield from common.unique_names(document, data)
    asked = data.get("judgments", ())
    if len(data["arms"]) == 1 and chains.ACROSS in asked:
        message = f"{chains.ACROSS} holds an arm against the first one, and there is one alone"
        yield common.at(document, "/judgments", "RL316", message, "add an arm, or leave the judgment out")
    if chains.ACROSS in asked and not {"gradient_invariance", "gradient_accuracy"} & set(asked):
        message = f"{chains.ACROSS} holds gradients against each other, and no other judgment asks for them"
        yield common.at(document, "/judgments", "RL316", message, "name gradient_invariance or gradient_accuracy, too")
    if chains.ACROSS in asked:
        yield from _twins(document, data["arms"])
    for index, arm in enumerate(data["arms"]):
        given, pointer = arm["implementation"], f"/arms/{index}/implementation"
        if isinstance(given, str):
            yield from operators.implementation(document, pointer, given, nodes.IMPLEMENTATIONS)
            continue
        yield from operators.mapped(document, pointer, given)


def _twins(document: Document, given: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    """Arms that differ from the first one by name alone: equal bits then say that it repeats itself, and no more."""
    first, *others = [{key: value for key, value in arm.items() if key not in ("name", "role")} for arm in given]
    for index, arm in enumerate(others, 1):
        if arm == first:
            message = f"arms {given[0]['name']} and {given[index]['name']} are the same but for their names"
            hint = f"{chains.ACROSS} of a thing with itself shows that it repeats itself, not that two agree"
            yield common.at(document, f"/arms/{index}", "RL316", message, hint, severity="warning")


def tables(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    try:
        entry = chain_sizes.of(catalog.whole(data["model"], document.path.parent))
    except (SpecError, ValueError):
        return  # said of the model
    due = chains.operators(entry, data.get("profile", PROFILE))
    remedy = f"a model runs all of them: add them to it, or map each operator and leave these to {nodes.DEFAULT}"
    yield from operators.short_tables(document, data, due, remedy)


def model(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    hints = "a chain takes all sizes from the model entry", f"{common.TO_THE_LETTER}: name a model that it runs"
    yield from common.decoded(document, data["model"], *hints)


def workload(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    try:
        chain = chains.asked(workloads.of(catalog.workload(data["workload"], document.path.parent)))
        chains.cells(chain, data.get("cells", ()))
        if set(chains.STATEFUL) & set(data.get("judgments", chains.JUDGMENTS)):
            chains.check_reads(chain)
    except SpecError as error:
        yield common.unknown(document, "/workload", error)
    except ValueError as error:
        message = f"workload {data['workload']}: {error}"
        yield common.at(document, "/workload", "RL314", message, "correct the workload, or name one for chains")


def token_ids(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    near = document.path.parent
    try:
        chain = chains.asked(workloads.of(catalog.workload(data["workload"], near)))
        vocabulary = chain_sizes.of(catalog.whole(data["model"], near)).vocab_size
    except (SpecError, ValueError):
        return  # said of the workload, or of the model
    try:
        chains.check_tokens(chain, vocabulary)
    except ValueError as error:
        message = f"workload {data['workload']}: {error}"
        yield common.at(document, "/workload", "RL314", message, "correct the ids, or name a workload for the model")


def weights(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    if "pins" in data["weights"]:
        try:
            catalog.pins(data["weights"]["pins"], document.path.parent)
        except SpecError as error:
            message, hint = common.hinted(error)
            hint = hint or "`python -m rlspec.device.weight_files FOLDER` prints the pins of files that you trust"
            yield common.at(document, "/weights/pins", "RL201", message, hint)


def folder(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    """Pins are of tensors alone: what the model does with them, its config.json says."""
    path = data["weights"].get("path")
    try:
        declared = catalog.whole(data["model"], document.path.parent)
        other = None if path is None else weight_folders.unfit(declared, document.path.parent / path)
    except SpecError:  # said of the model
        return
    except architecture.Unimplemented as error:
        hint = f"{common.TO_THE_LETTER}: name weights of a model that it runs"
        yield common.at(document, "/weights/path", "RL305", str(error), hint)
        return
    if other:
        message = f"model {data['model']} is not the one in {path}: {other}"
        hint = "name the model that the folder holds, or correct its config.json"
        yield common.at(document, "/model", "RL305", message, hint)


def contract_rows(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    yield from common.contract_rows(document, data, subjects=(chains.SUBJECT,))
    judgments = data.get("judgments", chains.JUDGMENTS)
    if PARITY in judgments:
        yield from common.contract_rows(document, {**data, "judgments": list(dlogp.STANDARD)})
    if "kv_cache" in judgments:
        yield from common.contract_rows(document, {**data, "judgments": ["forward_accuracy"]}, subjects=("attention",))


RULES: tuple[tuple[common.Rule, tuple[str, ...]], ...] = (
    (arms, ("arms", "judgments")),
    (tables, ("arms", "model", "profile")),
    (model, ("model",)),
    (workload, ("workload", "cells", "judgments")),
    (token_ids, ("workload", "model")),
    (weights, ("weights",)),
    (folder, ("weights", "model")),
    (contract_rows, ("judgments", "contract", "dtype")),
    (common.question, ("question",)),
)


def lint(document: Document, broken: Iterable[str]) -> list[Problem]:
    absent = {key for key in ("arms", "model", "workload", "weights") if key not in document.data}
    return common.apply(document, RULES, {*broken, *absent})


def parse(document: Document) -> Spec:
    data, near = document.data, document.path.parent
    given = data["workload"]
    return Spec(
        **common.shared(document),
        model=data["model"],
        dtype=data.get("dtype", "bf16"),
        arms=tuple(Arm(**{"role": "candidate", **arm}) for arm in data["arms"]),
        judgments=tuple(Judgment(check=name) for name in data.get("judgments", chains.JUDGMENTS)),
        contract=data.get("contract", common.CONTRACTS["chain"]),
        repository=near / data["repository"] if "repository" in data else None,
        template=TEMPLATE,
        workload=given if isinstance(given, dict) else catalog.workload(given, near),
        chain=data.get("chain") or _chain(data, near),
    )


def _chain(data: dict[str, Any], near: Path) -> dict[str, Any]:
    """What a run, its plan and its report hold whole."""
    made = dict(data["weights"])
    if "pins" in made:
        made["pins"] = {key: value for key, value in catalog.pins(made["pins"], near).items() if key in PINNED}
    return {
        "model": catalog.whole(data["model"], near),
        "weights": made,
        "profile": data.get("profile", PROFILE),
        "cells": list(data.get("cells", ())),
    }


expand = plan.steps


def memory(spec: Spec) -> chain_sizes.Memory:
    """What the run is thought to need."""
    backward = any(judgment.check in chains.GRADIENTS for judgment in spec.judgments)
    asked, sizes = chains.asked(workloads.of(spec.workload)), chain_sizes.of(spec.chain["model"])
    return chain_sizes.memory(asked, sizes, bits=32 if spec.dtype == "fp32" else 16, backward=backward)


def unmet(spec: Spec) -> list[str]:
    """Each requirement that is not met here, and weights that are not there."""
    given = spec.chain["weights"]
    reasons = machine.unmet(spec.requires, pinned="pins" in given, estimate=memory(spec).least / 2**30)
    if "path" in given and not (spec.path.parent / given["path"]).is_dir():
        reasons.append(f"the weights are not here: there is no folder {given['path']}")
    return reasons


def context(spec: Spec, contract: Contract) -> dict[str, Any]:
    """What the run file is told: all that is the same for all arms."""
    asked = _asked(spec, spec.arms[0], contract)
    judgments = [judgment.check for judgment in spec.judgments]
    measured = [name for name in judgments if name in (*chains.ACCURACY, "kv_cache")]
    return {
        "kind": spec.kind,
        **spec.chain,
        "workload": dict(spec.workload),
        "judgments": judgments,
        "limits": {name: dict(asked.limits(name)) for name in measured},
        "dtype": spec.dtype,
        "device": spec.requires.get("device"),
        "spec_dir": str(spec.path.parent.resolve()),
    }


def judge(spec: Spec, results: Sequence[Result], contract: Contract) -> list[Verdict]:
    """One verdict a judgment and configuration, arm by arm; one a judgment of an arm that left nothing."""
    alone = [verdict for result in results for verdict in _of_arm(spec, result, contract)]
    if chains.ACROSS not in [judgment.check for judgment in spec.judgments]:
        return alone
    return alone + [_beside(spec, results[0], result, contract) for result in results[1:]]


def _beside(spec: Spec, first: Result, result: Result, contract: Contract) -> Verdict:
    """An arm held against the first one."""
    sides, name = (first, result), f"{CANONICAL} beside {first.arm.name}"
    of_first, of_mine = (_asked(spec, one.arm, contract) for one in sides)
    row = of_mine.row(chains.ACROSS)
    if row.status in ("out_of_scope", "not_applicable"):
        found = Finding(category="not_applicable", reason=row.reason)
    elif first.measured is None or result.measured is None:
        failed = next(one for one in sides if one.measured is None)
        reason = f"arm {failed.arm.name}: {failed.failure or 'the arm left no records'}"
        found = Finding(category="process", reason=reason)
    else:
        found = chain_across.judge(first.measured, result.measured, of_first, of_mine, row)
    return _verdict(result.arm.name, chains.ACROSS, name, row, found)


def _of_arm(spec: Spec, result: Result, contract: Contract) -> Iterator[Verdict]:
    asked, arm = _asked(spec, result.arm, contract), result.arm.name
    if result.measured is None:
        reason = f"arm {arm}: {result.failure or 'the arm left no records'}"
        for judgment in (name for name in asked.judgments if name != chains.ACROSS):
            place = {"arm": arm, "configuration": "*", "category": "process"}
            yield Verdict(judgment=judgment, subject=f"{arm}/*", status="ERROR", reason=reason, evidence=place)
        return
    for judgment, name, row, found in chain_verdicts.judge(result.measured, asked):
        yield _verdict(arm, judgment, name, row, found)


def _verdict(arm: str, judgment: str, name: str, row: Row, found: Finding) -> Verdict:
    return Verdict(
        judgment=judgment,
        subject=f"{arm}/{name}",
        status=found.status,
        reason=found.reason,
        statistic=found.statistic,
        row=row,
        evidence={"arm": arm, "configuration": name, "category": found.category, **found.evidence},
        notes=found.notes,
    )


def row(spec: Spec, judgment: str, contract: Contract) -> Row:
    """The row that a judgment of the spec is made by."""
    return _asked(spec, spec.arms[0], contract).row(judgment)


def _asked(spec: Spec, arm: Arm, contract: Contract) -> Asked:
    chain = chains.asked(workloads.of(spec.workload))

    def resolve(judgment: str, subject: str) -> Row:
        return contract.resolve(judgment, subject, spec.dtype)

    return Asked(
        chain=chain,
        cells=chains.cells(chain, spec.chain["cells"]),
        model=chain_sizes.of(spec.chain["model"]),
        judgments=tuple(judgment.check for judgment in spec.judgments),
        implementation=arm.implementation,
        weights=spec.chain["weights"],
        profile=spec.chain["profile"],
        dtype=spec.dtype,
        device=spec.requires.get("device"),
        fault=arm.fault,
        resolve=resolve,
        cannot_fail=contract.cannot_fail,
    )


def remarks(spec: Spec) -> list[str]:
    """What the report says above single verdicts: whose weights they are."""
    given = spec.chain["weights"]
    return [f"weights are seeded ({given['seed']}), not those of a trained model"] if "seed" in given else []


def more(spec: Spec, verdicts: Sequence[Verdict]) -> Arm | None:
    return None
