"""Parity of two engines: d = train - rollout over one token stream, its verdicts, and likely causes where they fail.

The rollout's policy drew the tokens, so with r = exp(d) the mean of r - 1 - d estimates KL(rollout ‖ train); the other
direction would not. Sides go by role, never by the order of files. Sums are exact (math.fsum).
"""

from __future__ import annotations

import filecmp
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from heapq import nlargest
from itertools import permutations
from operator import eq, itemgetter
from pathlib import Path
from typing import Any

from rlspec import dilution, hints, logprobs, pairing
from rlspec.dlogp_statistics import NAMED, STATISTICS
from rlspec.errors import SpecError
from rlspec.logprob_lines import shown
from rlspec.logprobs import LogProbs
from rlspec.model import Judgment, Row, Status, Verdict
from rlspec.pairing import Pair, mean

STANDARD = tuple(STATISTICS)
SUBJECT = "logprob"
PERMILLE = {"50": 500, "99": 990, "99.9": 999}
CLIP = {"low": 0.8, "high": 1.2}  # PPO's usual range, where the row gives none
CONSTANT = 3  # tokens with one log-prob: one or two may be alike by chance
SURE = -1e-2  # log-probs above are of tokens that are sure on the other side, too

Asked = tuple[str, Row, dict[str, float]]


def judge(rollout: Path, train: Path, judgments: Sequence[Judgment], resolve: Callable[[str], Row]) -> list[Verdict]:
    """One verdict a judgment, in their order. Unusable or different files give ERROR to all.

    Raises SpecError for a file that cannot be opened and for a row without a usable limit, as `resolve` may.
    """
    asked = [(judgment.check, *_row(judgment.check, resolve)) for judgment in judgments]
    if _same_file(rollout, train):
        reason = f"self-comparison: rollout and train are the same file, {train}; give the file that each engine wrote"
        return _errors(asked, [reason])
    try:
        ours, theirs = logprobs.read(rollout), logprobs.read(train)
    except logprobs.BadLogProbs as error:
        return _errors(asked, [str(error)])
    if ours.semantics and _same_bytes(rollout, train):
        reason = (
            f"self-comparison: {train} is {rollout} to the byte, a copy of it or the same engine with the same "
            "settings; give the file that each engine wrote, with its name and how it ran under the key engine"
        )
        return _errors(asked, [reason])
    notes = pairing.remarks(ours, theirs)
    if problems := pairing.identity(ours, theirs):
        return _lead(_errors(asked, problems), notes, {})
    pair = pairing.join(ours, theirs)
    if problem := _constant(ours, theirs) or dilution.nothing(pair) or _repeated(pair) or _copied(pair, ours, theirs):
        return _lead(_errors(asked, [problem]), notes, {})
    return _judge(asked, pair, ours, theirs, [*notes, *_twins(pair, ours, theirs)])


def _copied(pair: Pair, ours: LogProbs, theirs: LogProbs) -> str | None:
    """Two files of one engine that are the same but for the order of lines and white space."""
    if "engine" not in ours.semantics or ours.semantics != theirs.semantics or pair.rollout != pair.train:
        return None
    return (
        f"self-comparison: every log-prob of {theirs.path} is that of {ours.path}, and both are of engine "
        f"{ours.semantics['engine']}: a copy, or the same engine with the same settings; give the file that each "
        "engine wrote, with its name and how it ran under the key engine"
    )


def _twins(pair: Pair, ours: LogProbs, theirs: LogProbs) -> Iterator[str]:
    """What to say of files that may be one: equal, without two engines that may agree to the bit; or but rounded."""
    if pair.rollout == pair.train:
        if not ("engine" in ours.semantics and "engine" in theirs.semantics):
            yield (
                f"every log-prob of {theirs.path.name} is that of {ours.path.name}, and no two engines are named: is "
                "one a copy? Two engines may agree to the bit; let each file say its own under the key engine"
            )
        return
    for (name, fine), (other, coarse) in permutations(((ours.path.name, pair.rollout), (theirs.path.name, pair.train))):
        how = next((how for how, rounded in ROUNDED.items() if all(map(eq, map(rounded, fine), coarse))), None)
        if how and len(set(coarse)) >= CONSTANT:
            yield f"every log-prob of {other} is that of {name} rounded to {how}: is it a copy, or do the bits agree?"
            return


def _packed(code: str) -> Callable[[float], float]:
    """A rounding to a format of struct; what does not fit is rounded to NaN, which equals nothing."""

    def rounded(value: float) -> float:
        try:
            return float(struct.unpack(code, struct.pack(code, value))[0])
        except OverflowError:
            return math.nan

    return rounded


def _bf16(value: float) -> float:
    """Half to even, as torch rounds the bits of an fp32."""
    try:
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
    except OverflowError:
        return math.nan
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", kept))[0])


ROUNDED: Mapping[str, Callable[[float], float]] = {
    **{f"{digits} decimals": partial(round, ndigits=digits) for digits in range(1, 10)},
    "fp32": _packed("<f"),
    "bf16": _bf16,
    "fp16": _packed("<e"),
}


