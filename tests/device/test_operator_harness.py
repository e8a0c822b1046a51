"""Operators through the whole harness, on a workload of eleven tokens, into the categories of their cells."""

from __future__ import annotations

import json
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import Function

from rlspec import nodes
from rlspec.device import bench as device_bench
from rlspec.device import beside, canonical, variant
from tests import benches

FORWARD, GRADIENT = ("forward_accuracy", "forward_invariance"), ("gradient_accuracy", "gradient_invariance")
ULP = 1 + 2.0**-7


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """A bench whose operators are these callables."""

    def make(**operators):
        changes = {name: operators.pop(name) for name in [*operators] if name not in nodes.NODES}
        return benches.bench(tmp_path, operators, benches.table(monkeypatch, **operators), **changes)

    return make


def by_judgment(on, operator="silu", name="ws1"):
    return {
        judgment: found.category for (one, judgment), found in benches.judged(on, name=name).items() if one == operator
    }


# Guards of the gate itself


def test_an_operator_that_looks_at_the_layout_is_red(harness):
    on = harness(silu=lambda x: canonical.silu(x) * (ULP if x.shape[1] == 4 else 1))
    assert by_judgment(on) == {
        "forward_accuracy": "green",
        "forward_invariance": "red_verdict",
        "gradient_accuracy": "green",
        "gradient_invariance": "red_verdict",
    }
    reason = benches.judged(on)["silu", "forward_invariance"].reason
    assert "B1/full/t2: " in reason and "first in sample t2 position 0 element " in reason
    assert "in a call of 1 × 4 tokens" in reason


def test_an_operator_that_looks_at_logical_identity_alone_is_green(harness):
    on = harness(silu=lambda x: x * 0.75)
    assert by_judgment(on) == {
        "forward_accuracy": "red_verdict",
        "forward_invariance": "green",
        "gradient_accuracy": "red_verdict",
        "gradient_invariance": "green",
    }


LAYOUT_FAULTS = {
    "pads reach a sum": ("BN/padded_nan", lambda x: canonical.silu(x) + 0 * x.sum()),
    "neighbours' content": ("BN/neighbours", lambda x: canonical.silu(x) * (ULP if x[0, -1, 0] > 0.5 else 1)),
    "strided read as contiguous": (
        "BN/strided",
        lambda x: canonical.silu(torch.as_strided(x, x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1))),
    ),
    "position in the call": (
        "BN/permuted",
        lambda x: canonical.silu(x) * (1 + 2.0**-6 * (torch.arange(x.shape[1]) == 10)).view(1, -1, 1).to(x.dtype),
    ),
}


@pytest.mark.parametrize("name", LAYOUT_FAULTS)
def test_each_layout_finds_the_fault_that_it_is_for(harness, name):
    layout, candidate = LAYOUT_FAULTS[name]
    found = benches.judged(harness(silu=candidate, judgments=["forward_invariance"]))["silu", "forward_invariance"]
    assert found.category == "red_verdict" and any(layout in line for line in found.evidence["failing"]), found.reason


