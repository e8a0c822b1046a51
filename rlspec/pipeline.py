"""One spec through the program: resolve, render, execute, judge, judge again with more arms, report."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import rlspec
from rlspec import contract as contracts
from rlspec import launch, logs, machine, plan, provenance, records, render, repository, runs, verdicts
from rlspec.checks import CHECKS, training
from rlspec.errors import RunError, SpecError
from rlspec.model import Arm, Document, Result, Row, Run, Spec, Step, Verdict
from rlspec.trainers import TRAINERS

PACKAGE = Path(rlspec.__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says about a run."""

    arms: tuple[str, ...] = ()
    from_run: str | None = None
    resume: bool = False
    retry_errors: bool = False
    keep_going: bool = False
    overrides: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Session:
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

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more; the run goes on
            print(text, file=self.stream, flush=True)


def startable(spec: Spec) -> None:
    """Raises SpecError if this version cannot start the spec's arms."""
    if spec.trainer is not None and (reason := training.cannot_run(spec)):
        raise SpecError(f"{spec.path}: {reason}")


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


def check(document: Document, options: Options) -> tuple[Spec, contracts.Contract, list[str]]:
    """What can be known before anything is written: the spec, its contract, unmet requirements. Raises SpecError."""
    spec = CHECKS[document.data["kind"]].parse(document)
    contract = contracts.load(spec.contract, spec.path.parent)
    startable(spec)
    _known_arms(spec, options)
    _earlier(spec, options, runs.root(Path.cwd().resolve()))
    blocked = machine.unmet(spec.requires)
    if not blocked:
        resolve_revisions(spec)
        if spec.trainer is not None and spec.trainer.template is not None:
            render.check(spec)
    return spec, contract, blocked


def run(document: Document, options: Options, stream: TextIO) -> dict[str, Any]:
    """Execute and judge one linted spec. Raises SpecError (nothing ran), RunError, launch.Interrupted."""
    spec, contract, blocked = check(document, options)
    if blocked:
        return _blocked(spec, contract, blocked, options)
    with launch.signals(), contextlib.ExitStack() as stack:
        notes: list[str] = []
        base = runs.root(Path.cwd().resolve())
        top, commits = _enter_repository(spec, stack, notes, base)
        earlier = _earlier(spec, options, base)
        if going_on := earlier if options.resume or options.retry_errors else None:
            spec, commits = _as_planned(spec, going_on, commits, options)
        session = _Session(
            spec=spec,
            contract=contract,
            folder=going_on or runs.create(base, spec.kind, spec.model, spec.path.stem),
            options=options,
            stream=stream,
            commits=commits,
            repository=top,
            notes=notes,
            earlier=earlier,
        )
        try:
            return _whole(session)
        except SpecError:
            if not session.begun and not going_on:
                runs.discard(session.folder)
            raise


def _whole(session: _Session) -> dict[str, Any]:
    for note in session.notes:
        session.say(note)
    steps = _steps(session)
    _write_plan(session, steps)
    _reuse(session, steps)
    return _execute_all(session, steps)


def _known_arms(spec: Spec, options: Options) -> None:
    names = [arm.name for arm in spec.arms]
    for name in options.arms:
        if name not in names:
            raise SpecError(f"--arm {name}: {spec.path} has the arms {', '.join(names)}")


def _enter_repository(
    spec: Spec, stack: contextlib.ExitStack, notes: list[str], base: Path
) -> tuple[Path | None, dict[str, str]]:
    top, _ = resolve_revisions(spec)
    if top is None:
        return None, {}
    stack.enter_context(repository.lock(top))
    notes += repository.repair(top)
    repository.require_clean(top, _own_files(spec, base))
    return top, resolve_revisions(spec)[1]


def _own_files(spec: Spec, base: Path) -> list[Path]:
    """What does not count as a change: the spec itself, and what rlspec writes."""
    return [spec.path.resolve(), base / "workspace", base / "logging"]


