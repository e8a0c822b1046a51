"""What ran is seen, not taken from a declaration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import torch.nn.functional as F

from rlspec import fallbacks
from rlspec.device import observe
from rlspec.device.observe import Seen
from tests import benches


def seen(**changes):
    made = Seen()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


# Operators of torch


def test_operators_are_seen_through_modules_views_and_autograd():
    x = torch.ones(2, 3, requires_grad=True)
    made = Seen()
    with made.call(launches=False):
        out = F.silu(F.linear(x, torch.ones(4, 3))).sum()
        torch.autograd.grad(out, x)
    assert {"silu", "silu_backward", "mm", "t"} <= set(made.torch) and len(made.torch) == len(set(made.torch))


def test_tables_of_whole_numbers_are_not_what_computes_but_what_looks_up_in_them_is():
    made, rows = Seen(), torch.arange(6)
    with made.call(launches=False):
        int((rows >= 2).sum()), rows.min(), rows + 1
        assert made.torch == []
        torch.ones(6).index_add(0, rows, torch.ones(6))
        torch.ones(6).argmax()
    assert {"index_add", "argmax", "ones"} <= set(made.torch)


def test_nothing_is_seen_outside():
    made = Seen()
    torch.ones(2).exp()
    with made.call(launches=False):
        pass
    torch.ones(2).exp()
    assert made.torch == [] and made.plain()["profiled"] is None


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: x @ x, "mm"),
        (lambda x: torch.bmm(x[None], x[None]), "bmm"),
        (lambda x: F.softmax(x, -1), "_softmax"),
        (lambda x: F.log_softmax(x, -1), "_log_softmax"),
        (lambda x: torch.logsumexp(x, -1), "logsumexp"),
        (lambda x: F.silu(x), "silu"),
        (lambda x: x.sigmoid(), "sigmoid"),
        (lambda x: F.embedding(torch.tensor([0]), x), "embedding"),
        (lambda x: x.pow(2).mean(-1), "mean"),
        (lambda x: torch.rsqrt(x), "rsqrt"),
        (lambda x: torch.zeros(4, 4).index_add_(0, torch.arange(4), x), "index_add_"),
        (lambda x: x.index_put_((torch.arange(4),), x.clone(), accumulate=True), "index_put_ (accumulate)"),
        (lambda x: torch.ops.aten.index_put(x, (torch.arange(4),), x, True), "index_put (accumulate)"),
        (lambda x: x.scatter(0, torch.zeros(1, 4, dtype=torch.int64), x), "scatter"),
    ],
)
def test_what_computes_is_the_librarys(call, name):
    made = Seen()
    with made.call(launches=False):
        call(torch.ones(4, 4))
    assert name in made.torch and name not in fallbacks._MOVING


def test_attention_of_the_library_is_seen():
    made = Seen()
    with made.call(launches=False):
        F.scaled_dot_product_attention(*torch.ones(3, 1, 2, 4, 8))
    assert any("attention" in one and one not in fallbacks._MOVING for one in made.torch)


@pytest.mark.parametrize(
    "name", ["copy_", "view", "empty", "zeros_like", "index_select", "cat", "_to_copy", "clone", "sort"]
)
def test_moving_and_making_data_is_nobodys_fallback(name):
    assert name in fallbacks._MOVING


@pytest.mark.parametrize(
    "call",
    [
        lambda x, rows: x[rows],
        lambda x, rows: x.__setitem__(rows, 1.0),
        lambda x, rows: x.index_put((rows,), x),
        lambda x, rows: x.index_copy_(0, rows, x.clone()),
        lambda x, rows: x[x > 0],
        lambda x, rows: x.take(rows).repeat(2).flip(0).roll(1),
        lambda x, rows: x.new_ones(3).unfold(0, 2, 1).diagonal(),
    ],
)
def test_rows_that_are_picked_out_and_put_elsewhere_are_moved(call):
    made = Seen()
    with made.call(launches=False):
        call(torch.ones(4, 4), torch.arange(4))
    assert made.torch and {*made.torch} <= fallbacks._MOVING


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.empty(3),
        lambda x: torch.empty_like(x),
        lambda x: x.new_empty(4),
        lambda x: torch.empty_strided((2, 2), (1, 2)),
        lambda x: x.new_empty_strided((2, 2), (2, 1)),
        lambda x: torch.empty(3, dtype=torch.bfloat16),
    ],
)
def test_memory_that_is_not_written_holds_nan_inside_alone(make):
    with Seen().call(launches=False):
        inside = make(torch.zeros(2))
        assert not torch.zeros(2).any() and torch.empty(3, dtype=torch.int64).dtype == torch.int64
    assert inside.isnan().all()


# Launches


def test_a_call_without_a_launch_is_idle_if_one_is_due():
    made = Seen()
    with made.call(launches=True):
        made.launched(made.triton, "k")
    with made.call(launches=True):
        pass
    with made.call(launches=False):
        pass
    assert made.idle == 1 and made.plain()["calls_without_launch"] == 1


def test_a_name_is_noted_once_and_each_launch_counts():
    made = Seen()
    for name in ("b", "a", "b"):
        with made.call(launches=True):
            made.launched(made.triton, name)
    assert made.triton == ["b", "a"] and made.idle == 0


def test_watching_leaves_triton_as_it_was():
    pytest.importorskip("triton")
    from triton.runtime import interpreter

    before = interpreter.GridExecutor.__call__
    with pytest.raises(KeyError), observe.watch():
        assert interpreter.GridExecutor.__call__ is not before
        raise KeyError
    assert interpreter.GridExecutor.__call__ is before


# Against the declaration


@pytest.mark.parametrize(
    ("backend", "ran", "problem"),
    [
        (None, seen(torch=["mm"]), None),
        ("triton", seen(triton=["k"], torch=["empty", "view"]), None),
        ("cuda", seen(native=["k"]), None),
        ("triton", seen(triton=["k"], profiled=["k", "vectorized_elementwise_kernel"]), None),
        ("triton", seen(), "declares triton, and no triton kernel was launched"),
        ("triton", seen(native=["k"]), "declares triton, and no triton kernel was launched"),
        ("cuda", seen(triton=["k"]), "declares cuda, and no cuda kernel was launched"),
        ("triton", seen(triton=["k"], idle=2), "declares triton, and 2 of its calls launched no triton kernel"),
        ("triton", seen(triton=["k"], torch=["view", "mm"]), "declares triton, and torch computed mm"),
        ("cuda", seen(native=["k"], torch=["_softmax"]), "declares cuda, and torch computed _softmax"),
        (
            "triton",
            seen(triton=["k"], profiled=["k", "void cutlass::Kernel2<cutlass_80_wmma>"]),
            "the profiler saw void cutlass",
        ),
        ("triton", seen(triton=["k"], profiled=["nvjet_tst_64x8"]), "the profiler saw nvjet_tst_64x8"),
        ("triton", seen(triton=["my_gemm"], profiled=["my_gemm"]), None),
        ("torch", seen(), "declares the backend 'torch'; known: triton, cuda"),
    ],
)
def test_what_ran_against_what_was_declared(backend, ran, problem):
    found = fallbacks.fallback(backend, ran.plain())
    assert found is None if problem is None else problem in found


@pytest.fixture
def switches():
    """The two switches of TF32, put back in the end."""
    places = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [place.allow_tf32 for place in places]
    yield places
    for place, value in zip(places, before, strict=True):
        place.allow_tf32 = value


def test_the_environment_tells_switches_and_leaves_unknown_what_is_not_there(switches):
    for place in switches:
        place.allow_tf32 = False
    here = observe.environment(torch.device("cpu"))
    assert here["device"] == "cpu" and here["name"] is None and here["capability"] is None
    assert here["tf32"] is False and here["autocast"] is False and here["torch"] == torch.__version__
    for place in switches:
        place.allow_tf32 = True
        assert observe.environment(torch.device("cpu"))["tf32"] is True
        place.allow_tf32 = False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_profiler_lists_the_kernels_of_a_call():
    x = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
    made = Seen(profiling=True)
    with made.call(launches=False):
        x @ x
    assert made.profiled and any(fallbacks._LIBRARY_KERNEL.search(name) for name in made.profiled)
    assert not any(character in name for name in made.profiled for character in "<(")


# Triton under its interpreter, in a process of its own: the interpreter is chosen when triton is imported

KERNELS = """
from concurrent.futures import ThreadPoolExecutor
import torch, triton
import triton.language as tl
import torch.nn.functional as F
from torch.autograd import Function

