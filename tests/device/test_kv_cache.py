"""Both caches under the canonical operators, whose bits depend on the sample alone, and by themselves."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rlspec import catalog
from rlspec.architecture import read
from rlspec.device import kv_cache
from rlspec.device.decoder import Decoder, Span
from rlspec.device.kv_cache import ContiguousCache, PagedCache
from rlspec.device.operators import Operators
from rlspec.errors import RunError
from tests.kernels.interpreted import gpu, interpreted

MODELS = Path(__file__).parents[2] / "specs/models"
PAGE_SIZES = (1, 4, 16, 512)
KINDS = ("contiguous", *PAGE_SIZES)
LENGTHS = (5, 8, 3)
WIDTH = 9
LAYOUTS = {
    "padded right": [Span(row, 0, length) for row, length in enumerate(LENGTHS)],
    "padded left": [Span(row, WIDTH - length, length) for row, length in enumerate(LENGTHS)],
    "permuted": [Span(row, 1, length) for row, length in zip((2, 0, 1), LENGTHS, strict=True)],
    "packed": [Span(0, 0, 5), Span(1, 1, 8), Span(0, 6, 3)],
}


def architecture(name="tiny-dense"):
    data, problems = catalog.checked("models", MODELS / f"{name}.yaml")
    assert not problems
    return read(data)


def small():
    """A model only for its sizes: 2 layers, 2 key heads of width 16."""
    sizes = {"vocab_size": 7, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 16}
    return read({"model_type": "qwen3", **sizes, "rope_theta": 1e4, "rms_norm_eps": 1e-6})


def make(kind, model, samples=3, positions=16, **options):
    if kind == "contiguous":
        return ContiguousCache(model, samples=samples, positions=positions, **options)
    return PagedCache(model, pages=samples * -(-positions // kind), page_size=kind, **options)


def build(name="tiny-dense", implementation="canonical"):
    """A decoder with weights spread enough that a wrong key would show in the logits."""
    decoder = Decoder(architecture(name), Operators(implementation))
    decoder.initialise(3)
    for parameter in decoder.parameters():
        parameter.requires_grad_(False).mul_(5 if parameter.dim() > 1 else 1)
    return decoder


def ids(length, seed=0):
    return torch.randint(257, (length,), generator=torch.Generator().manual_seed(seed))


def lay(samples, spans):
    """[rows, WIDTH] with the same id in all pads."""
    grid = torch.full((max(span.row for span in spans) + 1, WIDTH), 256)
    for sample, (row, start, length) in zip(samples, spans, strict=True):
        grid[row, start : start + length] = sample
    return grid


def given(x, spans):
    return [x[row, start : start + length] for row, start, length in spans]


def fill(cache, spans, width, seed=0):
    """One call of random keys and values, NaN in the pads -> by sample: what was written, what came back of all.

    Both [layers, 2, positions, heads, head_dim].
    """
    store = getattr(cache, "cache", cache).keys
    generator = torch.Generator().manual_seed(seed)
    shape = (len(store), 2, max(span.row for span in spans) + 1, width, store.shape[2], store.shape[4])
    grids = torch.full(shape, math.nan, dtype=store.dtype)
    for row, start, length in spans:
        part = grids[:, :, row, start : start + length]
        part.copy_(torch.randn(part.shape, generator=generator))
    segments = cache.begin(spans, width)
    back = [torch.stack(cache.extend(layer, *pair)) for layer, pair in enumerate(grids)]
    came = [Span(entry.row, entry.key_start, entry.key_length) for entry in segments.entries]
    return _by_sample(grids, spans), _by_sample(torch.stack(back), came)


def _by_sample(grids, spans):
    return [grids[:, :, row, start : start + length].clone() for row, start, length in spans]


# Through the decoder


@pytest.mark.parametrize(
    ("name", "kind"), [*(("tiny-dense", kind) for kind in KINDS), ("tiny-moe", "contiguous"), ("tiny-moe", 4)]
)
def test_whole_prefill_chunks_and_decode_have_the_same_bits(name, kind):
    decoder, tokens = build(name), torch.stack((ids(8), ids(8, 1)))
    want = decoder(tokens).logits
    for sizes in ([8], [3, 4, 1], [1] * 8):
        cache = make(kind, decoder.architecture)
        cache.open("a", "b")
        got = torch.cat([decoder(piece, cache=cache).logits for piece in tokens.split(sizes, 1)], 1)
        assert torch.equal(got, want)
        assert cache.lengths == {"a": 8, "b": 8} and cache.strays() == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_pads_take_no_position_whatever_the_layout(kind, layout):
    """Prefill in the layout, then two steps of decode, one token a row."""
    decoder, spans = build(), LAYOUTS[layout]
    samples = [ids(length + 2, length) for length in LENGTHS]
    cache = make(kind, decoder.architecture)
    cache.open(*range(3))
    grid = lay([sample[:-2] for sample in samples], spans)
    got = [given(decoder(grid, spans=spans, cache=cache).logits, spans)]
    assert list(cache.lengths.values()) == list(LENGTHS) and cache.strays() == 0
    for step in (-2, -1):
        token = torch.stack([sample[step] for sample in samples])[:, None]
        got.append(list(decoder(token, cache=cache).logits))
    for sample, parts in zip(samples, zip(*got, strict=True), strict=True):
        assert torch.equal(torch.cat(parts), decoder(sample[None]).logits[0])


@pytest.mark.parametrize("kind", KINDS)
def test_samples_enter_and_leave(kind):
    decoder = build()
    a, b, c = (ids(12, seed) for seed in range(3))
    whole = {name: decoder(x[None]).logits[0] for name, x in (("b", b), ("c", c))}
    cache = make(kind, decoder.architecture, samples=2)
    cache.open("a", "b")
    decoder(torch.stack((a[:7], b[:7])), cache=cache)
    cache.close("a")
    cache.open("c")
    # c is packed in front of the next token of b, then each goes on alone, then in one call again
    tokens, spans = torch.cat((c[:5], b[7:8]))[None], [Span(0, 5, 1), Span(0, 0, 5)]
    assert torch.equal(
        decoder(tokens, spans=spans, cache=cache).logits[0], torch.cat((whole["c"][:5], whole["b"][7:8]))
    )
    assert torch.equal(decoder(c[None, 5:9], cache=cache.of("c")).logits[0], whole["c"][5:9])
    assert torch.equal(decoder(b[None, 8:9], cache=cache.of("b")).logits[0], whole["b"][8:9])
    both = decoder(torch.stack((c[9:10], b[9:10])), cache=cache.of("c", "b")).logits
    assert torch.equal(both[0], whole["c"][9:10]) and torch.equal(both[1], whole["b"][9:10])
    assert cache.lengths == {"b": 10, "c": 10} and cache.strays() == 0
    cache.close("b", "c")
    assert cache.keys.isnan().all() and cache.values.isnan().all()


def test_an_operator_that_reads_too_far_is_seen():
    """torch's attention multiplies the values of later keys by 0: NaN shows it, 0 lets it be."""
    decoder, spans = build(implementation="torch"), LAYOUTS["padded right"]
    grid = lay([ids(length) for length in LENGTHS], spans)
    for unwritten, finite in ((math.nan, False), (0.0, True)):
        cache = make("contiguous", decoder.architecture, unwritten=unwritten)
        cache.open(*range(3))
        logits = torch.cat(given(decoder(grid, spans=spans, cache=cache).logits, spans))
        assert bool(logits.isfinite().all()) is finite and cache.strays() == 0


