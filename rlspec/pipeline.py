"""One spec through the program: resolve, render, execute, judge, judge again with more arms, report."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import rlspec
from rlspec import (
    arms,
    chain_records,
    collecting,
    copies,
    differing,
    launch,
    machine,
    measurements,
    provenance,
    records,
    render,
    reports,
    repository,
    resuming,
    reuse,
    runs,
    surroundings,
)
from rlspec import contract as contracts
from rlspec.checks import CHECKS, chain, operators
from rlspec.errors import ERROR, RunError, SpecError
from rlspec.interrupts import postponed
from rlspec.model import Document, Result, Spec, Status, Step, Verdict


class NothingRan(launch.Interrupted):
    """A signal came before a new run had begun, so that there is none to go on with."""


def resolve_revisions(spec: Spec) -> tuple[Path | None, dict[str, str]]:
    """The repository under test and revision → commit, or nothing if no arm names one. Raises SpecError."""
    named = list(dict.fromkeys(arm.revision for arm in spec.arms if arm.revision))
    if not named:
        return None, {}
    place = spec.repository or spec.path.resolve().parent
    if not place.is_dir():
        raise SpecError(f"{spec.path}: there is no folder {place}")
    top = repository.top(place)
    if top is None:
        raise SpecError(f"{spec.path}: arms name revisions, but {place} is in no git repository; set `repository:`")
    return top, {name: repository.resolve(top, name) for name in named}


def check(document: Document, options: arms.Options) -> tuple[Spec, contracts.Contract, list[str]]:
    """What can be known before anything is written: the spec, its contract, unmet requirements. Raises SpecError."""
    spec = CHECKS[document.data["kind"]].parse(document)
    contract = contracts.load(spec.contract, spec.path.parent)
    _known_arms(spec, options)
    if not (options.from_run or options.resume or options.retry_errors):  # else it is not known yet what will run
        arms.require_declared(spec, os.environ, options.arms or None)
    _earlier(spec, options, runs.root(Path.cwd().resolve()))
    blocked = chain.unmet(spec) if spec.chain else machine.unmet(spec.requires)
    if not blocked:
        resolve_revisions(spec)
        if render.has_files(spec):
            render.check(spec, contract)
    return spec, contract, blocked


def of_suite(documents: Sequence[Document], options: arms.Options) -> list[arms.Options]:
    """The options of each spec of a suite, which may go on: one that was not reached when it was cut off begins anew.

    That is one without a run, or with a run from before the one that was cut off. SpecError if none has a run.
    """
    if not (options.resume or options.retry_errors):
        return [options] * len(documents)
    base = runs.root(Path.cwd().resolve())
    found = [runs.latest(base, document.path) for document in documents]
    if not any(found):
        raise SpecError("none of these specs has an earlier run to go on with; leave out --resume and --retry-errors")
    anew = dataclasses.replace(options, resume=False, retry_errors=False)
    chosen, cut_off = [], ""
    for folder in found:
        goes_on = folder is not None and runs.began(folder) >= cut_off
        chosen.append(options if goes_on else anew)
        if folder is not None and goes_on and not folder.report.exists():
            cut_off = runs.began(folder)
    return chosen


def run(document: Document, options: arms.Options, stream: TextIO) -> dict[str, Any]:
    """Execute and judge one linted spec. Raises SpecError (nothing ran), RunError, launch.Interrupted."""
    spec, contract, blocked = check(document, options)
    if blocked:
        return _without_a_run(spec, contract, "BLOCKED", "; ".join(blocked), options)
    with launch.signals(), contextlib.ExitStack() as stack:
        notes: list[str] = []
        going_on = fresh = session = None
        try:
            base = runs.root(Path.cwd().resolve())
            written = [*arms.own_files(spec, base), *(path.resolve() for path in options.outputs)]
            top, commits = _enter_repository(spec, stack, notes, written)
            earlier = _earlier(spec, options, base)
            going_on = earlier if options.resume or options.retry_errors else None
            if going_on is None:
                fresh = runs.create(base, spec.kind, spec.model, spec.path.stem)
            folder = going_on or fresh
            assert folder is not None
            stack.enter_context(folder.lock("run"))
            if going_on:
                spec, commits, moved = resuming.as_planned(spec, going_on, commits, options)
                notes += moved
            session = arms.Session(
                spec=spec,
                contract=contract,
                folder=folder,
                options=options,
                stream=stream,
                commits=commits,
                repository=top,
                notes=notes,
                earlier=earlier,
            )
            return _whole(session)
        except (SpecError, launch.Interrupted) as error:
            if going_on is None and (session is None or not session.begun):
                _take_back(fresh, error)
            raise


def _take_back(folder: runs.Folder | None, error: BaseException) -> None:
    """Leave nothing of a run in which nothing ran. Raises NothingRan after a signal."""
    if folder is not None:
        with postponed():
            runs.discard(folder)
    if isinstance(error, launch.Interrupted):
        raise NothingRan(error.signum) from None


def _whole(session: arms.Session) -> dict[str, Any]:
    for note in session.notes:
        session.say(note)
    steps = _steps(session)
    _write_plan(session, steps)
    reuse.take_over(session, steps)
    session.notes += arms.require_declared(
        session.spec, os.environ, [step.arm.name for step in _wanted(session, steps)]
    )
    return _execute_all(session, steps)


def _known_arms(spec: Spec, options: arms.Options) -> None:
    names = [arm.name for arm in spec.arms]
    for name in options.arms:
        if name not in names:
            raise SpecError(f"--arm {name}: {spec.path} has the arms {', '.join(names)}")


def _enter_repository(
    spec: Spec, stack: contextlib.ExitStack, notes: list[str], written: Sequence[Path]
) -> tuple[Path | None, dict[str, str]]:
    top, _ = resolve_revisions(spec)
    if top is None:
        return None, {}
    stack.enter_context(repository.lock(top))
    notes += repository.repair(top)
    repository.require_clean(top, written)
    return top, resolve_revisions(spec)[1]


def _earlier(spec: Spec, options: arms.Options, base: Path) -> runs.Folder | None:
    """The run to go on with, or whose arms may be used."""
    if options.from_run:
        return runs.find(base, options.from_run)
    if not (options.resume or options.retry_errors):
        return None
    earlier = runs.latest(base, spec.path)
    if earlier is None:
        raise SpecError(f"{spec.path} has no earlier run to go on with; leave out --resume and --retry-errors")
    return earlier


def _steps(session: arms.Session) -> tuple[Step, ...]:
    spec, folder = session.spec, session.folder
    steps = CHECKS[spec.kind].expand(spec, folder.workspace, folder.logging)
    return tuple(_filled(session, step) for step in steps)


def _filled(session: arms.Session, step: Step) -> Step:
    values = {
        "{python}": sys.executable,
        "{run_file}": str(step.run_file or ""),
        "{records}": str(step.records),
    }
    words = []
    for word in step.argv:
        for hole, value in values.items():
            word = word.replace(hole, value)
        words.append(word)
    argv = launch.argv(session.spec.launch, words) if words else ()
    commit = session.commits.get(step.arm.revision) if step.arm.revision else None
    return dataclasses.replace(step, argv=argv, commit=commit)


def _write_plan(session: arms.Session, steps: Sequence[Step]) -> None:
    spec, contract = session.spec, session.contract
    folder = session.folder
    move = folder.move(runs.load(folder.plan, "plan")) if folder.plan.is_file() else None
    digests = render.write(spec, steps, contract, move)
    named = {arm["name"] for arm in spec.data["arms"]}
    data = {
        "schema_version": 1,
        "rlspec": rlspec.__version__,
        "created": reports.now(),
        "kind": spec.kind,
        "name": spec.name,
        "spec": {"path": str(spec.path.resolve()), "digest": spec.digest, "data": dict(spec.data)},
        "root": str(folder.root),
        "overrides": list(session.options.overrides),
        "tag": steps[0].tag if steps else "",
        "contract": contracts.whole(contract),
        "workload": dict(spec.workload) or None,
        "operators": list(operators.chosen(spec)) if spec.workload and not spec.chain else None,
        "chain": dict(spec.chain) or None,
        "arms": [
            {
                "name": step.arm.name,
                "role": step.arm.role,
                "stem": step.stem,
                "revision": step.arm.revision,
                "commit": step.commit,
                "run_file_digest": digests.get(step.arm.name),
                "argv": list(step.argv),
                "environment": dict(step.environment),
                "perturb": dict(step.arm.perturb) if step.arm.perturb else None,
                "implementation": _plain(step.arm.implementation),
                "fault": step.arm.fault,
                "reader": _reader(spec),
                "build": [list(command) for command in spec.build],
                "added": step.arm.name not in named,
            }
            for step in steps
        ],
    }
    runs.save(session.folder.plan, {**data, "seal": runs.seal(data)})


def _execute_all(session: arms.Session, steps: Sequence[Step]) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        made, steps = _until_settled(session, steps, stack)
    if failed := [name for name, state in session.states.items() if state["status"] == "failed"]:
        session.say(f"{', '.join(failed)} failed; `rlspec run {session.spec.path} --retry-errors` tries again")
    if session.trees is not None:  # complete only now that the trees are undone
        session.notes += session.trees.notes
    session.notes += _unused(session, steps) + arms.leftovers(session)
    report = reports.build(
        session.spec,
        session.contract,
        steps,
        session.states,
        made,
        session.folder,
        results_of(session.spec, steps, session.states) if session.spec.workload else (),
    )
    report["overrides"] = list(session.options.overrides)
    report["notes"] = session.notes + report["notes"]
    return report


def _unused(session: arms.Session, steps: Sequence[Step]) -> list[str]:
    """What differs between the commits and was not used, as far as it was observed."""
    if session.repository is None or arms.installs(session.spec):
        return []
    states = [session.states.get(step.arm.name) or {} for step in steps if step.commit]
    seen = [state.get("observed") if state.get("status") == "done" else None for state in states]
    try:
        names = differing.between(session.repository, session.commits.values())
    except RunError:  # all arms are those of an earlier run, whose commits are gone
        return []
    said = differing.remarks(names, seen, bool(session.spec.build))
    top, path, template = session.repository.resolve(), session.spec.path.resolve(), session.spec.run_template
    in_worktrees = session.spec.isolation == "worktree"  # a checkout becomes each arm's commit itself
    if in_worktrees and path.is_relative_to(top) and template is not None:
        said += differing.read_beside(names, path.relative_to(top), template.read_text(encoding="utf-8"))
    return said


def _until_settled(
    session: arms.Session, steps: Sequence[Step], stack: contextlib.ExitStack
) -> tuple[list[Verdict], Sequence[Step]]:
    _execute(session, steps, stack)
    while True:
        try:
            made = judge_states(session.spec, session.contract, steps, session.states)
        except SpecError as error:  # the arms have run, so this is no exit 2
            raise RunError(str(error)) from error
        arm = None if _failed(session) else CHECKS[session.spec.kind].more(session.spec, made)
        if arm is None or session.options.arms:
            return made, steps
        session.say(f"{arm.name}: added, since {_open_question(made)}")
        before = session.spec
        session.spec = dataclasses.replace(before, arms=(*before.arms, arm))
        more = _steps(session)
        try:
            _write_plan(session, more)
        except SpecError as error:  # what has run is judged without it
            session.notes.append(f"{arm.name} could not be added: {error}")
            session.spec = before
            return made, steps
        steps = more
        reuse.take_over(session, steps)
        _execute(session, steps, stack)


def _open_question(made: Sequence[Verdict]) -> str:
    unsure = next((v for status in ("INVESTIGATE", "FAIL", "ERROR") for v in made if v.status == status), made[0])
    return f"{unsure.subject} is {unsure.status}"


def _failed(session: arms.Session) -> bool:
    return any(state["status"] != "done" for state in session.states.values())


def _execute(session: arms.Session, steps: Sequence[Step], stack: contextlib.ExitStack) -> None:
    options = session.options
    wanted = _wanted(session, steps)
    if wanted and session.commits and session.trees is None:
        assert session.repository is not None
        needed = list(dict.fromkeys(s.commit for s in wanted if s.commit))
        session.trees = stack.enter_context(
            repository.isolation(session.repository, session.spec.isolation, needed, session.folder.workspace)
        )
    if not session.begun:
        runs.publish(session.folder)
        session.begun = True
    stopped = _failed(session) and not options.keep_going and not options.arms
    for step in wanted:
        if stopped:
            session.states[step.arm.name] = arms.state_of(step, "skipped", "not started, since an earlier arm failed")
            continue
        state = arms.run(session, step)
        session.states[step.arm.name] = state
        stopped = state["status"] != "done" and (not options.keep_going or bool(state.get("halt")))


def _wanted(session: arms.Session, steps: Sequence[Step]) -> list[Step]:
    """What is to run: all that is open, or the arms that were asked for; a file that is given is always read."""
    open_ones = [step for step in steps if step.arm.name not in session.states]
    only = session.options.arms
    return [step for step in open_ones if not only or step.arm.name in only or not step.argv]


def _reader(spec: Spec) -> list[Any]:
    """What reads an arm, as far as an arm of another run must agree in it."""
    if spec.trainer is None:
        return []
    suffix = [spec.trainer.suffix] if spec.trainer.suffix else []
    return [spec.trainer.reader, spec.trainer.pattern, spec.trainer.steps, *suffix]


def _plain(implementation: str | Mapping[str, str] | None) -> str | dict[str, str] | None:
    return dict(implementation) if isinstance(implementation, Mapping) else implementation


def judge_states(
    spec: Spec, contract: contracts.Contract, steps: Sequence[Step], states: Mapping[str, Mapping[str, Any]]
) -> list[Verdict]:
    """Verdicts of a run from what its arms left on disk."""
    results: Sequence[Result] = results_of(spec, steps, states)
    if spec.trainer is not None:
        results = copies.refused(results, collecting.read_from(spec, steps, states))
    made = CHECKS[spec.kind].judge(spec, results, contract)
    return surroundings.noted(made, steps, states) if spec.trainer else made


def results_of(spec: Spec, steps: Sequence[Step], states: Mapping[str, Mapping[str, Any]]) -> list[Result]:
    """What the arms left on disk."""
    return [_result(spec, step, states.get(step.arm.name)) for step in steps]


def _result(spec: Spec, step: Step, state: Mapping[str, Any] | None) -> Result:
    if state is None:
        return Result(arm=step.arm, records=step.records, failure="it has not run")
    if state["status"] != "done":
        return Result(arm=step.arm, records=step.records, failure=str(state.get("reason")))
    if spec.trainer is None and not spec.workload:
        return Result(arm=step.arm, records=step.records)
    try:
        if spec.workload:
            reader = chain_records if spec.chain else measurements
            return Result(arm=step.arm, records=step.records, measured=reader.read(step.records, step.arm.name))
        found = records.read(step.records, step.arm)
    except RunError as error:
        return Result(arm=step.arm, records=step.records, failure=str(error))
    seen = provenance.machine(state.get("observed") or {})
    return Result(arm=step.arm, records=step.records, run=dataclasses.replace(found, machine=seen))


def broken(spec: Spec, contract: contracts.Contract, options: arms.Options, reason: str) -> dict[str, Any]:
    """The report of a sound spec, of several, that ended in an error: none of its judgments could be made."""
    report = _without_a_run(spec, contract, "ERROR", reason, options)
    if report["expect"]:  # an ERROR that a spec waits for is one of its judgments
        report["expect"] = {**report["expect"], "met": False, "problems": [reason]}
    return {**report, "exit_code": ERROR}


def _without_a_run(
    spec: Spec, contract: contracts.Contract, status: Status, reason: str, options: arms.Options
) -> dict[str, Any]:
    category = {"category": "blocked_hardware" if status == "BLOCKED" else "process"} if spec.workload else {}
    made = [
        Verdict(judgment=j.check, subject=j.metric or "*", status=status, reason=reason, evidence=category)
        for j in spec.judgments
    ]
    report = reports.build(spec, contract, (), {}, made, None)
    report["overrides"] = list(options.overrides)
    return report