@triton.jit
def half_kernel(x, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < count).to(tl.float32)
    tl.store(out + place, value * 0.5, mask=place < count)

def launch(x):
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    half_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
    return out

class Half(Function):
    @staticmethod
    def forward(ctx, x):
        return launch(x)

    @staticmethod
    def backward(ctx, upstream):
        return launch(upstream)

def keeps_to_it(x):
    return Half.apply(x)

def falls_back_for_few(x):
    return Half.apply(x) if x.shape[1] > 4 else x * 0.5

def falls_back(x):
    return F.silu(x)

def computes_beside_a_decoy(x):
    launch(x.detach())
    return F.silu(x)

def backward_of_torch(x):
    class Mixed(Function):
        @staticmethod
        def forward(ctx, x):
            return launch(x)

        @staticmethod
        def backward(ctx, upstream):
            return torch.sigmoid(upstream)

    return Mixed.apply(x)

library = torch.library.Library("mine", "DEF")
library.define("moved(Tensor x) -> Tensor")
library.impl("moved", lambda x: launch(x.expand_as(x).float()).to(x.dtype), "CPU")
library.define("computed(Tensor x) -> Tensor")
library.impl("computed", F.silu, "CPU")

class Own(Half):
    @staticmethod
    def forward(ctx, x):
        return torch.ops.mine.moved(x)