# By themselves


STEP = [Span(row, 0, 1) for row in range(3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_is_what_is_read_and_given(kind, layout, dtype):
    cache, spans = make(kind, small(), dtype=dtype), LAYOUTS[layout]
    cache.open(*range(3))
    first, came = fill(cache, spans, WIDTH)
    assert all(map(torch.equal, came, first))
    second, came = fill(cache, STEP, 1, seed=1)
    for sample, parts in enumerate(zip(first, second, strict=True)):
        whole = torch.cat(parts, 2)
        assert torch.equal(came[sample], whole)
        assert torch.equal(torch.stack([torch.stack(cache.read(layer, sample)) for layer in (0, 1)]), whole)
    assert cache.strays() == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_slots_say_where_each_token_is_stored(kind, layout):
    cache, plain = (make(kind, small(), dtype=torch.float32, backend=backend) for backend in ("cuda", None))
    spans, generator = LAYOUTS[layout], torch.Generator().manual_seed(1)
    for one in (cache, plain):
        one.open(*range(3))
        one.begin(spans, WIDTH)
    for layer in range(2):
        grids = torch.randn(2, max(span.row for span in spans) + 1, WIDTH, 2, 16, generator=generator).unbind()
        keys, values, (block, place) = cache.slots(layer, *grids)
        stored = block >= 0
        assert int(stored.sum()) == sum(LENGTHS)
        for store, grid in ((keys, grids[0]), (values, grids[1])):
            store[block[stored], :, place[stored]] = grid.flatten(0, 1)[stored]
        cache.stored(layer, *grids)
        cache.write(layer, *grids)
        plain.write(layer, *grids)
    assert cache.lengths == plain.lengths and cache.strays() == 0
    assert torch.equal(cache.keys.nan_to_num(7), plain.keys.nan_to_num(7))
    assert torch.equal(cache.values.nan_to_num(7), plain.values.nan_to_num(7))


def test_only_what_was_stored_is_not_written_again(monkeypatch):
    written = []
    monkeypatch.setitem(kv_cache._WRITERS, "cuda", lambda pairs, table: written.append(pairs))
    cache = make("contiguous", small(), backend="cuda")
    cache.open(0)

    def after(change):
        written.clear()
        cache.of(0).begin([Span(0, 0, 1)], 1)
        for layer in range(2):
            keys, values = pair(1, 1, 2, 16)
            cache.stored(layer, keys, values)
            keys, values = change(keys, values)
            cache.write(layer, keys, values)
        return len(written)

    assert after(lambda keys, values: (keys, values)) == 0
    for change in (
        lambda keys, values: (keys.mul_(2), values),
        lambda keys, values: (keys, values.add_(1)),
        lambda keys, values: (keys.clone(), values),
        lambda keys, values: (values, keys),
    ):
        assert after(change) == 2


def test_no_slots_where_a_write_would_do_otherwise():
    class Twice(ContiguousCache):
        def write(self, layer, keys, values):
            super().write(layer, keys * 2, values)

    options = {"samples": 1, "positions": 16}
    given = pair(1, 1, 2, 16)
    for cache, there in (
        (ContiguousCache(small(), backend="cuda", **options), True),
        (ContiguousCache(small(), **options), False),
        (Twice(small(), backend="cuda", **options), False),
    ):
        cache.open(0)
        assert cache.slots(0, *given) is None
        cache.begin([Span(0, 0, 1)], 1)
        assert (cache.slots(0, *given) is not None) is there
        assert cache.slots(1, *given) is None and cache.slots(0, *pair(1, 2, 2, 16)) is None


@pytest.mark.parametrize("kind", KINDS)
def test_beyond_the_positions_of_a_sample_stands_nothing(kind):
    cache = make(kind, small(), dtype=torch.float32)
    cache.open(*range(3))
    segments = cache.begin([Span(0, 0, 2), Span(1, 0, 4), Span(2, 1, 1)], 4)
    keys, values = cache.extend(0, *torch.ones(2, 3, 4, 2, 16))
    assert keys.shape == values.shape == (3, segments.keys, 2, 16)
    held = (~keys.isnan()).all(-1).all(-1)
    assert held.tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False]]
    assert torch.equal(held, ~values.isnan().any(-1).any(-1))


