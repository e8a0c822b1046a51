"""The gradient of a weight has the bits of one pass however its rows are cut, packed, padded or permuted."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rlspec.device import gradients
from rlspec.device.gradients import Identity, Run, WeightGradient, tree_sum
from rlspec.errors import RunError

LENGTHS = (11, 16, 1, 19, 33)
ROWS = [(sample, position) for sample, length in enumerate(LENGTHS) for position in range(length)]
PAD = (-1, 0)
WIDTH, OUT, HEADS, IDS = 9, 6, 3, 7


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def identity(rows, lengths=LENGTHS):
    samples, positions = zip(*rows, strict=True) if rows else ((), ())
    return Identity.of(samples, positions, [lengths[sample] if sample >= 0 else 0 for sample in samples])


class Kind:
    """One weight with all its logical rows; `make` starts its gradient, `want` is the sum in fp64."""

    def __init__(self, name):
        count = len(ROWS)
        shapes = {
            "matrix": ((count, WIDTH), (count, OUT), (OUT, WIDTH)),
            "norm": ((count, WIDTH), (count, WIDTH), (WIDTH,)),
            "head norm": ((count, HEADS, WIDTH), (count, HEADS, WIDTH), (WIDTH,)),
            "embedding": ((count, 1), (count, OUT), (IDS, OUT)),
        }[name]
        self.name = name
        self.x, self.dy, self.weight = (normal(*shape, seed=seed) for seed, shape in enumerate(shapes))
        # Sizes from 2⁻¹⁵ to 2¹⁵: sums in another order then have other bits.
        sizes = torch.exp2(torch.arange(count) % 31 - 15.0)
        self.dy = self.dy * sizes.bfloat16().reshape(-1, *[1] * (self.dy.dim() - 1))
        if name == "embedding":
            self.x = torch.arange(count).square() % (IDS - 1)

    def make(self, lengths=LENGTHS, device="cpu"):
        weight = self.weight.to(device)
        if self.name == "matrix":
            return gradients.matrix_gradient(weight, lengths)
        if self.name == "embedding":
            return gradients.embedding_gradient(weight, lengths)
        return gradients.norm_gradient(weight, eps=1e-5, lengths=lengths)

    def place(self, table, rows, fill):
        out = torch.full((len(rows), *table.shape[1:]), fill, dtype=table.dtype)
        for slot, row in enumerate(rows):
            if row != PAD:
                out[slot] = table[ROWS.index(row)]
        return out

    def add(self, gradient, rows):
        x = self.place(self.x, rows, 0 if self.name == "embedding" else math.nan)
        gradient.add(x, self.place(self.dy, rows, math.nan), identity(rows))

    def of(self, calls, lengths=LENGTHS):
        gradient = self.make(lengths)
        for rows in calls:
            self.add(gradient, rows)
            assert gradient.carried <= 15
        return gradient.finish()

    @property
    def want(self):
        x, dy = self.x.double(), self.dy.double()
        if self.name == "matrix":
            return dy.T @ x
        if self.name == "embedding":
            return torch.zeros(IDS, OUT, dtype=torch.float64).index_add(0, self.x, dy)
        return (dy * x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)).reshape(-1, WIDTH).sum(0)


@pytest.fixture(params=["matrix", "norm", "head norm", "embedding"], scope="module")
def kind(request):
    return Kind(request.param)


def same(got, want):
    assert got.dtype == want.dtype == torch.float32 and got.shape == want.shape
    return torch.equal(got.view(torch.int32), want.view(torch.int32))


def chunks(rows, sizes):
    cut, start = [], 0
    while start < len(rows):
        size = next(sizes)
        cut.append(rows[start : start + size])
        start += size
    return cut


def layouts():
    """Name -> calls, each a list of rows. Random ones from fixed seeds."""
    found = {"singletons": [[row] for row in ROWS]}
    for size in (2, 7, 15, 16, 17, 50):
        found[f"chunks of {size}"] = chunks(ROWS, iter(lambda size=size: size, None))
    found["one sample a call"] = [[row for row in ROWS if row[0] == sample] for sample in range(len(LENGTHS))]
    grid = [[(s, p) if p < n else PAD for p in range(40)] for s, n in enumerate(LENGTHS)]
    found["padded right"] = [sum(grid, [])]
    found["padded left"] = [sum([row[::-1] for row in grid], [])]
    found["samples permuted"] = [[row for s in (2, 0, 4, 3, 1) for row in ROWS if row[0] == s]]
    found["only pads between"] = [ROWS[:20], [PAD] * 3, ROWS[20:]]
    for seed in range(12):
        chance = random.Random(seed)
        calls = chunks(ROWS, iter(lambda chance=chance: chance.randint(1, 40), None))
        for call in calls:
            call += [PAD] * chance.randint(0, 4)
            chance.shuffle(call)
        found[f"random {seed}"] = calls
    return found


@pytest.mark.parametrize("layout", layouts())
def test_every_layout_has_the_bits_of_one_pass(kind, layout):
    assert same(kind.of(layouts()[layout]), kind.of([ROWS]))


def test_the_order_of_samples_is_part_of_the_bits(kind):
    """Or the rows would be too tame to show a wrong order: the samples numbered otherwise give other bits."""
    order = (4, 3, 2, 1, 0)
    other, rows = kind.make([LENGTHS[sample] for sample in order]), []
    for new, old in enumerate(order):
        rows += [(new, position) for position in range(LENGTHS[old])]
    slots = [ROWS.index((order[new], position)) for new, position in rows]
    other.add(kind.x[slots], kind.dy[slots], identity(rows, [LENGTHS[sample] for sample in order]))
    assert not same(other.finish(), kind.of([ROWS]))


def test_accuracy(kind):
    got, want = kind.of([ROWS]), kind.want
    # 80 rows (240 heads) in fp32: half an ulp of the largest partial sum each.
    scale = kind.dy.abs().amax().double() * kind.x.abs().amax().double().clamp(min=1)
    assert (got - want).abs().amax() <= len(ROWS) * HEADS * 2**-24 * scale
    assert want.abs().amax() > 1
    assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-4 * float(want.abs().amax()))


def test_lengths_are_optional(kind):
    assert same(kind.of([ROWS[:30], ROWS[30:]], lengths=None), kind.of([ROWS]))


def test_it_adds_to_the_accumulator_it_is_given():
    sums = torch.full((OUT, WIDTH), 3.0)
    kind = Kind("matrix")
    gradient = WeightGradient(sums, gradients.fold_matrix)
    kind.add(gradient, ROWS)
    assert gradient.finish() is sums
    torch.testing.assert_close(sums.double(), kind.want + 3, rtol=1e-4, atol=1e-2)


def test_an_embedding_adds_row_after_row():
    kind = Kind("embedding")
    want = torch.zeros(IDS, OUT)
    for token, row in zip(kind.x.tolist(), kind.dy.float(), strict=True):
        want[token] = want[token] + row
    assert same(kind.of([ROWS]), want)


def test_a_matrix_adds_block_after_block():
    kind = Kind("matrix")
    want = torch.zeros(OUT, WIDTH)
    for sample, length in enumerate(LENGTHS):
        for start in range(0, length, 16):
            block = torch.zeros(OUT, WIDTH)
            for position in range(start, min(start + 16, length)):
                row = ROWS.index((sample, position))
                block = block + torch.outer(kind.dy[row].float(), kind.x[row].float())
            want = want + block
    assert same(kind.of([ROWS]), want)


def test_the_carry_is_bounded_and_holds_copies():
    kind, gradient = Kind("matrix"), Kind("matrix").make()
    seen = []
    for row in ROWS:
        x, dy = kind.place(kind.x, [row], 0.0), kind.place(kind.dy, [row], 0.0)
        gradient.add(x, dy, identity([row]))
        x.fill_(math.nan)
        dy.fill_(math.nan)
        seen.append(gradient.carried)
    assert max(seen) == 15 and seen[10] == 0 and seen[-1] == 0
    assert same(gradient.finish(), kind.of([ROWS]))


def test_gradients_of_inputs_are_not_tracked():
    gradient = gradients.matrix_gradient(torch.zeros(2, 3, requires_grad=True))
    x, dy = torch.ones(5, 3, requires_grad=True), torch.ones(5, 2, requires_grad=True)
    gradient.add(x, dy, Identity((Run(0, 0, 5, 0, 5),), 5))
    assert not gradient.finish().requires_grad


# What is refused


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([ROWS[1:]], "sample 0, position 0 has not come, and sample 0, position 1 is here already"),
        ([ROWS[:5], ROWS[4:]], "sample 0, position 4 came twice: the next is sample 0, position 5"),
        ([ROWS[:5], ROWS[6:]], "sample 0, position 5 has not come, and sample 0, position 6"),
        ([ROWS[:5], ROWS[8:11], ROWS[5:8], ROWS[11:]], "sample 0, position 5 has not come"),
        ([ROWS[:20], ROWS[:11]], "sample 0, position 0 came twice: the next is sample 1, position 9"),
        ([ROWS[:11], ROWS[27:]], "sample 1, position 0 has not come, and sample 2, position 0"),
        ([ROWS[:40] + ROWS[41:]], "sample 3, position 12 has not come, and sample 3, position 13"),
        ([ROWS[:-1]], "sample 4, position 32 never came"),
        ([ROWS[:47]], "sample 4, position 0 never came"),
        ([], "sample 0, position 0 never came"),
        ([[PAD, PAD]], "sample 0, position 0 never came"),
        ([ROWS, ROWS[-1:]], "sample 4, position 32 came twice"),
    ],
)
def test_rows_out_of_order_twice_or_never_are_refused(kind, calls, message):
    with pytest.raises(RunError, match=message):
        kind.of(calls)


def test_without_lengths_unfinished_samples_are_refused():
    with pytest.raises(RunError, match="sample 0, position 7 never came"):
        Kind("matrix").of([ROWS[:7]], lengths=None)
    with pytest.raises(RunError, match="sample 0, position 0 never came"):
        Kind("matrix").of([], lengths=None)


def test_a_refused_call_adds_nothing():
    kind, gradient = Kind("matrix"), Kind("matrix").make()
    kind.add(gradient, ROWS[:20])
    with pytest.raises(RunError, match="came twice"):
        kind.add(gradient, ROWS[19:])
    kind.add(gradient, ROWS[20:])
    assert same(gradient.finish(), kind.of([ROWS]))
    for late in (lambda: kind.add(gradient, ROWS[:1]), gradient.finish):
        with pytest.raises(RunError, match="finished"):
            late()


@pytest.mark.parametrize(
    ("runs", "rows", "message"),
    [
        ([Run(0, 0, 3, 0, 5), Run(1, 0, 3, 2, 5)], 9, "overlaps the rows of another run"),
        ([Run(0, 0, 3, 0, 5), Run(0, 2, 2, 3, 5)], 9, "sample 0, position 2 stands in two rows"),
        ([Run(0, 3, 3, 0, 5)], 9, "beyond the 5 positions"),
        ([Run(0, 0, 3, 7, 5)], 9, "beyond the 9 rows"),
        ([Run(0, 0, 0, 0, 5)], 9, "at least 1"),
        ([Run(-1, 0, 1, 0, 5)], 9, "at least 0"),
        ([Run(0, 0, 1, 0, 5), Run(0, 1, 1, 1, 6)], 9, "two lengths in one call: 5 and 6"),
    ],
)
def test_impossible_identities_are_refused(runs, rows, message):
    with pytest.raises(ValueError, match=message):
        Identity(tuple(runs), rows)


def test_identity_encodes_runs():
    found = Identity.of([0, 0, -1, 1, 1, 0], [3, 4, 99, 0, 1, 5], [6, 6, -7, 2, 2, 6])
    assert found == Identity((Run(0, 3, 2, 0, 6), Run(1, 0, 2, 3, 2), Run(0, 5, 1, 5, 6)), 6)
    with pytest.raises(ValueError, match="2 samples, 1 positions"):
        Identity.of([0, 0], [0], [1, 1])


def test_what_does_not_fit_is_refused():
    kind = Kind("matrix")
    x, dy, rows = kind.x, kind.dy, identity(ROWS)
    for bad, message in (
        ((x[:-1], dy, rows), "both must have the 80 rows"),
        ((x, dy[:, :-1], rows), r"do not fit a gradient \[6, 9\]"),
        ((x[:, None], dy, rows), "do not fit a gradient"),
        ((x.to("meta"), dy, rows), "different devices"),
        ((x, dy, identity(ROWS, (11, 16, 1, 19, 34))), "sample 4 has 33 positions, and 34 in this call"),
    ):
        with pytest.raises(ValueError, match=message):
            kind.make().add(*bad)
    gradient = kind.make()
    kind.add(gradient, ROWS[:3])
    with pytest.raises(ValueError, match="x has changed between calls: rows of torch.float32"):
        gradient.add(x[3:].float(), dy[3:], identity(ROWS[3:]))
    with pytest.raises(ValueError, match="sample 5 is not one of the 5"):
        more = Identity((*rows.runs, Run(5, 0, 1, 80, 1)), 81)
        kind.make().add(torch.cat((x, x[:1])), torch.cat((dy, dy[:1])), more)
    with pytest.raises(ValueError, match="summed in fp32"):
        WeightGradient(torch.zeros(2, 2, dtype=torch.float64), gradients.fold_matrix)
    for lengths in ((), (3, 0)):
        with pytest.raises(ValueError, match="there must be samples"):
            kind.make(lengths)
    with pytest.raises(ValueError, match="a weight of 2 dimensions"):
        gradients.matrix_gradient(torch.zeros(4))
    with pytest.raises(ValueError, match="tokens must be in 0 … 6, and there is 7"):
        one = Identity((Run(0, 0, 1, 0, 1),), 1)
        gradients.embedding_gradient(torch.zeros(7, 2)).add(torch.tensor([7]), torch.ones(1, 2), one)


def test_tree_sum_adds_neighbours():
    x = normal(3, 7, dtype=torch.float32)
    a, b, c, d, e, f, g = x.unbind(1)
    assert torch.equal(tree_sum(x), ((a + b) + (c + d)) + ((e + f) + g))
    assert torch.equal(tree_sum(x.T, 0), tree_sum(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_devices_agree(kind):
    calls = layouts()["random 3"]
    gradient = kind.make(device="cuda")
    for rows in calls:
        x = kind.place(kind.x, rows, 0 if kind.name == "embedding" else math.nan)
        gradient.add(x.cuda(), kind.place(kind.dy, rows, math.nan).cuda(), identity(rows))
    assert same(gradient.finish().cpu(), kind.of([ROWS]))
