"""Run one arm: build, execute, observe, collect its records. What came of it is a plain state, kept beside them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import rlspec
from rlspec import (
    checkouts,
    collecting,
    companions,
    differing,
    inputs,
    launch,
    named,
    provenance,
    repository,
    runs,
    slurm,
    snapshot,
    surroundings,
)
from rlspec import contract as contracts
from rlspec.changes import listed
from rlspec.errors import RunError, SpecError
from rlspec.model import Spec, Step
from rlspec.reports import digest, now
from rlspec.trainers import TRAINERS

PACKAGE = Path(rlspec.__file__).parent
SLURM_MARGIN = 60.0  # seconds in which a job ends after it was cancelled
PLACES = frozenset({"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "CUDA_HOME"})  # shells always have them
SITE = (  # what a batch system, a container or a site sets, by how the names begin
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "MASTER_"),
    *("NCCL_", "GLOO_", "UCX_", "FI_", "SLURM_", "HF_HOME", "HF_HUB_", "HF_DATASETS_", "TRANSFORMERS_", "TORCH_HOME"),
    *("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says about a run."""

    arms: tuple[str, ...] = ()
    from_run: str | None = None
    resume: bool = False
    retry_errors: bool = False
    keep_going: bool = False
    overrides: tuple[str, ...] = ()
    outputs: tuple[Path, ...] = ()  # reports that are written for whoever called


@dataclass(slots=True, kw_only=True)
class Session:
    """One run while it lasts."""

    spec: Spec
    contract: contracts.Contract
    folder: runs.Folder
    options: Options
    stream: TextIO
    commits: dict[str, str] = field(default_factory=dict)
    repository: Path | None = None
    trees: Any = None
    built: set[str] = field(default_factory=set)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    earlier: runs.Folder | None = None
    begun: bool = False
    ran: list[tuple[str, Path, list[str]]] = field(default_factory=list)  # arm, its tree, what it left there

    def note(self, *said: str | None) -> None:
        """Each once; None says nothing."""
        self.notes += [text for text in dict.fromkeys(said) if text is not None and text not in self.notes]

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more; the run goes on
            print(text, file=self.stream, flush=True)


def own_files(spec: Spec, base: Path) -> list[Path]:
    """What does not count as a change: the spec itself, and what rlspec writes."""
    return [spec.path.resolve(), base / "workspace", base / "logging"]


def require_declared(spec: Spec, shell: Mapping[str, str], names: Collection[str] | None = None) -> list[str]:
    """SpecError where arms that do not declare a variable, as others do, would take it from the shell.

    `names` are the arms that will run, all by default. One that shells, batch systems or sites always set may be there
    with another value than the one declared; a sentence for each.
    """
    running = [arm for arm in spec.arms if arm.records is None]
    said: dict[str, str] = {}
    for arm in running:
        for name, value in arm.environment.items():
            others = [o.name for o in running if name not in o.environment and (names is None or o.name in names)]
            inherited = shell.get(name) if name not in provenance.DEFAULTS else None
            if not others or inherited is None:
                continue
            if inherited == value or (name not in PLACES and not name.startswith(SITE)):
                raise SpecError(
                    f"{name} is set in the shell, arm {arm.name} declares it, and {', '.join(others)} would inherit "
                    f"it: unset it (`env -u {name} rlspec …`), or declare it in every arm"
                )
            if name not in PLACES:
                text = f"{', '.join(others)} took {name} from the shell, where {arm.name} declares another value"
                said.setdefault(name, text)
    return list(said.values())


def state_of(step: Step, status: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"arm": step.arm.name, "status": status, "reason": reason, "commit": step.commit, **more}


def run(session: Session, step: Step) -> dict[str, Any]:
    """Run one arm; its earlier record, if there is one, is kept until the new one is whole."""
    if not step.argv:
        return _given(step)
    kept = step
    if step.provenance.exists():
        step = _beside(step)
    state = _execute(session, step)
    if step is not kept and state["status"] == "done":
        moved = [(step.records, kept.records), (step.log, kept.log)]
        exact, former = collecting.beside(session.spec, step), collecting.beside(session.spec, kept)
        if exact is not None and former is not None:
            collecting.remove(former)
            moved.append((exact, former))
        for mine, theirs in moved:
            if mine.exists():
                mine.replace(theirs)
        state.update(log=str(kept.log), argv=list(kept.argv))
        step = kept
    if step is kept:
        runs.save(step.provenance, state)
    return state


def _given(step: Step) -> dict[str, Any]:
    """An arm whose records are a file of the user's; its digest shows later whether it is still the same."""
    try:
        state = state_of(step, "done", records_digest=digest(step.records))
    except OSError as error:
        return state_of(step, "failed", f"{step.records} cannot be read: {error.strerror}")
    runs.save(step.provenance, state)
    return state


def _beside(step: Step) -> Step:
    def retry(path: Path) -> Path:
        return path.with_name(f"retry-{path.name}")

    records = retry(step.records)
    argv = tuple(word.replace(str(step.records), str(records)) for word in step.argv)
    return dataclasses.replace(step, argv=argv, log=retry(step.log), records=records)