def _earlier(spec: Spec, options: Options, base: Path) -> runs.Folder | None:
    """The run to go on with, or whose arms may be used."""
    if options.from_run:
        return runs.find(base, options.from_run)
    if not (options.resume or options.retry_errors):
        return None
    earlier = runs.latest(base, spec.path)
    if earlier is None:
        raise SpecError(f"{spec.path} has no earlier run to go on with; leave out --resume and --retry-errors")
    return earlier


def _as_planned(
    spec: Spec, folder: runs.Folder, commits: dict[str, str], options: Options
) -> tuple[Spec, dict[str, str]]:
    """A run that goes on keeps the commits and the added arms of its plan. Raises SpecError if the spec changed."""
    planned = runs.load(folder.plan, "plan")
    if planned["spec"]["data"] != spec.data:
        before = planned.get("overrides", [])
        if before != list(options.overrides):
            raise SpecError(f"{folder.name} was started with {_sets(before)}, not with {_sets(options.overrides)}")
        raise SpecError(f"{spec.path} has changed since {folder.name}; start a new run, or use --from {folder.name}")
    for arm in planned["arms"]:
        if arm.get("revision") and arm.get("commit"):
            commits = {**commits, arm["revision"]: arm["commit"]}
    return _with_added(spec, planned), commits


def _sets(overrides: Sequence[str]) -> str:
    return " ".join(f"--set {text}" for text in overrides) or "no --set"


def _with_added(spec: Spec, planned: Mapping[str, Any]) -> Spec:
    for arm in planned["arms"]:
        if arm.get("added") and arm["name"] not in [known.name for known in spec.arms]:
            spec = dataclasses.replace(spec, arms=(*spec.arms, plan.base_copy(spec)))
    return spec


def _steps(session: _Session) -> tuple[Step, ...]:
    spec, folder = session.spec, session.folder
    steps = CHECKS[spec.kind].expand(spec, folder.workspace, folder.logging)
    return tuple(_filled(session, step) for step in steps)


def _filled(session: _Session, step: Step) -> Step:
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


def _write_plan(session: _Session, steps: Sequence[Step]) -> None:
    spec, contract = session.spec, session.contract
    digest = render.write(spec, steps)
    named = {arm["name"] for arm in spec.data["arms"]}
    data = {
        "schema_version": 1,
        "rlspec": rlspec.__version__,
        "created": _now(),
        "kind": spec.kind,
        "name": spec.name,
        "spec": {"path": str(spec.path.resolve()), "digest": spec.digest, "data": dict(spec.data)},
        "overrides": list(session.options.overrides),
        "tag": steps[0].tag if steps else "",
        "contract": {
            "name": contract.name,
            "digest": contract.digest,
            "rows": [contracts.plain(row) for row in contract.rows],
        },
        "arms": [
            {
                "name": step.arm.name,
                "role": step.arm.role,
                "stem": step.stem,
                "revision": step.arm.revision,
                "commit": step.commit,
                "run_file_digest": digest,
                "argv": list(step.argv),
                "environment": dict(step.environment),
                "perturb": dict(step.arm.perturb) if step.arm.perturb else None,
                "implementation": _plain(step.arm.implementation),
                "added": step.arm.name not in named,
            }
            for step in steps
        ],
    }
    for line in data["contract"]["rows"]:  # type: ignore[index]
        line.pop("id")
    runs.save(session.folder.plan, data)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


# --- arms that need not run again


def _reuse(session: _Session, steps: Sequence[Step]) -> None:
    """Take over what the earlier run has of the arms that are still open; a file that is given is read afresh."""
    earlier = session.earlier
    if earlier is None:
        return
    planned = {arm["name"]: arm for arm in runs.load(earlier.plan, "plan")["arms"]}
    mine = {arm["name"]: arm for arm in runs.load(session.folder.plan, "plan")["arms"]}
    for step in steps:
        name = step.arm.name
        if name in session.options.arms or name in session.states or not step.argv:
            continue
        reason = _not_reusable(session, step, earlier, planned.get(name), mine[name])
        if reason is None:
            session.states[name] = _take_over(session, step, earlier)
        elif session.options.arms:
            raise SpecError(f"arm {name} of {earlier.name} cannot be used: {reason}; run it again with --arm {name}")
        elif reason != "it has not run":
            session.say(f"{name}: runs again, since {reason}")


