"""What a chain spec asks: cells, executions, comparisons, from workload and model alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlspec import architecture, catalog, chain_sizes, chains, layouts, workloads

SPECS = Path(__file__).parents[1] / "specs"
PUBLISHED = ("BN/full", "B1/full", "BN/chunked", "B1/chunked", "BN/padded_right", "BN/padded_left", "BN/permuted")


def chain(name="ws1-chain", **changes):
    data = catalog.workload(name, SPECS)
    return workloads.of({**data, "chain": {**data["chain"], **changes}}).chain


def sizes(name="qwen3-8b", **changes):
    return chain_sizes.of({**catalog.model(name, SPECS), **changes})


SPARSE = {
    "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip


def test_experts_are_counted_however_the_config_spells_them(tmp_path):
    """transformers 5 writes num_local_experts; read as dense, a model would be judged without its router."""
    one, other = ({**SPARSE, key: 8} for key in ("num_experts", "num_local_experts"))
    made = chain_sizes.of(other)
    assert made == chain_sizes.of(one) == architecture.read(other) and made.num_experts == 8
    assert "router" in chains.operators(made, "ws1")
    assert "model.layers.1.mlp.experts.down_proj" in {line.tensor for line in chains.expected(
        chain(), made, ["gradient_accuracy"])}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(other))
    assert catalog.model("./config.json", tmp_path)["experts"] == {"count": 8}
    for key in ("num_experts", "num_local_experts"):
        (tmp_path / "config.json").write_text(json.dumps({**SPARSE, "model_type": "qwen3", key: 0}))
        assert "experts" not in catalog.model("./config.json", tmp_path)


def test_qwen3_8b_has_399_gradients_and_the_published_number_of_rows():
    due = list(chains.expected(chain(), sizes(), chains.JUDGMENTS))
    assert len(sizes().parameter_shapes()) == 399
    count = {name: sum(one.judgment == name for one in due) for name in chains.JUDGMENTS}
    assert count["forward_invariance"] == 7 and count["gradient_invariance"] == 8 * 399
    assert count["gradient_accuracy"] == 2 * 399 and count["forward_accuracy"] == 2
    assert len({(one.judgment, one.configuration, one.tensor, one.against) for one in due}) == len(due)


def test_ws1_has_its_six_decode_cases():
    assert [(case.name, [s.length for s in case.samples], case.width, case.left) for case in chain().decode] == [
        ("b1-short", [8], 8, False),
        ("b1-long", [32], 32, False),
        ("bn-varlen", [11, 16, 13, 19], 19, False),
        ("bn-padded-right", [11, 16, 13, 19], 20, False),
        ("bn-padded-left", [11, 16, 13, 19], 20, True),
        ("b1-primary-s3", [19], 19, False),
    ]


def test_the_samples_of_ws1_chain_are_those_of_ws1():
    ours, theirs = (catalog.workload(name, SPECS) for name in ("ws1-chain", "ws1"))
    assert all(ours[key] == theirs[key] for key in ("samples", "seed", "pad_token", "fill"))
    assert {key: ours["tiers"][0][key] for key in ("chunk", "padded_length", "permutation")} == {
        "chunk": 7, "padded_length": 20, "permutation": [2, 0, 3, 1],
    }  # fmt: skip


def test_the_long_workload_is_long():
    made = chain("long")
    lengths = [sample.length for sample in made.tier.samples]
    assert len(lengths) == 4 and min(lengths) == 512 and max(lengths) == 2048 and made.tier.active >= 1000
    assert made.tier.chunk == 509 and made.loss_weights == "logical"
    assert all(len(case.positions) == 64 for case in made.decode)
    assert {63, 64, 65, 508, 509, 511, 512, 513, 1023, 1024, 1536} <= set(made.decode[0].positions)


# Cells


@pytest.mark.parametrize(("name", "more"), [("ws1-chain", []), ("long", []), ("tiny-chain", ["B1/tokens"])])
def test_nine_cells_of_nine_layouts_that_restore(name, more):
    made = chain(name)
    found = chains.cells(made)
    assert [cell.name for cell in found] == [*PUBLISHED, "BN/packed", "BN/micro_batches", *more]
    assert len({cell.digest for cell in found}) == 9 + len(more)
    for cell in found:
        assert len(layouts.restore(cell.layout, made.tier)) == made.tier.tokens


def test_training_meets_a_chunk_of_a_single_token():
    """Kernels take another way for one token, and a backward that is wrong there alone shows nowhere else.

    The single token that a larger chunk leaves is the last one of a sample, which has no gradient.
    """
    cells = {cell.name: cell for cell in chains.cells(chain("tiny-chain"))}
    assert {call.rows for call in cells["B1/tokens"].layout.calls} == {cells["B1/tokens"].chunk} == {1}
    for name in ("B1/chunked", "BN/chunked"):
        assert 1 in {call.width % cells[name].chunk for call in cells[name].layout.calls}


def test_grids_are_those_of_a_trainer():
    grids = {c.name: [(call.rows, call.width) for call in c.layout.calls] for c in chains.cells(chain())}
    assert grids["BN/full"] == grids["BN/permuted"] == grids["BN/chunked"] == [(4, 19)]
    assert grids["BN/padded_right"] == grids["BN/padded_left"] == [(4, 20)] and grids["BN/packed"] == [(1, 59)]
    assert grids["B1/full"] == [(1, 11), (1, 16), (1, 13), (1, 19)]
    assert grids["BN/micro_batches"] == [(1, 11), (2, 16), (1, 19)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"micro_batches": [["s0"], ["s2", "s1"], ["s3"]]}, "in order"),
        ({"micro_batches": [["s0"], ["s1", "s2"]]}, "in order"),
        ({"micro_batches": [["s0", "s1", "s2", "s3"]]}, "are the same layout"),
    ],
)
def test_micro_batches_that_are_none(changes, reason):
    with pytest.raises(ValueError, match=reason):
        chains.cells(chain(**changes))


def test_a_cell_that_would_be_compared_with_itself():
    made = chain()
    with pytest.raises(ValueError, match="without pads"):
        chains.cells(replace(made, tier=replace(made.tier, padded_length=19)))
    with pytest.raises(ValueError, match="splits no sample"):
        chains.cells(replace(made, tier=replace(made.tier, chunk=19)))
    with pytest.raises(ValueError, match="no permutation"):
        chains.cells(replace(made, tier=replace(made.tier, permutation=(0, 0, 1, 2))))
    with pytest.raises(ValueError, match="same layout"):
        chains.cells(replace(made, tier=replace(made.tier, permutation=(0, 1, 2, 3))))


def test_a_workload_without_decode_cases():
    with pytest.raises(ValueError, match="no part `chain:`"):
        chains.asked(workloads.of(catalog.workload("ws1", SPECS)))


# Inference


def test_every_column_is_in_one_call():
    for name in ("ws1-chain", "long", "tiny-chain"):
        for case in chain(name).decode:
            pieces = chains.columns(case)
            assert pieces[0][0] == 0 and pieces[-1][1] == case.width
            assert all(before[1] == after[0] for before, after in zip(pieces, pieces[1:], strict=False))
            single = {start for start, stop in pieces if stop == start + 1}
            for index, positions in chains.decoded(case):
                shift = case.width - case.samples[index].length if case.left else 0
                assert {position + shift for position in positions} <= single


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"decode": [{"name": "a", "samples": ["s3"]}, {"name": "b", "samples": ["s3"], "positions": [0]}]}, "case b"),
        ({"page_size": 8}, "page_size 8: no decoded position of case b1-short lies behind the first page"),
        (
            {"decode": [{"name": "a", "samples": ["s3"], "positions": [1, 40]}]},
            "no sample has position 40, the longest has 19",
        ),
        ({"page_size": 19, "decode": [{"name": "a", "samples": ["long"]}]}, "longest sample of tier primary has 19"),
    ],
)
def test_a_workload_that_reads_nothing_back_from_a_cache(changes, reason):
    with pytest.raises(ValueError, match=reason):
        chains.check_reads(chain(**changes))


@pytest.mark.parametrize("name", ["ws1-chain", "long", "tiny-chain"])
def test_shipped_workloads_read_a_second_page(name):
    chains.check_reads(chain(name))


def test_generation_prefills_the_prompt_and_decodes_the_rest():
    made = chain()
    assert chains.generation(made, [made.tier.samples[0]]) == [(0, 8), (8, 9), (9, 10), (10, 11)]
    assert chains.generation(made, [made.tier.samples[0]], chunk=7)[:2] == [(0, 7), (7, 8)]
    assert chains.generation(made, made.tier.samples)[-1] == (18, 19)
    long = chain("long")
    assert chains.generation(long, [long.tier.samples[0]])[-3:] == [(158, 159), (159, 160), (160, 768)]
    cut = chains.generation(long, [long.tier.samples[3]], chunk=100)
    assert cut[:4] == [(0, 100), (100, 200), (200, 256), (256, 257)]


def test_prefixes_end_at_the_first_token_the_prompt_and_around_edges():
    made = chain()
    s3 = made.decode[-1]
    assert chains.prefixes(made, s3) == [(0, 1), (0, 8), (0, 15), (0, 16), (0, 17)]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"name": "a", "samples": ["s3"], "width": 18}, "does not hold"),
        ({"name": "a", "samples": ["s3"], "positions": [3, 2]}, "do not ascend"),
        ({"name": "a", "samples": ["s3"], "positions": [19]}, "no sample has them"),
        ({"name": "a", "samples": ["nobody"]}, "there is no sample 'nobody'"),
    ],
)
def test_decode_cases_that_are_none(case, reason):
    with pytest.raises(ValueError, match=reason):
        chain(decode=[case])
