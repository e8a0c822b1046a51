from __future__ import annotations

from pathlib import Path

import pytest

from rlspec import contract, linting, listing
from rlspec.chains import STATEFUL
from rlspec.errors import SpecError

HERE = Path(__file__).parent
BASE = {"source": "s", "date": "2026-11-29", "reason": "r"}
CLASSES = ("elementwise", "reduction", "logprob", "attention")

# judgment, class: (atol, rtol) in fp32, bf16, fp16, as published; written out so that an edit of the file is seen.
PUBLISHED = {
    ("forward_accuracy", "elementwise"): ((1e-5, 1e-5), (2e-2, 1.6e-2), (1e-3, 1e-3)),
    ("forward_accuracy", "reduction"): ((1e-4, 1e-4), (5e-2, 2e-2), (1e-3, 1e-3)),
    ("forward_accuracy", "logprob"): ((1e-5, 0), (6e-2, 0), (5e-3, 0)),
    ("forward_accuracy", "attention"): ((1e-4, 1e-4), (5e-2, 2e-2), (1e-3, 1e-3)),
    ("gradient_accuracy", "elementwise"): ((1e-5, 1e-5), (2e-2, 1.6e-2), (1e-3, 1e-3)),
    ("gradient_accuracy", "reduction"): ((1e-4, 1e-4), (1e-1, 2e-2), (1e-3, 1e-3)),
    ("gradient_accuracy", "logprob"): ((1e-5, 0), (5e-2, 0), (5e-3, 0)),
    ("gradient_accuracy", "attention"): ((1e-4, 1e-4), (5e-2, 2e-2), (1e-3, 1e-3)),
}
# metric: its published name, limits in fp32, bf16, fp16.
AGGREGATES = {
    "max_abs_dlogp": ("max_abs_dlogp", (1e-5, 6e-2, 5e-3)),
    "approx_kl": ("approx_kl0", (1e-5, 5e-2, 5e-3)),
    "clip_fraction": ("clipfrac0", (0, 0, 0)),
}
# judgment, class: baseline_ratio, then relative_rms in fp32, bf16, fp16.
STRICT = {
    ("forward_accuracy", "elementwise"): (2, (1e-5, 1e-2, 1.3e-3)),
    ("forward_accuracy", "reduction"): (2, (1e-5, 1e-2, 1.3e-3)),
    ("forward_accuracy", "logprob"): (2, (1e-5, 1e-2, 1.3e-3)),
    ("forward_accuracy", "attention"): (2, (1e-5, 1e-2, 1.3e-3)),
    ("gradient_accuracy", "elementwise"): (3, (1e-5, 1e-2, 1.3e-3)),
    ("gradient_accuracy", "reduction"): (3, (3e-5, 1e-2, 1.3e-3)),
    ("gradient_accuracy", "logprob"): (3, (3e-5, 5e-2, 6e-3)),
    ("gradient_accuracy", "attention"): (3, (3e-5, 1e-2, 1.3e-3)),
}
STRICT_PARITY = {
    "max_abs_dlogp": (1e-5, 6e-2, 5e-3),
    "mean_abs_dlogp": (1e-5, 0.005, 6e-4),
    "approx_kl": (1e-10, 1e-3, 1.6e-5),
    "clip_fraction": (0, 0, 0),
    "sequence_outliers": (0, 0, 0),
}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
STATUS = {"fp32": "applicable", "bf16": "applicable", "fp16": "optional"}
INVARIANCES = ("forward_invariance", "gradient_invariance")


def made(*rows):
    return contract.from_rows("c", [{**BASE, **row} for row in rows])


def written(folder, *lines, top="about: of one row"):
    path = folder / "contracts" / "own.yaml"
    path.parent.mkdir(exist_ok=True)
    base = [f'{key}: "{value}"' for key, value in BASE.items()]
    path.write_text("\n    ".join([f"name: own\n{top}\nrows:\n  - {lines[0]}", *lines[1:], *base]) + "\n")
    return path


