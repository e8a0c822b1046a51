"""A small workload, operators of a test's own in the harness (in this process), and hand-made lines of records."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

from rlspec import catalog, cells, contract, layouts, measurements, nodes, workloads

ROOT = Path(__file__).parents[1]
SHIPPED = ("tiny", "tiny-moe", "ws1", "wide", "wide-moe")
LAYOUTS = ("chunked", "singletons", "permuted", "padded_right", "padded_nan", "neighbours", "strided", "repeated")
CPU = {"device": "cpu", "tf32": False, "autocast": False}


def shipped(name):
    return workloads.of(catalog.workload(name, ROOT))


def data(*, operators=("silu",), fill="hashed", **tier):
    """Three samples of 6, 1 and 4 tokens; `tier` replaces keys of the only tier, `one`."""
    return {
        "name": "small",
        "seed": 7,
        "fill": fill,
        "pad_token": 0,
        "operators": list(operators),
        "samples": [
            {"id": "t0", "length": 6, "prompt": 2},
            {"id": "t1", "length": 1},
            {"id": "t2", "length": 4, "prompt": 1},
            {"id": "t3", "length": 2},
        ],
        "tiers": [
            {
                "name": "one",
                "samples": ["t0", "t1", "t2"],
                "chunk": 4,
                "padded_length": 7,
                "permutation": [2, 0, 1],
                "projections": ["k"],
                "layouts": list(LAYOUTS),
                **tier,
            }
        ],
    }


def tier(**changes):
    (made,) = workloads.of(data(**changes)).tiers
    return made


def layout(name, of=None):
    """One layout of a tier by its name in the report."""
    return next(one for one in layouts.of(of or tier()) if one.name == name)


# Operators of a test's own


def table(monkeypatch, **operators):
    """`module:table` of these callables."""
    module = types.ModuleType("operators_of_a_test")
    module.table = operators
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return f"{module.__name__}:table"


def bench(folder, operators, implementation="torch", *, name="ws1", dtype="bf16", judgments=nodes.JUDGMENTS, **changes):
    """A bench of tiny-dense; `changes` go to the tier, but `model` and `cases`."""
    import torch

    from rlspec import architecture
    from rlspec.device import bench as device_bench

    entry = catalog.whole(changes.pop("model", "tiny-dense"), ROOT)
    cases = changes.pop("cases", 1)
    rows = contract.load(name, ROOT)
    families = sorted({nodes.NODES[operator].family for operator in operators})
    return device_bench.Bench(
        run_file=folder / "run.py",
        arm="a",
        implementation=implementation,
        workload=workloads.of({**data(operators=operators, **changes), "cases": cases}),
        model=architecture.read(entry),
        operators=tuple(operators),
        judgments=tuple(judgments),
        limits={j: {one: dict(rows.resolve(j, one, dtype).limits) for one in families} for j in judgments},
        dtype=device_bench.DTYPES[dtype],
        device=torch.device("cpu"),
    )


def measured(on):
    """What the harness writes, read back."""
    from rlspec.device import operator_harness

    records = on.run_file.with_name("records.jsonl")
    operator_harness.main(on, records)
    return measurements.read(records, "a")


def judge(found, operator, tier, judgment, row, cannot_fail="note", **asked):
    """A cell judged as that of an arm with the implementation that ran."""
    ran = [cell["implementation"] for cell in found["cells"] if cell["operator"] == operator]
    wanted = {"implementation": ran[0] if ran else "torch", **asked}
    return cells.judge(
        found,
        cells.Asked(operator=operator, tier=tier, judgment=judgment, row=row, **wanted),
        cannot_fail=cannot_fail,
    )


def judged(on, found=None, name="ws1"):
    """(operator, judgment) -> Finding."""
    found, rows = found or measured(on), contract.load(name, ROOT)
    dtype = str(on.dtype).removeprefix("torch.")
    (only,) = on.workload.tiers
    return {
        (operator, judgment): judge(
            found,
            operator,
            only,
            judgment,
            rows.resolve(judgment, nodes.NODES[operator].family, dtype),
            cannot_fail=rows.cannot_fail,
        )
        for operator in on.operators
        for judgment in on.judgments
    }


def categories(on, found=None, name="ws1"):
    return {key: finding.category for key, finding in judged(on, found, name).items()}


# Lines by hand


def limits_of(operator, judgment, name="ws1"):
    return dict(contract.load(name, ROOT).resolve(judgment, nodes.NODES[operator].family, "bf16").limits)


def line(operator, of, judgment, expected, limits):
    """A comparison that agrees."""
    rows = [expected.tokens or 3, 2]
    accuracy = judgment.endswith("accuracy")
    made = {
        "operator": operator,
        "tier": of.name,
        "judgment": judgment,
        "variant": expected.variant,
        "tensor": expected.tensor,
        "configuration": expected.configuration,
        "against": "reference" if accuracy else layouts.CANONICAL,
        "tokens": expected.tokens,
        "shape": rows,
        "dtype": "bfloat16",
        "against_dtype": "float32" if accuracy else "bfloat16",
        "elements": rows[0] * rows[1],
        "limits": limits,
        "digest": "d0",
        "against_digest": "d1" if accuracy else "d0",
        "first": None,
    }
    if not accuracy:
        return {**made, "differing": 0}
    return {
        **made,
        "nonfinite": 0,
        "violations": 0,
        "excess": -0.01,
        "max_abs": 1e-3,
        "rms": 1e-4,
        "relative_rms": 1e-3,
        "relative_peak": 1e-3,
        "cosine": 1.0,
        "ulps": {"<= 0": rows[0] * rows[1]},
    }


def cell(operator, of, judgments=nodes.JUDGMENTS, name="ws1", **changes):
    """A cell as `cells.read` gives it, all of whose comparisons agree. Each configuration has digests of its own."""
    comparisons = []
    for judgment in judgments:
        for expected in nodes.expected(operator, of, judgment, "cpu"):
            comparisons.append(line(operator, of, judgment, expected, limits_of(operator, judgment, name)))
    parts = {"t0": "x0", "t1": "x1", "t2": "x2"}
    for one in comparisons:  # a sample alone has other rows, so another digest
        part = parts.get(one["configuration"].rpartition("/")[2], "")
        one["digest"] += part + one["tensor"]
        one["against_digest"] += part + one["tensor"]
    return {
        "operator": operator,
        "tier": of.name,
        "implementation": "torch",
        "backend": None,
        "blocked": None,
        "no_backward": None,
        "without_gradients": [],
        "error": None,
        "provenance": None,
        "seen": {"triton": [], "native": [], "torch": ["silu"], "profiled": None, "calls_without_launch": 0},
        "passed_by": {},
        "layouts": {one.name: one.digest for one in layouts.of(of) if not nodes.left_out(one, "cpu")},
        "comparisons": comparisons,
        **changes,
    }


def written(path, found, arm="a"):
    """Records of cells, as a device writes them."""
    lines = [{"record": "run", "schema_version": 1, "arm": arm, "kind": "operators", "environment": CPU}]
    for one in found:
        lines += [{"record": "comparison", **comparison} for comparison in one["comparisons"]]
        lines.append({"record": "cell", **{key: value for key, value in one.items() if key != "comparisons"}})
    lines.append({"record": "end", "cells": len(found), "comparisons": sum(len(one["comparisons"]) for one in found)})
    save(path, lines)
    return lines


def save(path, lines):
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
