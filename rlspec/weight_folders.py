"""What the config.json in a folder of weights says of the model, held against a model that is declared, or another."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlspec import architecture, config_json

NAME = "config.json"
_UNUSED = ("initializer_range", "attention_dropout")  # where weights are loaded, and nothing is trained


def config(folder: Path) -> dict[str, Any] | None:
    """None where there is none to read."""
    try:
        return config_json.parse((folder / NAME).read_bytes())
    except (OSError, ValueError):
        return None


def described(model: Mapping[str, Any]) -> dict[str, Any]:
    """What a model entry or a config.json says of the model, by the names of our entries."""
    rope, experts = model.get("rope_parameters"), model.get("experts")
    rope, experts = (one if isinstance(one, dict) else {} for one in (rope, experts))
    told = {ours: model.get(ours, model.get(theirs)) for ours, theirs in architecture.NAMES.items()}
    of_experts = {ours: theirs for ours, theirs in architecture.EXPERTS.items() if ours != "count"}
    told |= {f"experts.{ours}": experts.get(ours, model.get(theirs)) for ours, theirs in of_experts.items()}
    told["rope_theta"] = told["rope_theta"] or rope.get("rope_theta")
    dense = 0 if told["layers"] is not None else None  # a config.json that keeps its sizes elsewhere says nothing
    told["experts"] = architecture.experts(model) or dense
    return {key: value for key, value in told.items() if value is not None}


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(key, value, value) of all that both say of a model and say otherwise."""
    mine, theirs = described(one), described(other)
    for key in mine:
        if key in theirs and key != "max_positions" and mine[key] != theirs[key]:
            yield key, mine[key], theirs[key]


def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The same of two config.json, of any family: other keys that both have count, too."""
    told = list(differing(one, other))
    known = {*(key for key, *_ in told), *architecture.WITHOUT_EFFECT, *_UNUSED}
    known |= {theirs for ours, theirs in architecture.NAMES.items() if ours in known}
    known |= {theirs for ours, theirs in architecture.EXPERTS.items() if f"experts.{ours}" in known}
    known |= {*architecture.COUNTS} if "experts" in known else set()
    known |= {"rope_parameters"} if "rope_theta" in known else set()
    rest = (key for key in one if key in other and key not in known and one[key] != other[key])
    yield from (*told, *((key, one[key], other[key]) for key in rest))


def shown(one: object, other: object) -> tuple[str, str]:
    """Two values that differ, in quotes if they are texts and may look alike."""
    show = str if type(one) is type(other) else repr
    return show(one), show(other)


def unfit(model: Mapping[str, Any], folder: Path) -> str | None:
    """Why our decoder, run as `model`, would not run what the config.json in the folder is of, or None.

    None as well where nothing has that name: the shards may be pinned, and say nothing of eps or rope.
    Raises Unimplemented where the config.json says nothing else than `model`, and more than the decoder does.
    """
    path = folder / NAME
    if not os.path.lexists(path):
        return None
    if not path.is_file():  # a folder, or a link to nothing
        return f"its {NAME} is no file that can be read"
    try:
        held = config_json.parse(path.read_bytes())
        if other := next(differing(model, held), None):
            key, *both = other
            declared, there = shown(*both)
            return f"{key} is {declared}, and {there} there"
        architecture.read(held)
    except architecture.Unimplemented as error:
        raise architecture.Unimplemented(f"{path}: {error}") from None
    except OSError as error:
        return f"its {NAME} cannot be read: {error.strerror}"
    except ValueError as error:
        return f"its {NAME}: {error}"
    return None
