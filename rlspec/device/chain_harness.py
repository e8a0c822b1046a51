"""Judge a whole model: trained in every cell and inferred in every way, all compared, for one arm.

Writes records.jsonl line by line: `logprobs` of each execution, a `comparison` a tensor and pair, a `trace` for each
pair that shows where two runs part, `depth` with errors node by node, and what was seen to run: operators and, of each
cell and `execution`, the calls that its decoder met. Numbers and digests only: the host decides.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rlspec import chains, weight_folders
from rlspec.device import native, observe, weights
from rlspec.device.chain_bench import ChainBench
from rlspec.device.chain_lines import Lines, dtype_name
from rlspec.device.chain_observed import ObservedInference, ObservedPass, Observer
from rlspec.device.chain_session import Session
from rlspec.device.chain_stateful import Inference
from rlspec.device.chain_training import Canonical, Cells
from rlspec.device.execution import NoBackward
from rlspec.device.told import told

_GIB = float(1 << 30)


def main(on: ChainBench, records: Path) -> None:
    """Run the arm into `records`."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if on.device.type == "cpu":
        torch.set_num_threads(1)  # many small operators: threads would wait for each other for most of the time
    with records.open("w", encoding="utf-8") as file:
        session = Session(on, Lines(file, on.limits))
        blocked = _blocked(session)
        _head(session, blocked)
        if blocked is None:
            native.prepare(session.on.device, session.on.operators().implementations.values())
            _parts(session)
        session.lines.line("end", lines=session.lines.count)


def _blocked(session: Session) -> str | None:
    """Why the machine cannot hold the run, asked before anything is allocated."""
    on_gpu = session.on.device.type == "cuda"
    operators, needed = session.on.operators(), chains.operators(session.on.model, session.on.profile)
    own = sorted(set(filter(None, (getattr(getattr(operators, name), "backend", None) for name in needed))))
    if own and not on_gpu:
        return f"{own[0]} kernels need a CUDA device, and there is none here"
    if on_gpu and {"cuda", "fastest"} & set(own) and (why := native.missing(session.on.device)):
        return why
    need, total = session.memory.least, session.total_memory()
    if need <= total:
        return None
    estimate = f"the run is estimated to need {need / _GIB:.0f} GiB of {'GPU ' * on_gpu}memory"
    return f"{estimate}, and here are {total / _GIB:.0f} GiB"


def _head(session: Session, blocked: str | None) -> None:
    on = session.on
    session.lines.line(
        "run",
        schema_version=1,
        arm=on.arm,
        kind="chain",
        environment=observe.environment(on.device),
        implementation=on.implementation if isinstance(on.implementation, str) else dict(on.implementation),
        profile=on.profile,
        dtype=dtype_name(on.dtype),
        fingerprint=on.model.fingerprint(),
        blocked=blocked,
        cells={cell.name: cell.digest for cell in on.cells},
        parameters=len(on.model.parameter_shapes()),
        estimate_gib=round(session.memory.least / _GIB, 1),
        faulty=on.fault,
        calls_seen=True,
        backward=session.backward,
    )


def _parts(session: Session) -> None:
    """Weights, training, inference and what ran; a part that raises ends alone, and the others go on."""
    canonical: Canonical | None = None
    with observe.watch() as seen:
        with _part(session, "weights"):
            _load(session)
        if session.decoder is not None:
            if session.asked(*chains.INVARIANCE, *chains.ACCURACY, "train_inference_parity", chains.ACROSS):
                with _part(session, "training"):
                    canonical = Cells(session).run()
            if session.asked(*chains.STATEFUL):
                with _part(session, "inference"):
                    Inference(session, canonical).run()
            with _part(session, "provenance"):
                _provenance(session)
    after = None if session.decoder is None else weights.fingerprint(session.decoder)
    session.lines.line("kernels", triton=seen.triton, native=seen.native, weights=after)


@contextmanager
def _part(session: Session, name: str) -> Iterator[None]:
    """One part of the run, with its time and memory."""
    started, error, where, session.at = time.monotonic(), None, session.on.device, ""
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)
    try:
        yield
    except Exception as problem:  # whatever a user's operator raises is said, and what else can be judged is
        place = f"at {session.at}" if session.at else ""
        error = {**told(problem, place), "no_backward": isinstance(problem, NoBackward)}
    peak = torch.cuda.max_memory_allocated(where) / _GIB if where.type == "cuda" else None
    seconds = round(time.monotonic() - started, 3)
    session.lines.line("phase", name=name, seconds=seconds, peak_gib=peak, error=error)
    said = [f"{seconds:.1f} s", *([f"peak {peak:.1f} GiB"] if peak else []), *([error["message"]] if error else [])]
    print(f"{name}: {', '.join(said)}", flush=True)


def _load(session: Session) -> None:
    made, given = session.on.decoder(), session.on.weights
    named = {key: given.get(key) for key in ("source", "seed", "path")}
    folder = session.on.folder
    if folder is not None:
        path = folder / weight_folders.NAME
        named["config"] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    pinned = given["source"] != "seeded"
    session.lines.line("weights", **named, pinned=pinned, digest=weights.fingerprint(made))
    session.decoder = made


def _provenance(session: Session) -> None:
    """The first sample trained and decoded once more, operator by operator, and under the profiler on a GPU.

    Where no judgment is of gradients, in forwards alone: kernels of one's own may have nothing else.
    """
    session.step("provenance")
    on, observer = session.on, Observer(session.on.operators())
    made = session.training(ObservedPass, on.operators())
    assert isinstance(made, ObservedPass)
    call = session.alone().layout.calls[0]  # the logical order begins with its sample
    made.observe(call, observer)
    _decode_once(session, observer)
    for operator, seen in observer.plain().items():
        session.lines.line("operator", operator=operator, implementation=on.implementation_of(operator), **seen)
    again = (lambda: made.observe(call, None), lambda: _decode_once(session, None))
    session.lines.line("profile", profiled=observer.profiled(again, on.device))


def _decode_once(session: Session, observer: Observer | None) -> None:
    """A prompt and two tokens."""
    assert session.decoder is not None
    engine, sample = session.engine(), session.samples[0]
    decoder = ObservedInference.of(session.decoder, session.on.operators())
    assert isinstance(decoder, ObservedInference)
    decoder.observer, engine.decoder = observer, decoder
    cuts = [(0, sample.prompt), *((at, at + 1) for at in range(sample.prompt, sample.length)[:2])]
    engine.walk([sample], cuts, engine.cache("contiguous", [sample]))
