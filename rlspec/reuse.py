"""Arms of an earlier run that need not run again: same run file, commit, command, environment, tokens, weights."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rlspec import checkouts, companions, inputs, named, provenance, resuming, runs, snapshot
from rlspec.arms import Session, own_files
from rlspec.changes import listed
from rlspec.errors import SpecError
from rlspec.model import Step
from rlspec.reports import digest

# Texts and pictures, which hardly a trainer reads: that one changed is told, and costs no arm.
UNREAD = frozenset(
    ("", ".txt", ".log", ".adoc", ".org", ".tex", ".bib", ".html", ".css", ".pdf", ".png", ".jpg", ".jpeg", ".gif")
    + (".svg", ".ipynb", ".lock", ".patch", ".diff")
)


def take_over(session: Session, steps: Sequence[Step]) -> None:
    """Take over what the earlier run has of the arms that are still open; a file that is given is read afresh."""
    earlier = session.earlier
    if earlier is None:
        return
    planned = _planned(earlier)
    mine = {arm["name"]: arm for arm in runs.load(session.folder.plan, "plan")["arms"]}
    reasons = {
        step.arm.name: _not_reusable(session, step, earlier, planned.get(step.arm.name), mine[step.arm.name])
        for step in steps
        if step.arm.name not in session.options.arms and step.arm.name not in session.states and step.argv
    }
    _refuse_to_overwrite(session, earlier, reasons)
    kept = _kept(session, earlier, planned, reasons)
    for step in steps:
        name = step.arm.name
        if name not in reasons:
            continue
        reason = reasons[name]
        if reason is None or name in kept:
            session.states[name] = _copy(session, step, earlier, planned[name]["stem"])
            session.note(*companions.remarks(session.states[name], ()))
            if reason is not None:
                session.say(f"{name}: stays as it ran, though {reason}: an arm failed, and --retry-errors runs both")
            elif step.commit is None and session.states[name].get("code_digest") is None:
                session.notes.append(f"{name} is taken from {earlier.name}; what code it ran was not observed")
        elif session.options.arms:
            raise SpecError(f"arm {name} of {earlier.name} cannot be used: {reason}; run it again with --arm {name}")
        elif reason != "it has not run":
            session.say(f"{name}: runs again, since {reason}")


def _refuse_to_overwrite(session: Session, earlier: runs.Folder, reasons: Mapping[str, str | None]) -> None:
    """SpecError where arms would run again inside a run that is complete, whose records are what was judged."""
    if earlier != session.folder or session.options.arms:
        return
    found = [f"{name} is not as it ran: {why}" for name, why in reasons.items() if why not in (None, "it has not run")]
    if found and resuming.is_over(earlier, runs.load(earlier.plan, "plan")):
        raise SpecError(
            f"{earlier.name} is complete, and since then {found[0]}; `rlspec run {session.spec.path} --from "
            f"{earlier.name}` judges what is there now, in a new run"
        )


def _kept(
    session: Session, earlier: runs.Folder, planned: Mapping[str, Any], reasons: Mapping[str, str | None]
) -> set[str]:
    """Arms that are done and stay, since `--resume` starts nothing behind an arm that failed, nor runs that again."""
    if earlier != session.folder or session.options.keep_going or session.options.arms:
        return set()
    paths = {
        name: earlier.workspace / f"{planned[name]['stem']}.provenance.json" for name in reasons if name in planned
    }
    status = {name: runs.load(path).get("status") for name, path in paths.items() if path.exists()}
    stopped = any(reasons[name] is None and one != "done" for name, one in status.items())
    return {name for name, one in status.items() if stopped and one == "done"}


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
    if planned.get("commit") is None and (changed := _changed(session, state, earlier)):
        return changed
    if apart := _beside(state, earlier):
        return f"{listed(apart, 3)}, outside its tree, changed since then"
    if near := _near(session, step, state, earlier):
        return near
    if given := _given(session, step, state, earlier):
        return f"{listed(given, 3)}, which the command names, changed since then"
    if state.get("inputs") != inputs.seen(session.spec, step.arm):
        return "its tokens or weights are not known to be those that it had"
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


def _changed(session: Session, state: Mapping[str, Any], earlier: runs.Folder) -> str | None:
    """What of the work tree that an arm ran is not as it was; None for an arm that kept nothing of it."""
    before: str | None = state.get("code_digest")
    move, own = earlier.move(state), state.get("written") or ()
    seen = checkouts.without(state.get("observed") or {}, own)
    if before is not None and provenance.code_digest(seen, move.path) != before:
        return "the code that it ran has changed"
    if state.get("checkout") is None:
        return None
    top, _ = snapshot.top_of(checkouts.folder(session.spec))
    found = checkouts.changed(session.spec, top, state["checkout"], move.value(seen))
    if found is None:
        return "the commit that was checked out is gone, so what has changed since cannot be told"
    wrote = {move.path(file) for file in own}
    found = [name for name in found if top / name not in wrote]
    if read := [name for name in found if PurePath(name).suffix not in UNREAD]:
        return f"{listed(read, 3)} changed since then"
    if found:
        session.notes.append(f"{listed(found, 3)} changed since {state['arm']} of {earlier.name} ran")
    return None


def _beside(state: Mapping[str, Any], earlier: runs.Folder) -> list[str]:
    """Files that an arm with a revision ran outside its tree and that are not as they were."""
    move = earlier.move(state)
    places = {name: move.path(name) for name in state.get("beside") or ()}
    return [name for name, path in places.items() if not path.is_file() or digest(path) != state["beside"][name]]


def _given(session: Session, step: Step, state: Mapping[str, Any], earlier: runs.Folder) -> list[str]:
    """Files that the command of an arm named and that are not as they were, less what the arms of its run wrote."""
    if not state.get("named"):
        return []
    move, (top, _) = earlier.move(state), snapshot.top_of(checkouts.folder(session.spec))
    files = () if step.arm.command else earlier.workspace.glob("*.provenance.json")
    arms: list[Mapping[str, Any]] = [runs.load(path) for path in files]
    return named.changed(state, arms or [state], lambda name: move.path(name) if name.startswith("/") else top / name)


def _near(session: Session, step: Step, state: Mapping[str, Any], earlier: runs.Folder) -> str | None:
    """Why what lay beside the operators of an arm is not as it was."""
    own = own_files(session.spec, session.folder.workspace.parents[3])
    top, _ = snapshot.top_of(checkouts.folder(session.spec))
    return companions.changed(session.spec, step.arm, state, top, earlier.move(state).path, own)


def _without(argv: Sequence[str], folder: runs.Folder) -> list[str]:
    return [word.replace(str(folder.workspace), "") for word in argv]


def _copy(session: Session, step: Step, earlier: runs.Folder, stem: str) -> dict[str, Any]:
    source = earlier.workspace / f"{stem}.provenance.json"
    state = runs.load(source)
    mine = seen_here(earlier, state)
    if earlier != session.folder:
        records_path = source.with_name(f"{stem}.records.jsonl")
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
