"""Files written here byte by byte, and what is found against them."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from rlspec.architecture import read
from rlspec.device import weight_files
from rlspec.device.weight_files import INDEX, SINGLE
from tests.device.test_decoder import QWEN3_8B

ROOT = Path(__file__).parents[2]
PINS = ROOT / "specs/models/pins"
CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int8: "I8"}


def encoded(tensors, **changes):
    """The bytes of a safetensors file; `changes` replace entries of its header."""
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, x in tensors.items():
        raw = x.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": CODES[x.dtype], "shape": list(x.shape), "data_offsets": [len(body), len(body + raw)]}
        body += raw
    text = json.dumps(header | changes).encode()
    return struct.pack("<Q", len(text)) + text + body


def write(folder, *shards, weight_map=None):
    """One file, or shards with their index; -> their pins, computed apart from the code under test."""
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    names = names if len(shards) > 1 else [SINGLE]
    pins = {"index_sha256": None, "shards": {}}
    for name, tensors in zip(names, shards, strict=True):
        raw = encoded(tensors)
        (folder / name).write_bytes(raw)
        pins["shards"][name] = {"sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)}
    if len(shards) > 1:
        listed = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        text = json.dumps({"metadata": {}, "weight_map": weight_map or listed}).encode()
        (folder / INDEX).write_bytes(text)
        pins["index_sha256"] = hashlib.sha256(text).hexdigest()
    lines = sorted("\t".join((name, pin["sha256"], str(pin["bytes"]))) + "\n" for name, pin in pins["shards"].items())
    return pins | {"content_hash": hashlib.sha256("".join(lines).encode()).hexdigest()}


def tensors(*names, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(names))
    return {name: torch.randn(2, 3, generator=generator).to(dtype) for name in names}


A, B = tensors("a", "b"), tensors("c", dtype=torch.bfloat16)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


# Pins


def test_pins_of_qwen3_8b_are_consistent():
    pins = yaml.safe_load((PINS / "qwen3-8b.yaml").read_text())
    assert weight_files.content_hash(pins["shards"]) == pins["content_hash"]
    assert sum(pin["bytes"] for pin in pins["shards"].values()) == 16381516776
    elements = sum(torch.Size(shape).numel() for shape in read(QWEN3_8B).parameter_shapes().values())
    assert 2 * elements == pins["tensor_bytes"]


@pytest.mark.parametrize("shards", [(A,), (A, B)])
def test_measured_pins_are_those_of_the_files(tmp_path, shards):
    pins = write(tmp_path, *shards)
    assert weight_files.measure(tmp_path) == pins
    weight_files.verify(tmp_path, {**pins, "tensor_bytes": 0})


def test_all_wrong_sizes_and_files_are_named_at_once(tmp_path):
    pins = write(tmp_path, A, B)
    (tmp_path / FIRST).unlink()
    with (tmp_path / SECOND).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ValueError) as caught:
        weight_files.verify(tmp_path, pins)
    size = pins["shards"][SECOND]["bytes"]
    found = f"{FIRST} is missing; {SECOND} has {size + 1} bytes, not {size}"
    assert str(caught.value) == f"the weights in {tmp_path} are refused: {found}"


def test_a_flipped_bit_is_found(tmp_path):
    pins = write(tmp_path, A, B)
    raw = bytearray((tmp_path / SECOND).read_bytes())
    raw[-1] ^= 1
    (tmp_path / SECOND).write_bytes(raw)
    with pytest.raises(ValueError, match=f"{SECOND} has the SHA-256 .*, not .*; the content hash is"):
        weight_files.verify(tmp_path, pins)


def test_pins_that_are_written_are_read_again(tmp_path):
    for tensors in ((A,), (A, B)):
        folder = tmp_path / str(len(tensors))
        folder.mkdir()
        pins = write(folder, *tensors)
        command = [sys.executable, "-m", "rlspec.device.weight_files", str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        weight_files.verify(folder, yaml.safe_load(done.stdout))
        assert yaml.safe_load(done.stdout)["shards"] == pins["shards"]
    done = subprocess.run([*command[:-1], str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "is missing" in done.stderr


def test_another_index_is_found(tmp_path):
    pins = write(tmp_path, A, B)
    (tmp_path / INDEX).write_text((tmp_path / INDEX).read_text() + " ")
    with pytest.raises(ValueError, match=f"{INDEX} has the SHA-256 .*, not {pins['index_sha256']}"):
        weight_files.verify(tmp_path, pins)
    (tmp_path / INDEX).unlink()
    with pytest.raises(ValueError, match=f"{INDEX} is missing"):
        weight_files.verify(tmp_path, pins)


def test_an_index_where_none_is_pinned_is_found(tmp_path):
    pins = write(tmp_path, A)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(ValueError, match=f"{INDEX} is there, and none is pinned"):
        weight_files.verify(tmp_path, pins)


def test_pins_that_contradict_themselves_or_the_index(tmp_path):
    pins = write(tmp_path, A, B)
    with pytest.raises(ValueError, match="refused: the content hash is [0-9a-f]{64}, not beef$"):
        weight_files.verify(tmp_path, {**pins, "content_hash": "beef"})
    with pytest.raises(ValueError, match=f"refused: {SECOND} is not pinned$"):
        weight_files.verify(tmp_path, {**pins, "shards": {FIRST: pins["shards"][FIRST]}})
    (tmp_path / "more").write_bytes(b"")
    more = {**pins["shards"], "more": {"sha256": "", "bytes": 0}}
    with pytest.raises(ValueError, match="refused: more is not in the index"):
        weight_files.verify(
            tmp_path, {**pins, "shards": more, "content_hash": weight_files.content_hash(pins["shards"])}
        )
    with pytest.raises(ValueError, match="the pins have no shards and no content_hash"):
        weight_files.verify(tmp_path, {"index_sha256": None})


@pytest.mark.parametrize("text", ["", "[1]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"a": 1, "a": 2}'])
def test_an_index_that_is_none(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=INDEX):
        weight_files.measure(tmp_path)


def test_shards_without_their_index(tmp_path):
    write(tmp_path, A, B)
    (tmp_path / INDEX).unlink()
    with pytest.raises(ValueError, match=f"refused: {INDEX} is missing, which says what is in which of the shards$"):
        weight_files.measure(tmp_path)


def test_pins_in_upper_case_are_the_same(tmp_path):
    pins = write(tmp_path, A, B)
    shards = {name: {**pin, "sha256": pin["sha256"].upper()} for name, pin in pins["shards"].items()}
    upper = {key: pins[key].upper() for key in ("index_sha256", "content_hash")}
    weight_files.verify(tmp_path, {**upper, "shards": shards})
    (tmp_path / INDEX).write_text((tmp_path / INDEX).read_text() + " ")
    with pytest.raises(ValueError, match=f"{INDEX} has the SHA-256 .*, not {pins['index_sha256']}"):
        weight_files.verify(tmp_path, {**upper, "shards": shards})


def test_nothing_there(tmp_path):
    with pytest.raises(ValueError, match=f"{SINGLE} is missing"):
        weight_files.measure(tmp_path)


# Headers


def test_tensors_have_their_bits_wherever_they_are(tmp_path):
    """An odd header length puts numbers where no number of their size may be."""
    for pad in range(4):
        everything = (
            tensors("a" * (pad + 1), "b") | tensors("c", dtype=torch.bfloat16) | tensors("d", dtype=torch.float16)
        )
        write(tmp_path, everything)
        files = weight_files.Files(tmp_path, weight_files.entries(tmp_path, [SINGLE]))
        assert set(files.entries) == set(everything)
        for name, want in everything.items():
            assert files[name].dtype == want.dtype and torch.equal(files[name], want)


def test_writing_to_a_tensor_does_not_reach_the_file(tmp_path):
    write(tmp_path, A)
    before = (tmp_path / SINGLE).read_bytes()
    files = weight_files.Files(tmp_path, weight_files.entries(tmp_path, [SINGLE]))
    assert files["a"].any()
    files["a"].zero_()
    assert (tmp_path / SINGLE).read_bytes() == before


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": FIRST, "b": FIRST}, f"c is in {SECOND}, the index says nothing"),
        ({"a": FIRST, "b": SECOND, "c": SECOND}, f"b is in {FIRST}, the index says {SECOND}"),
        ({"a": FIRST, "b": FIRST, "c": SECOND, "d": FIRST}, f"d is in no file, the index says {FIRST}"),
    ],
)
def test_an_index_that_does_not_say_where_tensors_are(tmp_path, weight_map, message):
    write(tmp_path, A, B, weight_map=weight_map)
    with pytest.raises(ValueError, match=message):
        weight_files.entries(tmp_path, [FIRST, SECOND])


def test_a_tensor_in_two_shards(tmp_path):
    write(tmp_path, A, B | {"a": A["a"]})
    with pytest.raises(ValueError, match=f"a is in {FIRST} and in {SECOND}"):
        weight_files.entries(tmp_path, [FIRST, SECOND])


def header(**changes):
    return encoded(A, **changes)


def entry(start, stop, shape=(2, 3), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


BROKEN = {
    "empty": (b"", "a header of 0 bytes does not fit into 0"),
    "cut header": (header()[:40], "a header of .* bytes does not fit into 40"),
    "cut": (header()[:-1], "the tensors end at byte 48 of 47"),
    "more": (header() + b"\0", "the tensors end at byte 48 of 49"),
    "gap": (header(b=entry(25, 49)) + b"\0", r"b \[2, 3\] does not fill its bytes 25 to 49 after 24"),
    "overlap": (header(b=entry(20, 44)), r"b \[2, 3\] does not fill its bytes 20 to 44 after 24"),
    "shape": (header(b=entry(24, 48, (2, 4))), r"b \[2, 4\] does not fill its bytes"),
    "dtype": (header(b=entry(24, 48, dtype="F8_E4M3")), "b is F8_E4M3, and only BF16, F16, F32 are read"),
    "no offsets": (header(b={"dtype": "F32", "shape": [2, 3]}), "the header's entry b has no data_offsets"),
    "nothing": (header(b={}), "the header's entry b has no dtype and no shape and no data_offsets"),
    "no entry": (header(b=3), "the header's entry b is 3, not a mapping"),
    "dtype in a list": (header(b=entry(24, 48, dtype=["F32"])), r"b is \['F32'\], and only BF16, F16, F32 are read"),
    "shape of texts": (header(b=entry(24, 48, ("2", "3"))), r"the shape of b is \['2', '3'\], not a list of whole"),
    "shape of floats": (header(b=entry(24, 48, (2.0, 3))), r"the shape of b is \[2.0, 3\], not a list of whole"),
    "negative shape": (header(b=entry(24, 48, (-2, -3))) + bytes(24), r"the shape of b is \[-2, -3\], not a list"),
    "true shape": (header(b=entry(24, 28, (True,))) + bytes(4), r"the shape of b is \[True\], not a list"),
    "no shape": (header(b=entry(24, 48) | {"shape": None}), "the shape of b is None, not a list"),
    "offsets of texts": (header(b=entry("24", "48")), r"the data_offsets of b are \['24', '48'\], not two whole"),
    "one offset": (header(b=entry(24, 48) | {"data_offsets": [24]}), r"the data_offsets of b are \[24\], not two"),
    "deep": (struct.pack("<Q", 200_000) + b"[" * 200_000, f"{SINGLE}: nested too deep"),
    "not JSON": (struct.pack("<Q", 4) + b"{a: ", f"{SINGLE}: Expecting"),
    "a list": (struct.pack("<Q", 2) + b"[]", f"{SINGLE}: not a JSON object"),
    "twice": (struct.pack("<Q", 14) + b'{"a":1, "a":2}', f"{SINGLE}: a stands there twice"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_by_name(tmp_path, name):
    raw, message = BROKEN[name]
    (tmp_path / SINGLE).write_bytes(raw)
    with pytest.raises(ValueError, match=message) as caught:
        weight_files.entries(tmp_path, [SINGLE])
    assert SINGLE in str(caught.value)


def test_a_message_does_not_name_thousands(tmp_path):
    with pytest.raises(ValueError) as caught:
        weight_files.refuse(tmp_path, [f"problem {i}" for i in range(1000)])
    assert str(caught.value).endswith("problem 7; and 992 more")


def test_one_file_beside_an_index_that_does_not_name_it(tmp_path):
    write(tmp_path, A, B)
    (tmp_path / SINGLE).write_bytes(encoded(A))  # what transformers would load, though the hash is of the shards
    with pytest.raises(ValueError, match=f"{SINGLE} is beside {INDEX}, which does not name it"):
        weight_files.measure(tmp_path)
