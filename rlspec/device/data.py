"""Text to token ids, and a corpus of token ids to samples. It imports numpy and no torch.

A corpus is a folder of `.bin` files as pith-train reads them: two .npy arrays back to back, first the token ids in the
smallest unsigned dtype that holds the vocabulary, then the end of each document as uint64. Every document ends with
the end-of-document id. `x.bin.lock` marks an `x.bin` that is being written; `manifest.json` comes last.

Sample i of a file holds its tokens [i·T, i·T + T], T inputs and, one later, T targets. Targets after the last end of a
document in the sample do not count: what stands there is the torn-off head of another document. So the samples of a
step count unequal numbers of tokens, as they do wherever documents are padded.

    python -m rlspec.device.data prepare --output FOLDER [--text FILE…] [--tokenizer byte|bpe:SIZE|PATH]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from rlspec.device.tokenizing import Bytes, Tokenizer, TokenizerFile, train_bpe

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1


# Text


def topics() -> list[str]:
    """The default text: the paragraphs of Python's own `pydoc_data.topics`; each Python version has its own."""
    from pydoc_data.topics import topics as pages

    return [paragraph for name in sorted(pages) for paragraph in _paragraphs(pages[name])]


def read_texts(paths: Iterable[Path]) -> Iterator[str]:
    """The documents of .txt (parted by empty lines), .jsonl and .jsonl.zst (key text) files, in the order given.

    Raises ValueError with file and line for what cannot be read.
    """
    for path in paths:
        reader = next((read for ending, read in _READERS.items() if path.name.endswith(ending)), None)
        if reader is None:
            raise ValueError(f"{path}: text is read from {', '.join(_READERS)}")
        try:
            yield from reader(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from None


def _paragraphs(text: str) -> list[str]:
    return [part.strip("\n") for part in re.split(r"\n(?:[ \t]*\n)+", text) if part.strip()]


def _plain(path: Path) -> Iterator[str]:
    yield from _paragraphs(path.read_text(encoding="utf-8"))


def _jsonl(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        yield from _objects(path, lines)


def _zstd(path: Path) -> Iterator[str]:
    try:
        import zstandard
    except ImportError:
        raise ValueError(f"{path} needs the package zstandard: pip install zstandard") from None
    try:
        with zstandard.open(path, "rt", encoding="utf-8") as lines:
            yield from _objects(path, lines)
    except zstandard.ZstdError as error:
        raise ValueError(f"{path}: {error}") from None


def _objects(path: Path, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        if not isinstance(found, dict) or not isinstance(found.get("text"), str):
            raise ValueError(f"{path}:{number}: an object with the key text is due")
        yield found["text"]


_READERS: Mapping[str, Callable[[Path], Iterator[str]]] = {".txt": _plain, ".jsonl": _jsonl, ".jsonl.zst": _zstd}


# Writing a corpus


def prepare(texts: Iterable[str], folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write `texts`, one document each, as a corpus into `folder`; returns its manifest. Empty texts are left out.

    Raises ValueError if the folder holds a corpus already, if another writer is at it, or if there is no text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_occupied(folder)
    path = folder / "text.bin"
    lock = folder / "text.bin.lock"
    try:
        lock.open("x").close()
    except FileExistsError:
        raise ValueError(f"{lock} exists: another process writes here, or died at it; then remove it") from None
    try:
        described = _write(texts, path, tokenizer)
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "tokens": described["tokens"],
            "documents": described["documents"],
            "tokenizer": {
                "name": tokenizer.name,
                "digest": tokenizer.digest,
                "vocabulary_size": tokenizer.vocabulary_size,
                "end_of_document": tokenizer.end,
            },
            "files": [described],
        }
        draft = folder / f".{MANIFEST}.partial"
        draft.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        draft.replace(folder / MANIFEST)
    finally:
        lock.unlink()
    return manifest


def _refuse_occupied(folder: Path) -> None:
    if any(folder.rglob("*.bin")):
        raise ValueError(f"{folder} holds a corpus already; choose another folder, or remove it first")


def _write(texts: Iterable[str], path: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    dtype = np.min_scalar_type(tokenizer.vocabulary_size - 1)
    parts, ends, count = [], [], 0
    for text in texts:
        if not text:
            continue
        ids = np.asarray([*tokenizer.encode(text), tokenizer.end])
        if not 0 <= ids.min() <= ids.max() < tokenizer.vocabulary_size:
            raise ValueError(f"{tokenizer.name} gave ids outside of its vocabulary of {tokenizer.vocabulary_size}")
        count += len(ids)
        parts.append(ids.astype(dtype))
        ends.append(count)
    if not parts:
        raise ValueError("there is no text to prepare")
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            np.save(file, np.concatenate(parts))
            np.save(file, np.asarray(ends, dtype=np.uint64))
            file.flush()
            os.fsync(file.fileno())
        digest = hashlib.sha256(partial.read_bytes()).hexdigest()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    size = path.stat().st_size
    return {"name": path.name, "tokens": count, "documents": len(ends), "bytes": size, "digest": digest}


def default_corpus() -> Path:
    """The corpus of `topics()` in bytes, made once for each user and text below XDG_CACHE_HOME; safe to race for."""
    texts, tokenizer = topics(), Bytes()
    digest = hashlib.sha256("\0".join([tokenizer.digest, *texts]).encode()).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlspec" / "corpora"
    folder = home / f"topics-{tokenizer.name}-v{SCHEMA_VERSION}-{digest}"
    if (folder / MANIFEST).is_file():
        return folder
    home.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=home))
    try:
        prepare(texts, draft / "corpus", tokenizer)
        (draft / "corpus").rename(folder)
    except OSError:  # a folder that is there and not empty refuses the rename: another process came first
        if not (folder / MANIFEST).is_file():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


# Reading a corpus


class Sample(NamedTuple):
    """int64 [T + 1] token ids, and how many of the T targets count, from the first on."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    counted: int


class Corpus:
    """The samples of all `.bin` files below a folder, files by name. Nothing but the touched pages is read.

    Raises ValueError where there is no file, one is unfinished, or one is not what its manifest says.
    """

    def __init__(self, folder: Path, length: int) -> None:
        self.folder, self.length = folder, length
        paths = sorted(folder.rglob("*.bin"))
        if not paths:
            raise ValueError(f"{folder} holds no corpus (no .bin file); rlspec prepare makes one")
        self.manifest = self._manifest()
        self._files = [_open(path) for path in paths]
        self._ends = np.cumsum([max(0, len(tokens) - 1) // length for tokens, _ in self._files])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        file = int(np.searchsorted(self._ends, index, side="right"))
        tokens, ends = self._files[file]
        start = (index - (int(self._ends[file - 1]) if file else 0)) * self.length
        stop = start + self.length + 1
        # A document with its end at e has its last token at e - 1, and the first input of a sample is no target.
        before = int(np.searchsorted(ends, stop, side="right"))
        last = int(ends[before - 1]) if before else 0
        counted = last - 1 - start if last >= start + 2 else self.length
        return Sample(tokens[start:stop].astype(np.int64), counted)

    def _manifest(self) -> dict[str, Any]:
        path = self.folder / MANIFEST
        if not path.is_file():
            return {}
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for file in manifest["files"]:
            size = (self.folder / file["name"]).stat().st_size
            if size != file["bytes"]:
                raise ValueError(f"{self.folder / file['name']} has {size} bytes, its manifest says {file['bytes']}")
        return manifest


def _open(path: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    lock = path.with_name(path.name + ".lock")
    if lock.exists() or path.with_suffix(".lock").exists():
        raise ValueError(f"{path} is unfinished: a lock stands beside it")
    try:
        tokens = np.load(path, mmap_mode="r")
        with path.open("rb") as file:
            file.seek(tokens.offset + tokens.nbytes)
            ends = np.load(file)
    except (OSError, ValueError, EOFError, AttributeError) as error:
        raise ValueError(f"{path} is no corpus file of two .npy arrays: {error}") from None
    whole = tokens.ndim == ends.ndim == 1 and tokens.dtype.kind == ends.dtype.kind == "u"
    if not (whole and len(ends) and int(ends[-1]) == len(tokens)):
        raise ValueError(f"{path}: document ends do not fit {tokens.dtype} {list(tokens.shape)} token ids")
    return tokens, ends


# The command line, which `rlspec prepare` starts


def main(arguments: Sequence[str] | None = None, out: IO[str] = sys.stdout, err: IO[str] = sys.stderr) -> int:
    """0 with the manifest on `out`, 2 with the reason on `err`."""
    parser = argparse.ArgumentParser(prog="python -m rlspec.device.data")
    command = parser.add_subparsers(required=True).add_parser("prepare", help="text to a corpus of token ids")
    command.add_argument("--output", type=Path, required=True, help="folder of the corpus")
    command.add_argument("--text", type=Path, nargs="+", action="extend", default=[], help=".txt, .jsonl, .jsonl.zst")
    command.add_argument("--tokenizer", default="byte", help="byte, bpe:SIZE, or the path of a tokenizer.json")
    command.add_argument("--end", help="token that ends a document, where the tokenizer.json has another than usual")
    given = parser.parse_args(arguments)
    try:
        texts = list(read_texts(given.text)) if given.text else topics()
        _refuse_occupied(given.output)
        manifest = prepare(texts, given.output, _tokenizer(given.tokenizer, given.end, texts, given.output))
    except (ValueError, OSError) as error:
        with suppress(OSError):
            given.output.rmdir()  # only if nothing is in it
        print(f"error: {error}", file=err)
        return 2
    json.dump({"folder": str(given.output), **manifest}, out, indent=2)
    out.write("\n")
    return 0


def _tokenizer(wanted: str, end: str | None, texts: Iterable[str], output: Path) -> Tokenizer:
    if wanted == "byte":
        return Bytes()
    if wanted.startswith("bpe:"):
        size = wanted.removeprefix("bpe:")
        if not size.isascii() or not size.isdigit():
            raise ValueError(f"--tokenizer {wanted}: a vocabulary size is due, such as bpe:4096")
        return train_bpe(texts, int(size), output / "tokenizer.json")
    return TokenizerFile(Path(wanted), end)


if __name__ == "__main__":
    sys.exit(main())