def _not_reusable(
    session: _Session, step: Step, earlier: runs.Folder, planned: Mapping[str, Any] | None, mine: Mapping[str, Any]
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
    ):
        if planned.get(key) != mine.get(key):
            return text
    if _without(planned["argv"], earlier) != _without(mine["argv"], session.folder):
        return "the command differs"
    path = earlier.workspace / f"{planned['stem']}.records.jsonl"
    if state.get("records_digest") and (not path.exists() or digest(path) != state["records_digest"]):
        return f"{path.name} is not what the arm wrote"
    return None


def _without(argv: Sequence[str], folder: runs.Folder) -> list[str]:
    return [word.replace(str(folder.workspace), "") for word in argv]


def _take_over(session: _Session, step: Step, earlier: runs.Folder) -> dict[str, Any]:
    planned = {arm["name"]: arm for arm in runs.load(earlier.plan, "plan")["arms"]}[step.arm.name]
    source = earlier.workspace / f"{planned['stem']}.provenance.json"
    state = runs.load(source)
    if earlier != session.folder:
        records_path = source.with_name(f"{planned['stem']}.records.jsonl")
        if records_path.exists():
            shutil.copyfile(records_path, step.records)
        state = {**state, "reused_from": earlier.name}
        runs.save(step.provenance, state)
    return {**state, "reused_from": state.get("reused_from") or earlier.name}


# --- execution


def _execute_all(session: _Session, steps: Sequence[Step]) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        made, steps = _until_settled(session, steps, stack)
    if failed := [name for name, state in session.states.items() if state["status"] == "failed"]:
        session.say(f"{', '.join(failed)} failed; `rlspec run {session.spec.path} --retry-errors` tries again")
    if session.trees is not None:  # complete only now that the trees are undone
        session.notes += session.trees.notes
    report = build(session.spec, session.contract, steps, session.states, made, session.folder)
    report["overrides"] = list(session.options.overrides)
    report["notes"] = session.notes + report["notes"]
    return report


def _until_settled(
    session: _Session, steps: Sequence[Step], stack: contextlib.ExitStack
) -> tuple[list[Verdict], Sequence[Step]]:
    _execute(session, steps, stack)
    while True:
        made = judge_states(session.spec, session.contract, steps, session.states)
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
        _reuse(session, steps)
        _execute(session, steps, stack)


def _open_question(made: Sequence[Verdict]) -> str:
    unsure = min(made, key=lambda verdict: ("INVESTIGATE", "FAIL", verdict.status).index(verdict.status))
    return f"{unsure.subject} is {unsure.status}"


def _failed(session: _Session) -> bool:
    return any(state["status"] != "done" for state in session.states.values())


def _execute(session: _Session, steps: Sequence[Step], stack: contextlib.ExitStack) -> None:
    options = session.options
    wanted = [s for s in steps if s.arm.name not in session.states]
    if options.arms:
        wanted = [s for s in wanted if s.arm.name in options.arms or not s.argv]
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
            session.states[step.arm.name] = _state(step, "skipped", "not started, since an earlier arm failed")
            continue
        state = _arm(session, step)
        session.states[step.arm.name] = state
        stopped = state["status"] != "done" and (not options.keep_going or bool(state.get("halt")))


def _state(step: Step, status: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"arm": step.arm.name, "status": status, "reason": reason, "commit": step.commit, **more}


def _arm(session: _Session, step: Step) -> dict[str, Any]:
    """Run one arm; its earlier record, if there is one, is kept until the new one is whole."""
    if not step.argv:
        return _given(step)
    kept = step
    if step.provenance.exists():
        step = _beside(step)
    state = _run_arm(session, step)
    if step is not kept and state["status"] == "done":
        for mine, theirs in ((step.records, kept.records), (step.log, kept.log)):
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
        state = _state(step, "done", records_digest=digest(step.records))
    except OSError as error:
        return _state(step, "failed", f"{step.records} cannot be read: {error.strerror}")
    runs.save(step.provenance, state)
    return state