def test_the_most_exact_row_holds():
    rows = made(
        {"judgment": "j", "limits": {"max": 1}},
        {"judgment": "j", "dtype": "bf16", "limits": {"max": 2}},
        {"judgment": "j", "subject": "loss", "limits": {"max": 3}},
    )
    assert rows.resolve("j").limits["max"] == 1
    assert rows.resolve("j", "x", "bf16").limits["max"] == 2
    assert rows.resolve("j", "loss", "bf16").limits["max"] == 3


def test_a_missing_row_is_an_error_with_the_nearest_name():
    with pytest.raises(SpecError, match="did you mean 'approx_kl'"):
        made({"judgment": "approx_kl"}).resolve("aprox_kl")


def test_two_rows_for_one_key():
    with pytest.raises(SpecError, match="two rows"):
        made({"judgment": "j"}, {"judgment": "j"})


def test_digest_follows_the_limits():
    one, two = made({"judgment": "j", "limits": {"max": 1}}), made({"judgment": "j", "limits": {"max": 2}})
    assert one.digest != two.digest
    assert contract.from_rows("c", [{k: v for k, v in contract.plain(r).items() if k != "id"} for r in one.rows]) == one


def test_shipped_limits_of_training():
    training = contract.load("training", HERE)
    assert training.resolve("drift", "loss").limits == {"pass_below": 3.0, "fail_above": 5.0}
    assert training.resolve("drift_calibrated_4").limits == {"pass_below": 2.65, "fail_above": 4.3}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(("judgment", "subject"), PUBLISHED)
def test_ws1_accuracy_is_as_published(judgment, subject, place):
    dtype = list(DTYPES)[place]
    row = contract.load("ws1", HERE).resolve(judgment, subject, dtype)
    atol, rtol = PUBLISHED[judgment, subject][place]
    assert row.id == f"ws1/{judgment}/{subject}/{dtype}" and row.status == STATUS[dtype]
    assert dict(row.limits) == {"atol": atol, "rtol": rtol}
    assert row.published_id == f"{judgment}.{subject}.{DTYPES[dtype]}"


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("metric", AGGREGATES)
def test_ws1_aggregates_are_as_published(metric, place):
    dtype = list(DTYPES)[place]
    row = contract.load("ws1", HERE).resolve(metric, "*", dtype)
    published, limits = AGGREGATES[metric]
    clip = {"low": 0.8, "high": 1.2} if metric == "clip_fraction" else {}
    assert dict(row.limits) == {"max": limits[place], **clip} and row.status == STATUS[dtype]
    assert row.published_id == f"{published}.{DTYPES[dtype]}"


@pytest.mark.parametrize("name", ["ws1", "strict"])
@pytest.mark.parametrize("judgment", INVARIANCES)
def test_invariance_allows_no_bit_in_any_class(name, judgment):
    made = contract.load(name, HERE)
    for dtype, long in DTYPES.items():
        for subject in CLASSES:
            row = made.resolve(judgment, subject, dtype)
            assert dict(row.limits) == {"differing_elements": 0} and row.status == STATUS[dtype]
            assert row.published_id == (f"{judgment}.*.{long}" if name == "ws1" else None)


def test_ws1_has_these_rows_and_no_other():
    rows = contract.load("ws1", HERE).rows
    accuracy = {(j, s, d) for j, s in PUBLISHED for d in (*DTYPES, "fp8")}
    others = {(j, "*", d) for j in (*INVARIANCES, *AGGREGATES) for d in (*DTYPES, "fp8")}
    measured = {("mean_abs_dlogp", "*", "*"), ("sequence_outliers", "*", "*")}
    wholes = {(judgment, "chain") for judgment in ("forward_accuracy", "gradient_accuracy")}
    ours = {(judgment, subject, d) for judgment, subject in wholes for d in ("bf16", "fp32")} | {("kv_cache", "*", "*")}
    ours |= {(judgment, "*", d) for judgment in STATEFUL[:2] for d in ("bf16", "fp32")}
    ours |= {(judgment, "*", "fp8") for judgment in STATEFUL}
    assert {(row.judgment, row.subject, row.dtype) for row in rows} == accuracy | others | measured | ours
    assert {(row.judgment, row.subject, row.dtype) for row in rows if row.status == "measured"} == measured
    assert all(row.source.startswith("RL-Kernel, tolerance contract ws1-c1-v2") for row in rows if row.published_id)
    assert len({row.published_id for row in rows if row.published_id}) == len(rows) - len(measured | ours)