def test_a_write_that_goes_astray_is_counted():
    cache = make(4, small())
    cache.open("a", "b", "c")
    fill(cache, LAYOUTS["packed"], WIDTH)
    for store, page in ((cache.keys, -1), (cache.values, -2)):
        store[1, page, 0, 3, :5] = 1
    assert cache.strays() == 10


@pytest.mark.parametrize(
    ("samples", "rows", "view"),
    [
        ("abcd", (0, 1, 2, 3), True),
        ("bc", (0, 1), True),
        ("bd", (0, 2), True),
        ("ac", (0, 1), False),
        ("a", (1,), False),
    ],
)
def test_the_contiguous_cache_gives_views_where_rows_are_blocks(samples, rows, view):
    cache = make("contiguous", small(), samples=4)
    cache.open(*"abcd")
    spans = [Span(row, 0, 2) for row in rows]
    wrote, came = fill(cache.of(*samples), spans, 2)
    assert all(map(torch.equal, came, wrote))
    cache.of(*samples).begin(spans, 2)
    keys, _ = cache.extend(0, *pair(max(rows) + 1, 2, 2, 16))
    assert (keys.untyped_storage().data_ptr() == cache.keys.untyped_storage().data_ptr()) is view


def test_pages_and_their_table():
    """Pages in the order of a sample's positions, whatever their order in memory; -1 behind its end."""
    cache = make(4, small())
    cache.open("a", "b")
    fill(cache, [Span(0, 0, 5), Span(1, 0, 2)], 5)
    cache.close("a")
    cache.open("c")
    spans = [Span(0, 0, 7), Span(0, 7, 9)]
    _, came = fill(cache, spans, 16)
    keys, values, table = cache.pages(1)
    assert table.dtype == torch.int32 and table.shape == (2, 3)
    assert (table[1] >= 0).all() and table[0].min() >= 0 and len(set(table.flatten().tolist())) == 6
    for number, (pages, length) in enumerate(zip(table, (9, 9), strict=True)):
        for side, store in enumerate((keys, values)):
            assert store.shape == (12, 4, 2, 16)
            assert torch.equal(store[pages.long()].flatten(0, 1)[:length], came[number][1, side])
    cache.of("c").begin([Span(0, 0, 1)], 1)
    assert cache.pages(0)[2].tolist() == [table[1].tolist()]