def _constant(ours: LogProbs, theirs: LogProbs) -> str | None:
    """A side that has one value for all tokens: no log-probs of a model, though the two may differ by any little."""
    flat = [side for side in (ours, theirs) if min(side.logprobs) == max(side.logprobs)]
    other = theirs if flat and flat[0] is ours else ours
    if len(flat) == 1 and flat[0].logprobs[0] == 0 and min(other.logprobs) > SURE:
        return None  # in fp32 the log-prob of a sure token is 0
    values = {side.logprobs[0] for side in flat}
    if len(flat) == 2 and len(values) == 1 and len(ours.logprobs) > 1:
        return f"every log-prob of both files is {values.pop():g}, a constant: this gate cannot fail"
    if not flat or len(ours.logprobs) < CONSTANT:
        return None
    told = " and ".join(f"every log-prob of {side.path} is {side.logprobs[0]!r}" for side in flat)
    return f"{told}, a constant: these are not the log-probs of the {len(ours.logprobs)} tokens under a model"


def _repeated(pair: Pair) -> str | None:
    """A side on which all tokens of a sample share a value, as where the mean of a sample was written for each."""
    spans = [(start, stop) for start, stop in pair.spans.values() if stop - start >= CONSTANT]
    for name, side in (("rollout", pair.rollout), ("train", pair.train)):
        values = [set(side[start:stop]) for start, stop in spans]
        if len(spans) >= CONSTANT and all(len(one) == 1 for one in values) and min(min(one) for one in values) < SURE:
            return f"all tokens of a sample have one log-prob on the {name} side: these are not log-probs of tokens"
    return None


def aggregates(pair: Pair, resolve: Callable[[str], Row]) -> dict[str, dict[str, Any]]:
    """Every aggregate of two executions of one model: `value`, its `status` by the contract's row, and `detail`."""
    found, evidence = {}, _figures(pair)
    for check in STANDARD:
        row, limits = _row(check, resolve)
        value, _, detail, more = STATISTICS[check](pair, limits, evidence)
        status, _ = _status(value, row, limits)
        found[check] = {"value": value, "status": status, "row": row.id, "detail": detail, **more}
    return found


def _judge(asked: Sequence[Asked], pair: Pair, ours: LogProbs, theirs: LogProbs, notes: Sequence[str]) -> list[Verdict]:
    evidence = _evidence(pair, ours, theirs)
    verdicts = [_verdict(pair, check, row, limits, evidence) for check, row, limits in asked]
    thin = dilution.find(pair)
    compared = pairing.without(pair, thin.places) if 0 < len(thin.places) < len(pair.d) else pair
    verdicts, texts, numbers = _hinted(verdicts, hints.find(compared))
    verdicts = [_doubted(one, thin.short) if _hidden(one, thin.factor) else one for one in verdicts]
    routing = [_routing_note(evidence["routing"])] if pair.flips is not None else []
    return _lead(verdicts, [*notes, *thin.notes, *texts, *routing], numbers)


def _hidden(verdict: Verdict, factor: float) -> bool:
    """Whether a mean is within its limit only since tokens count that should not."""
    if verdict.judgment not in dilution.DILUTED or verdict.statistic is None or verdict.row is None:
        return False
    return verdict.statistic * factor > verdict.row.limits.get("max", math.inf)


def _hinted(
    verdicts: list[Verdict], found: Mapping[str, hints.Hint]
) -> tuple[list[Verdict], list[str], dict[str, Any]]:
    """Verdicts, notes and numbers: all hints where something fails, those beside a PASS where nothing does."""
    statuses = {verdict.status for verdict in verdicts}
    passing = "PASS" in statuses and "FAIL" not in statuses
    told = {name: hint for name, hint in found.items() if not passing or (hint.text and hint.beside)}
    numbers = {"hints": {name: dict(hint.numbers) for name, hint in told.items()}} if told or not passing else {}
    texts = [hint.text for hint in told.values() if hint.text]
    if sure := [hint.text for hint in told.values() if passing and hint.sure]:
        verdicts = [_doubted(verdict, f"no rounding gives such d: {sure[0]}") for verdict in verdicts]
        texts.remove(sure[0])  # the reasons have it
    return verdicts, texts, numbers


def _doubted(verdict: Verdict, why: str) -> Verdict:
    """No PASS of a number that is not what it seems; one that is not gated says so."""
    if verdict.status not in ("PASS", "MEASURED"):
        return verdict
    status: Status = "INVESTIGATE" if verdict.status == "PASS" else "MEASURED"
    return replace(verdict, status=status, reason=f"{verdict.reason}; {why}")