def _execute(session: Session, step: Step) -> dict[str, Any]:
    spec, started = session.spec, now()
    tree = session.trees.tree(step.commit) if session.trees is not None and step.commit else None
    observed = session.folder.workspace / f"{step.stem}.observed"
    shutil.rmtree(observed, ignore_errors=True)
    observed.mkdir()
    began = observed.stat().st_mtime_ns
    environment = _environment(spec, step, tree, observed)
    nodes = _nodes(session, step)
    if nodes is not None:
        environment |= slurm.environment(nodes, step.time_limit, spec.launch.queue_limit)
    cwd = tree or checkouts.folder(spec)
    if broken := _build(session, step, cwd, environment):
        shutil.rmtree(observed, ignore_errors=True)
        return {**broken, "started": started}
    for file in observed.iterdir():
        file.unlink()  # the build is not the arm
    observed.touch()  # which tells the time by the clock of the file system
    built = observed.stat().st_mtime_ns
    before, given = snapshot.take(cwd), inputs.seen(spec, step.arm)
    told = named.take(spec, step, cwd, before.top, _own_files(session))
    near = companions.take(spec, step.arm, environment, _own_files(session))
    expected = spec.trainer.steps if spec.trainer else None
    progress = launch.Progress(step.arm.name, expected, session.stream)
    progress.start()
    collecting.clear(session.spec, step)
    try:
        outcome = launch.execute(
            step.argv,
            cwd=cwd,
            environment=environment,
            log=step.log,
            time_limit=_limit(spec, step),
            on_line=progress.feed,
            on_tick=progress.tick,
        )
    except launch.Interrupted:
        progress.end("interrupted")
        raise
    except RunError as error:  # it did not start, or did not end: no next arm beside it
        progress.end("failed")
        return state_of(step, "failed", str(error), started=started, log=str(step.log), tail=_tail(step.log), halt=True)
    finally:
        seen = provenance.collect(
            observed, commit=step.commit, dirty=False if step.commit else None, run_file=step.run_file, tree=tree
        )
        shutil.rmtree(observed, ignore_errors=True)
    if nodes is not None:
        ended = slurm.result(nodes)
        seen["slurm"] = ended
        outcome = dataclasses.replace(outcome, reason=ended["reason"] or outcome.reason)
    progress.end("done" if outcome.reason is None else "failed")
    state = _state_after(session, step, tree, outcome, seen, started) | {"inputs": given}
    session.ran.append((step.arm.name, before.top, snapshot.left(before, _own_files(session))))
    state |= named.of(told, before.top, seen)
    state |= companions.of(spec, step, near, before.top, seen, built, _own_files(session))
    return _followed(session, step, state, before, seen, began, built)


def _followed(
    session: Session,
    step: Step,
    state: dict[str, Any],
    before: snapshot.Snapshot,
    seen: Mapping[str, Any],
    began: int,
    built: int,
) -> dict[str, Any]:
    """The state of an arm that has run: failed, where the code was not the same all along and for all arms.

    `began` and `built`: when its build and its command began, in ns by the clock of the file system.
    """
    spec, earlier = session.spec, [other for name, other in session.states.items() if name != step.arm.name]
    own = checkouts.written(before, seen, began, earlier)
    if step.commit:
        state |= checkouts.beside(before, seen, own)
        reason = checkouts.elsewhere(before.top, seen, built, own)
    else:
        state |= checkouts.of(before, seen, own)
        if own:
            state["code_digest"] = provenance.code_digest(checkouts.without(seen, own))
        session.note(checkouts.rewritten(before, own, earlier))
        reason, others = checkouts.meanwhile(spec, before, seen, built, own)
        session.notes += [f"{listed(others)} changed while {step.arm.name} ran"] if others else []
        session.note(checkouts.other_files(spec, before, session.states.values()))
    session.note(*companions.remarks(state, earlier))
    reason = reason or checkouts.other_code(state, earlier) or companions.apart(state, earlier)
    alike = () if step.arm.command else earlier  # the arms of a parity spec have commands of their own
    return _unless(reason or named.apart(state, alike), state)


def _unless(reason: str | None, state: dict[str, Any]) -> dict[str, Any]:
    """The state of an arm that ended well, failed if there is a reason."""
    if reason is not None and state["status"] == "done":
        state.update(status="failed", reason=reason)
    return state


def leftovers(session: Session) -> list[str]:
    """A sentence for each arm during which something appeared in a tree in which another ran after it."""
    said = []
    for number, (arm, tree, left) in enumerate(session.ran):
        later = [name for name, other, _ in session.ran[number + 1 :] if other == tree and name != arm]
        if left and later:
            said.append(
                f"{listed(left, 3)} appeared or changed while {arm} ran, in the tree in which {', '.join(later)} ran "
                "after it: if the trainer reads that, they did not start alike"
            )
    return said


def _own_files(session: Session) -> list[Path]:
    return own_files(session.spec, session.folder.workspace.parents[3])


