"""The lint rules of the training kinds beyond the schema. Each reads a few keys and yields what is wrong with them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlspec import catalog, joining, plan, schema
from rlspec.checks import common
from rlspec.checks.training import default_metrics, known_metrics, settings
from rlspec.errors import SpecError
from rlspec.formats import compiled
from rlspec.logs import READERS
from rlspec.model import Document, Problem
from rlspec.trainers import TRAINERS

Rule = common.Rule
at = common.at


def _model(data: Mapping[str, Any], document: Document) -> dict[str, Any] | None:
    try:
        return catalog.model(data["model"], document.path.parent)
    except SpecError:
        return None


def model_known(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    try:
        catalog.model(data["model"], document.path.parent)
    except SpecError as error:
        yield common.unknown(document, "/model", error)


def arm_names(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    yield from common.unique_names(document, data)
    roles = [arm["role"] for arm in data["arms"]]
    bases, features = roles.count("base"), roles.count("feature")
    if bases == 0 or features == 0:
        missing = "base" if bases == 0 else "feature"
        yield at(document, "/arms", "RL221", f"no arm has the role {missing}", "both roles are needed")
    elif data["kind"] == "correctness" and bases < 2:
        hint = "add {name: base1, role: base} with the revision of base0: their difference is the floor"
        yield at(document, "/arms", "RL210", "drift needs two base arms, here is one", hint)


def launcher(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    given = data.get("launch", {})
    name = given.get("name", "local")
    sizes = [key for key in ("nodes", "processes_per_node", "gpus_per_node") if key in given]
    if name == "local" and sizes:
        hint = "use torchrun for several processes"
        yield at(document, f"/launch/{sizes[0]}", "RL226", f"local starts one process and takes no {sizes[0]}", hint)
    if name == "local" and TRAINERS[data["trainer"]["name"]].torchrun:
        message = f"trainer {data['trainer']['name']} is started by torchrun, even as one process"
        yield at(document, "/launch", "RL226", message, "launch: {name: torchrun, processes_per_node: 8}, or slurm")
    if name == "torchrun" and "gpus_per_node" in given:
        yield at(document, "/launch/gpus_per_node", "RL226", "torchrun counts processes_per_node", "rename the key")
    if name == "torchrun" and given.get("nodes", 1) > 1:
        yield at(document, "/launch/nodes", "RL226", "torchrun starts processes of one node", "use slurm for several")
    if name == "slurm" and {"gpus_per_node", "processes_per_node"} <= set(given):
        yield at(document, "/launch", "RL226", "slurm takes gpus_per_node or processes_per_node, not both", "keep one")
    for key in {"options", "queue_limit"} & set(given) if name != "slurm" else ():
        yield at(document, f"/launch/{key}", "RL226", f"{name} takes no {key}", "it is for slurm")
    if name != "local" and not sizes:
        wanted = "processes_per_node" if name == "torchrun" else "nodes and gpus_per_node"
        yield at(document, "/launch", "RL226", f"{name} needs {wanted}", "their product is the world size")
    command = data["trainer"].get("command", ["python"])
    if name != "local" and not common.is_python(command[0]):
        message = (
            f"{name} starts Python commands, by torchrun, not {command[0]!r}"
            if name == "slurm"
            else f"torchrun starts Python commands, not {command[0]!r}"
        )
        yield at(document, "/trainer/command/0", "RL226", message, "begin with python")


def mesh(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    given, how = data["mesh"], plan.launch(data.get("launch", {}))
    pp, cp, ep = (given.get(key, 1) for key in ("pp", "cp", "ep"))
    world = how.world_size
    if problem := plan.mesh_problem(pp, cp, ep, world):
        made = "one process" if how.name == "local" else f"nodes × processes per node = {world}"
        hint = f"world size = {made}; pp must divide it, and cp and ep must each divide world / pp"
        yield at(document, "/mesh", "RL203", f"mesh: {problem}", hint)
        return
    if "dp" in given and given["dp"] != world // (pp * cp):
        message = f"mesh: dp {given['dp']} is given, world / (pp·cp) = {world}/({pp}·{cp}) is {world // (pp * cp)}"
        yield at(document, "/mesh/dp", "RL204", message, "leave dp out: it is inferred")
    length = data.get("sequence_length", 2048)
    if cp > 1 and length % (2 * cp):
        message = f"sequence_length {length} is not divisible by 2·cp = {2 * cp}"
        yield at(document, "/sequence_length", "RL205", message, "each rank takes two of 2·cp equal pieces")
    experts = (_model(data, document) or {}).get("experts", {}).get("count")
    if experts and experts % ep:
        message = f"{experts} experts of {data['model']} are not divisible by ep {ep}"
        yield at(document, "/mesh/ep", "RL208", message, "each rank holds the same number of experts")
    yield from batches(document, data, world // (pp * cp), pp)


def of_the_trainer(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    entry, given = TRAINERS[data["trainer"]["name"]], data["trainer"]
    for axis in ("pp", "cp", "ep"):
        if axis not in entry.axes and data["mesh"].get(axis, 1) > 1:
            message = f"trainer {given['name']} has no {axis} axis yet"
            yield at(document, f"/mesh/{axis}", "RL229", message, "it is parallel over dp, by launch: torchrun")
    if given["name"] == "embedded":
        yield from uncut(document, data)
        with contextlib.suppress(SpecError):  # said by the rule of the model
            yield from common.decoder_has(document, data["model"], catalog.whole(data["model"], document.path.parent))
    fault = given.get("settings", {}).get("fault") if given["name"] != "command" else None
    if fault is not None and "expect" not in data:
        message = f"the planted fault {fault} belongs to a control, and no outcome is expected here"
        yield at(document, "/trainer/settings/fault", "RL230", message, "add expect: FAIL or ERROR, or leave it out")
    revised = any("revision" in arm for arm in data["arms"])
    if given["name"] == "embedded" and revised and not _holds_device(document, data):
        message = "the repository under test has no rlspec/device, so its revisions are not what would train"
        yield at(document, "/arms", "RL231", message, "let the arms differ by implementation, environment or perturb")


def uncut(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    """What of the model cannot be parted by the mesh."""
    model, name = _model(data, document) or {}, data["model"]
    pp, ep = (data["mesh"].get(axis, 1) for axis in ("pp", "ep"))
    layers = model.get("layers", pp)
    if pp > layers:
        message = f"mesh: pp {pp} stages need a layer each, and {name} has {layers}"
        yield at(document, "/mesh/pp", "RL229", message, f"pp is {layers} at most")
    elif pp > 1 and model and catalog.whole(name, document.path.parent).get("tie_word_embeddings"):
        message = f"mesh: pp {pp} parts the embedding from the head, and {name} ties them"
        yield at(document, "/mesh/pp", "RL229", message, "leave pp at 1, or use a model with a head of its own")
    if ep > 1 and model and not model.get("experts"):
        message = f"mesh: ep {ep} parts experts, and {name} is dense"
        yield at(document, "/mesh/ep", "RL229", message, "leave ep out")


def _holds_device(document: Document, data: dict[str, Any]) -> bool:
    place = document.path.parent / data.get("repository", ".")
    return any((folder / "rlspec" / "device").is_dir() for folder in (place.resolve(), *place.resolve().parents))


def batches(document: Document, data: dict[str, Any], dp: int, pp: int) -> Iterator[Problem]:
    values = settings(data)
    batch, micro = values.get("global_batch_size"), values.get("micro_batch_size", 1)
    if data["trainer"]["name"] == "command" or batch is None:
        return
    pointer = "/trainer/settings/global_batch_size"
    if batch % (micro * dp):
        message = f"global_batch_size {batch} is not divisible by micro_batch_size·dp = {micro}·{dp}"
        yield at(document, pointer, "RL207", message, f"a multiple of {micro * dp} fits")
    elif TRAINERS[data["trainer"]["name"]].pipeline and batch // dp < 2 * pp:
        message = f"global_batch_size / dp = {batch // dp} is below 2·pp = {2 * pp}"
        yield at(document, pointer, "RL206", message, f"at least {2 * pp * dp} sequences fill the pipeline")
    samples, steps = corpus_samples(document, values, data.get("sequence_length", 2048)), values.get("max_steps", 0)
    if samples is not None and batch * steps > samples:
        message = f"{steps} steps of {batch} need {batch * steps} samples, the corpus has {samples}"
        pointer = "/trainer/settings/corpus_samples" if "corpus_samples" in values else "/trainer/settings/corpus"
        yield at(document, pointer, "RL209", message, "fewer steps, or a smaller batch")


def corpus_samples(document: Document, values: Mapping[str, Any], length: int) -> int | None:
    """What the spec says, or what the manifest of a corpus that `rlspec prepare` wrote says; None if nothing does."""
    if "corpus_samples" in values:
        return int(values["corpus_samples"])
    if "corpus" not in values:
        return None
    try:
        manifest = json.loads((document.path.parent / values["corpus"] / "manifest.json").read_text(encoding="utf-8"))
        return sum((int(file["tokens"]) - 1) // length for file in manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def routing(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    if data["trainer"]["name"] == "command":
        return
    forced = settings(data).get("force_balanced_routing")
    pointer = "/trainer/settings/force_balanced_routing"
    if data["kind"] == "correctness" and forced:
        message = "force-balanced routing pins the load-balance loss at 1.0: a gate that cannot fail"
        yield at(document, pointer, "RL212", message, "it belongs to performance specs")
    experts = (_model(data, document) or {}).get("experts")
    if data["kind"] == "performance" and not forced and experts:
        message = "step times under real routing differ by expert imbalance"
        can = TRAINERS[data["trainer"]["name"]].forces_routing
        hint = "set force_balanced_routing: true" if can else f"trainer {data['trainer']['name']} cannot force it"
        yield at(document, pointer, "RL213", message, hint, severity="warning")


def trainer(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    given = data["trainer"]
    if given["name"] == "huggingface" and given.get("settings", {}).get("logging_nan_inf_filter"):
        message = "logging_nan_inf_filter is on: a NaN loss would be printed as the mean of earlier ones"
        hint = "leave logging_nan_inf_filter out: it is off"
        yield at(document, "/trainer/settings", "RL214", message, hint, severity="warning")
    if data.get("dtype") == "fp8" and not TRAINERS[given["name"]].fp8:
        message = f"fp8 is out of scope for trainer {given['name']}"
        yield at(document, "/dtype", "RL215", message, "use bf16 or fp32")
    named = given.get("template", "")
    if named and not common.PLACEHOLDER.search(named) and not (document.path.parent / named).is_file():
        message = f"there is no template {given['template']}"
        yield at(document, "/trainer/template", "RL222", message, "paths are relative to the spec's folder")
    if "{run_file}" in given.get("command", []) and "template" not in given:
        message = "{run_file} is asked for, but no template is given"
        yield at(document, "/trainer/command", "RL222", message, "name the template that it is rendered from")
    if "reader" in given:
        yield from reader(document, given["reader"])


def reader(document: Document, given: dict[str, Any]) -> Iterator[Problem]:
    name, pattern = given["name"], given.get("pattern")
    if name not in READERS:
        hint = schema.suggestion(name, READERS)
        yield at(document, "/trainer/reader/name", "RL201", f"unknown reader {name!r}", hint)
    elif READERS[name].folders and "suffix" not in given:
        message = f"reader {name} reads files of its own, not the log"
        hint = "say suffix: .tb, and write to the path in RLSPEC_RECORDS with .tb in the place of .records.jsonl"
        yield at(document, "/trainer/reader", "RL223", message, hint)
    elif name == "regex" and pattern is None:
        yield at(document, "/trainer/reader", "RL223", "reader regex needs a pattern", "with the named group step")
    elif name != "regex" and pattern is not None:
        yield at(document, "/trainer/reader/pattern", "RL223", f"reader {name} takes no pattern", "leave it out")
    elif pattern is not None:
        try:
            groups = compiled(pattern).groupindex
        except SpecError as error:
            yield at(document, "/trainer/reader/pattern", "RL223", str(error), "Python's re syntax")
            return
        if "step" not in groups:
            hint = "such as (?P<step>\\d+)"
            yield at(document, "/trainer/reader/pattern", "RL223", "the pattern has no named group step", hint)


def _not_known(document: Document, trainer: Mapping[str, Any], metric: str, pointer: str, hint: str) -> Problem:
    """A trainer of the user's, which prints in the form of another's log, may print more than that one does."""
    if trainer["name"] != "command":
        return at(document, pointer, "RL211", f"trainer {trainer['name']} prints no {metric!r}", hint)
    reader = trainer["reader"]["name"]
    if reader == "regex":
        return at(document, pointer, "RL211", f"the pattern has no group {metric!r}", hint)
    message = f"logs of {reader} have no {metric!r}; an ERROR if yours has none either"
    return at(document, pointer, "RL211", message, hint, severity="warning")


def metrics(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    known = known_metrics(data)
    for index, given in enumerate(data.get("judgments", ["drift"])):
        if data["kind"] != "correctness":
            return
        metric = given.get("metric") if isinstance(given, dict) else None
        pointer = f"/judgments/{index}"
        if metric is None and not default_metrics(data):
            name = data["trainer"]["reader"]["name"]
            hint = "write {check: drift, metric: loss}"
            yield at(document, pointer, "RL211", f"reader {name} has no usual metrics; name the one to judge", hint)
        elif metric is not None and known and metric not in known:
            yield _not_known(document, data["trainer"], metric, f"{pointer}/metric", schema.suggestion(metric, known))
        if isinstance(given, dict) and given.get("judge") == "calibrated":
            bases = sum(arm["role"] == "base" for arm in data["arms"])
            if bases < 3:
                message = f"judge: calibrated needs three base arms, here are {bases}"
                yield at(document, f"{pointer}/judge", "RL220", message, "add base arms, or use judge: ratio")


def arms(document: Document, data: dict[str, Any]) -> Iterator[Problem]:
    listed = data["arms"]
    named = [i for i, arm in enumerate(listed) if "revision" in arm]
    for index in named:
        yield from revision(document, f"/arms/{index}/revision", listed[index]["revision"])
    if named and len(named) < len(listed):
        index = next(i for i in range(len(listed)) if i not in named)
        message = f"arm {listed[index]['name']} names no revision, others do"
        yield at(document, f"/arms/{index}", "RL217", message, "give every arm one, or none")
    can_perturb = TRAINERS[data["trainer"]["name"]].perturbs
    for index, arm in enumerate(listed):
        if "perturb" in arm and arm["role"] != "base":
            yield at(document, f"/arms/{index}/perturb", "RL225", "only base arms are perturbed", "they make the floor")
        elif "perturb" in arm and not can_perturb:
            message = f"trainer {data['trainer']['name']} cannot perturb its weights"
            yield at(document, f"/arms/{index}/perturb", "RL225", message, "the embedded trainer can")
        elif "perturb" in arm and data["trainer"].get("settings", {}).get("master_dtype") == "bf16":
            message = "one unit in the last place of bf16 is no rounding-level change; fp32 masters are needed"
            yield at(document, f"/arms/{index}/perturb", "RL225", message, "leave master_dtype at fp32")
        if "implementation" in arm and data["trainer"]["name"] != "embedded":
            message = f"trainer {data['trainer']['name']} does not read implementation"
            yield at(document, f"/arms/{index}/implementation", "RL227", message, "use environment")
    if data["kind"] == "correctness":
        yield from seeds(document, listed)
    if "fault" not in data["trainer"].get("settings", {}):  # a planted fault is the difference
        yield from alike(document, listed)


def alike(document: Document, listed: Sequence[dict[str, Any]]) -> Iterator[Problem]:
    def content(arm: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in arm.items() if key not in ("name", "role")}

    bases = [content(arm) for arm in listed if arm["role"] == "base"]
    for index, arm in enumerate(listed):
        if arm["role"] == "feature" and content(arm) in bases:
            message = f"arm {arm['name']} says the same as a base arm"
            hint = "fine for an A/A run; otherwise name what differs"
            yield at(document, f"/arms/{index}", "RL218", message, hint, severity="warning")


def seeds(document: Document, listed: Sequence[dict[str, Any]]) -> Iterator[Problem]:
    bases = {index: arm.get("environment", {}) for index, arm in enumerate(listed) if arm["role"] == "base"}
    names = {listed[index]["name"]: environment for index, environment in bases.items()}
    for name, values in joining.seeds(names).items():
        message = f"base arms differ in {name} ({values}): their floor would be what seeds differ by"
        index = next(index for index in reversed(bases) if name in bases[index])
        pointer, hint = f"/arms/{index}/environment/{name}", "give every base arm the same"
        yield at(document, pointer, "RL232", message, hint, severity="warning")


def revision(document: Document, pointer: str, text: str) -> Iterator[Problem]:
    if common.PLACEHOLDER.search(text):
        return  # RL005 says so
    bad = re.search(r"^-|\s|\.\.|[\x00-\x1f\x7f\\*?\[]|\.lock$|/$|^/", text)
    if bad:
        message = f"{text!r} is not a revision: {bad.group()!r} may not stand there"
        yield at(document, pointer, "RL216", message, "a branch, tag or commit")


RULES: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    (model_known, ("model",)),
    (arm_names, ("arms",)),
    (launcher, ("launch", "trainer")),
    (mesh, ("model", "mesh", "launch", "trainer")),
    (of_the_trainer, ("model", "mesh", "trainer", "arms", "repository")),
    (routing, ("model", "trainer")),
    (trainer, ("trainer",)),
    (metrics, ("trainer", "arms", "judgments")),
    (arms, ("arms", "trainer")),
    (common.contract_rows, ("judgments", "contract")),
    (common.question, ("question",)),
)
NEEDED = ("model", "mesh", "trainer", "arms")


def lint(document: Document, broken: Iterable[str]) -> list[Problem]:
    """Findings of all rules whose keys are not among the `broken` ones."""
    return common.apply(document, RULES, {*broken, *(key for key in NEEDED if key not in document.data)})


def across(documents: Sequence[Document]) -> Iterator[Problem]:
    """Warnings about specs of one model and kind that differ where meshes alone should."""
    first: dict[tuple[str, str, str], Document] = {}
    for document in documents:
        data = document.data
        key = (data["kind"], data["model"], data["trainer"]["name"])
        other = first.setdefault(key, document)
        if key[2] == "command" or other is document:
            continue
        for name, pointer in (("sequence_length", "/sequence_length"), ("global_batch_size", "/trainer/settings")):
            mine, theirs = _setting(data, name), _setting(other.data, name)
            if mine != theirs:
                message = f"{name} {mine} differs from {theirs} in {other.path}, a spec of the same model"
                hint = "meshes of one model are comparable only at one size"
                yield at(document, pointer, "RL219", message, hint, severity="warning")


def _setting(data: Mapping[str, Any], name: str) -> Any:
    return data.get("sequence_length", 2048) if name == "sequence_length" else settings(data).get(name)
