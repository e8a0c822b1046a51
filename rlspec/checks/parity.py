"""Do two engines give the same log-probs for one token stream?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlspec import catalog, dlogp, engines, nodes, plan, schema, token_files, weight_folders
from rlspec.checks import common
from rlspec.contract import Contract
from rlspec.engines import ENGINES
from rlspec.errors import RunError, SpecError
from rlspec.model import Arm, Document, Judgment, Problem, Result, Severity, Spec, Verdict

TEMPLATES = catalog.SHIPPED.parent / "templates" / "parity"
SOURCES = ("records", "command", "engine")
OF_ENGINES = ("settings", "weights", "fault")


def sides(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    yield from common.unique_names(document, data)
    roles = sorted(arm["role"] for arm in data["arms"])
    if roles != ["rollout", "train"]:
        hint = "one arm of each role"
        yield common.at(document, "/arms", "RL301", f"the arms' roles are {' and '.join(roles)}", hint)
    files = []
    for index, arm in enumerate(data["arms"]):
        yield from _source(document, index, arm)
        if "records" in arm:
            files.append((document.path.parent / arm["records"]).resolve())
    if len(files) == 2 and files[0] == files[1]:
        yield common.at(
            document,
            "/arms/1/records",
            "RL303",
            "both arms name the same file",
            "a comparison with itself proves nothing",
        )


def _source(document: Document, index: int, arm: dict[str, Any]) -> Iterator[Problem]:
    """Where the log-probs of an arm come from: one thing, which is there or says where it writes."""
    pointer, named = f"/arms/{index}", [key for key in SOURCES if key in arm]
    if len(named) != 1:
        what = " and ".join(f"a {key}" if key != "records" else key for key in named) or f"none of {', '.join(SOURCES)}"
        yield common.at(document, pointer, "RL302", f"arm {arm['name']} has {what}", "give it one of the three")
    elif "command" in arm and not any("{records}" in word for word in arm["command"]):
        message = "the command does not say where to write: {records} is nowhere in it"
        yield common.at(document, f"{pointer}/command", "RL302", message, "add it as an argument")
    elif "records" in arm and not (document.path.parent / arm["records"]).is_file():
        hint = "paths are relative to the spec's folder"
        yield common.at(document, f"{pointer}/records", "RL222", f"there is no file {arm['records']}", hint)
    if "engine" not in arm:
        for key in OF_ENGINES:
            if key in arm:
                message = f"arm {arm['name']} has {key} and no engine"
                yield common.at(document, f"{pointer}/{key}", "RL302", message, f"{key} belong to an engine")


def tokens(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    arms = _of_engines(data)
    if "tokens" not in data:
        if arms:
            hint = 'name a file with lines such as {"sample": "s0", "prompt": [5, 17], "response": [9, 4]}'
            yield common.at(document, "", "RL304", "engines score tokens, and the spec names no file of tokens", hint)
        return
    hint = "paths are relative to the spec's folder"
    if not (document.path.parent / data["tokens"]).is_file():
        yield common.at(document, "/tokens", "RL222", f"there is no file {data['tokens']}", hint)
    elif not arms:
        message = "no arm is an engine, so nobody reads the tokens"
        yield common.at(document, "/tokens", "RL304", message, "leave them out, or give an arm an engine")
    else:
        yield from _samples(document, data, arms)


def _samples(document: Document, data: dict[str, Any], arms: dict[int, dict[str, Any]]) -> Iterator[Problem]:
    try:
        streams = token_files.read(document.path.parent / data["tokens"])
    except (RunError, SpecError) as error:
        message = str(error).removeprefix(str(document.path.parent)).lstrip("/")
        hint = f"a sample has a prompt, and a response or its length, together at most {token_files.MOST:,} tokens"
        yield common.at(document, "/tokens", "RL304", message, hint)
        return
    open_ = [one.sample for one in streams if one.response is None]
    if open_ and _generating(arms.values()) is None:
        hint = "give the rollout an engine with execution: generate, or each sample a response"
        yield common.at(document, "/tokens", "RL304", f"sample {open_[0]} has no response, and no arm generates", hint)
    vocabulary = _vocabulary(document, data)
    for one in streams:
        if vocabulary is not None and (most := max((*one.prompt, *(one.response or ())))) >= vocabulary:
            message = f"sample {one.sample}: token {most} is not below the vocabulary of {data['model']}, {vocabulary}"
            yield common.at(document, "/tokens", "RL304", message, "tokens are those of the model that is scored")
            return
    yield from _too_long(document, data, arms, streams)


def _too_long(
    document: Document, data: dict[str, Any], arms: dict[int, dict[str, Any]], streams: Sequence[token_files.Stream]
) -> Iterator[Problem]:
    """The first sample that is longer than the positions which a model knows."""
    longest = max(streams, key=lambda one: len(one.prompt) + one.length)
    tokens = len(longest.prompt) + longest.length
    for name, model in _models(document, data, arms).items():
        most = weight_folders.described(model).get("max_positions")
        if isinstance(most, int) and tokens > most:
            place = f"{data['tokens']}:{longest.line}"
            message = f"{place}: sample {longest.sample} has {tokens} tokens, and {name} at most {most} positions"
            hint = f"shorten its prompt, response or length to {most} tokens together"
            yield common.at(document, "/tokens", "RL304", message, hint)
            return


def _models(document: Document, data: dict[str, Any], arms: dict[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What is known of the models that are scored: the declared one's entry, and the config.json of each folder."""
    found = {}
    if "model" in data:
        with suppress(SpecError):  # what is wrong with it is said elsewhere
            found[f"model {data['model']}"] = catalog.whole(data["model"], document.path.parent)
    for weights in (arm.get("weights", data.get("weights", {})) for arm in arms.values()):
        config = weight_folders.config(document.path.parent / weights["path"]) if "path" in weights else None
        if config is not None:
            found[f"the model in {weights['path']}"] = config
    return found


