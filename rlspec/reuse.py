"""Arms of an earlier run that need not run again: the same run file, commit, command and environment."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from rlspec import provenance, runs
from rlspec.arms import Session
from rlspec.errors import SpecError
from rlspec.model import Step
from rlspec.reports import digest


def take_over(session: Session, steps: Sequence[Step]) -> None:
    """Take over what the earlier run has of the arms that are still open; a file that is given is read afresh."""
    earlier = session.earlier
    if earlier is None:
        return
    planned = _planned(earlier)
    mine = {arm["name"]: arm for arm in runs.load(session.folder.plan, "plan")["arms"]}
    for step in steps:
        name = step.arm.name
        if name in session.options.arms or name in session.states or not step.argv:
            continue
        reason = _not_reusable(session, step, earlier, planned.get(name), mine[name])
        if reason is None:
            session.states[name] = _copy(session, step, earlier)
            if step.commit is None and session.states[name].get("code_digest") is None:
                session.notes.append(f"{name} is taken from {earlier.name}; what code it ran was not observed")
        elif session.options.arms:
            raise SpecError(f"arm {name} of {earlier.name} cannot be used: {reason}; run it again with --arm {name}")
        elif reason != "it has not run":
            session.say(f"{name}: runs again, since {reason}")


def _not_reusable(
    session: Session, step: Step, earlier: runs.Folder, planned: Mapping[str, Any] | None, mine: Mapping[str, Any]
) -> str | None:
    if planned is None:
        return "it has not run"
    state_path = earlier.workspace / f"{planned['stem']}.provenance.json"
    if not state_path.exists():
        return "it has not run"
    state = runs.load(state_path)
    if state.get("status") != "done":
        if earlier == session.folder and not session.options.retry_errors:
            return None  # --resume leaves failed arms to --retry-errors
        return "it had failed"
    for key, text in (
        ("run_file_digest", "the run file differs"),
        ("commit", "the commit differs"),
        ("environment", "the environment differs"),
        ("perturb", "the perturbation differs"),
        ("implementation", "the implementation differs"),
        ("fault", "the planted fault differs"),
        ("reader", "the reader differs"),
        ("build", "the build commands differ"),
    ):
        if planned.get(key) != mine.get(key):
            return text
    if _without(planned["argv"], earlier) != _without(mine["argv"], session.folder):
        return "the command differs"
    if planned.get("commit") is None and _changed(state, earlier):
        return "the code that it ran has changed"
    path = earlier.workspace / f"{planned['stem']}.records.jsonl"
    if state.get("records_digest") and (not path.exists() or digest(path) != state["records_digest"]):
        return f"{path.name} is not what the arm wrote"
    return None


def _planned(earlier: runs.Folder) -> dict[str, Any]:
    """Arm -> what the earlier run planned for it, with the paths of this machine, also in its run file."""
    plan = runs.load(earlier.plan, "plan")
    move = earlier.move(plan)
    found = {arm["name"]: move.value(arm) for arm in plan["arms"]}
    for arm in found.values() if move.old != move.new else ():
        for file in earlier.workspace.glob(f"{arm['stem']}.*"):
            if digest(file) == arm["run_file_digest"]:
                text = move.text(file.read_text(encoding="utf-8"))
                arm["run_file_digest"] = hashlib.sha256(text.encode()).hexdigest()
    return found


def _changed(state: Mapping[str, Any], earlier: runs.Folder) -> bool:
    before: str | None = state.get("code_digest")
    seen = state.get("observed") or {}
    return before is not None and provenance.code_digest(seen, earlier.move(state).path) != before


def _without(argv: Sequence[str], folder: runs.Folder) -> list[str]:
    return [word.replace(str(folder.workspace), "") for word in argv]


def _copy(session: Session, step: Step, earlier: runs.Folder) -> dict[str, Any]:
    planned = {arm["name"]: arm for arm in runs.load(earlier.plan, "plan")["arms"]}[step.arm.name]
    source = earlier.workspace / f"{planned['stem']}.provenance.json"
    state = runs.load(source)
    mine = seen_here(earlier, state)
    if earlier != session.folder:
        records_path = source.with_name(f"{planned['stem']}.records.jsonl")
        if records_path.exists():
            shutil.copyfile(records_path, step.records)
        mine = {**mine, "reused_from": earlier.name}
        if earlier.root != session.folder.root:  # another repository, not another mount of ours
            state.pop("root", None)
        runs.save(step.provenance, {**state, "reused_from": earlier.name})
    return {**mine, "reused_from": mine.get("reused_from") or earlier.name}


def seen_here(folder: runs.Folder, state: dict[str, Any]) -> dict[str, Any]:
    """The state of an arm of that run, its log by the path on this machine."""
    return {**state, "log": folder.move(state).text(state["log"])} if state.get("log") else state
