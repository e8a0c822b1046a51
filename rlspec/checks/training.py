"""What a spec of the training kinds says: settings, metrics, and the `Spec` that it parses to."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlspec import catalog, plan
from rlspec.checks import common
from rlspec.errors import SpecError
from rlspec.formats import metrics_of
from rlspec.logs import READERS
from rlspec.model import Arm, Document, Judgment, Spec, Trainer
from rlspec.trainers import FAULTS_OF_ALL, FIXTURES, TRAINERS

TEMPLATES = Path(__file__).parents[1] / "templates"


def settings(data: Mapping[str, Any]) -> dict[str, Any]:
    """A spec's trainer settings over the kind's fixture."""
    trainer = data["trainer"]
    given = dict(trainer.get("settings", {}))
    if trainer["name"] == "command":
        return given
    entry, usual = TRAINERS[trainer["name"]], dict(FIXTURES[data["kind"]])
    if not entry.forces_routing:
        del usual["force_balanced_routing"]
    if entry.global_batch_size:
        usual["global_batch_size"] = entry.global_batch_size
    return {**usual, **given}


def known_metrics(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Names that the trainer's log can hold; empty if anything goes."""
    given = data["trainer"]
    if given["name"] != "command":
        return TRAINERS[given["name"]].metrics
    name, pattern = given["reader"]["name"], given["reader"].get("pattern")
    if name == "regex" and pattern:
        with contextlib.suppress(SpecError):  # the rule of the reader says what is wrong with it
            return tuple(metrics_of(pattern))
        return ()
    matching = [entry for entry in TRAINERS.values() if entry.reader == name]
    return matching[0].metrics if matching else ()


def reader_name(data: Mapping[str, Any]) -> str:
    given = data["trainer"]
    return str(given["reader"]["name"]) if given["name"] == "command" else TRAINERS[given["name"]].reader


def default_metrics(data: Mapping[str, Any]) -> tuple[str, ...]:
    """What is judged where a spec names no metric."""
    name = reader_name(data)
    return READERS[name].metrics if name in READERS else ()


def parse(document: Document) -> Spec:
    """The spec of a document that lint passed."""
    data, folder = document.data, document.path.parent
    how = plan.launch(data.get("launch", {}))
    given, chosen = data["trainer"], settings(data)
    steps = given.get("steps") or chosen.get("max_steps")
    fault = chosen.pop("fault", None) if given["name"] != "command" else None  # an arm's own, so none of the run file
    shipped = TRAINERS[given["name"]].template
    template = TEMPLATES / shipped.format(kind=data["kind"]) if shipped else None
    repository = folder / data["repository"] if "repository" in data else None
    shared = common.shared(document)
    if how.name == "slurm":
        needs = shared["requires"].get("commands", ())
        shared["requires"] = {**shared["requires"], "commands": list(dict.fromkeys([*needs, "srun"]))}
    return Spec(
        **shared,
        model=catalog.model(data["model"], folder)["name"] if "model" in data else "",
        mesh=plan.mesh(data["mesh"], how.world_size),
        sequence_length=data.get("sequence_length", 2048),
        dtype=data.get("dtype", "bf16"),
        arms=tuple(_arm(arm, fault) for arm in data["arms"]),
        judgments=tuple(_judgment(j) for j in data.get("judgments", common.STANDARD[data["kind"]])),
        contract=data.get("contract", common.CONTRACTS[data["kind"]]),
        trainer=Trainer(
            name=given["name"],
            settings=chosen,
            template=folder / given["template"] if "template" in given else template,
            command=tuple(given.get("command", ("{python}", "{run_file}") if shipped else ())),
            reader=reader_name(data),
            pattern=given.get("reader", {}).get("pattern"),
            suffix=given.get("reader", {}).get("suffix"),
            steps=steps,
        ),
        launch=how,
        repository=repository,
        isolation=data.get("isolation", "worktree"),
        build=tuple(tuple(command) for command in data.get("build", ())),
    )


def _judgment(given: str | dict[str, Any]) -> Judgment:
    return Judgment(check=given) if isinstance(given, str) else Judgment(**given)


def _arm(given: dict[str, Any], fault: str | None) -> Arm:
    perturb = given.get("perturb")
    planted = fault if given["role"] == "feature" or fault in FAULTS_OF_ALL else None
    return Arm(**{**given, "perturb": {"seed": 1, **perturb} if perturb else None, "fault": planted})
