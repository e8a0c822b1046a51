from __future__ import annotations

from dataclasses import replace

import pytest

from rlspec import layouts
from rlspec.layouts import CANONICAL, Call, Layout, Run
from tests import benches

TIERS = [(name, tier) for name in benches.SHIPPED for tier in benches.shipped(name).tiers]
PRIMARY = next(tier for name, tier in TIERS if (name, tier.name) == ("ws1", "primary"))
EVERY = tuple(name for name in layouts.LAYOUTS if name not in ("packed_with", "groups_of_16"))


def every():
    return layouts.of(benches.tier(layouts=EVERY))


def widths(name, of=PRIMARY):
    return [call.width for call in benches.layout(name, of).calls]


# What each layout is


def test_a_full_batch_is_one_call_of_all_tokens_and_no_pad():
    (call,) = benches.layout(CANONICAL, PRIMARY).calls
    assert (call.rows, call.width) == (1, 59) and [run[:3] for run in call.runs] == [
        (0, 0, 11),
        (1, 0, 16),
        (2, 0, 13),
        (3, 0, 19),
    ]


def test_chunks_split_every_sample_that_is_longer():
    assert widths("BN/chunked") == [28, 24, 7]
    assert widths("B1/chunked") == [7, 4, 7, 7, 2, 7, 6, 7, 7, 5]
    first, second, _ = benches.layout("BN/chunked", PRIMARY).calls
    assert [run.length for run in second.runs] == [4, 7, 6, 7] and first.runs[3].position == 0
    assert [(run.position, run.length) for run in second.key_runs] == [(0, 11), (0, 14), (0, 13), (0, 14)]


def test_singletons_are_a_call_each():
    assert widths("B1/full") == [11, 16, 13, 19]


def test_pads_reach_the_operator_on_their_side():
    for name, end in (("BN/padded_right", False), ("BN/padded_left", True)):
        (call,) = benches.layout(name, PRIMARY).calls
        assert (call.rows, call.width, call.key_width) == (4, 20, 20) and call.slots - 59 == 21
        assert [run.column for run in call.runs] == ([9, 4, 7, 1] if end else [0, 0, 0, 0])


def test_pads_have_another_amount_and_value():
    made = {one.name: one for one in every()}
    (right,), (more,), (nan,) = (made[f"BN/padded_{name}"].calls for name in ("right", "more", "nan"))
    assert right.width < nan.width < more.width
    assert [made[f"BN/padded_{name}"].pads for name in ("right", "more", "nan")] == ["zero", "large", "nan"]


def test_permuted_samples_stand_elsewhere():
    (call,) = benches.layout("BN/permuted", PRIMARY).calls
    assert [run.sample for run in call.runs] == [2, 0, 3, 1] and [run.column for run in call.runs] == [0, 13, 24, 43]


def test_company_stands_before_the_judged_samples():
    short = next(tier for name, tier in TIERS if (name, tier.name) == ("ws1", "short"))
    (call,) = benches.layout("BN/packed", short).calls
    assert call.width == 67 and [run.sample for run in call.runs] == [1, 2, 3, 4, 0]


def test_each_sample_is_judged_beside_changed_neighbours_once():
    beside = layouts.LAYOUTS["neighbours"](PRIMARY)
    first, second = beside.calls
    assert first.changed == (1, 3) and second.changed == (0, 2) and first.runs == second.runs
    assert {call for call, _ in layouts.restore(beside, PRIMARY).values()} == {0, 1}


def test_groups():
    assert [len(call.runs) for call in layouts.LAYOUTS["groups_of_2"](benches.tier()).calls] == [2, 1]


def test_decode_is_a_query_a_call_against_all_keys_before_it():
    calls = layouts.LAYOUTS["decode"](benches.tier()).calls
    assert len(calls) == 11 and {call.slots for call in calls} == {1}
    assert [call.key_width for call in calls] == [1, 2, 3, 4, 5, 6, 1, 1, 2, 3, 4]


def test_batched_decode_drops_samples_that_have_ended():
    calls = layouts.LAYOUTS["batched_decode"](benches.tier()).calls
    assert [call.rows for call in calls] == [3, 2, 2, 2, 1, 1] and calls[3].key_width == 4


# Guards