def test_limits_fitted_to_the_system_they_judge_say_so():
    made = contract.load("ws1", HERE)
    for key, figure in {
        ("forward_accuracy", "logprob", "bf16"): "0.05064",
        ("gradient_accuracy", "reduction", "bf16"): "0.0978",
        ("max_abs_dlogp", "*", "bf16"): "0.05064",
    }.items():
        reason = made.resolve(*key).reason
        assert figure in reason and "system" in reason, key


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(("judgment", "subject"), STRICT)
def test_strict_accuracy(judgment, subject, place):
    dtype = list(DTYPES)[place]
    row = contract.load("strict", HERE).resolve(judgment, subject, dtype)
    ratio, relative = STRICT[judgment, subject]
    assert row.id == f"strict/{judgment}/{subject}/{dtype}" and row.status == STATUS[dtype]
    assert dict(row.limits) == {"baseline_ratio": ratio, "relative_rms": relative[place]}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("metric", STRICT_PARITY)
def test_strict_parity(metric, place):
    dtype = list(DTYPES)[place]
    row = contract.load("strict", HERE).resolve(metric, "*", dtype)
    clip = {"low": 0.8, "high": 1.2} if metric == "clip_fraction" else {}
    assert dict(row.limits) == {"max": STRICT_PARITY[metric][place], **clip} and row.status == STATUS[dtype]


def test_only_strict_makes_a_limit_that_zeros_pass_an_error():
    assert contract.load("strict", HERE).cannot_fail == "error"
    assert {contract.load(name, HERE).cannot_fail for name in ("training", "ws1")} == {"note"}


@pytest.mark.parametrize("name", ["ws1", "strict"])
def test_fp8_is_out_of_scope_everywhere(name):
    made = contract.load(name, HERE)
    gated = {row.judgment for row in made.rows if row.status != "measured"}
    assert gated >= {*INVARIANCES, "forward_accuracy", "gradient_accuracy", *AGGREGATES}
    for judgment in gated:
        for subject in CLASSES:
            row = made.resolve(judgment, subject, "float8_e5m2")
            assert row.status == "out_of_scope" and not row.limits and row.dtype == "fp8"
            with pytest.raises(SpecError, match=r"is out of scope: Out of scope.* limits of another dtype"):
                contract.limits_of(row)


@pytest.mark.parametrize("name", ["training", "ws1", "strict"])
def test_every_shipped_row_can_be_held_against_numbers(name):
    assert {contract.limits_problem(row) for row in contract.load(name, HERE).rows} == {None}


def test_an_unknown_operator_class_has_no_row():
    with pytest.raises(SpecError, match="/reductoin/bf16; did you mean 'reduction/bf16'"):
        contract.load("ws1", HERE).resolve("forward_accuracy", "reductoin", "bf16")


