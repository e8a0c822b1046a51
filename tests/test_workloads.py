from __future__ import annotations

import copy

import pytest

from rlspec import layouts, nodes, workloads
from tests import benches


def tier_of(name, tier):
    return next(one for one in benches.shipped(name).tiers if one.name == tier)


# The workload of the first closeout, as published


def test_ws1_has_59_tokens_of_which_27_are_active():
    primary = tier_of("ws1", "primary")
    assert primary.tokens == 59 and primary.active == 27
    assert [(s.id, s.length, s.prompt, s.active) for s in primary.samples] == [
        ("s0", 11, 8, 3),
        ("s1", 16, 8, 8),
        ("s2", 13, 8, 5),
        ("s3", 19, 8, 11),
    ]


def test_ws1_tokens_pads_and_order_are_as_published():
    made = benches.shipped("ws1")
    tokens = {sample.id: sample.tokens for tier in made.tiers for sample in tier.samples}
    assert tokens["s0"] == (*range(100, 108), *range(200, 203)) and tokens["s3"][-1] == 240
    assert tokens["short"] == (*range(310, 314), *range(410, 414)) and tokens["long"][16] == 600
    assert made.pad_token == 151643 and made.fill == "published"
    primary = tier_of("ws1", "primary")
    assert primary.permutation == (2, 0, 3, 1) and primary.chunk == 7 and primary.padded_length == 20
    assert {tier.seed for tier in made.tiers} == {20260812}


def test_ws1_has_thirteen_configurations_in_its_primary_tier():
    primary = tier_of("ws1", "primary")
    names = [name for one in layouts.of(primary) for name, _ in layouts.configurations(one, primary)]
    samples = ("s0", "s1", "s2", "s3")
    assert names == [
        "BN/full",
        "BN/chunked",
        *(f"B1/full/{sample}" for sample in samples),
        *(f"B1/chunked/{sample}" for sample in samples),
        "BN/permuted",
        "BN/padded_right",
        "BN/padded_left",
    ]


def test_ws1_has_192_cells_for_two_implementations_of_which_16_are_not_applicable():
    made = benches.shipped("ws1")
    cells = [
        operator
        for operator in made.operators
        for tier in nodes.tiers(operator, made.tiers)
        for _ in nodes.judged(tier, nodes.JUDGMENTS)
        if tier.counted
    ]
    assert len(made.operators) == 12 and 2 * len(cells) == 192
    assert 2 * sum(bool(nodes.NODES[operator].not_applicable) for operator in cells) == 16


def test_ws1_names_what_the_short_tier_leaves_out():
    left_out = dict(tier_of("ws1", "short").left_out)
    assert set(left_out) == {"singletons", "singletons_chunked", "permuted"} and all(left_out.values())


# The workload that rlspec trusts


def test_wide_reaches_tile_edges_long_keys_and_large_batches():
    made = benches.shipped("wide")
    lengths = {sample.queries for tier in made.tiers for sample in tier.samples}
    assert lengths >= {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 4096}
    keys = {keys for sample in tier_of("wide", "decode").samples for keys in range(sample.first + 1, sample.length + 1)}
    assert keys >= {*range(1, 258), 1000, 1025, 4096, 32768}
    assert tier_of("wide", "edges").active >= 1000 and len(tier_of("wide", "batch").samples) > 16
    assert len({tier.seed for tier in made.tiers}) == 4 and tier_of("wide", "edges").logit_scales == (1, 16, 64)


def test_wide_moe_has_experts_without_rows_and_with_most_and_ties():
    made = benches.shipped("wide-moe")
    lengths = {sample.queries for tier in made.tiers for sample in tier.samples}
    assert lengths >= {1, 2, 15, 16, 17, 63, 64, 65, 129, 1000, 4096} and len(tier_of("wide-moe", "batch").samples) > 16
    assert tier_of("wide-moe", "edges").active >= 1000
    assert all({"even", "skewed", "tied"} <= set(tier.routings) for tier in made.tiers)
    assert made.operators == ("router", "grouped_gemm", "combine")


def test_wide_asks_for_every_layout_but_company():
    asked = {name for tier in benches.shipped("wide").tiers for name in tier.layouts}
    assert asked == set(layouts.LAYOUTS) - {"packed_with"}


# Reading


def test_queries_stand_at_the_end_of_their_keys():
    changed = benches.data()
    changed["samples"][0] |= {"queries": 2}
    sample = workloads.of(changed).tiers[0].samples[0]
    assert (sample.first, sample.queries, sample.active) == (4, 2, 2)


def test_a_tier_has_the_defaults_of_its_workload():
    (tier,) = workloads.of(benches.data(operators=("rope", "silu"))).tiers
    assert (tier.seed, tier.operators, tier.counted, tier.logit_scales) == (7, ("rope", "silu"), True, (1.0,))


def test_company_does_not_count():
    tier = benches.tier(company=["t3"], layouts=["packed_with"])
    assert tier.tokens == 11 and tier.active == 8 and [s.id for s in tier.company] == ["t3"]


def edited(*path, value):
    changed = copy.deepcopy(benches.data())
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (edited("samples", 1, "id", value="t0"), "two samples have one id"),
        (edited("samples", 0, "prompt", value=6), "sample t0: prompt 6 leaves no active token of 6"),
        (edited("samples", 0, "tokens", value=[[1, 5]]), "sample t0: 5 token ids for 6 positions"),
        (edited("tiers", 0, "samples", value=["t0", "t9"]), "tier one: there is no sample 't9'; known: t0, t1"),
        (edited("tiers", 0, "samples", value=["t0", "t0"]), "tier one: a sample stands twice"),
        (edited("tiers", value=[*benches.data()["tiers"]] * 2), "two tiers have one name"),
    ],
)
def test_what_does_not_fit_together_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        workloads.of(changed)


def test_any_edit_changes_the_digest_and_the_order_of_keys_does_not():
    plain = benches.data()
    assert workloads.digest(dict(reversed(plain.items()))) == workloads.digest(plain) == workloads.of(plain).digest
    for changed in (
        edited("samples", 0, "length", value=7),
        edited("tiers", 0, "chunk", value=3),
        {**plain, "seed": 8},
    ):
        assert workloads.digest(changed) != workloads.digest(plain)
