"""Log-prob files of a few lines, and what reading them says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlspec import logprobs
from rlspec.logprobs import BadLogProbs, LogProbs

GOOD = '{"sample": "s0", "position": 8, "token": 42, "logprob": -0.5}'


def entry(
    sample: object = "s0", position: object = 8, token: object = 42, logprob: object = -0.5, **more: object
) -> str:
    return json.dumps({"sample": sample, "position": position, "token": token, "logprob": logprob, **more})


def stored(path: Path, *lines: str) -> LogProbs:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return logprobs.read(path)


def refusal(path: Path, *lines: str) -> str:
    with pytest.raises(BadLogProbs) as caught:
        stored(path, *lines)
    return str(caught.value)
