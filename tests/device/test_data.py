from __future__ import annotations

import io
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rlspec.device import data, tokenizing
from rlspec.device.data import Corpus, prepare
from rlspec.device.tokenizing import Bytes

ROOT = Path(__file__).parents[2]
TEXTS = ["first document", "second", "ein drittes, größeres Stück Text"]


class Sized(Bytes):
    """Bytes in a larger vocabulary."""

    def __init__(self, vocabulary_size, end=None):
        self.vocabulary_size = vocabulary_size
        self.end = vocabulary_size - 1 if end is None else end


def write_like_pithtrain(path, documents, dtype=np.uint16):
    """A corpus file as its own tools write it, without a manifest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.save(file, np.concatenate(documents).astype(dtype))
        np.save(file, np.cumsum([len(d) for d in documents]).astype(np.uint64))
    return path


# Writing


def test_a_file_is_two_arrays_back_to_back(tmp_path):
    prepare(TEXTS, tmp_path, Bytes())
    with (tmp_path / "text.bin").open("rb") as file:
        tokens, ends = np.load(file), np.load(file)
        assert file.read() == b""
    assert tokens.dtype == np.uint16 and ends.dtype == np.uint64
    assert tokens.tolist() == [i for text in TEXTS for i in [*text.encode(), 256]]
    assert ends.tolist() == np.cumsum([len(text.encode()) + 1 for text in TEXTS]).tolist()
    assert np.array_equal(np.load(tmp_path / "text.bin", mmap_mode="r"), tokens)


@pytest.mark.parametrize(
    ("size", "dtype"), [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32), (151936, np.uint32)]
)
def test_ids_take_the_smallest_dtype_that_holds_the_vocabulary(tmp_path, size, dtype):
    prepare(["plain"], tmp_path, Sized(size))
    tokens = np.load(tmp_path / "text.bin", mmap_mode="r")
    assert tokens.dtype == dtype and tokens[-1] == size - 1


def test_the_manifest_says_what_lint_needs(tmp_path):
    manifest = prepare([*TEXTS, ""], tmp_path, Bytes())
    assert manifest == json.loads((tmp_path / "manifest.json").read_text())
    tokens = sum(len(text.encode()) + 1 for text in TEXTS)
    assert (manifest["tokens"], manifest["documents"]) == (tokens, 3)
    assert manifest["tokenizer"] == {
        "name": "byte", "digest": "byte-257", "vocabulary_size": 257, "end_of_document": 256,
    }  # fmt: skip
    for length in (1, 7, tokens - 1, tokens):
        assert len(Corpus(tmp_path, length)) == sum((file["tokens"] - 1) // length for file in manifest["files"])


def test_a_lock_stands_beside_the_file_while_it_is_written(tmp_path):
    def texts():
        yield "one"
        assert (tmp_path / "text.bin.lock").exists() and not (tmp_path / "text.bin").exists()
        yield "two"

    prepare(texts(), tmp_path, Bytes())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "text.bin"]


@pytest.mark.parametrize(
    ("texts", "tokenizer", "message"),
    [([], Bytes(), "no text"), ([""], Bytes(), "no text"), (["x"], Sized(257, end=300), "outside of its vocabulary")],
)
def test_a_failed_writer_leaves_nothing(tmp_path, texts, tokenizer, message):
    with pytest.raises(ValueError, match=message):
        prepare(texts, tmp_path, tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_writer_leaves_nothing(tmp_path):
    def texts():
        yield "one"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(texts(), tmp_path, Bytes())
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(file, array):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space"):
        prepare(TEXTS, tmp_path, Bytes())
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    prepare(TEXTS, tmp_path, Bytes())
    before = (tmp_path / "text.bin").read_bytes()
    with pytest.raises(ValueError, match="holds a corpus already"):
        prepare(["other"], tmp_path, Bytes())
    assert (tmp_path / "text.bin").read_bytes() == before
    write_like_pithtrain(tmp_path / "theirs" / "shard.bin", [[1, 2]])
    with pytest.raises(ValueError, match="holds a corpus already"):
        prepare(["other"], tmp_path / "theirs", Bytes())


def test_a_second_writer_is_refused_and_leaves_the_lock(tmp_path):
    (tmp_path / "text.bin.lock").touch()
    with pytest.raises(ValueError, match="another process writes here"):
        prepare(TEXTS, tmp_path, Bytes())
    assert (tmp_path / "text.bin.lock").exists()


# Reading


def test_samples_follow_each_other(tmp_path):
    prepare(TEXTS, tmp_path, Bytes())
    tokens = np.load(tmp_path / "text.bin").astype(np.int64)
    corpus = Corpus(tmp_path, 5)
    for index in range(len(corpus)):
        sample = corpus[index].tokens
        assert sample.dtype == np.int64 and sample.tolist() == tokens[5 * index : 5 * index + 6].tolist()
    for index in (-1, len(corpus)):
        with pytest.raises(IndexError):
            corpus[index]


def test_targets_after_the_last_end_do_not_count(tmp_path):
    texts = ["x" * n for n in (2, 2, 1, 9, 2, 3, 30, 1, 7, 12)]
    prepare(texts, tmp_path, Bytes())
    seen = set()
    for length in (1, 2, 5, 8):
        corpus = Corpus(tmp_path, length)
        for index in range(len(corpus)):
            targets = corpus[index].tokens[1:].tolist()
            ends = [place for place, token in enumerate(targets) if token == 256]
            assert corpus[index].counted == (ends[-1] + 1 if ends else length)
            seen.add((length, corpus[index].counted))
    assert len(seen) > 6


def test_files_are_read_by_name_and_without_a_manifest(tmp_path):
    write_like_pithtrain(tmp_path / "b" / "2.bin", [[10, 11, 12], [13, 14]])
    write_like_pithtrain(tmp_path / "a" / "1.bin", [[1, 2, 3, 4, 5, 6, 7]], np.uint32)
    np.save(tmp_path / "indices.npy", np.arange(3))  # pith-train leaves such files in the folder
    corpus = Corpus(tmp_path, 2)
    found = [corpus[i].tokens.tolist() for i in range(len(corpus))]
    assert found == [[1, 2, 3], [3, 4, 5], [5, 6, 7], [10, 11, 12], [12, 13, 14]]
    assert [corpus[i].counted for i in range(len(corpus))] == [2, 2, 2, 2, 2]


def _lock(name):
    return lambda folder: (folder / name).touch()


def _append(folder):
    with (folder / "text.bin").open("ab") as file:
        file.write(b"more")


def _cut(folder):
    (folder / "manifest.json").unlink()
    path = folder / "text.bin"
    path.write_bytes(path.read_bytes()[:-1])


def _short(folder):
    (folder / "manifest.json").unlink()
    with (folder / "text.bin").open("wb") as file:
        np.save(file, np.arange(9, dtype=np.uint16))
        np.save(file, np.asarray([3, 8], dtype=np.uint64))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_lock("text.bin.lock"), "unfinished"),
        (_lock("text.lock"), "unfinished"),
        (_append, "its manifest says"),
        (_cut, "no corpus file"),
        (_short, "do not fit"),
        (lambda folder: (folder / "text.bin").unlink(), "no .bin file"),
    ],
)
def test_a_damaged_corpus_is_refused(tmp_path, damage, message):
    prepare(TEXTS, tmp_path, Bytes())
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        Corpus(tmp_path, 4)


# Text


def test_text_is_read_from_three_kinds_of_file(tmp_path):
    (tmp_path / "a.txt").write_text("one\nstill one\n\n \ntwo\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "drei ö", "id": 1}\n\n{"text": "four\\n\\nstill four"}\n')
    found = list(data.read_texts([tmp_path / "b.jsonl", tmp_path / "a.txt"]))
    assert found == ["drei ö", "four\n\nstill four", "one\nstill one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', r"a\.jsonl:2: .*key text"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', r"a\.jsonl:2: .*key text"),
        ("a.jsonl", b'["x"]\n', r"a\.jsonl:1: "),
        ("a.jsonl", b'{"text": "x"\n', r"a\.jsonl:1: "),
        ("a.txt", b"\xff\xfe", r"a\.txt: "),
        ("a.parquet", b"", r"read from \.txt, \.jsonl, \.jsonl\.zst"),
        ("a.jsonl.zst", b"no archive", r"a\.jsonl\.zst"),
    ],
)
def test_text_that_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(data.read_texts([tmp_path / name]))


def test_a_missing_file_and_a_missing_package_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"gone\.txt"):
        list(data.read_texts([tmp_path / "gone.txt"]))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ValueError, match="pip install zstandard"):
        list(data.read_texts([tmp_path / "a.jsonl.zst"]))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        tokenizing.TokenizerFile(tmp_path / "tokenizer.json")


def test_zst_is_read(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    lines = '{"text": "one"}\n{"text": "zwei ö"}\n'
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    assert list(data.read_texts([tmp_path / "a.jsonl.zst"])) == ["one", "zwei ö"]


def test_the_default_text_is_many_documents_of_many_lengths():
    lengths = [len(text) for text in data.topics()]
    assert len(lengths) > 1000 and min(lengths) > 0 and max(lengths) > 10 * sorted(lengths)[len(lengths) // 2]


# Tokenizers


def test_a_trained_bpe_repeats_and_serves_as_a_tokenizer_file(tmp_path):
    pytest.importorskip("tokenizers")
    texts = data.topics()[:200]
    first, second = (tokenizing.train_bpe(texts, 400, tmp_path / name) for name in ("a.json", "b.json"))
    assert first.digest == second.digest and first.vocabulary_size == 400
    ids = first.encode(texts[0])
    assert len(ids) < len(texts[0].encode()) and first.end not in ids
    manifest = prepare(texts, tmp_path / "corpus", tokenizing.TokenizerFile(tmp_path / "a.json"))
    assert manifest["tokenizer"]["digest"] == first.digest and manifest["tokenizer"]["end_of_document"] == first.end
    with pytest.raises(ValueError, match="<none>"):
        tokenizing.TokenizerFile(tmp_path / "a.json", "<none>")
    with pytest.raises(ValueError, match="at least 257"):
        tokenizing.train_bpe(texts, 200, tmp_path / "c.json")


def test_what_is_no_tokenizer_is_named(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    for name, message in (("tokenizer.json", "is no tokenizer.json"), ("gone.json", "No such file")):
        with pytest.raises(ValueError, match=message):
            tokenizing.TokenizerFile(tmp_path / name)


# The default corpus, and the command


def test_the_default_corpus_is_made_once_by_many(tmp_path):
    code = "from rlspec.device.data import default_corpus; print(default_corpus())"
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def build(_):
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    with ThreadPoolExecutor(4) as pool:
        found = {done.stdout.strip() for done in pool.map(build, range(4))}
    (folder,) = found
    assert [path.name for path in (tmp_path / "rlspec" / "corpora").iterdir()] == [Path(folder).name]
    before = (Path(folder) / "text.bin").stat().st_mtime_ns
    assert build(0).stdout.strip() == folder and (Path(folder) / "text.bin").stat().st_mtime_ns == before
    assert len(Corpus(Path(folder), 64)) > 4 * 32


def test_a_builder_that_comes_second_uses_the_first_ones_corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(data, "topics", lambda: TEXTS)
    real, made = data.prepare, []

    def slow(texts, folder, tokenizer):
        manifest = real(texts, folder, tokenizer)
        if not made:
            made.append(True)
            made.append(data.default_corpus())  # another builder is done before this one
        return manifest

    monkeypatch.setattr(data, "prepare", slow)
    folder = data.default_corpus()
    assert folder == made[1] and [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_the_command(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    out, err = io.StringIO(), io.StringIO()
    arguments = ["prepare", "--output", str(tmp_path / "made"), "--text", str(tmp_path / "a.txt")]
    assert data.main(arguments, out, err) == 0 and err.getvalue() == ""
    answer = json.loads(out.getvalue())
    assert answer["folder"] == str(tmp_path / "made") and answer["tokens"] == 8 and answer["documents"] == 2
    assert data.main(arguments, out, err) == 2 and "holds a corpus already" in err.getvalue()


@pytest.mark.parametrize("tokenizer", ["bpe:", "bpe:many", "bpe:12", "nowhere.json"])
def test_the_command_refuses_a_bad_tokenizer(tmp_path, tokenizer):
    err = io.StringIO()
    assert data.main(["prepare", "--output", str(tmp_path / "made"), "--tokenizer", tokenizer], err, err) == 2
    assert err.getvalue().startswith("error: ") and not (tmp_path / "made").exists()


def test_data_needs_no_torch(tmp_path):
    code = "import sys, rlspec.device.data; print(sorted({'torch', 'tokenizers', 'zstandard'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
