"""One module a kind, in one literal dict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from rlspec.checks import chain, correctness, operators, parity, performance
from rlspec.contract import Contract
from rlspec.model import Arm, Document, Problem, Result, Spec, Step, Verdict


class Check(Protocol):
    """What a kind is: from a document to verdicts."""

    def lint(self, document: Document, broken: Iterable[str]) -> list[Problem]:
        """Findings beyond the schema, of rules that do not read the `broken` keys."""

    def parse(self, document: Document) -> Spec:
        """The spec of a document that lint passed."""

    def expand(self, spec: Spec, workspace: Path, logging: Path) -> tuple[Step, ...]:
        """One step an arm, in order."""

    def judge(self, spec: Spec, results: Sequence[Result], contract: Contract) -> list[Verdict]:
        """Pure: what the arms left behind, to verdicts."""

    def more(self, spec: Spec, verdicts: Sequence[Verdict]) -> Arm | None:
        """A further arm that would settle an open verdict."""


CHECKS: dict[str, Check] = {
    "correctness": correctness,
    "performance": performance,
    "operators": operators,
    "chain": chain,
    "parity": parity,
}