def test_a_call_that_is_not_repeatable_is_red(harness):
    count = iter(range(100))
    on = harness(silu=lambda x: canonical.silu(x) * (ULP if next(count) // 2 % 2 else 1), layouts=["repeated"])
    assert by_judgment(on)["forward_invariance"] == "red_verdict"


def test_a_forward_that_is_wrong_without_gradients_alone_is_red(harness):
    on = harness(silu=lambda x: canonical.silu(x) * (1 if torch.is_grad_enabled() else 1.5), layouts=["repeated"])
    found = by_judgment(on)
    assert (found["forward_accuracy"], found["forward_invariance"]) == ("red_verdict", "red_without_gradients")
    assert found["gradient_accuracy"] == "green"


def test_a_forward_that_gives_the_same_memory_again_hides_nothing(harness):
    kept = {}

    class Silu(Function):
        @staticmethod
        def forward(ctx, x, factor):
            return kept.setdefault(x.shape, torch.empty_like(x)).copy_(F.silu(x) * factor).detach()

        @staticmethod
        def backward(ctx, upstream):
            return upstream, None

    on = harness(silu=lambda x: Silu.apply(x, 1 if torch.is_grad_enabled() else 1.5), layouts=["repeated"])
    found = by_judgment(on)
    assert (found["forward_accuracy"], found["forward_invariance"]) == ("red_verdict", "red_without_gradients")


def test_a_forward_that_is_other_without_gradients_in_small_calls_alone_is_red(harness):
    def silu(x):
        return canonical.silu(x) * (1 if torch.is_grad_enabled() or x.shape[1] > 1 else ULP)

    found = benches.judged(harness(silu=silu))["silu", "forward_accuracy"]
    assert found.category == "red_without_gradients" and "a call of 1 × 1 tokens" in found.reason


@pytest.mark.parametrize("module", ["no_such_kernels", "no_such_kernels.inner"])
def test_a_module_that_is_missing_is_a_sentence_without_frames(tmp_path, module):
    on = benches.bench(tmp_path, ["silu"], f"{module}:table")
    found = benches.judged(on)["silu", "forward_accuracy"]
    assert found.category == "raised" and found.evidence["tail"] == []
    assert found.reason.startswith(
        f"{module}:table: there is no module no_such_kernels; looked in the folder of the spec"
    )


def test_a_module_that_lacks_what_it_imports_shows_where(tmp_path, monkeypatch):
    (tmp_path / "kernels_that_import.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = benches.judged(benches.bench(tmp_path, ["silu"], "kernels_that_import:table"))["silu", "forward_accuracy"]
    assert "no_such_package" in found.reason and any(
        "kernels_that_import.py" in line for line in found.evidence["tail"]
    )


@pytest.mark.parametrize("operator", ["rms_norm", "qk_norm"])
def test_another_eps_without_gradients_is_an_error_of_the_value(harness, operator):
    def norm(x, weight, *, eps):
        return canonical.rms_norm(x, weight, eps=eps if torch.is_grad_enabled() else 3 * eps)

    norm.weight_gradient = canonical.rms_norm.weight_gradient
    on = harness(**{operator: norm}, cases=2, layouts=["repeated"])
    assert by_judgment(on, operator)["forward_accuracy"] == "red_verdict"


@pytest.mark.parametrize("grad", [False, True])
def test_a_weight_that_is_kept_with_gradients_or_without_alone_is_found(harness, grad):
    kept = {}

    def det_gemm(x, weight):
        if torch.is_grad_enabled() == grad:
            weight = kept.setdefault(tuple(weight.shape), weight.detach().clone())
        return canonical.det_gemm(x, weight)

    det_gemm.weight_gradient = canonical.det_gemm.weight_gradient
    found = benches.judged(harness(det_gemm=det_gemm))["det_gemm", "forward_accuracy"]
    assert found.category == "raised" and "is one kept?" in found.reason


def test_a_weight_that_is_kept_is_found_where_the_result_is_no_multiple_of_it(harness):
    kept = {}

    def linear_logprob(x, weight, targets):
        return canonical.linear_logprob(x, kept.setdefault(tuple(weight.shape), weight.detach().clone()), targets)

    on = harness(linear_logprob=linear_logprob, judgments=FORWARD, layouts=["repeated"])
    found = benches.judged(on)["linear_logprob", "forward_accuracy"]
    assert found.category == "raised" and "is one kept?" in found.reason


def test_a_flipped_zero_is_red_for_bits_alone(harness):
    def silu(x):
        out = canonical.silu(x)
        return torch.where(x == 0, -0.0 if x.shape[1] == 4 else 0.0, out)

    on = harness(silu=silu, judgments=FORWARD)
    assert by_judgment(on) == {"forward_accuracy": "green", "forward_invariance": "red_verdict"}
    assert "-0.0 is not 0.0" in benches.judged(on)["silu", "forward_invariance"].reason


def test_unwritten_output_is_red_everywhere(harness):
    def silu(x):
        out = torch.empty_like(x)
        out[:, :-1] = canonical.silu(x)[:, :-1]
        return out

    on = harness(silu=silu, judgments=FORWARD)
    assert by_judgment(on) == {"forward_accuracy": "red_verdict", "forward_invariance": "red_verdict"}
    assert "are not finite" in benches.judged(on)["silu", "forward_accuracy"].reason


def test_a_full_batch_is_one_call_chunks_split_it_and_pads_reach_the_operator(harness):
    seen = []
    benches.measured(harness(silu=lambda x: seen.append(tuple(x.shape[:2])) or F.silu(x), judgments=FORWARD))
    canonical_call, chunks, singles = seen[0], seen[1:3], seen[3:6]
    assert canonical_call == (1, 11) and chunks == [(1, 9), (1, 2)] and singles == [(1, 6), (1, 1), (1, 4)]
    assert seen[6:14] == [(1, 11), (3, 7), (3, 8), *[(1, 11)] * 5]  # two of neighbours, two that are strided


# Right operators


@pytest.mark.parametrize(
    ("operator", "changes"),
    [(name, {}) for name in nodes.NODES if not nodes.NODES[name].experts and name != "pack"]
    + [(name, {"model": "tiny-moe"}) for name in ("router", "grouped_gemm", "combine", "rms_norm")],
)
def test_the_canonical_operators_have_one_set_of_bits(tmp_path, operator, changes):
    unowned = operator in ("qk_norm", "linear_logprob", "router", "grouped_gemm")
    if unowned:  # autograd adds the parts of their weight's gradient, and 0 · NaN of a pad is NaN
        changes = {**changes, "layouts": [name for name in benches.LAYOUTS if name != "padded_nan"]}
    on = benches.bench(tmp_path, [operator], "canonical", name="strict", **changes)
    found = {judgment: one for (_, judgment), one in benches.judged(on, name="strict").items()}
    green = [judgment for judgment, one in found.items() if one.category == "green"]
    assert [*nodes.JUDGMENTS[: 3 if unowned else 4]] == green[: 3 if unowned else 4], found
    red = found["gradient_invariance"].evidence.get("failing", []) if unowned else []
    assert all("dweight:" in line for line in red)


@pytest.mark.parametrize("name", ["ws1", "strict"])
def test_torch_is_right_and_its_bits_follow_the_layout(tmp_path, name):
    on = benches.bench(tmp_path, ["det_gemm"], "torch", name=name)
    found = by_judgment(on, "det_gemm", name=name)
    assert found["forward_accuracy"] == "green" and found["gradient_invariance"] == "red_verdict"


def test_the_reference_is_fp64_where_it_is_cheap_and_else_fp32(tmp_path, monkeypatch):
    def against(on):
        return {line["against_dtype"] for line in benches.measured(on)["cells"][0]["comparisons"]}

    on = benches.bench(tmp_path, ["silu"], judgments=["forward_accuracy"])
    assert against(on) == {"float64"}
    monkeypatch.setattr(variant, "_FP64_ELEMENTS", 0)
    assert against(on) == {"float32"}


def test_a_sum_over_calls_says_who_made_it(tmp_path):
    for implementation, who in (("torch", "autograd"), ("canonical", "operator")):
        (cell,) = benches.measured(benches.bench(tmp_path, ["det_gemm"], implementation))["cells"]
        told = {line["accumulated_by"] for line in cell["comparisons"] if line["tensor"] == "dweight"}
        assert told == {who} and not any(
            "accumulated_by" in line for line in cell["comparisons"] if line["tensor"] == "dx"
        )


# Wrong gradients


class Gradient(Function):
    """Silu with another gradient."""

    change = staticmethod(lambda dx: dx)

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return canonical.silu(x)

    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(canonical.silu(x), x, upstream)
        return Gradient.change(dx)


@pytest.mark.parametrize(
    "change",
    [
        torch.zeros_like,
        lambda dx: -dx,
        lambda dx: dx.roll(1, 1),
        lambda dx: torch.where(torch.arange(dx.shape[0]).view(-1, 1, 1) > 0, 0, dx),
        lambda dx: dx.index_fill(1, torch.tensor([dx.shape[1] - 1]), float("nan")),
    ],
    ids=["zero", "flipped", "shuffled", "first row alone", "nan"],
)
@pytest.mark.parametrize("name", ["ws1", "strict"])
def test_a_wrong_gradient_is_red(harness, monkeypatch, change, name):
    monkeypatch.setattr(Gradient, "change", staticmethod(change))
    found = by_judgment(harness(silu=Gradient.apply, name=name), name=name)
    assert found["gradient_accuracy"] == "red_verdict" and found["forward_accuracy"] == "green"


def test_upstream_gradients_are_not_uniform(harness):
    def backward(ctx, upstream):
        return torch.full_like(upstream, float(upstream.flatten()[0])) * ctx.slope

    class FirstAlone(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.slope = torch.ones_like(x)
            return canonical.silu(x)

    FirstAlone.backward = staticmethod(backward)
    assert by_judgment(harness(silu=FirstAlone.apply))["gradient_accuracy"] == "red_verdict"


def test_no_backward_is_a_category_and_forward_is_judged(harness):
    on = harness(silu=lambda x: canonical.silu(x.detach()))
    found = benches.judged(on)
    assert {found["silu", one].category for one in GRADIENT} == {"red_no_backward"}
    assert {found["silu", one].category for one in FORWARD} == {"green"}
    assert found["silu", "gradient_accuracy"].reason == "no backward: an output has no gradient function"


# Rows that judge nothing


def test_a_row_that_zeros_would_pass_is_told_for_each_cell(tmp_path):
    small = benches.bench(tmp_path, ["silu"], "canonical", fill="published")
    found = benches.judged(small)["silu", "gradient_accuracy"]
    assert (
        found.category == "green"
        and "cannot_fail: the row would also pass a candidate that is zero dx" in found.notes[0]
    )
    large = benches.bench(tmp_path, ["silu"], "canonical")
    assert benches.judged(large)["silu", "gradient_accuracy"].notes == ()


def test_strict_rows_can_fail_whatever_the_size(tmp_path):
    small = benches.bench(tmp_path, ["silu", "rms_norm"], "canonical", fill="published", name="strict")
    assert all(not cell["passed_by"] for cell in benches.measured(small)["cells"])


# Trouble stays in its cell


def test_a_raise_ends_its_own_cell_and_tells_its_last_lines(harness, capsys):
    def silu(x):
        raise RuntimeError("no such kernel\nsecond line")

    on = harness(silu=silu, rope=canonical.rope)
    found = benches.measured(on)
    judged = benches.judged(on, found)
    assert {judged["silu", one].category for one in nodes.JUDGMENTS} == {"raised"}
    assert {judged["rope", one].category for one in nodes.JUDGMENTS} == {"green"}
    error = found["cells"][0]["error"]
    assert (
        error["message"] == "RuntimeError: no such kernel (in BN/full, a call of 1 × 11 tokens)"
        and len(error["tail"]) <= 6
    )
    assert any("raise RuntimeError" in line for line in error["tail"])
    assert "silu one: RuntimeError: no such kernel" in capsys.readouterr().out


def test_a_raise_in_the_middle_leaves_no_half_cell_that_passes(harness):
    def silu(x):
        if x.shape[1] == 4:
            raise ValueError("four")
        return canonical.silu(x)

    on = harness(silu=silu)
    assert benches.measured(on)["cells"][0]["comparisons"] and set(by_judgment(on).values()) == {"raised"}


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (lambda x: x.float(), "ValueError: the result out is torch.float32, torch.bfloat16 is due"),
        (lambda x: x[:, 1:], "ValueError: the result out has shape [1, 10, 192] for 1 rows of 11 tokens"),
        (lambda x: (x, x), "ValueError: the result out is no tensor but a tuple"),
    ],
)
def test_a_result_that_does_not_fit_is_told_in_a_sentence(harness, candidate, message):
    on = harness(silu=candidate)
    assert {found.reason for found in benches.judged(on).values()} == {
        f"{message} (in BN/full, a call of 1 × 11 tokens)"
    }


def _overwrites(x):
    made = canonical.silu(x)
    x.data.zero_()
    return made


class _OverwritesUpstream(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        made = upstream.clone()
        upstream.zero_()
        return made


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (_overwrites, "ValueError: the operator writes into its input x"),
        (lambda x: _OverwritesUpstream.apply(x), "ValueError: the backward writes into the upstream gradient of out"),
    ],
)
def test_what_an_operator_is_given_stays_as_it_is(harness, candidate, message):
    for found in benches.judged(harness(silu=candidate)).values():
        assert found.category == "raised" and found.reason.startswith(message)


@pytest.mark.parametrize("name", ["deterministic", "threads", "default_dtype"])
def test_what_an_operator_changes_of_its_process_is_no_green(harness, name):
    before = (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.get_default_dtype())

    def silu(x):
        if name == "deterministic":
            torch.use_deterministic_algorithms(not before[0])
        elif name == "threads":
            torch.set_num_threads(before[1] + 1)
        made = canonical.silu(x)
        if name == "default_dtype":
            torch.set_default_dtype(torch.float64)
        return made

    try:
        found = benches.judged(harness(silu=silu))
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_num_threads(before[1])
        torch.set_default_dtype(before[2])
    assert {one.category for one in found.values()} == {"red_provenance"}
    assert all(name in one.reason for one in found.values())


@pytest.mark.parametrize(
    ("implementation", "message"),
    [
        ("no_such_module:table", "no_such_module:table: there is no module no_such_module; looked in"),
        ("operators_of_a_test:tabel", "ValueError: module 'operators_of_a_test' has no 'tabel'"),
        ("operators_of_a_test:table", "ValueError: operators_of_a_test:table has no operator 'silu'; it has: rope"),
        ("tritn", "ValueError: unknown implementation 'tritn' of 'silu'"),
    ],
)
def test_an_operator_that_is_not_there_is_an_error_of_its_cell(tmp_path, monkeypatch, implementation, message):
    benches.table(monkeypatch, rope=canonical.rope)
    on = benches.bench(tmp_path, ["silu", "rope"], {"silu": implementation, "rope": "canonical"})
    found = benches.judged(on)
    assert found["silu", "forward_accuracy"].category == "raised"
    assert found["silu", "forward_accuracy"].reason.startswith(message)
    assert found["rope", "forward_accuracy"].category == "green"


def test_a_kernel_without_its_device_is_blocked_and_never_run(harness, monkeypatch):
    def silu(x):
        raise AssertionError

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for backend in ("triton", "cuda"):
        silu.backend = backend
        found = benches.judged(harness(silu=silu))["silu", "gradient_accuracy"]
        assert (found.category, found.status) == ("blocked_hardware", "BLOCKED")
        assert found.reason == f"{backend} kernels need a CUDA device, and there is none here"


def test_an_unknown_backend_is_no_green(harness):
    def silu(x):
        return canonical.silu(x)

    silu.backend = "tpu"
    assert set(by_judgment(harness(silu=silu)).values()) == {"red_provenance"}


def test_tf32_is_off_whatever_it_was_before(tmp_path):
    for place in (torch.backends.cuda.matmul, torch.backends.cudnn):
        place.allow_tf32 = True
    found = benches.measured(benches.bench(tmp_path, ["silu"], judgments=["forward_accuracy"]))
    assert found["environment"]["tf32"] is False


def test_one_end_line_counts_all(tmp_path):
    on = benches.bench(tmp_path, ["silu", "rope"], judgments=FORWARD)
    benches.measured(on)
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    kinds = [line["record"] for line in lines]
    assert kinds[0] == "run" and kinds[-1] == "end" and lines[-1]["cells"] == kinds.count("cell") == 2
    assert lines[-1]["comparisons"] == kinds.count("comparison") > 30


# A bench from a run file


def config(folder, **changes):
    on = benches.bench(folder, ["silu"])
    return {
        "model": benches.catalog.whole("tiny-dense", benches.ROOT),
        "workload": benches.data(),
        "operators": ["silu"],
        "judgments": list(FORWARD),
        "limits": on.limits,
        "dtype": "bf16",
        "device": "cpu",
        "spec_dir": str(folder),
        **changes,
    }


def test_operators_of_a_user_lie_beside_the_spec(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    monkeypatch.setattr("sys.meta_path", [*__import__("sys").meta_path])
    source = "import torch\n\n\ndef silu(x):\n    return {}\n\n\ntable = {{'silu': silu}}\n"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "operators_beside_a_spec.py").write_text(source.format("torch.nn.functional.silu(x)"))
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")  # as PYTHONPATH would have it
    (tmp_path / "operators_beside_a_spec.py").write_text(source.format("x * 0.75"))
    (tmp_path / "colorsys.py").write_text("raise AssertionError('no module of the standard library is one')")
    arm = {"name": "a", "implementation": "operators_beside_a_spec:table"}
    on = device_bench.bench(tmp_path / "run.py", config(tmp_path), arm)
    assert by_judgment(on) == {"forward_accuracy": "red_verdict", "forward_invariance": "green"}
    monkeypatch.delitem(__import__("sys").modules, "colorsys", raising=False)
    assert tmp_path.name not in __import__("colorsys").__file__
    (tmp_path / "triton.py").write_text("raise AssertionError('nor one of those that rlspec runs on')")
    finders = [one for one in __import__("sys").meta_path if isinstance(one, beside.Finder)]
    assert finders and all(one.find_spec("triton") is None for one in finders)


def test_the_path_that_an_arm_declares_comes_before_the_folder_of_the_spec(tmp_path, monkeypatch):
    for name in ("spec", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "found_on_a_declared_path.py").write_text(f"place = {name!r}\n")
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    monkeypatch.setattr("sys.meta_path", [*__import__("sys").meta_path])
    monkeypatch.setenv("RLSPEC_DECLARED_PATH", str(tmp_path / "other"))
    beside.first(str(tmp_path / "spec"))
    assert __import__("found_on_a_declared_path").place == "other"


def test_an_arm_may_name_implementations_by_operator(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    arm = {"name": "a", "implementation": {"silu": "canonical"}}
    on = device_bench.bench(tmp_path / "run.py", config(tmp_path), arm)
    assert on.implementation_of("silu") == "canonical" and on.implementation_of("rope") == "torch"
    assert device_bench.bench(tmp_path / "run.py", config(tmp_path), {"name": "a"}).implementation == "torch"


def test_a_dtype_that_is_not_judged_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    with pytest.raises(ValueError, match="arms run in fp32, bf16, fp16, not in fp8"):
        device_bench.bench(tmp_path / "run.py", config(tmp_path, dtype="fp8"), {"name": "a"})


# The canonical call in another process

RUN_FILE = """
import os
from pathlib import Path

import pytest
from tests import benches
from rlspec.device import canonical

ELSEWHERE = "RLSPEC_CANONICAL_DIGESTS" in os.environ
MODULE = {{"silu": canonical.silu, "rope": lambda *args: canonical.rope(*args) * (0.5 if ELSEWHERE else 1)}}


def bench():
    table = benches.table(pytest.MonkeyPatch(), **MODULE)
    return benches.bench(Path({folder!r}), ["silu", "rope"], table, layouts=["other_process"])


if __name__ == "__main__":
    from rlspec.device import operator_harness

    operator_harness.main(bench(), Path(os.devnull))
"""


def test_the_bits_of_another_process(tmp_path, monkeypatch):
    (tmp_path / "run.py").write_text(textwrap.dedent(RUN_FILE.format(folder=str(tmp_path))))
    monkeypatch.setenv("PYTHONPATH", str(benches.ROOT))
    on = benches.bench(
        tmp_path, ["silu", "rope"], benches.table(monkeypatch, silu=canonical.silu, rope=canonical.rope),
        layouts=["other_process"],
    )  # fmt: skip
    found = benches.measured(on)
    assert set(benches.categories(on, found).values()) == {"green", "red_verdict"}
    assert by_judgment_of(on, found, "silu") == dict.fromkeys(nodes.JUDGMENTS, "green")
    assert by_judgment_of(on, found, "rope")["forward_invariance"] == "red_verdict"
    assert by_judgment_of(on, found, "rope")["forward_accuracy"] == "green"


def by_judgment_of(on, found, operator):
    return {
        judgment: category for (one, judgment), category in benches.categories(on, found).items() if one == operator
    }


def test_another_process_that_fails_is_no_agreement(tmp_path, capfd):
    (tmp_path / "run.py").write_text("raise SystemExit(3)\n")
    on = benches.bench(tmp_path, ["silu"], "canonical", layouts=["other_process"])
    found = by_judgment(on)
    assert found["forward_invariance"] == found["gradient_invariance"] == "broken"
    assert "the process for the layout other_process ended with 3" in capfd.readouterr().out
