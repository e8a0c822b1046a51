"""Text to token ids: bytes, any tokenizer.json, or a byte-level BPE trained here; each can end a document."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "<｜end▁of▁sentence｜>")


class Tokenizer(Protocol):
    """`end` is the id that closes a document; ids are below `vocabulary_size`; `digest` names it in the manifest."""

    name: str
    digest: str
    vocabulary_size: int
    end: int

    def encode(self, text: str) -> Sequence[int]: ...


class Bytes:
    """The bytes of UTF-8 as ids 0 to 255, and 256 for the end of a document."""

    name, digest, vocabulary_size, end = "byte", "byte-257", 257, 256

    def encode(self, text: str) -> Sequence[int]:
        return text.encode()


class TokenizerFile:
    """A tokenizer.json of the `tokenizers` package. Raises ValueError if it is none, or has no token for the end."""

    def __init__(self, path: Path, end_token: str | None = None) -> None:
        content = _tokenizers(f"{path}").Tokenizer
        try:
            text = path.read_text(encoding="utf-8")
            self._tokenizer = content.from_str(text)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
        except Exception as error:  # the package raises bare Exception
            raise ValueError(f"{path} is no tokenizer.json: {error}") from None
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        wanted = END_TOKENS if end_token is None else (end_token,)
        found = [token for token in wanted if token in vocabulary]
        if not found:
            raise ValueError(f"{path} has no token {' or '.join(wanted)} for the end of a document; name it by --end")
        self.name = path.name
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self.vocabulary_size = max(vocabulary.values()) + 1
        self.end = vocabulary[found[0]]

    def encode(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def train_bpe(texts: Iterable[str], vocabulary_size: int, path: Path) -> TokenizerFile:
    """Train a byte-level BPE on `texts` and write its tokenizer.json; the same texts give the same file."""
    package = _tokenizers("a BPE")
    if vocabulary_size < 257:
        raise ValueError(f"a byte-level BPE needs a vocabulary of at least 257, not {vocabulary_size}")
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_TOKENS[0]],
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return TokenizerFile(path)


def _tokenizers(wanted: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ValueError(f"{wanted} needs the package tokenizers: pip install tokenizers") from None
    return tokenizers
