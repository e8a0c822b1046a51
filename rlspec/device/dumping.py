"""What the run files of engines share: the token stream, the weights, and the file of log-probs.

A run file scores the response of each sample and hands over one log-prob a token. What the file says beside them
(weights, temperature, dtype of the logits) is what was used, not what was asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from rlspec import architecture, token_files
from rlspec.device import weight_files, weights
from rlspec.device.decoder import Decoder
from rlspec.device.dtypes import DTYPES as DTYPES
from rlspec.device.dtypes import NAMES
from rlspec.device.operators import Operators
from rlspec.device.routing import Routes
from rlspec.errors import RunError, SpecError
from rlspec.token_files import Stream

_LOADING = {  # what transformers says of loading -> what is wrong with the tensors that it names
    "missing_keys": "is missing",
    "unexpected_keys": "is no parameter of this model, or stands there twice",
    "mismatched_keys": "is of another shape",
}
COLD = 0.7  # the temperature of the planted fault


class Refused(RunError, ValueError):
    """What is wrong with weights, tokens or the disk: a sentence that needs no frames, see `run`."""


def run(main: Callable[[], None]) -> None:
    """The main function of a run file; what it refuses ends it with a sentence, anything else with its frames."""
    try:
        main()
    except (RunError, SpecError) as error:
        raise SystemExit(f"error: {error}") from None


@contextmanager
def refusing() -> Iterator[None]:
    """What weights are refused for, or a file that cannot be read, as Refused."""
    try:
        yield
    except OSError as error:
        raise Refused(f"cannot read {error.filename}: {error.strerror or error}") from error
    except ValueError as error:
        raise Refused(str(error)) from error


class Dump:
    """The samples of a run file, and the file that it writes; a context, in which `add` is called once a sample.

    `how`: words on how the engine ran, kept in the file. `temperature`: of `select`, and what the file declares.
    `fault`: for controls, a mistake that an engine could make; see `select`, `add` and `seeded`.
    """

    def __init__(
        self,
        run_file: str,
        *,
        engine: str,
        how: Sequence[object],
        tokens: str,
        generated: str | None = None,
        temperature: float = 1.0,
        fault: str | None = None,
    ) -> None:
        path = Path(run_file).absolute()
        self.path = Path(os.environ.get("RLSPEC_RECORDS") or path.with_name(f"{path.stem}.records.jsonl"))
        self.streams = token_files.read(Path(tokens))
        if generated is not None:
            self.streams = token_files.generated(self.streams, path.with_name(generated))
        package = "torch" if engine == "rlspec" else engine
        self.engine = " ".join(map(str, (engine, f"({package} {version(package)})", *how)))
        self.temperature, self.fault = temperature, fault
        self.weights: str | None = None
        self.tensors: str | None = None
        self.head_dtype: str | None = None
        self.written: set[str] = set()
        self.routes = Routes()

    def __enter__(self) -> Dump:
        with self._writing():
            self.file: TextIO = self.path.open("w", encoding="utf-8")
        return self

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # a full disk does not say which file it has no room for
            raise Refused(f"cannot write log-probs to {self.path}: {error.strerror or error}") from error

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._writing() if kind is None else suppress(OSError):  # the first mistake is the one to tell
            self.file.close()
        if kind is None and (missing := [one.sample for one in self.streams if one.sample not in self.written]):
            raise ValueError(f"{len(missing)} samples have no log-probs, {missing[0]} first")

    def batches(self, size: int) -> Iterator[list[Stream]]:
        """The samples in order, `size` at a time."""
        for first in range(0, len(self.streams), size):
            yield list(self.streams[first : first + size])

    def check(self, vocabulary: int) -> None:
        """Raise ValueError for a token id that the model does not have."""
        for one in self.streams:
            if (most := max((*one.prompt, *(one.response or ())))) >= vocabulary:
                raise Refused(f"sample {one.sample}: token {most} is not below the vocabulary, {vocabulary}")

    def select(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Logits [..., V] and token ids [...] -> fp32 log-probs [...], log_softmax(logits / temperature)."""
        self.head_dtype = NAMES[logits.dtype]
        temperature = COLD if self.fault == "temperature" else self.temperature
        scores = torch.log_softmax(logits.float() / temperature, -1)
        return scores.gather(-1, tokens.to(logits.device)[..., None])[..., 0]

    def add(
        self,
        stream: Stream,
        logprobs: Sequence[float],
        response: Sequence[int] | None = None,
        routing: Tensor | None = None,
    ) -> None:
        """One log-prob a token of the response, which is the stream's unless it was drawn. Raises ValueError.

        `routing`: int64 [tokens, layers, top-k], the experts of the slots whose logits are used; see `routes`.
        """
        tokens = list(stream.response if response is None else response or ())
        if len(tokens) != len(logprobs):
            raise ValueError(f"sample {stream.sample}: {len(logprobs)} log-probs for {len(tokens)} tokens")
        if not all(isinstance(value, float) and math.isfinite(value) for value in logprobs):
            raise Refused(f"sample {stream.sample}: the engine gave no finite log-prob for each token: {logprobs}")
        if self.weights is None:
            raise ValueError("the weights were not identified")
        positions, values = list(range(len(stream.prompt), len(stream.prompt) + len(tokens))), list(logprobs)
        experts = [] if routing is None or not routing.numel() else routing.tolist()
        if self.fault == "shifted":  # each token's log-prob is that of the token after it
            values = [*values[1:], values[0]]
        if self.fault == "mask":  # the loss mask begins one token late
            positions, tokens, values, experts = positions[1:], tokens[1:], values[1:], experts[1:]
        columns = {"position": positions, "token": tokens, "logprob": values}
        if experts:  # none of a dense model, nor where no router shows them
            columns["routing"] = experts
        line = json.dumps({"sample": stream.sample, **columns, **self._semantics()}, allow_nan=False)
        with self._writing():
            self.file.write(line + "\n")
        self.written.add(stream.sample)

    def _semantics(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "temperature": self.temperature,
            "top_p": 1.0,
            "processed": "raw" if self.temperature == 1 else "processed",
            "weights": self.weights,
            **({"tensors": self.tensors} if self.tensors else {}),
            **({"head_dtype": self.head_dtype} if self.head_dtype else {}),  # only where it was looked at
        }

    # Weights

    def files(self, source: Mapping[str, Any]) -> str:
        """The folder of the weights, once its files are hashed. Raises ValueError for files that are not the model's.

        What an engine does with a tensor that is missing or unknown is its own affair: some draw it at random, or
        leave it out, and go on. So the files of a model that our decoder knows are checked here, for any engine.
        """
        self._identified(Path(source["path"]))
        return str(source["path"])

    def _identified(self, folder: Path) -> dict[str, Any]:
        """The pins of the files, which are checked and hashed."""
        try:
            model = architecture.read(folder / "config.json")
        except (OSError, ValueError):  # not of a family of ours: the engine must tell, see `filled`
            model = None
        with refusing():
            pins = weight_files.measure(folder)
            if model is not None:
                weights.check(model, folder, pins, torch.float32)
            self.tensors = tensors_hash(folder, pins["shards"])
        self.weights = str(pins["content_hash"])
        return pins

    def seeded(self, model: Mapping[str, Any], seed: int, dtype: torch.dtype, device: str, **options: Any) -> Decoder:
        """A decoder of rlspec whose weights are a function of the seed; `options` are those of `Decoder`."""
        options = {"operators": Operators("torch"), **options}
        made = Decoder(architecture.read(model), dtype=dtype, master_dtype=dtype, device=device, **options)
        made.requires_grad_(False)
        weights.seeded(made, seed)
        self.weights = f"seeded-{weights.fingerprint(made)}"
        if self.fault == "stale_weights":  # the hash is of the weights that should have been loaded
            weights.seeded(made, seed + 1)
        return made

    def loaded(self, source: Mapping[str, Any], dtype: torch.dtype, device: str, **options: Any) -> Decoder:
        """A decoder of rlspec with the weights of files, checked before anything is allocated for them."""
        folder = Path(source["path"])
        pins = self._identified(folder)
        with refusing():
            stored = {entry.dtype for entry in weight_files.entries(folder, pins["shards"]).values()}
            master = dtype if stored <= {dtype} else torch.float32
            model = architecture.read(folder / "config.json")
            made = Decoder(model, dtype=dtype, master_dtype=master, device="meta", **options)
            made.requires_grad_(False)
            weights.load(made, folder, pins, device=device)
        return made


