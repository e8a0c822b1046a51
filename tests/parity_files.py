"""Log-probs of two engines that differ by a given rule, and what parity says of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlspec import dlogp
from rlspec.model import Judgment, Row, RowStatus, Verdict

Token = tuple[str, int, int, float]


def row(check: str, status: RowStatus = "applicable", **limits: float) -> Row:
    return Row(
        contract="test",
        judgment=check,
        subject="*",
        dtype="*",
        status=status,
        limits=limits,
        source="a test",
        date="2026-01-01",
        reason="because of the test",
    )


ROWS = {
    "max_abs_dlogp": row("max_abs_dlogp", max=0.06),
    "mean_abs_dlogp": row("mean_abs_dlogp", "measured"),
    "approx_kl": row("approx_kl", max=0.05),
    "clip_fraction": row("clip_fraction", max=0.0, low=0.8, high=1.2),
    "sequence_outliers": row("sequence_outliers", "measured"),
}
STRICT = {check: row(check, max=0.06 if check == "max_abs_dlogp" else 0.05) for check in dlogp.STANDARD} | {
    "clip_fraction": row("clip_fraction", max=0.0),
    "sequence_outliers": row("sequence_outliers", max=0.0),
}


def lines(tokens: Sequence[Token], **more: Any) -> str:
    keys = ("sample", "position", "token", "logprob")
    return "".join(json.dumps({**dict(zip(keys, token, strict=True)), **more}) + "\n" for token in tokens)


def files(folder: Path, rollout: str, train: str) -> tuple[Path, Path]:
    ours, theirs = folder / "rollout.jsonl", folder / "train.jsonl"
    ours.write_text(rollout, encoding="utf-8")
    theirs.write_text(train, encoding="utf-8")
    return ours, theirs


def judged(
    ours: Path, theirs: Path, rows: dict[str, Row] = ROWS, checks: Sequence[str] = dlogp.STANDARD
) -> dict[str, Verdict]:
    verdicts = dlogp.judge(ours, theirs, [Judgment(check=check) for check in checks], rows.__getitem__)
    assert [verdict.judgment for verdict in verdicts] == list(checks)
    return {verdict.judgment: verdict for verdict in verdicts}


def compared(
    folder: Path, train: Sequence[Token], to_rollout: Callable[[int, Token], float], rows: dict[str, Row] = ROWS
) -> dict[str, Verdict]:
    rollout = [(*token[:3], min(0.0, to_rollout(at, token))) for at, token in enumerate(train)]
    return judged(*files(folder, lines(rollout, engine="one"), lines(train, engine="other")), rows)


def stream(sequences: int = 16, length: int = 16, seed: int = 0) -> list[Token]:
    rng = random.Random(seed)
    return [
        (f"s{sequence}", 8 + at, rng.randrange(150_000), -0.5 - rng.expovariate(0.5))
        for sequence in range(sequences)
        for at in range(length)
    ]


def statuses(verdicts: dict[str, Verdict]) -> str:
    return " ".join(verdicts[check].status for check in dlogp.STANDARD)


def hint(verdicts: dict[str, Verdict], word: str) -> str:
    return "".join(note for note in verdicts["max_abs_dlogp"].notes if word in note)
