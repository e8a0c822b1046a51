"""What operators are judged with is what the decoder calls them with."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from rlspec import architecture, catalog, nodes, workloads
from rlspec.device import cases
from rlspec.device.decoder import PROFILES, Decoder
from rlspec.device.operators import Operators, Segment, Segments, resolve
from tests import benches

SPARSE = architecture.read(catalog.whole("tiny-moe", benches.ROOT))
WORKING = torch.bfloat16
OF_MODEL = ("segments", "dispatch", "eps", "scale", "top_k", "normalise")


def signature(operator, arguments, options):
    """The dtypes of tensors and the options of a call, defaults among them."""
    bound = inspect.signature(resolve(operator, "reference")).bind(*arguments, **options)
    bound.apply_defaults()
    found = {name: value.dtype if isinstance(value, Tensor) else value for name, value in bound.arguments.items()}
    return operator, tuple((name, str(value)) for name, value in found.items() if name not in OF_MODEL)


class Recorded(Decoder):
    def operate(self, at, name, operator, *arguments, **options):
        self.seen.add(signature(operator, arguments, options))
        return super().operate(at, name, operator, *arguments, **options)


def called(profile, **options):
    """All calls of the decoder; of its dense layers too, which a mixture of experts lacks."""
    dense = architecture.read(catalog.whole("tiny-dense", benches.ROOT))
    for model in (dense, SPARSE):
        decoder = Recorded(model, Operators("torch"), dtype=WORKING, profile=profile)
        decoder.initialise(0)
        decoder.seen = set()
        tokens = torch.zeros(1, 3, dtype=torch.int64)
        for balanced in (False, True)[: 1 + (model is SPARSE)]:
            decoder(tokens, targets=tokens, force_balanced=balanced)
        yield from decoder.seen


def judged(names):
    """All calls of the cases of shipped workloads, on few tokens."""
    for name in names:
        shipped = workloads.of({**catalog.workload(name, benches.ROOT), "cases": workloads.CASES})
        for operator in set(shipped.operators) - {"pack"}:
            for variant in {v for tier in shipped.tiers for v in nodes.variants(operator, tier)}:
                yield from one(operator, variant, workloads.of(benches.data(fill=shipped.fill)))


def one(operator, variant, workload):
    (tier,), seen = workload.tiers, []

    def call(*arguments, **options):
        seen.append(signature(operator, arguments, options))
        return resolve(operator, "torch")(*arguments, **options)

    case = cases.of(operator, variant, SPARSE, workload, WORKING)
    tokens = {
        key: table[:2].unsqueeze(0)
        for key, table in cases.logical(case, tier, workload, SPARSE, WORKING, "cpu").items()
    }
    weights = cases.weights(case, tier, workload, WORKING, torch.device("cpu"))
    segments = Segments((Segment(0, 0, 2, 0, 2),), 1, 2, 2, torch.device("cpu"))
    case.call(call, tokens, weights, segments, None)
    return seen


@pytest.mark.parametrize("names", [("tiny", "tiny-moe"), ("wide", "wide-moe")], ids=" ".join)
def test_all_that_the_decoder_calls_is_judged(names):
    due = {call for profile in PROFILES for call in called(profile)}
    assert len({operator for operator, _ in due}) == 14
    assert due - set(judged(names)) == set()


# An operator that is wrong under one option alone


def broken(monkeypatch, operator, holds):
    """The canonical operator, which gives half of what is due where the call holds."""
    right = resolve(operator, "canonical")

    def wrong(*arguments, **options):
        found = right(*arguments, **options)
        if not holds(*arguments, **options):
            return found
        return found._replace(weights=found.weights / 2) if operator == "router" else found / 2

    return benches.table(monkeypatch, **{operator: wrong})


def _rounded(x, weight, *, eps, round_before_weight=False):
    return round_before_weight


def _chosen(x, weight, *, logits_dtype, choice=None, **options):
    return choice is not None and logits_dtype == torch.float32


def _narrow(x, weight, *, logits_dtype, choice=None, **options):
    return choice is None and logits_dtype == WORKING


@pytest.mark.parametrize(
    ("operator", "holds"),
    [
        ("rms_norm", _rounded),
        ("qk_norm", _rounded),
        ("rope", lambda x, cos, sin: cos.dtype == WORKING),
        ("residual_add", lambda residual, x: residual.dtype == x.dtype == WORKING),
        ("lm_head", lambda x, weight, *, out_dtype: out_dtype == torch.float32 and x.dtype == WORKING),
        ("logprob", lambda logits, targets: logits.dtype == torch.float32),
        ("router", _chosen),
        ("router", _narrow),
        ("combine", lambda rows, weights, dispatch: weights.dtype == WORKING),
    ],
)
def test_an_operator_that_is_wrong_under_one_option_alone_is_red(tmp_path, monkeypatch, operator, holds):
    table = broken(monkeypatch, operator, holds)
    asked = {"name": "strict", "judgments": ["forward_accuracy"], "layouts": ["repeated"], "model": "tiny-moe"}
    found = {}
    for numbering in (2, 3):
        on = benches.bench(tmp_path, [operator], table, cases=numbering, **asked)
        found[numbering] = benches.judged(on, name="strict")[operator, "forward_accuracy"].category
    assert found == {2: "green", 3: "red_verdict"}


def test_logits_in_fp32_that_were_rounded_on_the_way_are_red(tmp_path, monkeypatch):
    def lm_head(x, weight, *, out_dtype):
        return resolve("lm_head", "canonical")(x, weight, out_dtype=x.dtype).to(out_dtype)

    table = benches.table(monkeypatch, lm_head=lm_head)
    on = benches.bench(
        tmp_path, ["lm_head"], table, cases=3, name="strict", judgments=["forward_accuracy"], layouts=["repeated"]
    )
    found = benches.judged(on, name="strict")["lm_head", "forward_accuracy"]
    assert found.category == "red_verdict" and found.reason.startswith("fp32 out in BN/full")