def _beside(step: Step) -> Step:
    def retry(path: Path) -> Path:
        return path.with_name(f"retry-{path.name}")

    records = retry(step.records)
    argv = tuple(word.replace(str(step.records), str(records)) for word in step.argv)
    return dataclasses.replace(step, argv=argv, log=retry(step.log), records=records)


def _run_arm(session: _Session, step: Step) -> dict[str, Any]:
    spec, started = session.spec, _now()
    tree = session.trees.tree(step.commit) if session.trees is not None and step.commit else None
    observed = session.folder.workspace / f"{step.stem}.observed"
    shutil.rmtree(observed, ignore_errors=True)
    observed.mkdir()
    inherited = {name: value for name, value in os.environ.items() if name not in repository.REDIRECTS}
    environment = {**inherited, **provenance.environment(tree, observed, inherited, step.environment)}
    if tree is None and spec.trainer is not None and TRAINERS[spec.trainer.name].own_records:
        environment["PYTHONPATH"] += f"{os.pathsep}{PACKAGE.parent}"  # run from a checkout, rlspec is not installed
    cwd = tree or (spec.repository or spec.path.parent).resolve()
    if broken := _build(session, step, cwd, environment):
        shutil.rmtree(observed, ignore_errors=True)
        return {**broken, "started": started}
    for file in observed.iterdir():
        file.unlink()  # the build is not the arm
    expected = spec.trainer.steps if spec.trainer else None
    progress = launch.Progress(step.arm.name, expected, session.stream)
    progress.start()
    try:
        outcome = launch.execute(
            step.argv,
            cwd=cwd,
            environment=environment,
            log=step.log,
            time_limit=step.time_limit,
            on_line=progress.feed,
            on_tick=progress.tick,
        )
    except launch.Interrupted:
        progress.end("interrupted")
        raise
    except RunError as error:  # it did not start, or did not end: no next arm beside it
        progress.end("failed")
        return _state(step, "failed", str(error), started=started, log=str(step.log), tail=_tail(step.log), halt=True)
    finally:
        seen = provenance.collect(
            observed, commit=step.commit, dirty=False if step.commit else None, run_file=step.run_file, tree=tree
        )
        shutil.rmtree(observed, ignore_errors=True)
    progress.end("done" if outcome.reason is None else "failed")
    state = _state(
        step,
        "done",
        started=started,
        seconds=round(outcome.seconds, 3),
        returncode=outcome.returncode,
        argv=list(step.argv),
        log=str(step.log),
        run_file_digest=seen.get("run_file_digest"),
        notes=list(outcome.notes),
        observed=seen,
    )
    reason = _explain(outcome, step) or _broken_provenance(session, step, tree, seen)
    if reason is None:
        reason = _collect_records(spec, step, state)
    if reason is not None:
        cause = (outcome.traceback or "").splitlines()[-6:]
        state.update(status="failed", reason=reason, tail=cause or list(outcome.tail))
    return state


def _build(session: _Session, step: Step, cwd: Path, environment: Mapping[str, str]) -> dict[str, Any] | None:
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
            return _state(step, "failed", reason, log=str(log), tail=_tail(log))
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


def _broken_provenance(session: _Session, step: Step, tree: Path | None, seen: dict[str, Any]) -> str | None:
    if tree is None or step.commit is None:
        return None
    assert session.repository is not None
    own = _own_files(session.spec, session.folder.workspace.parents[3])
    if changed := repository.verify(tree, step.commit, own):
        return changed
    required = session.spec.isolation == "worktree"
    if wrong := provenance.wrong_imports(seen, tree, session.repository, required=required):
        return wrong
    installs = not required and session.spec.build  # into the environment, anew for each arm
    return None if installs else provenance.unused_tree(seen, tree)


