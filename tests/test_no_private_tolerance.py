"""Only a row of a contract says how far a number may be off: the harness and tests of operators hide none."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HARNESS = (
    *("rlspec/nodes.py", "rlspec/cells.py", "rlspec/layouts.py", "rlspec/workloads.py", "rlspec/checks/operators.py"),
    *("rlspec/chains.py", "rlspec/chain_verdicts.py", "rlspec/checks/chain.py"),
    *("rlspec/chain_asked.py", "rlspec/chain_places.py", "rlspec/chain_truth.py"),
    *(
        f"rlspec/device/{name}.py"
        for name in (
            "operator_harness",
            "execution",
            "comparing",
            "cases",
            "observe",
            "fills",
            "chain_harness",
            "chain_trace",
            *("chain_inference", "chain_lines", "chain_routes", "chain_session", "chain_stateful", "chain_training"),
        )
    ),
)
NAMES = {"allclose", "assert_close", "isclose", "assert_allclose", "assert_almost_equal", "approx"}
LIMITS = {"atol", "rtol", "abs_tol", "rel_tol", "tolerance", "baseline_ratio", "relative_rms"}
DEFAULTED = LIMITS | {"ratio"}  # `ratio or 2` would be a default
# Powers of two of the harness: no limits, and each a constant with a name.
POWERS = {
    "HALF_ULP": "the rounding of each dtype, below which no error can be told from none",
    "_ROUNDING": "that of fp32 scores, by which equal logits may part",
    "_SMALL": "the size of an input",
    "TIE": "by how much inputs are not quite equal",
}
POSITIONAL = {"errors": 2, "allclose": 2, "isclose": 2, "assert_close": 2}

# Tests that hold numbers against a formula, not an operator against its reference; each with its reason.
ALLOWED = {
    "tests/device/test_operators.py": "formulas in fp64, a few units of 2⁻⁵³",
    "tests/device/test_canonical.py": "formulas in fp64, a few units of 2⁻⁵³",
    "tests/device/test_gradients.py": "the folds against a sum in fp64",
    "tests/device/test_decoder.py": "the decoder against transformers",
    "tests/device/test_trainer.py": "the trainer against losses by hand",
    "tests/device/test_mesh.py": "a mesh against one process in fp32, a few units in the last place",
    "tests/device/test_triton_operators.py": "the folds of kernels against autograd of the formula in fp32",
    "tests/device/test_comparing.py": "the comparison itself: figures against numpy, tolerances as arguments",
    "tests/test_nodes.py": "limits as arguments of the function that holds numbers against them",
    "tests/test_cells.py": "edited limits, which must be refused",
    "tests/benches.py": "figures of records made by hand",
    "tests/device/test_weights.py": "one rounding to bf16 of a value that is computed again by hand",
    "tests/checks/test_operators.py": "the limits of ws1, written out so that an edit of the contract is seen",
}

KERNELS = ("tests/kernels/", "tests/bench/")  # kernels stand alone and know no contract: formulas in fp64, and specs


def tolerances(source):
    """(line, what) of each comparison by name, and of each limit that is a number other than zero."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in NAMES:
                yield node.lineno, name
            for keyword in node.keywords:
                if keyword.arg in LIMITS and number(keyword.value):
                    yield node.lineno, keyword.arg
            for value in node.args[POSITIONAL.get(name, len(node.args)) :]:
                if number(value):
                    yield node.lineno, name
            if name in ("get", "setdefault") and len(node.args) == 2 and limit(node.args[0]) and number(node.args[1]):
                yield node.lineno, "a default"
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) and number(node.values[-1]):
            if DEFAULTED & {getattr(one, "id", getattr(one, "attr", "")) for one in node.values[:-1]}:
                yield node.lineno, "a default"
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is not None and limit(key) and number(value):
                    yield node.lineno, key.value
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and number(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if getattr(target, "id", "").lower().strip("_") in LIMITS:
                    yield node.lineno, target.id
        elif isinstance(node, ast.FunctionDef):
            for argument, default in zip(node.args.args[::-1], node.args.defaults[::-1], strict=False):
                if argument.arg in LIMITS and number(default):
                    yield node.lineno, argument.arg


def limit(node):
    return isinstance(node, ast.Constant) and node.value in LIMITS


def number(node):
    constants = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
    return any(isinstance(value, (int, float)) and value != 0 for value in constants)


def powers(source):
    """The constant that each negative power of a literal is the value of; "" for one in the midst of a formula."""
    tree, named = ast.parse(source), {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            named |= {id(one): getattr(node.targets[0], "id", "") for one in ast.walk(node.value)}
    for node in ast.walk(tree):
        power = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
        if power and isinstance(node.left, ast.Constant) and isinstance(node.right, ast.UnaryOp):
            yield named.get(id(node), "")


def about_operators(path):
    text = path.read_text(encoding="utf-8")
    return any(word in text for word in ("rlspec.device", "operator_harness", "import benches", "rlspec.kernels"))


TESTS = [p for p in sorted((ROOT / "tests").rglob("*.py")) if about_operators(p) and p != Path(__file__)]


@pytest.mark.parametrize("path", HARNESS)
def test_the_harness_has_no_tolerance_of_its_own(path):
    source = (ROOT / path).read_text(encoding="utf-8")
    assert list(tolerances(source)) == [] and set(powers(source)) <= set(POWERS)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT / "tests")))
def test_no_test_of_operators_has_one(path):
    name = str(path.relative_to(ROOT))
    found = list(tolerances(path.read_text(encoding="utf-8")))
    assert name in ALLOWED or name.startswith(KERNELS) or found == []


def test_each_exception_has_a_reason_and_is_one():
    assert all(ALLOWED.values())
    for name in ALLOWED:
        if (ROOT / name).is_file():
            assert list(tolerances((ROOT / name).read_text(encoding="utf-8"))), f"{name} needs no exception"


@pytest.mark.parametrize(
    "source",
    [
        "torch.testing.assert_close(a, b)",
        "torch.allclose(a, b, rtol=0)",
        "check(a, b, atol=1e-3)",
        "comparing.errors(a, b, 0.0, 1e-2)",
        "limits = {'atol': 2e-2}",
        "limits.get('atol', 1e-3)",
        "ATOL = 1e-3",
        "def check(a, b, atol=1e-3): ...",
        "assert x == pytest.approx(1.0)",
        "_rtol: float = 2 * 1e-3",
        "allowed = theirs * (ratio or 2)",
    ],
)
def test_what_is_found(source):
    assert len(list(tolerances(source))) >= 1


def test_a_power_of_two_in_a_formula_is_found():
    assert list(powers("allowed = theirs + size * 2**-9")) == ["allowed"]
    assert list(powers("def beyond(size):\n    return size * 2.0**-9")) == [""]


@pytest.mark.parametrize(
    "source",
    ["errors(a, b, 0.0, 0.0)", "errors(a, b, atol, rtol)", "limits.get('atol', 0.0)", "{'atol': row.atol}", "n or 2"],
)
def test_what_is_not(source):
    assert list(tolerances(source)) == []
