"""A run that goes on (`--resume`, `--retry-errors`) stays what it was planned to be, and says what has moved since."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rlspec import arms, plan, runs
from rlspec.errors import SpecError
from rlspec.model import Spec


def as_planned(
    spec: Spec, folder: runs.Folder, commits: dict[str, str], options: arms.Options
) -> tuple[Spec, dict[str, str], list[str]]:
    """A run that goes on keeps the commits and the added arms of its plan; a sentence for each that has moved since.

    Raises SpecError if the spec changed, or if one has moved and nothing is left to run.
    """
    planned = runs.load(folder.plan, "plan")
    if planned["spec"]["data"] != spec.data:
        before = planned.get("overrides", [])
        if before != list(options.overrides):
            raise SpecError(f"{folder.name} was started with {_sets(before)}, not with {_sets(options.overrides)}")
        raise SpecError(f"{spec.path} has changed since {folder.name}; start a new run, or use --from {folder.name}")
    then = {arm["revision"]: arm["commit"] for arm in planned["arms"] if arm.get("revision") and arm.get("commit")}
    moved = [name for name, commit in then.items() if commits.get(name, commit) != commit]
    anew = f"`rlspec run {spec.path} --from {folder.name}` judges what is there now"
    if moved and not options.arms and is_over(folder, planned):
        named = ", ".join(f"{name} moved from {then[name][:12]} to {commits[name][:12]}" for name in moved)
        raise SpecError(f"{folder.name} is complete, and since then {named}; {anew}")
    said = [
        f"{name} is at {commits[name][:12]} now; {folder.name} goes on with {then[name][:12]}, as it began; {anew}"
        for name in moved
    ]
    return with_added(spec, planned), {**commits, **then}, said


def is_over(folder: runs.Folder, planned: Mapping[str, Any]) -> bool:
    """Whether a run has its report, and no arm is left to run or to try again."""
    states = [folder.workspace / f"{arm['stem']}.provenance.json" for arm in planned["arms"]]
    return folder.report.exists() and all(one.exists() and runs.load(one).get("status") == "done" for one in states)


def _sets(overrides: Sequence[str]) -> str:
    return " ".join(f"--set {text}" for text in overrides) or "no --set"


def with_added(spec: Spec, planned: Mapping[str, Any]) -> Spec:
    for arm in planned["arms"]:
        if arm.get("added") and arm["name"] not in [known.name for known in spec.arms]:
            spec = dataclasses.replace(spec, arms=(*spec.arms, plan.base_copy(spec)))
    return spec
