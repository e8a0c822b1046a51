"""`rlspec plan` and `rlspec render`: what a run would do, in words."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rlspec import chain_sizes, chains, launch, nodes, pipeline, plan, render, runs, schema, workloads
from rlspec import contract as contracts
from rlspec.checks import CHECKS, chain, common, operators
from rlspec.errors import SpecError
from rlspec.model import Document, Judgment, Row, Spec, Step
from rlspec.report.text import wrap

LABEL = 12
RUN = "<UTC time>"


def text(document: Document, width: int = 80) -> str:
    """The resolved spec, its judgments, arms, files and cost, wrapped. Raises SpecError; writes nothing."""
    check = CHECKS[document.data["kind"]]
    spec = check.parse(document)
    contract = contracts.load(spec.contract, spec.path.parent)
    top, commits = pipeline.resolve_revisions(spec)
    if render.has_files(spec):
        render.check(spec, contract)
    below = runs.below(spec.kind, spec.model) / f"{RUN}-{spec.path.stem}"
    steps = check.expand(spec, Path("workspace") / below, Path("logging") / below)
    blocks = [
        [*_head(spec, width)],
        [*_resolved(spec, contract, top, width)],
        ["judgments", *_judgments(spec, contract, width)],
        ["arms, one after the other", *(line for step in steps for line in _arm(spec, step, commits, width))],
        [*_files(spec, steps, width)],
        [*_cost(spec, width)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _field(name: str, value: str, width: int) -> list[str]:
    return wrap(value, width, f"  {name:<{LABEL}}")


def _head(spec: Spec, width: int) -> Iterator[str]:
    yield from wrap(f"{spec.kind}: {spec.name}", width)
    yield from wrap(spec.question, width) if spec.question else ()


def _resolved(spec: Spec, contract: contracts.Contract, top: Path | None, width: int) -> Iterator[str]:
    mesh, how, trainer = spec.mesh, spec.launch, spec.trainer
    shape = f"pp {mesh.pp}, dp {mesh.dp}, cp {mesh.cp}, ep {mesh.ep}"
    processes = f"{_count(how.nodes, 'node')} of {_count(how.processes_per_node, 'process', 'processes')}"
    fields = {"model": spec.model}
    if trainer is not None:
        fields |= {
            "mesh": f"{shape}; world size {mesh.world_size}; dp of experts {mesh.expert_dp}",
            "sequence": f"{spec.sequence_length} tokens, {spec.dtype}",
            "tag": plan.tag(spec),
            "trainer": f"{trainer.name}, {trainer.steps or 'unknown number of'} steps, log read by {trainer.reader}",
            "settings": _flat(trainer.settings),
            "launch": f"{how.name}, {processes}",
        }
    if spec.chain:
        fields |= _chain(spec)
    elif spec.workload:
        fields |= {"workload": _workload(spec), "operators": ", ".join(operators.chosen(spec))}
    fields |= {
        "tokens": str(spec.data.get("tokens", "")),
        "time limit": f"{spec.data['time_limit']} an arm" if spec.time_limit else "",
        "requires": _flat(spec.requires),
        "repository": f"{top}, isolation {spec.isolation}" if top else "",
        "contract": f"{contract.name}, digest {contract.digest[:12]}",
        "expect": f"{spec.expect.status} {_flat(spec.expect.judgments)}".strip() if spec.expect else "",
    }
    fields["by default"] = ", ".join(_defaults(spec))
    for name, value in fields.items():
        yield from _field(name, value, width) if value else ()


def _workload(spec: Spec) -> str:
    made = workloads.of(spec.workload)
    tiers = ", ".join(f"{tier.name} ({tier.tokens} tokens, {tier.active} active)" for tier in made.tiers)
    return f"{made.name}, digest {made.digest[:12]}; {tiers}"


def _chain(spec: Spec) -> dict[str, str]:
    asked, model = chains.asked(workloads.of(spec.workload)), chain_sizes.of(spec.chain["model"])
    given = {key: value for key, value in spec.chain["weights"].items() if key != "pins"}
    due = sum(1 for _ in chains.expected(asked, model, [j.check for j in spec.judgments], spec.chain["cells"]))
    backward = any(judgment.check in chains.GRADIENTS for judgment in spec.judgments)
    need = chain.memory(spec)
    more = f", {need.resident / 2**30:.0f} GiB to say of each gradient how much differs" if backward else ""
    return {
        "workload": _workload(spec),
        "cells": ", ".join(cell.name for cell in chains.cells(asked, spec.chain["cells"])),
        "decode": ", ".join(case.name for case in asked.decode),
        "weights": f"{_flat(given)}; {model.parameter_count():,} in {len(model.parameter_shapes())} tensors",
        "rounding": f"profile {spec.chain['profile']}, {spec.dtype}",
        "comparisons": f"{due:,} an arm",
        "memory": f"at least {need.least / 2**30:.0f} GiB on the device{more}",
    }


def _flat(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {_plain(value)}" for key, value in sorted(values.items()))


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _count(count: int, one: str, more: str = "") -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"


def _defaults(spec: Spec) -> list[str]:
    """The keys that the spec leaves out, with what the schema says instead."""
    loaded = schema.load(spec.kind)
    found = []
    for key, value in loaded["properties"].items():
        name = str(value.get("$ref", "")).rpartition("/")[2]
        default = value.get("default", loaded["definitions"].get(name, {}).get("default"))
        if key not in spec.data and default not in (None, [], {}):
            found.append(f"{key} {_plain(default)}")
    if "contract" not in spec.data:
        found.append(f"contract {spec.contract}")
    return found


def _judgments(spec: Spec, contract: contracts.Contract, width: int) -> Iterator[str]:
    """Judgments on the same terms are named together."""
    said = [(_title(judgment), _terms(judgment, spec, contract)) for judgment in spec.judgments]
    for terms, group in groupby(said, key=lambda one: one[1]):
        titles = ", ".join(title for title, _ in group)
        if len(terms) == 1:
            yield from wrap(f"{titles}: {terms[0]}", width, "  ")
            continue
        yield from wrap(titles, width, "  ")
        for line in terms:
            yield from wrap(line, width, "    ")


def _title(judgment: Judgment) -> str:
    usual = "every usual metric that is printed" if judgment.check == "drift" else ""
    return f"{judgment.check} {judgment.metric or usual}".rstrip()


def _terms(judgment: Judgment, spec: Spec, contract: contracts.Contract) -> list[str]:
    if spec.chain:
        row = chain.row(spec, judgment.check, contract)
        return [f"{_limits(row)} ({row.id})"]
    if spec.workload:
        return _by_class(judgment, spec, contract)
    names = common.row_names({"check": judgment.check, "judge": judgment.judge})
    rows = [contract.resolve(name, judgment.metric or "*", spec.dtype) for name in names]
    lines = [f"{_limits(row)} ({row.id})" for row in rows]
    if judgment.check != "drift":
        return lines
    when = "INVESTIGATE or a first FAIL" if judgment.confirm_fail else "INVESTIGATE"
    if judgment.max_base_runs > sum(arm.role == "base" for arm in spec.arms):
        lines.append(f"{when} adds base runs, up to {judgment.max_base_runs} in all")
    lines.append(f"base runs equal to the bit, and the feature not: {judgment.zero_envelope.upper()}")
    return lines


def _by_class(judgment: Judgment, spec: Spec, contract: contracts.Contract) -> list[str]:
    families = sorted({nodes.NODES[name].family for name in operators.chosen(spec)})
    rows = [contract.resolve(judgment.check, family, spec.dtype) for family in families]
    lines = [f"{_limits(row)} ({row.id})" for row in rows]
    return list(dict.fromkeys(lines))


def _limits(row: Row) -> str:
    limits = dict(row.limits)
    if row.status != "applicable":
        return "MEASURED, never gated" if row.status == "measured" else row.status.replace("_", " ")
    if set(limits) == {"pass_below", "fail_above"}:
        return f"PASS below {limits['pass_below']:g}, FAIL above {limits['fail_above']:g}, INVESTIGATE between"
    if "differing_elements" in limits:
        return "PASS if equal to the bit"
    if "baseline_ratio" in limits:
        ratio, share = limits["baseline_ratio"], limits["relative_rms"]
        return f"PASS up to {ratio:g} × the error of plain torch and an RMS error of {share:g} of the reference's RMS"
    if "max" in limits:
        most = f"PASS up to {limits.pop('max'):g}, FAIL above"
        return f"{most}; {', '.join(f'{key} {value:g}' for key, value in limits.items())}" if limits else most
    return ", ".join(f"{key} {value:g}" for key, value in limits.items()) or "no limits"


def _arm(spec: Spec, step: Step, commits: Mapping[str, str], width: int) -> Iterator[str]:
    arm = step.arm
    source = f"{arm.revision} = {commits[arm.revision][:12]}" if arm.revision else "the files as they lie here"
    if arm.records:
        source = f"the file {arm.records}"
    if arm.engine:
        source = f"engine {arm.engine}, {_flat(_given(arm.settings))}; weights {_flat(arm.weights)}"
    if arm.implementation:
        named = arm.implementation if isinstance(arm.implementation, str) else _flat(arm.implementation)
        source += f", implementation {named}"
    yield from _field(arm.name, f"{arm.role}, {source}", width)
    if arm.environment:
        values = " ".join(f"{key}={shlex.quote(value)}" for key, value in sorted(arm.environment.items()))
        yield from _field("", values, width)
    if arm.perturb:
        yield from _field("", f"weights moved by {arm.perturb['weights']}, seed {arm.perturb['seed']}", width)
    if arm.fault:
        yield from _field("", f"with the planted fault {arm.fault}", width)
    if step.argv:
        yield from _field("", f"$ {shlex.join(_command(spec, step))}", width)


def _given(settings: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in settings.items() if value not in (None, {}, False)}


def _command(spec: Spec, step: Step) -> Sequence[str]:
    """With short names of files, which `_files` lists, and as the launcher would start it if this version can."""
    run_file = step.run_file.name if step.run_file else ""
    holes = {"{python}": "python", "{run_file}": run_file, "{records}": step.records.name}
    words = []
    for word in step.argv:
        for hole, value in holes.items():
            word = word.replace(hole, value)
        words.append(word)
    if spec.launch.name != "slurm":
        return launch.argv(spec.launch, words)
    how = spec.launch
    gpus = [f"--gpus-per-node={how.processes_per_node}"] if how.gpus else []
    ranks = ["torchrun", f"--nnodes={how.nodes}", f"--nproc-per-node={how.processes_per_node}"]
    return ["srun", f"--nodes={how.nodes}", *gpus, *how.options, *ranks, *words[1:]]


def _files(spec: Spec, steps: Sequence[Step], width: int) -> Iterator[str]:
    first = steps[0]
    stem = f"{first.tag}-<arm>" if first.tag else "<arm>"
    starts = spec.trainer is not None or any(step.argv for step in steps)
    run_file = next((step.run_file for step in steps if step.run_file), None)
    own = [run_file.suffix if run_file else "", ".records.jsonl" if starts else "", ".provenance.json"]
    yield "files"
    yield from wrap(f"{first.provenance.parent}/", width, "  ")
    yield from wrap("plan.json report.json", width, "    ")
    yield from wrap(" ".join(filter(None, [stem, *own])), width, "    ")
    if starts:
        yield from wrap(f"{first.log.parent}/", width, "  ")
        yield from wrap(f"{stem} .log", width, "    ")


def _cost(spec: Spec, width: int) -> Iterator[str]:
    if spec.trainer is None:
        return
    world, arms = spec.mesh.world_size, len(spec.arms)
    bases = sum(arm.role == "base" for arm in spec.arms)
    added = max((judgment.max_base_runs for judgment in spec.judgments), default=2) - bases
    extra = f", and up to {_count(added, 'added base run')}" if spec.kind == "correctness" and added > 0 else ""
    bound = "no upper bound: set time_limit for one"
    if spec.time_limit:
        hours = spec.time_limit / 3600 * world
        more = f", and {hours:.3g} for each added run" if extra else ""
        unit = "GPU" if spec.launch.gpus else "process"
        bound = f"at most {hours * arms:.3g} {unit}-hours (arms × processes × time_limit){more}"
    yield "cost"
    yield from wrap(f"{_count(arms, 'arm')} of {_count(world, 'process', 'processes')}{extra}", width, "  ")
    yield from wrap(bound, width, "  ")


def render_files(document: Document) -> list[Path]:
    """Write the run files of a spec into a new run folder. Raises SpecError if it has none, or they cannot be made."""
    check = CHECKS[document.data["kind"]]
    spec = check.parse(document)
    if not render.has_files(spec):
        raise SpecError(f"{spec.path} has no run files: no template is named in it")
    contract = contracts.load(spec.contract, spec.path.parent)
    render.check(spec, contract)
    folder = runs.create(runs.root(Path.cwd().resolve()), spec.kind, spec.model, spec.path.stem)
    steps = check.expand(spec, folder.workspace, folder.logging)
    render.write(spec, steps, contract)
    return [step.run_file for step in steps if step.run_file is not None]