def _plain(implementation: str | Mapping[str, str] | None) -> str | dict[str, str] | None:
    return dict(implementation) if isinstance(implementation, Mapping) else implementation


def _collect_records(spec: Spec, step: Step, state: dict[str, Any]) -> str | None:
    """Turn the log into records; why it cannot be done, or None."""
    if spec.trainer is not None:
        own = TRAINERS[spec.trainer.name].own_records
        try:
            found = records.read(step.records, step.arm) if own else _read_log(spec, step)
        except (SpecError, RunError) as error:  # the arm has run, so this is its failure
            return str(error)
        if not own:
            records.write(found, step.records, spec.trainer.reader)
        state["steps"] = max((len(series.steps) for series in found.series.values()), default=0)
    if not step.records.is_file():
        return f"the command wrote no {step.records.name}"
    state["records_digest"] = digest(step.records)
    return None


def _read_log(spec: Spec, step: Step) -> Run:
    assert spec.trainer is not None
    asked = [judgment.metric for judgment in spec.judgments if judgment.metric]
    usual = training.default_metrics(spec.data)
    timed = [entry[0] for entry in logs.READERS[spec.trainer.reader].timing.values()]
    metrics = tuple(dict.fromkeys([*asked, *usual, *timed])) if usual else ()
    found = logs.read(step.log, spec.trainer.reader, step.arm, metrics=metrics, pattern=spec.trainer.pattern)
    if spec.trainer.steps is not None:
        found = dataclasses.replace(found, steps_expected=spec.trainer.steps)
    return found


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    made = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            made.update(block)
    return made.hexdigest()


# --- judging and reporting


def judge_states(
    spec: Spec, contract: contracts.Contract, steps: Sequence[Step], states: Mapping[str, Mapping[str, Any]]
) -> list[Verdict]:
    """Verdicts of a run from what its arms left on disk."""
    results = [_result(spec, step, states.get(step.arm.name)) for step in steps]
    return CHECKS[spec.kind].judge(spec, results, contract)


def _result(spec: Spec, step: Step, state: Mapping[str, Any] | None) -> Result:
    if state is None:
        return Result(arm=step.arm, records=step.records, failure="it has not run")
    if state["status"] != "done":
        return Result(arm=step.arm, records=step.records, failure=str(state.get("reason")))
    if spec.trainer is None:
        return Result(arm=step.arm, records=step.records)
    try:
        found = records.read(step.records, step.arm)
    except RunError as error:
        return Result(arm=step.arm, records=step.records, failure=str(error))
    seen = provenance.machine(state.get("observed") or {})
    return Result(arm=step.arm, records=step.records, run=dataclasses.replace(found, machine=seen))


def rejudge(folder: runs.Folder, contract_name: str | None = None) -> dict[str, Any]:
    """Judge a finished run again from its records. Raises SpecError or RunError."""
    planned = runs.load(folder.plan, "plan")
    path = Path(planned["spec"]["path"])
    document = Document(path=path, data=planned["spec"]["data"], keys={}, values={}, digest=planned["spec"]["digest"])
    spec = _with_added(CHECKS[planned["kind"]].parse(document), planned)
    given = planned["contract"]
    if contract_name:
        contract = contracts.load(contract_name, Path.cwd())
    else:
        contract = contracts.from_rows(given["name"], given["rows"])
        if contract.digest != given["digest"]:
            raise RunError(f"{folder.plan}: the contract's rows do not have the digest that stands beside them")
    steps = CHECKS[spec.kind].expand(spec, folder.workspace, folder.logging)
    by_name = {arm["name"]: arm for arm in planned["arms"]}
    states: dict[str, dict[str, Any]] = {}
    for step in steps:
        if step.provenance.exists():
            states[step.arm.name] = runs.load(step.provenance)
            _untouched(step, states[step.arm.name])
        elif not step.argv:
            states[step.arm.name] = _state(step, "done")
    steps = tuple(dataclasses.replace(s, commit=by_name[s.arm.name].get("commit")) for s in steps)
    report = build(spec, contract, steps, states, judge_states(spec, contract, steps, states), folder)
    report["overrides"] = planned.get("overrides", [])
    return report