@pytest.mark.parametrize("page_size", [16, 64])
@interpreted
def test_the_kernel_reads_pages_as_it_reads_rows(page_size):
    from rlspec.kernels import attention

    cache = make(page_size, small(), positions=160, dtype=torch.float32)
    cache.open(*range(3))
    fill(cache, [Span(0, 3, 70), Span(1, 0, 5), Span(2, 0, 130)], 130)
    segments = cache.begin(spans := [Span(0, 0, 2), Span(1, 1, 1), Span(2, 0, 1)], 2)
    keys, values = cache.extend(0, *torch.randn(2, 3, 2, 2, 16, generator=torch.Generator().manual_seed(5)))
    query = torch.randn(len(spans), 2, 4, 16, generator=torch.Generator().manual_seed(6))
    want = attention.forward(query, keys, values, segments.table, scale=0.25)
    got = attention.paged(query, *cache.pages(0), segments.table, scale=0.25)
    assert all(map(torch.equal, got, want)) and not got[0].isnan().any()


@pytest.mark.parametrize("kind", ["contiguous", 16])
@gpu
def test_the_layers_of_a_call_do_not_wait_for_the_device(kind):
    cache = make(kind, small(), device="cuda")
    cache.open("a", "b")
    pair = torch.ones(2, 2, 3, 2, 16, device="cuda", dtype=torch.bfloat16)
    for shift in (0, 1):  # rows as blocks, then not
        cache.of("a", "b").begin([Span(shift, 0, 2), Span(1 - shift, 1, 2)], 3)
        cache.extend(0, *pair)  # moves the table of the call
        torch.cuda.set_sync_debug_mode("error")
        try:
            cache.extend(1, *pair)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert cache.strays() == 0


# Refusals


def pair(*shape, dtype=torch.bfloat16):
    return (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))


def opened(kind="contiguous"):
    """Samples a and b, five positions of each written; 8 positions a sample, or 4 pages of 4."""
    cache = make(kind, small(), samples=2, positions=8)
    cache.open("a", "b")
    fill(cache, [Span(0, 0, 5), Span(1, 0, 5)], 5)
    return cache


def begun(cache):
    cache.begin([Span(0, 0, 1), Span(1, 0, 1)], 1)
    return cache