BROKEN = [
    ("forward_accuracy", {"atol": 1e-2}, "limits atol and rtol, or baseline_ratio"),
    ("forward_accuracy", {"rtol": 1e-2}, "limits atol and rtol, or baseline_ratio"),
    ("gradient_accuracy", {"baseline_ratio": 2}, "limits atol and rtol, or baseline_ratio"),
    ("gradient_accuracy", {"relative_rms": 0.1}, "limits atol and rtol, or baseline_ratio"),
    ("forward_accuracy", {"max": 1}, "limits atol and rtol, or baseline_ratio"),
    ("forward_accuracy", {}, "limits atol and rtol, or baseline_ratio"),
    ("gradient_accuracy", {"atol": 1e-2, "rtol": 0, "relative_rms": 0.1}, "and no other"),
    ("gradient_accuracy", {"baseline_ratio": 2, "relative_rms": 0.1, "max": 1}, "and no other"),
    ("forward_accuracy", {"atol": 0, "rtol": 0}, "not both 0"),
    ("forward_accuracy", {"atol": -1e-3, "rtol": 1e-2}, "atol ≥ 0"),
    ("forward_accuracy", {"atol": 1e-3, "rtol": -1e-2}, "0 ≤ rtol"),
    ("forward_accuracy", {"atol": 1e-3, "rtol": 1}, "rtol < 1"),
    ("forward_accuracy", {"baseline_ratio": 0.9, "relative_rms": 0.1}, "baseline_ratio ≥ 1"),
    ("forward_accuracy", {"baseline_ratio": 2, "relative_rms": 0}, "0 < relative_rms"),
    ("forward_accuracy", {"baseline_ratio": 2, "relative_rms": 1}, "relative_rms < 1"),
    ("forward_invariance", {"differing_elements": 1}, "differing_elements 0"),
    ("gradient_invariance", {"differing_elements": 1e-9}, "differing_elements 0"),
    ("forward_invariance", {"max": 0}, "differing_elements 0"),
    ("gradient_invariance", {"differing_elements": 0, "atol": 0}, "differing_elements 0"),
    ("gradient_invariance", {}, "differing_elements 0"),
]
ENDLESS = [
    ("forward_accuracy", {"atol": float("inf"), "rtol": 0}, "atol ≥ 0"),
    ("forward_accuracy", {"atol": float("nan"), "rtol": 0.1}, "atol ≥ 0"),
    ("forward_accuracy", {"baseline_ratio": float("inf"), "relative_rms": 0.1}, "baseline_ratio ≥ 1"),
    ("forward_accuracy", {"baseline_ratio": 2, "relative_rms": float("nan")}, "0 < relative_rms"),
    ("forward_invariance", {"differing_elements": float("nan")}, "differing_elements 0"),
]


@pytest.mark.parametrize("status", ["applicable", "optional"])
@pytest.mark.parametrize(("judgment", "limits", "words"), BROKEN + ENDLESS)
def test_a_row_without_violable_limits_does_not_resolve(judgment, limits, words, status):
    rows = made({"judgment": judgment, "dtype": "bf16", "status": status, "limits": limits})
    with pytest.raises(SpecError, match=f"c/{judgment}/./bf16 needs .*{words}"):
        rows.resolve(judgment, "reduction", "bf16")
    with pytest.raises(SpecError, match=words):
        contract.limits_of(rows.rows[0])


@pytest.mark.parametrize(("judgment", "limits", "words"), BROKEN)
def test_nor_does_it_load(tmp_path, judgment, limits, words):
    text = ", ".join(f"{key}: {value:g}" for key, value in limits.items())
    path = written(tmp_path, f"judgment: {judgment}", f"limits: {{{text}}}")
    with pytest.raises(SpecError, match=r"own\.yaml:\d+:\d+: RL10"):
        contract.load("own", tmp_path)
    assert linting.lint([path])[1]


@pytest.mark.parametrize(
    ("judgment", "limits"),
    [
        ("forward_accuracy", {"atol": 1e-5, "rtol": 0}),
        ("forward_accuracy", {"atol": 0, "rtol": 1e-2}),
        ("gradient_accuracy", {"baseline_ratio": 1, "relative_rms": 0.5}),
        ("gradient_invariance", {"differing_elements": 0}),
    ],
)
def test_limits_that_can_be_violated_load_and_resolve(tmp_path, judgment, limits):
    text = ", ".join(f"{key}: {value:g}" for key, value in limits.items())
    written(tmp_path, f"judgment: {judgment}", f"limits: {{{text}}}")
    row = contract.load("own", tmp_path).resolve(judgment, "attention", "bf16")
    assert contract.limits_of(row) == limits


def test_limits_of_a_row_that_has_none_to_give():
    row = made({"judgment": "forward_accuracy", "status": "not_applicable", "reason": "a helper of layout"}).rows[0]
    with pytest.raises(SpecError, match="c/forward_accuracy/./. is not applicable: a helper of layout"):
        contract.limits_of(row)
    assert contract.limits_of(made({"judgment": "step_time", "status": "measured"}).rows[0]) == {}