def _untouched(step: Step, state: Mapping[str, Any]) -> None:
    wanted = state.get("records_digest")
    if state.get("status") == "done" and wanted and step.records.exists() and digest(step.records) != wanted:
        what = "is not what arm {} wrote" if step.argv else "has changed since arm {} was judged"
        raise RunError(f"{step.records} {what.format(step.arm.name)}: its digest differs from its provenance")


def build(
    spec: Spec,
    contract: contracts.Contract,
    steps: Sequence[Step],
    states: Mapping[str, Mapping[str, Any]],
    made: Sequence[Verdict],
    folder: runs.Folder | None,
) -> dict[str, Any]:
    """The report, as `schemas/report.schema.json` describes it."""
    statuses = [verdict.status for verdict in made]
    report: dict[str, Any] = {
        "schema_version": 1,
        "rlspec": rlspec.__version__,
        "created": _now(),
        "kind": spec.kind,
        "name": spec.name,
        "question": spec.question,
        "outcome": verdicts.worst(statuses),
        "exit_code": verdicts.exit_code(statuses),
        "expect": None,
        "spec": {"path": str(spec.path), "digest": spec.digest} if spec.digest else None,
        "contract": {"name": contract.name, "digest": contract.digest},
        "model": spec.model or None,
        "tag": plan.tag(spec) or None,
        "dtype": spec.dtype,
        "mesh": {axis: getattr(spec.mesh, axis) for axis in ("pp", "dp", "cp", "ep")} if spec.trainer else None,
        "sequence_length": spec.sequence_length if spec.trainer else None,
        "run": {"name": folder.name, "folder": str(folder.workspace)} if folder else None,
        "overrides": [],
        "arms": [_arm_report(step, states.get(step.arm.name)) for step in steps],
        "verdicts": [_verdict_report(verdict) for verdict in made],
        "counts": {"judged": sum(s not in ("ERROR", "BLOCKED") for s in statuses), "expected": len(statuses)},
        "notes": [],
    }
    return expected(spec, report)


def _arm_report(step: Step, state: Mapping[str, Any] | None) -> dict[str, Any]:
    state = state or {"status": "skipped", "reason": "it has not run"}
    reused = state.get("reused_from")
    return {
        "name": step.arm.name,
        "role": step.arm.role,
        "status": "reused" if reused and state["status"] == "done" else state["status"],
        "revision": step.arm.revision,
        "commit": step.commit or state.get("commit"),
        "seconds": state.get("seconds"),
        "steps": state.get("steps"),
        "log": state.get("log") or (str(step.records) if step.arm.records else None),
        "log_digest": state.get("log_digest"),
        "reason": state.get("reason"),
        "tail": list(state.get("tail") or ()),
        "provenance": state.get("observed"),
    }


def _verdict_report(verdict: Verdict) -> dict[str, Any]:
    return {
        "judgment": verdict.judgment,
        "subject": verdict.subject,
        "status": verdict.status,
        "statistic": verdict.statistic,
        "reason": verdict.reason,
        "row": contracts.plain(verdict.row) if isinstance(verdict.row, Row) else None,
        "evidence": dict(verdict.evidence),
        "notes": list(verdict.notes),
    }


def expected(spec: Spec, report: dict[str, Any]) -> dict[str, Any]:
    """Hold the outcome against `expect:`; met is exit 0, not met 1, an unexpected ERROR or BLOCKED keeps its code."""
    want = spec.expect
    if want is None:
        return report
    problems = []
    if report["outcome"] != want.status:
        problems.append(f"expected {want.status}, got {report['outcome']}")
    for name, status in want.judgments.items():
        found = [v["status"] for v in report["verdicts"] if name in (v["subject"], v["judgment"])]
        if not found or verdicts.worst(found) != status:
            problems.append(f"{name}: expected {status}, got {verdicts.worst(found) if found else 'no verdict'}")
    if want.category is not None or want.at is not None:
        problems.append("category and at are judged in kinds of a later version")
    code = report["exit_code"]
    report["expect"] = {"status": want.status, "met": not problems, "problems": problems}
    report["exit_code"] = 0 if not problems else code if code in (4, 5) else 1
    return report


