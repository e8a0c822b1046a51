from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from rlspec.device import dumping
from rlspec.device.routing import Routes
from tests.device.test_weight_files import A, B, write
from tests.test_token_files import GOOD, stored


def dump(tmp_path, **options):
    tokens = str(stored(tmp_path, GOOD))
    made = dumping.Dump(str(tmp_path / "bf16-train.py"), engine="rlspec", how=("full",), tokens=tokens, **options)
    made.weights = "w"
    return made


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "bf16-train.records.jsonl").read_text().splitlines()]


def test_what_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("RLSPEC_RECORDS", raising=False)
    with dump(tmp_path) as made:
        made.select(torch.zeros(1, 8, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64))
        made.add(made.streams[0], [-1.0, -2.5])
    (line,) = lines(tmp_path)
    assert line.pop("engine").startswith("rlspec (torch ")
    assert line == {
        "sample": "s0", "position": [2, 3], "token": [9, 4], "logprob": [-1.0, -2.5], "temperature": 1.0, "top_p": 1.0,
        "processed": "raw", "weights": "w", "head_dtype": "bf16",
    }  # fmt: skip


def test_routing_is_left_out_of_dense_models_and_cut_like_the_tokens(tmp_path, monkeypatch):
    monkeypatch.delenv("RLSPEC_RECORDS", raising=False)
    chosen = torch.tensor([[[1, 2], [3, 4]], [[5, 6], [7, 0]]])  # two tokens, two layers, two experts
    for routing, fault, written in ((chosen, None, chosen.tolist()), (chosen, "mask", [[[5, 6], [7, 0]]])):
        with dump(tmp_path, fault=fault) as made:
            made.add(made.streams[0], [-1.0, -2.5], routing=routing)
        assert lines(tmp_path)[0]["routing"] == written
    with dump(tmp_path) as made:
        made.add(made.streams[0], [-1.0, -2.5], routing=made.routes.taken(torch.zeros(1, 2))[0])
    assert "routing" not in lines(tmp_path)[0]


class Router(torch.nn.Module):
    """Two of four experts, as routers of transformers hand them on; or only logits, as some do."""

    def __init__(self, told=True):
        super().__init__()
        self.told = told

    def forward(self, x):
        scores, experts = x.topk(2, -1)
        return (x, scores, experts) if self.told else (x, scores)


def test_routers_are_seen_by_the_names_of_their_classes():
    routes, ids = Routes(), torch.zeros(2, 3, dtype=torch.int64)
    model, mute = torch.nn.Sequential(Router(), Router()), Router(told=False)
    routes.watch(model)
    routes.watch(mute)
    x = torch.rand(6, 4)
    mute(x)
    for layer in model:
        layer(x)
    seen = routes.taken(ids)
    assert seen.shape == (2, 3, 2, 2) and torch.equal(seen[:, :, 1].flatten(0, 1), x.topk(2, -1).indices)
    for odd in (x[:5], x[:0]):  # on some of the rows alone, or not at all
        model[0](odd)
        assert routes.taken(ids).shape == (2, 3, 0, 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([-1.0], "1 log-probs for 2 tokens"),
        ([-1.0, None], "no finite log-prob"),
        ([-1.0, math.nan], "no finite log-prob"),
        ([-1.0, -math.inf], "no finite log-prob"),
    ],
)
def test_refused(tmp_path, values, message):
    with pytest.raises(ValueError, match=message), dump(tmp_path) as made:
        made.add(made.streams[0], values)


def test_a_sample_that_was_left_out_and_weights_without_a_name(tmp_path):
    with pytest.raises(ValueError, match="1 samples have no log-probs, s0 first"), dump(tmp_path):
        pass
    with pytest.raises(ValueError, match="weights were not identified"), dump(tmp_path) as made:
        made.weights = None
        made.add(made.streams[0], [-1.0, -1.0])


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    monkeypatch.setenv("RLSPEC_RECORDS", "/dev/full")

    def main():
        with dump(tmp_path) as made:
            made.add(made.streams[0], [-1.0, -2.5])

    with pytest.raises(SystemExit, match="^error: cannot write log-probs to /dev/full: No space left on device$"):
        dumping.run(main)


def test_a_temperature_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("RLSPEC_RECORDS", raising=False)
    logits, tokens = torch.tensor([[0.0, 3.0], [1.0, -1.0]]), torch.tensor([0, 1])
    with dump(tmp_path, temperature=0.5) as made:
        found = made.select(logits, tokens)
        made.add(made.streams[0], found.tolist())
    assert torch.equal(found, torch.log_softmax(logits / 0.5, -1)[[0, 1], tokens])
    (line,) = lines(tmp_path)
    assert (line["temperature"], line["processed"], line["head_dtype"]) == (0.5, "processed", "fp32")


def test_weights_are_one_however_they_are_cut_into_files(tmp_path):
    def hashes(name, *shards):
        (tmp_path / name).mkdir()
        write(tmp_path / name, *shards)
        made = dump(tmp_path)
        made.files({"path": str(tmp_path / name)})
        return made.weights, made.tensors

    files, whole = hashes("whole", A | B)
    cut = [hashes("cut", B, A), hashes("other", A, B)]
    assert {tensors for _, tensors in cut} == {whole} and len({files, *(file for file, _ in cut)}) == 3
    changed = [A | {"c": B["c"] + 1}, A | {"d": B["c"]}, A | {"c": B["c"].float()}, A | {"c": B["c"].view(3, 2)}, A]
    assert len({whole, *(hashes(f"changed{at}", one)[1] for at, one in enumerate(changed))}) == 6
    assert hashes("int8", {"a": torch.ones(2, dtype=torch.int8)})[1] is None  # of a dtype that we do not read


def test_token_ids_that_the_model_does_not_have(tmp_path):
    made = dump(tmp_path)
    made.check(18)
    with pytest.raises(ValueError, match="sample s0: token 17 is not below the vocabulary, 17"):
        made.check(17)


@pytest.mark.parametrize("side", ["left", "right"])
def test_grid(side):
    ids, mask = dumping.grid([(1, 2, 3), (4,)], side, "cpu")
    assert ids.tolist() == [[1, 2, 3], [0, 0, 4] if side == "left" else [4, 0, 0]]
    assert mask.sum(1).tolist() == [3, 1] and (ids * mask).tolist() == ids.tolist()