GOOD = pair(2, 1, 2, 16)
REFUSED = {
    "open twice": (lambda c: c.open("a"), ValueError, "sample 'a' is open already, at position 5"),
    "not open": (
        lambda c: c.of("a", "z").begin(STEP[:2], 1),
        ValueError,
        r"sample 'z' is not open; open are \['a', 'b'",
    ),
    "closed twice": (lambda c: (c.close("a"), c.close("a")), ValueError, "sample 'a' is not open"),
    "read": (lambda c: c.read(0, "z"), ValueError, "sample 'z' is not open"),
    "read layer": (lambda c: c.read(2, "a"), ValueError, "sample 'a': there is no layer 2 of 2"),
    "spans": (lambda c: c.begin(STEP, 1), ValueError, r"3 spans for samples \['a', 'b'\]: each needs one"),
    "twice in a call": (lambda c: c.of("a", "a").begin(STEP[:2], 1), ValueError, "each needs one of its own"),
    "no samples": (lambda c: c.of().begin([], 1), ValueError, "0 spans"),
    "outside": (lambda c: c.of("a").begin([Span(0, 1, 1)], 1), ValueError, "does not fit into 1 rows of 1 queries"),
    "empty span": (lambda c: c.of("a").begin([Span(0, 0, 0)], 1), ValueError, "does not fit"),
    "overlap": (lambda c: c.begin([Span(0, 0, 2), Span(0, 1, 1)], 2), ValueError, "overlaps"),
    "no call": (lambda c: make(4, small()).write(0, *GOOD), RunError, "layer 0 was written before a call began"),
    "after": (lambda c: c.extend(1, *GOOD), RunError, "'a', position 0: layer 1 of 2 was written a second time"),
    "skipped": (
        lambda c: begun(c).extend(1, *GOOD),
        RunError,
        "'a', position 5: layer 1 of 2 was written before layer 0",
    ),
    "unfinished": (lambda c: begun(begun(c)), RunError, "'a', position 5: the call before ended at layer 0 of 2"),
    "leaving": (lambda c: begun(c).close("b"), RunError, "'b', position 5: left before layer 0 of a call"),
    "rows": (
        lambda c: begun(c).extend(0, *pair(3, 1, 2, 16)),
        ValueError,
        r"'a', position 5, layer 0: keys must be .*\[2, 1",
    ),
    "values": (lambda c: begun(c).extend(0, GOOD[0], GOOD[1][..., :8]), ValueError, "values must be torch.bfloat16"),
    "dtype": (
        lambda c: begun(c).extend(0, GOOD[0], GOOD[1].float()),
        ValueError,
        "values must be .* not torch.float32",
    ),
    "device": (
        lambda c: begun(c).extend(0, GOOD[0].to("meta"), GOOD[1]),
        ValueError,
        "keys must be .* on cpu, not .* meta",
    ),
    "gradients": (lambda c: begun(c).extend(0, GOOD[0].clone().requires_grad_(), GOOD[1]), ValueError, "no gradients"),
    "dtype of the cache": (
        lambda c: make(4, small(), dtype=torch.int64),
        ValueError,
        "no cache of 12 .* in torch.int64",
    ),
    "no positions": (lambda c: make("contiguous", small(), positions=0), ValueError, "no cache of 3 blocks of 0"),
    "page size": (lambda c: make(12, small()), ValueError, "page_size 12 must be a power of two up to 512"),
    "large pages": (lambda c: make(1024, small()), ValueError, "page_size 1024 must be a power of two up to 512"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_sample_and_position(name):
    act, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        act(opened())


def test_a_write_for_a_layer_twice_in_a_call_is_refused():
    cache = begun(opened())
    cache.extend(0, *GOOD)
    with pytest.raises(RunError, match="sample 'a', position 5: layer 0 of 2 was written a second time in a call"):
        cache.extend(0, *GOOD)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("contiguous", "sample 'b', position 8: the cache holds 8 positions a sample"), (4, "'b', position 8: no page")],
)
def test_overflow_takes_nothing(kind, message):
    cache = opened(kind)
    with pytest.raises(RunError, match=message):
        cache.begin([Span(0, 0, 3), Span(1, 0, 4)], 4)
    assert cache.lengths == {"a": 5, "b": 5}
    fill(cache, [Span(0, 0, 3), Span(1, 0, 3)], 3)
    assert cache.lengths == {"a": 8, "b": 8} and cache.strays() == 0


def test_more_samples_than_there_is_room_for():
    with pytest.raises(RunError, match="sample 'c', position 0: all 2 places for samples are taken"):
        opened().open("c")
    cache = opened(4)
    cache.open("c")  # takes no page before its first token
    with pytest.raises(RunError, match="sample 'c', position 0: no page is free of 4"):
        cache.of("c").begin([Span(0, 0, 1)], 1)


def test_a_page_is_promised_once():
    cache = PagedCache(small(), pages=3, page_size=4)
    cache.open("a", "b")
    fill(cache, [Span(0, 0, 4), Span(1, 0, 4)], 4)
    with pytest.raises(RunError, match="sample 'b', position 4: no page is free of 3"):
        cache.begin([Span(0, 0, 1), Span(1, 0, 1)], 1)
