"""Do two engines give the same log-probs for one token stream?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rlspec import dlogp, plan
from rlspec.checks import common
from rlspec.contract import Contract
from rlspec.model import Arm, Document, Judgment, Problem, Result, Spec, Verdict


def sides(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    yield from common.unique_names(document, data)
    roles = sorted(arm["role"] for arm in data["arms"])
    if roles != ["rollout", "train"]:
        hint = "one arm of each role"
        yield common.at(document, "/arms", "RL301", f"the arms' roles are {' and '.join(roles)}", hint)
    files = []
    for index, arm in enumerate(data["arms"]):
        pointer = f"/arms/{index}"
        if ("records" in arm) == ("command" in arm):
            what = "records and a command" if "records" in arm else "neither records nor a command"
            yield common.at(document, pointer, "RL302", f"arm {arm['name']} has {what}", "give it one of the two")
        elif "command" in arm and not any("{records}" in word for word in arm["command"]):
            message = "the command does not say where to write: {records} is nowhere in it"
            yield common.at(document, f"{pointer}/command", "RL302", message, "add it as an argument")
        elif "records" in arm:
            path = document.path.parent / arm["records"]
            files.append(path.resolve())
            if not path.is_file():
                hint = "paths are relative to the spec's folder"
                yield common.at(document, f"{pointer}/records", "RL222", f"there is no file {arm['records']}", hint)
    if len(files) == 2 and files[0] == files[1]:
        yield common.at(
            document,
            "/arms/1/records",
            "RL303",
            "both arms name the same file",
            "a comparison with itself proves nothing",
        )


RULES: tuple[tuple[common.Rule, tuple[str, ...]], ...] = (
    (sides, ("arms",)),
    (common.contract_rows, ("judgments", "contract")),
    (common.question, ("question",)),
)


def lint(document: Document, broken: Iterable[str]) -> list[Problem]:
    return common.apply(document, RULES, {*broken, *(() if "arms" in document.data else ("arms",))})


def parse(document: Document) -> Spec:
    data = document.data
    return Spec(
        **common.shared(document),
        model=data.get("model", ""),
        dtype=data.get("dtype", "bf16"),
        arms=tuple(_arm(arm) for arm in data["arms"]),
        judgments=tuple(Judgment(check=name) for name in data.get("judgments", dlogp.STANDARD)),
        contract=data.get("contract", common.CONTRACTS["parity"]),
        repository=document.path.parent / data["repository"] if "repository" in data else None,
    )


def _arm(given: dict[str, Any]) -> Arm:
    return Arm(**{**given, "command": tuple(given.get("command", ()))})


expand = plan.steps


def judge(spec: Spec, results: Sequence[Result], contract: Contract) -> list[Verdict]:
    """All judgments, or the reason why none can be made."""
    failures = [f"arm {result.arm.name}: {result.failure}" for result in results if result.failure]
    by_role = {result.arm.role: result.records for result in results}
    if failures or set(by_role) != {"rollout", "train"}:
        reason = "; ".join(failures) or "an arm has not run"
        return [Verdict(judgment=j.check, subject="*", status="ERROR", reason=reason) for j in spec.judgments]
    rows = lambda name: contract.resolve(name, "*", spec.dtype)  # noqa: E731
    return dlogp.judge(by_role["rollout"], by_role["train"], spec.judgments, rows)


def more(spec: Spec, verdicts: Sequence[Verdict]) -> Arm | None:
    return None