def _vocabulary(document: Document, data: dict[str, Any]) -> int | None:
    """None where the spec names no model, or one that says nothing of it; what is wrong with it is said elsewhere."""
    try:
        model = catalog.whole(data["model"], document.path.parent) if "model" in data else {}
    except SpecError:
        return None
    size = model.get("vocabulary_size", model.get("vocab_size"))
    return size if isinstance(size, int) else None


def engines_fit(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    arms = _of_engines(data)
    found = [problem for index, arm in arms.items() for problem in _weights(document, data, index, arm)]
    found += _two_models(document, data, arms.values())
    yield from dict.fromkeys(found)  # what is wrong with the weights of both is said once
    for index, arm in arms.items():
        yield from _settings(document, index, arm)
    yield from _dtypes(document, data, arms)
    generating = _generating(arms.values())
    if generating is not None and generating["role"] == "rollout" and data["arms"][0] is not generating:
        message = f"arm {generating['name']} generates and is not the first"
        yield common.at(document, "/arms", "RL306", message, "arms run in order; the other one scores what it drew")


def _of_engines(data: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {index: arm for index, arm in enumerate(data["arms"]) if arm.get("engine") in ENGINES}


def _generating(arms: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    return next((arm for arm in arms if _execution(arm) == "generate"), None)


def _execution(arm: dict[str, Any]) -> str:
    return engines.execution(arm["engine"], arm["role"], arm.get("settings", {}))


def _weights(document: Document, data: dict[str, Any], index: int, arm: dict[str, Any]) -> Iterator[Problem]:
    pointer = f"/arms/{index}/weights" if "weights" in arm else "/weights"
    weights = arm.get("weights", data.get("weights"))
    if weights is None:
        hint = "weights: {source: huggingface, path: FOLDER}, for both or in the arm"
        yield common.at(document, f"/arms/{index}", "RL305", f"arm {arm['name']} has no weights", hint)
    elif weights["source"] == "seeded" and not ENGINES[arm["engine"]].seeded:
        able = ", ".join(name for name, engine in ENGINES.items() if engine.seeded)
        message = f"engine {arm['engine']} loads weights from files alone"
        yield common.at(document, pointer, "RL305", message, f"seeded weights are for {able}; save them as files first")
    elif weights["source"] == "seeded" and "model" not in data:
        hint = "model: an entry of `rlspec list models`, or a config.json"
        yield common.at(document, pointer, "RL305", "seeded weights need a model, whose shapes they have", hint)
    elif weights["source"] == "seeded":
        yield from _model(document, data)
    elif "model" in data:
        yield from _held(document, data, Path(weights["path"]))


def _held(document: Document, data: dict[str, Any], path: Path) -> Iterator[Problem]:
    """A model that is declared and that the folder does not hold: the report would name what nobody scored."""
    try:
        model = catalog.whole(data["model"], document.path.parent)
    except SpecError as error:
        yield common.unknown(document, "/model", error)
        return
    config = weight_folders.config(document.path.parent / path)
    if other := list(weight_folders.differing(model, config or {})):
        key, declared, held = other[0]
        declared, held = weight_folders.shown(declared, held)
        message = f"model {data['model']} is not the one in {path}: {key} is {declared}, and {held} there"
        hint = f"{_also(other)}name the model that the folder holds, or leave `model` out"
        yield common.at(document, "/model", "RL305", message, hint)


def _also(other: Sequence[tuple[str, Any, Any]]) -> str:
    return f"also different: {', '.join(key for key, *_ in other[1:])}; " if other[1:] else ""


def _two_models(document: Document, data: dict[str, Any], arms: Iterable[dict[str, Any]]) -> Iterator[Problem]:
    """Two folders whose tensors may be the same, to the bit, and whose models are not: hashes are of tensors alone."""
    given = [arm.get("weights", data.get("weights")) or {} for arm in arms]
    paths = list(dict.fromkeys(weights["path"] for weights in given if "path" in weights))
    configs = [weight_folders.config(document.path.parent / path) for path in paths]
    if len(configs) == 2 and (other := list(weight_folders.apart(configs[0] or {}, configs[1] or {}))):
        key, one, two = other[0]
        one, two = weight_folders.shown(one, two)
        message = f"{paths[0]} and {paths[1]} hold two models: {key} is {one} in one and {two} in the other"
        hint = f"{_also(other)}two engines are compared on one model"
        yield common.at(document, "/arms/1", "RL305", message, hint)


def _model(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    hint = "seeded weights are made for what our decoder runs; name a folder of weights for another"
    yield from common.decoded(document, data["model"], hint, hint)


def _settings(document: Document, index: int, arm: dict[str, Any]) -> Iterator[Problem]:
    """Settings that each are right, and do not go together."""
    settings, pointer, name = arm.get("settings", {}), f"/arms/{index}/settings", arm["engine"]
    execution = _execution(arm)
    if execution == "generate" and arm["role"] == "train":
        message = f"arm {arm['name']} is the trainer, and generates"
        yield common.at(document, f"{pointer}/execution", "RL306", message, "the trainer scores; use full or decode")
    if "padding" in settings and execution != "full":
        message = f"padding has no meaning in execution {execution}"
        yield common.at(document, f"{pointer}/padding", "RL306", message, "leave it out")
    if taken := sorted(set(settings.get("options", {})) & set(ENGINES[name].keys)):
        message = f"options.{taken[0]} is decided by the settings of {name}"
        hint = "what they decide: dtype, attention, batch_size, seed, and how the files of `weights` are loaded"
        yield common.at(document, f"{pointer}/options/{taken[0]}", "RL306", message, hint)
    if settings.get("invariant") and _device(document.data, arm) != "cuda":
        hint = "settings: {device: cuda}, or requires: {device: cuda}"
        yield common.at(document, f"{pointer}/invariant", "RL306", "invariant mode runs on CUDA, this arm on cpu", hint)
    given = settings.get("implementation", {})
    for one in [given] if isinstance(given, str) else given.values():
        if ":" not in one and one not in nodes.IMPLEMENTATIONS:
            hint = f"{schema.suggestion(one, nodes.IMPLEMENTATIONS)}, or module:table of your own"
            yield common.at(document, f"{pointer}/implementation", "RL312", f"unknown implementation {one!r}", hint)
    yield from _fault(document, index, arm)


def _dtypes(document: Document, data: dict[str, Any], arms: dict[int, dict[str, Any]]) -> Iterator[Problem]:
    """Arms in another dtype than the spec's: its rows allow what that dtype rounds, which may be more than theirs."""
    judged = data.get("dtype", "bf16")
    others = {}
    for index, arm in arms.items():
        used, able = arm.get("settings", {}).get("dtype", judged), _able(arm["engine"])
        if used not in able:
            message = f"engine {arm['engine']} does not run in {used}, arm {arm['name']}"
            yield common.at(document, "/dtype", "RL306", message, f"it runs in {', '.join(able)}")
        elif used != judged:
            others[index] = used
    none_is = len(others) == len(data["arms"])
    for index, used in others.items():
        message = f"arm {data['arms'][index]['name']} runs in {used}, and {judged} picks the contract's rows"
        hint = f"dtype: {used}" if none_is else f"right where the other arm runs in {judged}, the coarser of the two"
        severity: Severity = "error" if none_is else "warning"
        yield common.at(document, f"/arms/{index}/settings/dtype", "RL306", message, hint, severity=severity)


def _able(engine: str) -> list[str]:
    return list(schema.load("parity")["definitions"][f"{engine}_settings"]["properties"]["dtype"]["enum"])


def _fault(document: Document, index: int, arm: dict[str, Any]) -> Iterator[Problem]:
    """Faults that would not show, so that a control with them could not fail."""
    fault, weights = arm.get("fault"), arm.get("weights", document.data.get("weights", {}))
    if fault == "temperature" and arm["engine"] != "transformers":
        message = f"the fault temperature cannot be planted into {arm['engine']}"
        yield common.at(document, f"/arms/{index}/fault", "RL306", message, "it is one of transformers")
    if fault == "stale_weights" and weights.get("source") != "seeded":
        message = "the fault stale_weights cannot be planted into weights from files"
        yield common.at(document, f"/arms/{index}/fault", "RL306", message, "weights: {source: seeded, seed: 1}")


def planted(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    for index, arm in enumerate(data["arms"]):
        if "fault" in arm and "expect" not in data:
            message = f"the planted fault {arm['fault']} belongs to a control, and no outcome is expected here"
            yield common.at(document, f"/arms/{index}/fault", "RL230", message, "add expect: FAIL, or leave it out")


RULES: tuple[tuple[common.Rule, tuple[str, ...]], ...] = (
    (sides, ("arms",)),
    (tokens, ("arms", "tokens")),
    (engines_fit, ("arms", "weights", "model", "requires", "dtype")),
    (planted, ("arms", "expect")),
    (common.contract_rows, ("judgments", "contract")),
    (common.question, ("question",)),
)


def lint(document: Document, broken: Iterable[str]) -> list[Problem]:
    return common.apply(document, RULES, {*broken, *(() if "arms" in document.data else ("arms",))})


def parse(document: Document) -> Spec:
    data = document.data
    shared = common.shared(document)
    return Spec(
        **{**shared, "requires": _requires(document)},
        model=data.get("model", ""),
        dtype=data.get("dtype", "bf16"),
        arms=tuple(_arm(document, arm) for arm in data["arms"]),
        judgments=tuple(Judgment(check=name) for name in data.get("judgments", dlogp.STANDARD)),
        contract=data.get("contract", common.CONTRACTS["parity"]),
        repository=document.path.parent / data["repository"] if "repository" in data else None,
    )


def _arm(document: Document, given: dict[str, Any]) -> Arm:
    """`settings` with all defaults, `weights` those of the arm or of the spec, with an absolute path."""
    known = {**given, "command": tuple(given.get("command", ()))}
    if "engine" not in given:
        return Arm(**known)
    weights = dict(given.get("weights", document.data.get("weights", {})))
    if "path" in weights:
        weights["path"] = str((document.path.parent / weights["path"]).resolve())
    settings = {**_defaults(given["engine"]), **given.get("settings", {})}
    settings |= {"execution": _execution(given), "device": _device(document.data, given), "fault": given.get("fault")}
    settings["dtype"] = settings["dtype"] or document.data.get("dtype", "bf16")
    if settings["execution"] != "full":
        settings["padding"] = ENGINES[given["engine"]].pads
    known.pop("fault", None)
    template = TEMPLATES / ENGINES[given["engine"]].template
    return Arm(**{**known, "settings": settings, "weights": weights, "template": template})


def _defaults(engine: str) -> dict[str, Any]:
    """What the schema says where a setting is left out."""
    schemas = schema.load("parity")["definitions"]
    properties = schemas[f"{engine}_settings"]["properties"]
    return {key: value.get("default") for key, value in properties.items()}


def _device(data: dict[str, Any], arm: dict[str, Any]) -> str:
    usual = data.get("requires", {}).get("device", "cpu")
    devices, settings = ENGINES[arm["engine"]].devices, arm.get("settings", {})
    chosen = settings.get("implementation")
    if not set(nodes.OWN_KERNELS).isdisjoint(chosen.values() if isinstance(chosen, dict) else [chosen]):
        devices = ("cuda",)
    return str(settings.get("device") or (usual if usual in devices else devices[0]))


def _requires(document: Document) -> dict[str, Any]:
    """What the spec requires, and what its engines do: their packages, their device, folders with weights."""
    data = document.data
    needed = dict(data.get("requires", {}))
    arms = [_arm(document, arm) for arm in data["arms"] if "engine" in arm]
    packages = [ENGINES[str(arm.engine)].package for arm in arms]
    if packages := list(dict.fromkeys([*needed.get("packages", ()), *packages])):
        needed["packages"] = packages
    if folders := list(dict.fromkeys(arm.weights["path"] for arm in arms if "path" in arm.weights)):
        needed["weights"] = folders
    if any(arm.settings["device"] == "cuda" for arm in arms):
        needed["device"] = "cuda"
    return needed


def context(spec: Spec, arm: Arm) -> dict[str, Any]:
    """What the run file of an engine's arm is told."""
    folder = spec.path.parent.resolve()
    generating = next((one for one in spec.arms if one.settings.get("execution") == "generate"), None)
    follows = generating is not None and generating is not arm
    seeded = arm.weights["source"] == "seeded"
    return {
        **arm.settings,
        "weights": dict(arm.weights),
        "model": catalog.whole(spec.model, spec.path.parent) if seeded else None,
        "tokens": str((folder / spec.data["tokens"]).resolve()),
        "generated": f"{plan.tag(spec)}-{generating.name}.records.jsonl" if generating and follows else None,
        "spec_dir": str(folder),
    }


expand = plan.steps


def judge(spec: Spec, results: Sequence[Result], contract: Contract) -> list[Verdict]:
    """All judgments, or the reason why none can be made."""
    failures = [f"arm {result.arm.name}: {result.failure}" for result in results if result.failure]
    by_role = {result.arm.role: result.records for result in results}
    if failures or set(by_role) != {"rollout", "train"}:
        reason = "; ".join(failures) or "an arm has not run"
        return [Verdict(judgment=j.check, subject="*", status="ERROR", reason=reason) for j in spec.judgments]
    rows = lambda name: contract.resolve(name, "*", spec.dtype)  # noqa: E731
    return dlogp.judge(by_role["rollout"], by_role["train"], spec.judgments, rows)


def more(spec: Spec, verdicts: Sequence[Verdict]) -> Arm | None:
    return None