def _row(check: str, resolve: Callable[[str], Row]) -> tuple[Row, dict[str, float]]:
    """The row of a judgment and its limits; for outliers also `above`, the limit of one token."""
    if check not in STANDARD:
        close = get_close_matches(check, STANDARD, 1)
        known = f"did you mean {close[0]}?" if close else f"known are {', '.join(STANDARD)}"
        raise SpecError(f"unknown judgment {check!r}; {known}")
    row = resolve(check)
    limits = dict(row.limits)
    if row.status in ("applicable", "optional") and "max" not in limits:
        raise SpecError(f"row {row.id} has no limit `max`; give it one, or the status measured")
    if check == "clip_fraction":
        limits = {**CLIP, **limits}
        if not 0 < limits["low"] < limits["high"]:
            raise SpecError(f"row {row.id}: clip range [{limits['low']:g}, {limits['high']:g}] is not 0 < low < high")
    if check == "sequence_outliers":
        token_row = resolve("max_abs_dlogp")
        if "max" not in token_row.limits:
            raise SpecError(
                f"sequence_outliers counts by the limit `max` of row {token_row.id}, which has none; give it one"
            )
        limits["above"] = token_row.limits["max"]
    return row, limits


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # missing or unreadable: reading says so
        return False


def _same_bytes(one: Path, other: Path) -> bool:
    """Whole files, with what they say of themselves: two engines may agree to the bit, and not be the same one."""
    try:
        return filecmp.cmp(one, other, shallow=False)
    except OSError:
        return False


def _errors(asked: Iterable[Asked], problems: list[str]) -> list[Verdict]:
    return [
        Verdict(
            judgment=check,
            subject=SUBJECT,
            status="ERROR",
            reason="; ".join(problems),
            row=row,
            evidence={"problems": problems},
        )
        for check, row, _ in asked
    ]


def _lead(verdicts: list[Verdict], notes: Sequence[str], numbers: Mapping[str, Any]) -> list[Verdict]:
    """Notes and numbers of the whole comparison go to one verdict, that of max_abs_dlogp or else the first."""
    at = next((at for at, verdict in enumerate(verdicts) if verdict.judgment == "max_abs_dlogp"), 0)
    return [
        replace(verdict, notes=tuple(notes), evidence={**verdict.evidence, **numbers}) if index == at else verdict
        for index, verdict in enumerate(verdicts)
    ]


def _evidence(pair: Pair, ours: LogProbs, theirs: LogProbs) -> dict[str, Any]:
    return {**_figures(pair), "semantics": {"rollout": dict(ours.semantics), "train": dict(theirs.semantics)}}


def _figures(pair: Pair) -> dict[str, Any]:
    total = len(pair.d)
    ordered = sorted(pair.size)
    worst = nlargest(NAMED, pair.peaks, key=itemgetter(0))
    evidence: dict[str, Any] = {
        "tokens": total,
        "sequences": len(pair.spans),
        "worst_token": _worst(pair, worst[0][1]),
        "worst_sequences": [{"sample": shown(name), "max_abs_dlogp": peak} for peak, name in worst],
        "percentiles": {name: ordered[-(-part * total // 1000) - 1] for name, part in PERMILLE.items()},
        "mean_dlogp": mean(pair.d),
        "positive_share": sum(map((0.0).__lt__, pair.d)) / total,
    }
    if pair.flips is not None:
        calm = [size for size, flip in zip(pair.size, pair.flips, strict=True) if not flip]
        evidence["routing"] = {
            "tokens": total,
            "flips": total - len(calm),
            "max_abs_dlogp_without_flips": max(calm, default=None),
        }
    return evidence


def _worst(pair: Pair, name: str) -> dict[str, Any]:
    start, stop = pair.spans[name]
    at = max(range(start, stop), key=pair.size.__getitem__)
    return {
        "sample": shown(name),
        "position": pair.positions[at],
        "token": pair.tokens[at],
        "rollout": pair.rollout[at],
        "train": pair.train[at],
        "dlogp": pair.d[at],
    }


def _routing_note(routing: Mapping[str, Any]) -> str:
    calm = routing["max_abs_dlogp_without_flips"]
    rest = "no token has the same experts on both sides" if calm is None else f"max |d| of the others is {calm:.6g}"
    return f"routing: {routing['flips']} of {routing['tokens']} tokens went to other experts; {rest}"


def _verdict(pair: Pair, check: str, row: Row, limits: Mapping[str, float], evidence: Mapping[str, Any]) -> Verdict:
    value, what, detail, more = STATISTICS[check](pair, limits, evidence)
    status, relation = _status(value, row, limits)
    reason = row.reason if status == "N/A" else f"{what} is {relation}; {detail}"
    return Verdict(
        judgment=check,
        subject=SUBJECT,
        status=status,
        reason=reason,
        statistic=value,
        row=row,
        evidence={**evidence, **more},
    )


def _status(value: float, row: Row, limits: Mapping[str, float]) -> tuple[Status, str]:
    if row.status in ("out_of_scope", "not_applicable"):
        return "N/A", row.reason
    if not math.isfinite(value):
        return "FAIL", f"{value}, not a finite number"
    if row.status == "measured":
        return "MEASURED", f"{value:.6g}, reported and not gated"
    limit = limits["max"]
    number = f"{value:.6g}" if value == limit or f"{value:.6g}" != f"{limit:.6g}" else repr(value)
    return ("PASS", f"{number}, within {limit:g}") if value <= limit else ("FAIL", f"{number}, above {limit:g}")
