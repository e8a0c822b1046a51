"""Mesh arithmetic, tags and the steps of a plan."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlspec.model import Arm, Launch, Mesh, Spec, Step
from rlspec.trainers import FIXTURES

_SECONDS = {"s": 1, "m": 60, "h": 3600}


def seconds(text: str | None) -> float | None:
    """`90s`, `30m`, `2h` in seconds."""
    return None if text is None else float(int(text[:-1]) * _SECONDS[text[-1]])


def launch(data: Mapping[str, Any]) -> Launch:
    """A launcher from a spec's mapping; the schema has checked its form."""
    if data.get("name", "local") == "local":
        return Launch()
    per_node = data.get("processes_per_node") or data.get("gpus_per_node") or 1
    return Launch(
        name=data["name"],
        nodes=data.get("nodes", 1),
        processes_per_node=per_node,
        gpus="gpus_per_node" in data,
        options=tuple(data.get("options", ())),
        queue_limit=seconds(data.get("queue_limit")) or Launch().queue_limit,
    )


def mesh(data: Mapping[str, Any], world: int) -> Mesh:
    """The mesh with dp inferred; lint has checked that the degrees divide."""
    pp, cp, ep = (data.get(key, 1) for key in ("pp", "cp", "ep"))
    return Mesh(pp=pp, dp=world // (pp * cp), cp=cp, ep=ep)


def mesh_problem(pp: int, cp: int, ep: int, world: int) -> str | None:
    """Why the degrees do not fit, or None."""
    if world % pp:
        return f"world size {world} is not divisible by pp {pp}"
    for name, degree in (("cp", cp), ("ep", ep)):
        if (world // pp) % degree:
            return f"world / pp = {world // pp} is not divisible by {name} {degree}"
    return None


def tag(spec: Spec) -> str:
    """Mesh, length and dtype, defaults included, and a mark where the settings leave the fixture of the kind.

    Of operators: workload and dtype, of engines the dtype, which also keeps a run file from being named as a package
    that it imports.
    """
    if any(arm.template for arm in spec.arms):
        return spec.dtype
    if spec.workload:
        return f"{spec.workload['name']}-{spec.dtype}"
    if spec.trainer is None:
        return ""
    parts = [f"{axis}{getattr(spec.mesh, axis)}" for axis in ("pp", "dp", "cp", "ep")]
    text = "-".join([*parts, f"seq{spec.sequence_length}", spec.dtype])
    changed = changed_fixture(spec)
    return f"{text}-fx{changed}" if changed else text


def changed_fixture(spec: Spec) -> str:
    """Six hex digits if the settings leave the kind's fixture, else nothing."""
    assert spec.trainer is not None
    if spec.trainer.name == "command":
        return ""  # the fixture of a user's own trainer is the user's
    usual = FIXTURES[spec.kind]
    other = {k: v for k, v in sorted(spec.trainer.settings.items()) if k in usual and v != usual[k]}
    return hashlib.sha256(json.dumps(other).encode()).hexdigest()[:6] if other else ""


def steps(spec: Spec, workspace: Path, logging: Path) -> tuple[Step, ...]:
    """One step an arm, in the spec's order, with all file names of a run."""
    return tuple(step(spec, arm, workspace, logging) for arm in spec.arms)


def step(spec: Spec, arm: Arm, workspace: Path, logging: Path) -> Step:
    spelled = tag(spec)
    stem = f"{spelled}-{arm.name}" if spelled else arm.name
    template = arm.template or spec.run_template
    suffix = run_file_suffix(template) if template else None
    run_file = workspace / f"{stem}{suffix}" if suffix else None
    records = workspace / f"{stem}.records.jsonl"
    if arm.records:
        records = (spec.path.parent / arm.records).resolve()
    command = arm.command or (spec.trainer.command if spec.trainer else ())
    if spec.template is not None or arm.template is not None:
        command = ("{python}", "{run_file}")
    return Step(
        tag=spelled,
        arm=arm,
        argv=command,
        run_file=run_file,
        log=logging / f"{stem}.log",
        records=records,
        provenance=workspace / f"{stem}.provenance.json",
        environment=dict(arm.environment),
        time_limit=spec.time_limit,
    )


def run_file_suffix(template: Path) -> str:
    """`run.py.j2` renders a `.py`; without the template's own ending the first suffix is kept."""
    name = template.name.removesuffix(".j2").removesuffix(".jinja")
    return Path(name).suffix


def base_copy(spec: Spec) -> Arm:
    """A further base arm: a copy of the last one, under the next free name; a perturbation's seed counts on."""
    bases = [arm for arm in spec.arms if arm.role == "base"]
    last = bases[-1]
    names = {arm.name for arm in spec.arms}
    stem = re.sub(r"\d+$", "", last.name) or "base"
    number = next(n for n in range(len(bases), len(names) + len(bases) + 1) if f"{stem}{n}" not in names)
    perturb = last.perturb
    if perturb is not None:
        seeds = [int(arm.perturb.get("seed", 1)) for arm in bases if arm.perturb]
        perturb = {**perturb, "seed": max(seeds) + 1}
    return replace(last, name=f"{stem}{number}", perturb=perturb)