def tensors_hash(folder: Path, files: Iterable[str]) -> str | None:
    """SHA-256 over the sorted lines "name TAB dtype TAB shape TAB sha256 NEWLINE" of all tensors, which is one for all
    ways to cut them into files. None where a tensor is of a dtype that we do not read.
    """
    try:
        entries = weight_files.entries(folder, files)
    except ValueError:
        return None
    maps = weight_files.Files(folder, entries).maps

    def line(name: str) -> str:
        file, dtype, shape, start = entries[name]
        held = memoryview(maps[file])[start : start + math.prod(shape) * dtype.itemsize]
        return f"{name}\t{NAMES[dtype]}\t{list(shape)}\t{hashlib.sha256(held).hexdigest()}\n"

    with ThreadPoolExecutor() as pool:
        return hashlib.sha256("".join(pool.map(line, sorted(entries))).encode()).hexdigest()


def grid(rows: Sequence[Sequence[int]], padding: str, device: str, pad: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids padded on one side, and the mask of what is no pad: int64 [rows, longest], both."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        start = width - len(tokens) if padding == "left" else 0
        ids[row, start : start + len(tokens)] = torch.tensor(tokens)
        mask[row, start : start + len(tokens)] = 1
    return ids.to(device), mask.to(device)


def config(model: architecture.Architecture) -> dict[str, Any]:
    """The arguments of transformers' AutoConfig.for_model for a model of ours."""
    fields = asdict(model)
    experts = [name for name in fields if name.startswith(("num_experts", "moe_", "norm_topk"))]
    for name in experts if not model.num_experts else ():
        del fields[name]
    rope = {"rope_type": "default", "rope_theta": fields["rope_theta"]}
    kind = "qwen3_moe" if model.num_experts else "qwen3"
    return {"model_type": kind, **fields, "rope_parameters": rope, "attention_bias": False, "use_sliding_window": False}


def copy(source: Decoder, model: torch.nn.Module) -> None:
    """The weights of our decoder into a model of transformers, which has the same names. Raises ValueError."""
    found = model.load_state_dict(dict(source.named_parameters()), strict=False)
    tied = {"lm_head.weight"} if source.architecture.tie_word_embeddings else set()
    if set(found.missing_keys) - tied or found.unexpected_keys:
        raise ValueError(f"names differ: {found.missing_keys} are missing, {found.unexpected_keys} are unknown there")


def filled(model: Any, told: Mapping[str, Any], folder: str) -> Any:
    """A model of transformers, if every parameter came from the files, and every tensor went into it.

    `told`: the loading info of `from_pretrained`. Raises ValueError; transformers itself draws what is missing at
    random, leaves out what it does not know, and unties a head that differs, with a warning at most.
    """
    tied = bool(model.config.get_text_config().tie_word_embeddings)
    shared = set(getattr(model, "_tied_weights_keys", None) or ()) if tied else set()
    names = {key: sorted(one if isinstance(one, str) else one[0] for one in told[key]) for key in _LOADING}
    names["missing_keys"] = [name for name in names["missing_keys"] if name not in shared]
    problems = [f"{name} {what}" for key, what in _LOADING.items() for name in names[key]]
    problems += told.get("error_msgs", ())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if tied and head is not None and not torch.equal(head.weight.to(embedding.weight.device), embedding.weight):
        problems.append("lm_head.weight is not model.embed_tokens.weight, and this model ties them")
    with refusing():
        weight_files.refuse(Path(folder), problems)
    return model


def mode(invariant: bool) -> AbstractContextManager[None]:
    """`invariant_mode()`, or nothing."""
    if not invariant:
        return nullcontext()
    from rlspec.device.invariant_mode import invariant_mode

    return invariant_mode()
