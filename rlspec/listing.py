"""`rlspec list`, `explain` and `doctor`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from rlspec import catalog, cells, chains, contract, linting, logs, machine, nodes, runs, schema, workloads
from rlspec.checks import CHECKS, chain, common
from rlspec.engines import ENGINES, EXECUTIONS
from rlspec.errors import RunError, SpecError
from rlspec.model import Document, Row
from rlspec.rules import RULES
from rlspec.trainers import TRAINERS

JUDGMENTS: dict[str, tuple[str, str]] = {
    "drift": (
        "correctness",
        "mean |feature − base| over the steps after the first, as a ratio to what two base runs differ by",
    ),
    "step_time": ("performance", "median seconds of the steps after the first; measured, never gated"),
    "throughput": ("performance", "median tokens per second of the steps after the first; measured, never gated"),
    "peak_memory": ("performance", "largest GiB over ranks and steps after the first; measured, never gated"),
    "forward_accuracy": (
        "operators",
        "results against an fp32 or fp64 reference on the same inputs",
    ),
    "forward_invariance": ("operators", "results in every layout against those of one packed batch, to the bit"),
    "gradient_accuracy": ("operators", "gradients against those of the reference on the same inputs"),
    "gradient_invariance": (
        "operators",
        "gradients in every layout against those of one packed batch, to the bit",
    ),
    "train_inference_parity": ("chain", "log-probs as a trainer has them against those of prefill, decode and rescore"),
    "decode_prefill": ("chain", "logits of decoded tokens and of prefixes against those of one prefill of the whole"),
    "kv_cache": ("chain", "what is read against what was written, cursors, pads, attention through the cache"),
    "cross_arm_invariance": (
        "chain",
        "log-probs and gradients of an arm against those of the first one, to the bit; made where it is named",
    ),
    "max_abs_dlogp": ("parity", "max |d| over all tokens, d = train − rollout log-prob"),
    "mean_abs_dlogp": ("parity", "mean |d| over all tokens"),
    "approx_kl": ("parity", "mean(exp d − 1 − d): an estimate of KL(rollout ‖ train) that is never negative"),
    "clip_fraction": ("parity", "share of tokens whose ratio exp d leaves the clip range"),
    "sequence_outliers": ("parity", "number of sequences whose largest |d| exceeds the row of max_abs_dlogp"),
}

KINDS: dict[str, tuple[str, str]] = {
    "correctness": (
        "whether a branch changes what training computes: feature against base, in units of what base runs differ by",
        "rlspec run specs/quickstart.yaml",
    ),
    "performance": (
        "whether a branch is slower or needs more memory: times and memory of its arms, measured and not gated",
        "rlspec init performance > specs/my-times.yaml",
    ),
    "operators": (
        "whether kernels are right, and whether the bits of a sample depend on the batch that it is in",
        "rlspec run specs/operators",
    ),
    "chain": (
        "whether a whole model gives the same log-probs in training, prefill, decode and rescore",
        "rlspec run specs/chain",
    ),
    "parity": (
        "whether two engines, that of the rollout and that of the trainer, give the same log-probs for the same tokens",
        "rlspec run specs/parity/example.yaml",
    ),
}


def table(what: str, near: Path) -> str:
    rows = _ROWS[what](near)
    if not rows:
        return f"no {what}"
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)


def _models(near: Path) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name in sorted(catalog.entries("models", near)):
        data = catalog.model(name, near)
        experts = data.get("experts")
        shape = f"{data.get('layers', '?')} layers, hidden {data.get('hidden_size', '?')}"
        sort = f"{experts['count']} experts" if isinstance(experts, dict) and "count" in experts else "dense"
        rows.append((name, sort, shape))
    return rows


def _contracts(near: Path) -> list[tuple[str, ...]]:
    loaded = [(name, contract.load(name, near)) for name in sorted(catalog.entries("contracts", near))]
    return [(name, f"{len(made.rows)} rows", made.digest[:12], _strictness(made)) for name, made in loaded]


def _strictness(made: contract.Contract) -> str:
    return "a limit that zeros pass is an ERROR" if made.cannot_fail == "error" else ""


def _family(node: nodes.Node) -> str:
    return "not judged" if node.not_applicable else node.family


def _workloads(near: Path) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name in sorted(catalog.entries("workloads", near)):
        made = workloads.of(catalog.workload(name, near))
        tiers = ", ".join(f"{tier.name} {tier.tokens}" for tier in made.tiers)
        rows.append((name, f"tokens: {tiers}", made.digest[:12]))
    return rows


def _runs(near: Path) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for folder in runs.all_of(runs.root(near.resolve())):
        try:
            status = str(runs.load(folder.report)["outcome"]) if folder.report.exists() else "unfinished"
        except (RunError, KeyError):
            status = "unreadable"
        kind, model = folder.workspace.parts[-3:-1]
        rows.append((folder.name, kind.removeprefix("validate-"), model, status))
    return rows


_ROWS: dict[str, Callable[[Path], list[tuple[str, ...]]]] = {
    "models": _models,
    "contracts": _contracts,
    "operators": lambda near: [(name, _family(node), ", ".join(node.outputs)) for name, node in nodes.NODES.items()],
    "workloads": _workloads,
    "runs": _runs,
    "trainers": lambda near: [(name, entry.about) for name, entry in TRAINERS.items()],
    "engines": lambda near: [(name, ", ".join(engine.executions), engine.about) for name, engine in ENGINES.items()],
    "readers": lambda near: [
        (name, reader.units, reader.resolution, reader.about) for name, reader in logs.READERS.items()
    ],
    "judgments": lambda near: [(name, *about) for name, about in JUDGMENTS.items()],
}


def explain(name: str, near: Path) -> str:
    """Of a kind, rule, judgment, contract row, category of cells or listed name. Raises SpecError with near names."""
    if name.upper() in RULES:
        rule = RULES[name.upper()]
        why = textwrap.fill(rule.why, 78)
        bad, good = textwrap.indent(rule.bad, "    "), textwrap.indent(rule.good, "    ")
        return f"{name.upper()}: {rule.title}\n\n{why}\n\n  refused\n{bad}\n\n  better\n{good}"
    if name in KINDS:
        return _kind(name)
    if "/" in name:
        return "\n\n".join(_row(row) for row in _rows(name, near))
    if (category := name.replace(" ", "_")) in cells.MEANING:
        said = f"{category}: what a cell came out as, {cells.CATEGORIES[category]}: {cells.MEANING[category]}"
        return textwrap.fill(said, 78)
    if name in ENGINES:
        return "\n\n".join([f"{name}: {ENGINES[name].about}; package {ENGINES[name].package}",
                            *(_indented(f"{one}: {EXECUTIONS[one]}") for one in ENGINES[name].executions)])  # fmt: skip
    if name in JUDGMENTS:
        kind, about = JUDGMENTS[name]
        usual = "strict" if name == chains.ACROSS else common.CONTRACTS[kind]
        rows = [row for row in contract.load(usual, near).rows
                if row.judgment == name or row.judgment.startswith(f"{name}_calibrated")]  # fmt: skip
        return "\n\n".join([textwrap.fill(f"{name} (kind {kind}): {about}", 78), *(_row(row) for row in rows)])
    contracts = catalog.entries("contracts", near)
    if name in contracts:
        return "\n\n".join(_row(row) for row in contract.load(name, near).rows)
    for what in ("models", "operators", "workloads", "trainers", "readers"):
        for row in _ROWS[what](near):
            if row[0] == name:
                return textwrap.fill(f"{name}, of `rlspec list {what}`: {'; '.join(filter(None, row[1:]))}", 78)
    close = schema.nearest(name, [*KINDS, *JUDGMENTS, *contracts]) or schema.nearest(name.upper(), RULES)
    meant = f"did you mean {close!r}? " if close else ""
    raise SpecError(
        f"nothing is called {name!r}; {meant}known are lint rules such as {min(RULES)}, "
        f"the kinds {', '.join(KINDS)}, the judgments {', '.join(JUDGMENTS)}, "
        f"the contracts {', '.join(contracts)} and rows such as training/drift, "
        f"the engines {', '.join(ENGINES)}, other names that `rlspec list` gives, "
        "and categories of cells such as red_verdict"
    )


def _kind(name: str) -> str:
    asks, example = KINDS[name]
    facts = [
        f"judgments: {', '.join(common.STANDARD[name])}",
        f"contract: {common.CONTRACTS[name]}, unless it names one",
        f"schema: `rlspec schema {name}`",
        f"to start: `rlspec init {name}` prints a commented spec",
        f"example: `{example}`",
    ]
    return textwrap.fill(f"{name}, a kind of spec: {asks}", 78) + "\n\n" + "\n".join(map(_indented, facts))


def _rows(name: str, near: Path) -> list[Row]:
    wanted = name.split("/")
    made = contract.load(wanted[0], near)
    found = [row for row in made.rows if row.id.split("/")[: len(wanted)] == wanted]
    if not found:
        known = [row.judgment for row in made.rows]
        raise SpecError(f"contract {wanted[0]} has no row {name!r}; {schema.suggestion(wanted[1], set(known))}")
    return found


def _row(row: Row) -> str:
    limits = ", ".join(f"{key} {value:g}" for key, value in row.limits.items()) or "none"
    facts = [f"limits: {limits}", f"published as {row.published_id}" if row.published_id else ""]
    facts += [f"source: {row.source}", f"date: {row.date}", row.reason]
    return "\n".join([f"{row.id}: {row.status.replace('_', ' ')}", *(_indented(fact) for fact in facts if fact)])


def _indented(text: str) -> str:
    indent = "  "
    return textwrap.fill(text, 80, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def doctor(paths: Sequence[Path]) -> str:
    """This machine's means, and the specs that it would leave BLOCKED."""
    lines = [f"{name:<8} {value}" for name, value in machine.facts()]
    documents, problems = linting.lint(paths) if paths else ([], [])
    lines += [""] * bool(documents or problems)
    lines += [f"{document.path}: {_prospects(document)}" for document in documents]
    broken = sorted({str(problem.path) for problem in problems if problem.severity == "error"})
    lines += [f"{path}: does not lint; see `rlspec lint {path}`" for path in broken]
    return "\n".join(lines)


def _prospects(document: Document) -> str:
    spec = CHECKS[document.data["kind"]].parse(document)
    if reasons := chain.unmet(spec) if spec.chain else machine.unmet(spec.requires):
        return f"BLOCKED: {'; '.join(reasons)}"
    return "not BLOCKED: this machine has what it requires" if spec.requires else "not BLOCKED: it requires nothing"
