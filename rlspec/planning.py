"""`rlspec plan` and `rlspec render`: what a run would do, in words."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from rlspec import contract as contracts
from rlspec import pipeline, plan, render, runs, schema
from rlspec.checks import CHECKS, common, training
from rlspec.model import Document, Spec, Step


def text(document: Document) -> str:
    """The resolved spec, its steps, commands, files and cost. Raises SpecError; writes nothing."""
    check = CHECKS[document.data["kind"]]
    spec = check.parse(document)
    contract = contracts.load(spec.contract, spec.path.parent)
    top, commits = pipeline.resolve_revisions(spec)
    if spec.trainer is not None and spec.trainer.template is not None:
        render.check(spec)
    below = Path(f"validate-{spec.kind}") / (spec.model or "any") / f"<UTC time>-{spec.path.stem}"
    steps = check.expand(spec, Path("workspace") / below, Path("logging") / below)
    lines = [*_head(spec, contract), "", "judgments"]
    for judgment in spec.judgments:
        for name in common.row_names(judgment.check):
            row = contract.resolve(name, judgment.metric or "*", spec.dtype)
            limits = ", ".join(f"{key} {value:g}" for key, value in row.limits.items()) or row.status
            subject = judgment.metric or ("every usual metric that is printed" if judgment.check == "drift" else "")
            lines.append(f"  {judgment.check} {subject}: {limits}  ({row.id})".replace(" :", ":"))
    lines += ["", f"steps, in this order ({len(steps)} arms, one after the other)"]
    for number, step in enumerate(steps, 1):
        lines += _step(number, spec, step, commits)
    if top is not None:
        lines += ["", f"repository {top}, isolation {spec.isolation}"]
    return "\n".join([*lines, "", *_cost(spec)])


def _head(spec: Spec, contract: contracts.Contract) -> Iterator[str]:
    yield f"{spec.kind} {spec.name}: {spec.question}"
    fields = [("model", spec.model), ("tag", plan.tag(spec)), ("contract", f"{contract.name} ({contract.digest[:12]})")]
    if spec.trainer is not None:
        mesh = spec.mesh
        shape = f"pp {mesh.pp}, dp {mesh.dp}, cp {mesh.cp}, ep {mesh.ep}"
        fields += [
            ("mesh", f"{shape}; world size {mesh.world_size}; experts' dp {mesh.expert_dp}"),
            ("trainer", f"{spec.trainer.name}, reader {spec.trainer.reader}, {spec.trainer.steps or 'unknown'} steps"),
            ("launch", f"{spec.launch.name}, {spec.launch.nodes} × {spec.launch.processes_per_node} processes"),
        ]
        fields += [(f"  {key}", str(value)) for key, value in sorted(spec.trainer.settings.items())]
    yield from (f"  {name:<26} {value}" for name, value in fields if value)
    defaults = _defaults(spec)
    if defaults:
        yield f"  {'by default':<26} {', '.join(defaults)}"
    if spec.trainer is not None and (reason := training.cannot_run(spec)):
        yield f"  {'note':<26} {reason}"


def _defaults(spec: Spec) -> list[str]:
    properties = schema.load(spec.kind)["properties"]
    definitions = schema.load(spec.kind)["definitions"]
    found = []
    for key, value in properties.items():
        name = str(value.get("$ref", "")).rpartition("/")[2]
        default = value.get("default", definitions.get(name, {}).get("default"))
        if key not in spec.data and default not in (None, [], {}):
            found.append(f"{key}: {default}")
    return found


def _step(number: int, spec: Spec, step: Step, commits: dict[str, str]) -> Iterator[str]:
    arm = step.arm
    where = f"{arm.revision} = {commits[arm.revision][:12]}" if arm.revision else "as the files lie here"
    yield f"  {number}. {arm.name} ({arm.role}): {where}"
    for key, value in sorted(arm.environment.items()):
        yield f"       {key}={value}"
    if arm.perturb:
        yield f"       weights moved by {arm.perturb['weights']}, seed {arm.perturb['seed']}"
    if step.argv:
        words = [word.replace("{run_file}", str(step.run_file)).replace("{records}", str(step.records))
                 for word in step.argv]  # fmt: skip
        yield f"       $ {shlex.join(words)}"
    for file in (step.run_file, step.log if step.argv else None, step.records):
        if file is not None:
            yield f"       {file}"


def _cost(spec: Spec) -> Iterator[str]:
    world, arms = spec.mesh.world_size, len(spec.arms)
    if spec.trainer is None:
        return
    added = max((j.max_base_runs for j in spec.judgments), default=2) - sum(a.role == "base" for a in spec.arms)
    extra = f", and up to {added} added base runs" if spec.kind == "correctness" and added > 0 else ""
    yield f"cost: {arms} arms × {world} processes{extra}"
    if spec.time_limit:
        hours = spec.time_limit / 3600 * world
        yield f"      at most {hours * arms:.2f} process-hours (time_limit × processes × arms), {hours:.2f} more an added run"
    else:
        yield "      no upper bound: set time_limit for one"


def render_files(document: Document) -> list[Path]:
    """Write the run files of a spec into a new run folder. Raises SpecError."""
    check = CHECKS[document.data["kind"]]
    spec = check.parse(document)
    pipeline.startable(spec)
    if spec.trainer is None or spec.trainer.template is None:
        return []
    render.check(spec)
    folder = runs.create(runs.root(Path.cwd().resolve()), spec.kind, spec.model, spec.path.stem)
    steps = check.expand(spec, folder.workspace, folder.logging)
    render.write(spec, steps)
    return [step.run_file for step in steps if step.run_file is not None]