class Decoy(Half):
    @staticmethod
    def forward(ctx, x):
        launch(x)
        return torch.ops.mine.computed(x)

class Elsewhere(Half):
    @staticmethod
    def forward(ctx, x):
        launch(x)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(F.silu, x).result()

def in_a_library(x):
    return Own.apply(x)

def hides_in_a_library(x):
    return Decoy.apply(x)

def hides_in_a_thread(x):
    return Elsewhere.apply(x)

table = {name: globals()[name] for name in
         ("keeps_to_it", "falls_back_for_few", "falls_back", "computes_beside_a_decoy", "backward_of_torch",
          "in_a_library", "hides_in_a_library", "hides_in_a_thread")}
for one in table.values():
    one.backend = "triton"
"""
CHILD = """
import json, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import mine
from tests import benches

found = {{}}
for name, one in mine.table.items():
    mine.chosen = {{"silu": one}}
    on = benches.bench(Path({folder!r}), ["silu"], "mine:chosen", layouts=["singletons", "repeated"])
    cell = benches.measured(on)["cells"][0]
    verdict = benches.judged(on)["silu", "forward_invariance"]
    found[name] = [verdict.reason, cell["seen"]["triton"], cell["error"] or cell["blocked"], verdict.category]
found["compiler"] = "torch._dynamo" in sys.modules
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("interpreted")
    (folder / "mine.py").write_text(textwrap.dedent(KERNELS))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(benches.ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(folder=str(folder))], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["keeps_to_it", "in_a_library"])
def test_a_kernel_under_the_interpreter_is_seen(interpreted, name):
    assert interpreted[name][1:] == [["half_kernel"], None, "green"], interpreted[name][0]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("falls_back", "the candidate declares triton, and no triton kernel was launched"),
        ("falls_back_for_few", "the candidate declares triton, and torch computed mul"),
        ("computes_beside_a_decoy", "the candidate declares triton, and torch computed silu"),
        ("backward_of_torch", "the candidate declares triton, and torch computed sigmoid"),
        ("hides_in_a_library", "the candidate declares triton, and torch computed silu"),
        ("hides_in_a_thread", "the candidate declares triton, and torch computed silu"),
    ],
)
def test_a_fallback_is_seen_and_its_cell_is_an_error(interpreted, name, problem):
    reason, _, error, category = interpreted[name]
    assert error is None and problem in reason and category == "red_provenance"


def test_torchs_compiler_is_not_imported_to_see_what_ran(interpreted):
    assert interpreted["compiler"] is False  # it takes a second, of an arm that may take two


# Kernels outside Triton tell of themselves


def test_a_launcher_of_cuda_kernels_is_heard_while_somebody_watches():
    with observe.watch() as outer, observe.watch() as inner:
        with inner.call(launches=True):
            observe.native("scale_bf16")
        with inner.call(launches=True):
            pass
    observe.native("after")
    assert inner.native == outer.native == ["scale_bf16"] and inner.idle == 1
    assert fallbacks.fallback("cuda", outer.plain()) is None
    assert "1 of its calls launched no cuda kernel" in fallbacks.fallback("cuda", inner.plain())


def test_threads_are_left_alone_when_nobody_watches_any_more():
    before = threading.Thread.start
    with pytest.raises(KeyError), observe.watch(), observe.watch():
        assert threading.Thread.start is not before
        raise KeyError
    assert threading.Thread.start is before


@pytest.fixture
def library():
    made = torch.library.Library("seen_here", "DEF")
    made.define("chosen(int count) -> Tensor")
    made.impl("chosen", lambda count: torch.ones(count).exp(), "BackendSelect")
    made.define("made(int count) -> Tensor")
    made.impl("made", lambda count: torch.ones(count).exp2(), "CompositeExplicitAutograd")
    made.define("linear(Tensor x) -> Tensor")
    made.impl("linear", lambda x: F.linear(x, x), "CPU")
    yield torch.ops.seen_here
    made._destroy()


def test_operators_of_a_users_library_are_looked_into(library):
    made = Seen()
    with made.call(launches=False):
        library.chosen(2), library.made(2), library.linear(torch.ones(2, 2))
    assert {"seen_here::chosen", "exp", "seen_here::made", "exp2", "seen_here::linear", "mm"} <= {*made.torch}
    assert "linear" not in made.torch  # it is made of others, by which it is known everywhere


def test_an_operator_of_a_users_library_is_no_fallback():
    assert fallbacks.fallback("triton", seen(triton=["k"], torch=["view", "mine::silu"]).plain()) is None