def _blocked(spec: Spec, contract: contracts.Contract, reasons: Sequence[str], options: Options) -> dict[str, Any]:
    reason = "; ".join(reasons)
    made = [Verdict(judgment=j.check, subject=j.metric or "*", status="BLOCKED", reason=reason) for j in spec.judgments]
    report = build(spec, contract, (), {}, made, None)
    report["overrides"] = list(options.overrides)
    return report


# --- bring your own logs


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The logs of `rlspec judge`, with their roles."""

    kind: str
    files: tuple[tuple[str, Path], ...]
    reader: str
    pattern: str | None = None
    metrics: tuple[str, ...] = ()
    contract: str | None = None


def judge_logs(source: Source) -> dict[str, Any]:
    """Judge logs that somebody else's launcher left. Raises SpecError."""
    spec = _spec_of(source)
    contract = contracts.load(spec.contract, Path.cwd())
    arms = list(zip(spec.arms, (path for _, path in source.files), strict=True))
    states = {arm.name: {"status": "read", "log": str(path), "log_digest": digest(path)} for arm, path in arms}
    results = list(_read_results(spec, source, arms))
    made = CHECKS[spec.kind].judge(spec, results, contract)
    steps = [_no_step(arm, path) for arm, path in arms]
    for result in results:
        if result.run is not None:
            lengths = [len(series.steps) for series in result.run.series.values()]
            states[result.arm.name]["steps"] = max(lengths, default=0)  # type: ignore[assignment]
    report = build(spec, contract, steps, states, made, None)
    report.update(tag=None, mesh=None, sequence_length=None, dtype=None)  # logs do not say
    report["source"] = {
        "reader": source.reader,
        "pattern": source.pattern,
        "metrics": list(source.metrics),
        "contract": source.contract,
    }
    return report


def _no_step(arm: Arm, path: Path) -> Step:
    return Step(tag="", arm=arm, argv=(), run_file=None, log=path, records=path, provenance=path)


def _spec_of(source: Source) -> Spec:
    """The spec that logs of unknown origin stand for."""
    counts: dict[str, int] = {}
    arms = []
    for role, path in source.files:
        short = {"base": "base", "feature": "feat"}.get(role, role)
        number = counts[role] = counts.get(role, -1) + 1
        name = short if role in ("rollout", "train") else f"{short}{number}"
        arms.append({"name": name, "role": role, **({"records": str(path)} if source.kind == "parity" else {})})
    data: dict[str, Any] = {"kind": source.kind, "arms": arms}
    if source.contract:
        data["contract"] = source.contract
    if source.kind != "parity":
        reader = {"name": source.reader, **({"pattern": source.pattern} if source.pattern else {})}
        trainer = {"name": "command", "command": ["{python}"], "reader": reader}
        data |= {"model": "any", "mesh": {}, "trainer": trainer}
    if source.metrics and source.kind == "correctness":
        data["judgments"] = [{"check": "drift", "metric": metric} for metric in source.metrics]
    return _parse_any(source.kind, data)


def _parse_any(kind: str, data: dict[str, Any]) -> Spec:
    document = Document(path=Path("logs"), data={**data, "model": "qwen3-8b"}, keys={}, values={}, digest="")
    spec = CHECKS[kind].parse(document)
    return dataclasses.replace(spec, name="logs", model="", data=data)


def _read_results(spec: Spec, source: Source, arms: Sequence[tuple[Arm, Path]]) -> Iterator[Result]:
    if source.kind == "parity":
        for arm, path in arms:
            yield Result(arm=arm, records=path)
        return
    for arm, path in arms:
        found = logs.read(path, source.reader, arm, metrics=source.metrics, pattern=source.pattern)
        yield Result(arm=arm, records=path, run=found)