def test_cannot_fail_is_read_and_closed(tmp_path):
    written(tmp_path, "judgment: j", "limits: {max: 1}", top="cannot_fail: error")
    assert contract.load("own", tmp_path).cannot_fail == "error"
    written(tmp_path, "judgment: j", "limits: {max: 1}")
    assert contract.load("own", tmp_path).cannot_fail == "note"
    written(tmp_path, "judgment: j", "limits: {max: 1}", top="cannot_fail: never")
    with pytest.raises(SpecError, match="RL104 cannot_fail: unknown 'never'"):
        contract.load("own", tmp_path)
    with pytest.raises(SpecError, match="contract c: unknown cannot_fail 'never'"):
        contract.from_rows("c", [], "never")


def test_cannot_fail_is_part_of_the_digest_where_it_is_an_error():
    rows = [{**BASE, "judgment": "j", "limits": {"max": 1}}]
    plain = contract.from_rows("c", rows)
    # Of a contract of before the key existed: runs of then must go on being judged.
    assert plain.digest == "07a3e4d825c182837b334b6f8ca3682daa36aa90f79cff613bb46e294bd6215b"
    assert contract.from_rows("c", rows, "note") == plain
    assert contract.from_rows("c", rows, "error").digest != plain.digest


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "fp32": "fp32 FP32 float32 torch.float32 float",
        "bf16": "bf16 bfloat16 BFloat16 torch.bfloat16",
        "fp16": "fp16 float16 torch.float16 half",
        "fp8": "fp8 float8 float8_e4m3fn torch.float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu fp8_e4m3",
        "*": "*",
    }.items(),
)
def test_names_of_a_dtype(name, words):
    assert {contract.dtype_name(word) for word in words.split()} == {name}


@pytest.mark.parametrize("name", ["", "int8", "float64", "fp4", "fp80", "torch", "tf32", "bf16 "])
def test_unknown_dtypes_are_not_guessed(name):
    with pytest.raises(SpecError, match="unknown dtype .* known: bf16, fp16, fp32, fp8"):
        contract.dtype_name(name)
    with pytest.raises(SpecError, match="unknown dtype"):
        made({"judgment": "j", "limits": {"max": 1}}).resolve("j", "*", name)


def test_resolve_takes_any_name_of_a_dtype():
    rows = made({"judgment": "j", "dtype": "bf16", "limits": {"max": 1}})
    assert rows.resolve("j", "*", "torch.bfloat16") is rows.resolve("j", "*", "bf16")


@pytest.mark.parametrize("name", ["training", "ws1", "strict", "det_gemm", "mllog", "qwen3-8b", "ws1-chain"])
def test_explain_fits_80_columns(name):
    assert [line for line in listing.explain(name, HERE).splitlines() if len(line) > 80] == []


def test_explain_a_row():
    assert listing.explain("ws1/forward_accuracy/reduction/bf16", HERE).splitlines()[:5] == [
        "ws1/forward_accuracy/reduction/bf16: applicable",
        "  limits: atol 0.05, rtol 0.02",
        "  published as forward_accuracy.reduction.bfloat16",
        "  source: RL-Kernel, tolerance contract ws1-c1-v2 (RL-Align/RL-Kernel#315)",
        "  date: 2026-11-29",
    ]
    assert listing.explain("strict/forward_accuracy", HERE).count("source:") == 15


def test_explain_what_lists_name():
    assert listing.explain("qwen3-8b", HERE) == "qwen3-8b, of `rlspec list models`: dense; 36 layers, hidden 4096"


def test_list_tells_what_zeros_get():
    lines = {line.split()[0]: line for line in listing.table("contracts", HERE).splitlines()}
    assert lines["strict"].endswith("a limit that zeros pass is an ERROR") and "ERROR" not in lines["ws1"]


def test_unknown_contract():
    with pytest.raises(SpecError, match="did you mean 'training'"):
        contract.load("trainig", HERE)