@pytest.mark.parametrize(("name", "tier"), TIERS, ids=lambda one: one if isinstance(one, str) else one.name)
def test_every_shipped_layout_restores_and_is_one_of_its_kind(name, tier):
    made = layouts.of(tier)
    assert [one.name for one in made].count(CANONICAL) == 1 and made[0].name == CANONICAL
    assert len({one.name for one in made}) == len({one.digest for one in made}) == len(made) == len(tier.layouts) + 1
    for one in made:
        found = layouts.restore(one, tier)
        assert len(found) == len(set(found.values())) == tier.tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layouts": ["permuted"], "permutation": [0, 1, 2]}, "BN/permuted and BN/full are the same layout"),
        ({"layouts": ["chunked", "chunked"]}, "BN/chunked and BN/chunked are the same layout"),
        ({"layouts": ["chunked", "decode"], "samples": ["t0"], "chunk": 1}, "B1/decode and BN/chunked are the same"),
        ({"layouts": ["permuted"], "permutation": [0, 1, 1]}, "is no permutation of its samples"),
        ({"layouts": ["permuted"], "samples": ["t0"]}, "permutation of a single sample is the canonical layout"),
        ({"layouts": ["singletons"], "samples": ["t0"]}, "singletons of a single sample is the canonical"),
        ({"layouts": ["singletons_chunked"], "samples": ["t0"]}, "singletons of a single sample is the canonical"),
        ({"layouts": ["neighbours"], "samples": ["t0"]}, "changed neighbours of a single sample"),
        ({"layouts": ["chunked"], "chunk": 6}, "chunk 6 splits no sample"),
        ({"layouts": ["chunked"], "chunk": 0}, "chunk 0 splits no sample"),
        ({"layouts": ["singletons_chunked"], "chunk": 7}, "chunk 7 splits no sample"),
        ({"layouts": ["padded_right"], "padded_length": 6}, "leaves the longest sample, 6, without pads"),
        ({"layouts": ["padded_left"], "padded_length": 0}, "leaves the longest sample, 6, without pads"),
        ({"layouts": ["groups_of_16"]}, "groups of 16 are the canonical layout"),
        ({"layouts": ["packed_with"]}, "packed_with needs company"),
        ({"layouts": ["shuffled"]}, "unknown layout 'shuffled'; known: chunked"),
    ],
)
def test_a_layout_that_would_change_nothing_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        layouts.of(benches.tier(**changes))


def by_hand(*calls):
    return Layout(name="L", calls=calls)


def grid(*runs, rows=1, width=11, changed=()):
    return Call(rows=rows, width=width, runs=runs, key_width=width, key_runs=runs, changed=changed)


WHOLE = (Run(0, 0, 6, 0, 0), Run(1, 0, 1, 0, 6), Run(2, 0, 4, 0, 7))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (by_hand(grid(*WHOLE, width=10)), "does not lie in 1 × 10 slots"),
        (by_hand(grid(Run(0, 0, 6, 1, 0), *WHOLE[1:])), "does not lie in 1 × 11 slots"),
        (by_hand(grid(*WHOLE[:2], Run(2, 0, 4, 0, 6))), "two tokens in slot 6 of call 0"),
        (by_hand(grid(*WHOLE), grid(WHOLE[1])), "sample 1 position 0 stands twice"),
        (by_hand(grid(*WHOLE[:2])), "sample 2 position 0 is missing"),
        (by_hand(grid(*WHOLE[:2], Run(2, 0, 3, 0, 7))), "sample 2 position 3 is missing"),
        (by_hand(grid(*WHOLE[:2], Run(2, 1, 4, 0, 7))), "sample 2 position 0 is missing"),
        (by_hand(grid(*WHOLE, Run(2, 4, 1, 0, 11), width=12)), "sample 2 position 4 is missing or none of the tier"),
        (by_hand(grid(*WHOLE, changed=(1,))), "sample 1 position 0 is missing"),
    ],
)
def test_restoring_refuses(layout, message):
    with pytest.raises(ValueError, match=message):
        layouts.restore(layout, benches.tier())


def test_restoring_tells_call_and_slot():
    found = layouts.restore(by_hand(grid(*WHOLE[:1], width=6), grid(*(r._replace(column=9) for r in WHOLE[1:2]),
                                    Run(2, 0, 4, 1, 2), rows=2, width=10)), benches.tier())  # fmt: skip
    assert found[0, 5] == (0, 5) and found[1, 0] == (1, 9) and found[2, 3] == (1, 15)


# What follows from a layout


def test_only_calls_that_interleave_samples_are_out_of_order():
    made = every()
    assert {one.name for one in made if not one.ordered} == {"BN/chunked", "BN/decode", "BN/neighbours"}


def test_parameters_have_no_gradient_to_compare_beside_changed_neighbours():
    assert {one.name for one in every() if not one.parameters} == {"BN/neighbours"}


def test_the_digest_is_of_everything_but_the_name():
    one = benches.layout(CANONICAL)
    assert replace(one, name="other").digest == one.digest
    for change in ({"how": "strided"}, {"pads": "nan"}, {"split": True}, {"calls": one.calls * 2}):
        assert replace(one, **change).digest != one.digest