def _nodes(session: Session, step: Step) -> Path | None:
    """The folder in which the nodes of a slurm job say how they ended; what an earlier try left is no answer."""
    if session.spec.launch.name != "slurm":
        return None
    folder = session.folder.workspace / f"{step.stem}.slurm"
    folder.mkdir(exist_ok=True)
    (folder / "result.json").unlink(missing_ok=True)
    return folder


def _limit(spec: Spec, step: Step) -> float | None:
    """Seconds after which the arm is stopped from here; a slurm job keeps its limit itself, from its start on."""
    if step.time_limit is None or spec.launch.name != "slurm":
        return step.time_limit
    return spec.launch.queue_limit + step.time_limit + SLURM_MARGIN


def _environment(spec: Spec, step: Step, tree: Path | None, observed: Path) -> dict[str, str]:
    """The whole environment of an arm: the user's, what observes it, and what the arm declares."""
    inherited = {name: value for name, value in os.environ.items() if name not in repository.REDIRECTS}
    environment = {**inherited, **provenance.environment(tree, observed, inherited, step.environment)}
    own = spec.trainer is not None and TRAINERS[spec.trainer.name].own_records
    if tree is None and (own or spec.template is not None or step.arm.template is not None):
        environment["PYTHONPATH"] += f"{os.pathsep}{PACKAGE.parent}"  # run from a checkout, rlspec is not installed
    if tree is not None and spec.template is not None:  # what lies beside the spec is that of the revision
        top = repository.top(spec.path.parent.resolve())
        if top is not None:
            environment["RLSPEC_SPEC_DIR"] = str(tree / spec.path.parent.resolve().relative_to(top))
    environment["RLSPEC_RECORDS"] = str(step.records)  # beside the earlier ones where an arm is tried again
    return environment


def _state_after(
    session: Session, step: Step, tree: Path | None, outcome: launch.Outcome, seen: dict[str, Any], started: str
) -> dict[str, Any]:
    """What an arm that has ended comes to: done, or failed with the reason and the end of its log."""
    state = state_of(
        step,
        "done",
        started=started,
        seconds=round(outcome.seconds, 3),
        returncode=outcome.returncode,
        argv=list(step.argv),
        log=str(step.log),
        run_file_digest=seen.get("run_file_digest"),
        code_digest=provenance.code_digest(seen),
        shell=surroundings.shell(os.environ),
        root=str(session.folder.root),
        notes=list(outcome.notes),
        observed=seen,
    )
    reason = _explain(outcome, step) or _broken_provenance(session, step, tree, seen)
    if reason is None:
        reason = collecting.collect(session.spec, step, state)
    if reason is not None:
        cause = (outcome.traceback or "").splitlines()[-6:]
        state.update(status="failed", reason=reason, tail=cause or list(outcome.tail))
    return state


def _build(session: Session, step: Step, cwd: Path, environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Run the build commands in an arm's tree: once in each, in a checkout before each arm. The state if one fails."""
    key = str(cwd)
    if not session.spec.build or (session.spec.isolation == "worktree" and key in session.built):
        return None
    for command in session.spec.build:
        words = [word.replace("{python}", sys.executable) for word in command]
        session.say(f"{step.arm.name}: build: {shlex.join(words)}")
        log = step.log.with_suffix(".build.log")
        try:
            outcome = launch.execute(words, cwd=cwd, environment=environment, log=log, time_limit=step.time_limit)
            reason = outcome.reason
        except RunError as error:
            reason = str(error)
        if reason:
            reason = f"build command {shlex.join(words)} failed: {reason}"
            return state_of(step, "failed", reason, log=str(log), tail=_tail(log))
    session.built.add(key)
    return None


def _tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 8192))
            return file.read().decode("utf-8", "replace").splitlines()[-20:]
    except OSError:
        return []


def _explain(outcome: launch.Outcome, step: Step) -> str | None:
    if outcome.reason is None:
        return None
    started = outcome.step is not None  # a mistake at step 500 is the arm's own
    if step.run_file is not None and not started and launch.could_not_run(outcome.traceback or "", step.run_file):
        return f"this arm could not run the file {step.run_file.name}: {outcome.reason}"
    return outcome.reason


def _broken_provenance(session: Session, step: Step, tree: Path | None, seen: dict[str, Any]) -> str | None:
    if tree is None or step.commit is None:
        return None
    assert session.repository is not None
    if changed := repository.verify(tree, step.commit, _own_files(session)):
        return changed
    required = session.spec.isolation == "worktree"
    if wrong := provenance.wrong_imports(seen, tree, session.repository, required=required):
        return wrong
    if seen["imported"] is None:
        session.note(
            "no Python process of the arms told what it imported: whether they ran the checkout's code, or a copy of "
            "it that is installed elsewhere, is not known"
        )
    if installs(session.spec):
        return None
    names = differing.between(session.repository, session.commits.values())
    wrong, doubts = differing.stray(seen, tree, session.repository, names, session.commits.values())
    session.note(*doubts)
    return wrong or provenance.unused_tree(seen, tree)


def installs(spec: Spec) -> bool:
    """Whether the build may install the code under test into the environment, anew for each arm."""
    return spec.isolation == "checkout" and bool(spec.build)
