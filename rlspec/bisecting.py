"""`rlspec bisect`: the commit at which the verdict turns.

The base arms run once, at the good end; their difference is the envelope of the whole search. The bad end and then each
midpoint is one feature arm against it. A commit that cannot run is skipped. Where a midpoint stays INVESTIGATE, base
runs added, the search stops: half of what is left would be thrown away on a guess.

The commit that is found and the last good one before it then run once more, since one run of each may have been luck.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rlspec import errors, git, linting, pipeline, report, repository, runs
from rlspec.arms import Options
from rlspec.checks import CHECKS
from rlspec.errors import RunError, SpecError
from rlspec.model import Document
from rlspec.report.text import wrap
from rlspec.reports import now

SKIPPED = "skipped"
GOOD = ("PASS", "MEASURED", "N/A")


@dataclass(slots=True, kw_only=True)
class Search:
    """`commits` are those after the good end, oldest first, the last is the bad end; `found` what is known of them."""

    commits: Sequence[str]
    found: dict[str, str] = field(default_factory=dict)

    @property
    def bounds(self) -> tuple[int, int]:
        """Indices of the newest good commit (-1: the good end) and of the oldest bad one (None known: past the end)."""
        known = [(at, self.found.get(commit)) for at, commit in enumerate(self.commits)]
        bad = min((at for at, status in known if status == "FAIL"), default=len(self.commits))
        return max((at for at, status in known if status in GOOD and at < bad), default=-1), bad

    def next(self) -> str | None:
        """The bad end first, then the untried commit nearest to the middle; None where the search is over."""
        if self.commits[-1] not in self.found:
            return self.commits[-1]
        if self.found[self.commits[-1]] != "FAIL" or self.undecided is not None:
            return None
        good, bad = self.bounds
        untried = [at for at in range(good + 1, bad) if self.commits[at] not in self.found]
        middle = (good + bad) // 2
        return self.commits[min(untried, key=lambda at: (abs(at - middle), at))] if untried else None

    @property
    def undecided(self) -> str | None:
        """A commit that is neither good nor bad nor skipped."""
        return next((c for c, status in self.found.items() if status not in (*GOOD, "FAIL", SKIPPED)), None)

    @property
    def suspects(self) -> Sequence[str]:
        """Where the verdict turns: one commit, or more where those between could not run or were not tried."""
        good, bad = self.bounds
        return self.commits[good + 1 : bad + 1]


def bisect(
    document: Document, good: str, bad: str, overrides: Sequence[str], resume: bool, stream: TextIO, width: int = 80
) -> tuple[str, int]:
    """What is found, in words, and the exit code: 0 where one commit is named. Raises SpecError, RunError."""
    top, (first, last) = _ends(document, good, bad)
    state = _State.begin(document, top, first, last, overrides, resume)
    search = Search(commits=state.data["commits"], found={c: one["status"] for c, one in state.data["tried"].items()})
    while (commit := search.next()) is not None:
        _say(stream, f"bisect: {len(search.suspects)} commits may be it; {_title(top, commit)} is next")
        search.found[commit] = state.attempt(document, commit, stream)
        _say(stream, f"bisect: {_title(top, commit)}: {search.found[commit]}")
    _confirm(document, search, state, top, stream)
    return _words(search, state, top, first, width), _exit_code(search, state.data)


def _confirm(document: Document, search: Search, state: _State, top: Path, stream: TextIO) -> None:
    """Run the commit that was found, and the one before, once more, unless an earlier search has."""
    for commit in _to_confirm(search, state.data["good"]):
        if commit not in state.data["again"]:
            _say(stream, f"bisect: {_title(top, commit)} once more, to be sure")
            state.attempt(document, commit, stream, "again")
            _say(stream, f"bisect: {_title(top, commit)}: {state.data['again'][commit]['status']}")
            if commit in _contradicted(search, state.data):
                return


def _to_confirm(search: Search, good: str) -> list[str]:
    """The commit that was found and the last good one before it; nothing where none was found."""
    if search.undecided is not None or search.found.get(search.commits[-1]) != "FAIL":
        return []
    last, bad = search.bounds
    return [search.commits[bad], search.commits[last] if last >= 0 else good]


def _contradicted(search: Search, data: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Of the commits that ran once more, those that did not come out as before."""
    again: Mapping[str, Mapping[str, Any]] = data["again"]
    failed = {commit for commit, status in search.found.items() if status == "FAIL"}
    return {
        commit: one for commit, one in again.items() if one["status"] not in (("FAIL",) if commit in failed else GOOD)
    }


def _say(stream: TextIO, text: str) -> None:
    print(text, file=stream, flush=True)


def _ends(document: Document, good: str, bad: str) -> tuple[Path, tuple[str, str]]:
    if document.data["kind"] != "correctness":
        raise SpecError(f"{document.path}: bisect needs a spec of kind correctness, this is {document.data['kind']}")
    spec = CHECKS["correctness"].parse(document)
    place = spec.repository or spec.path.resolve().parent
    top = repository.top(place) if place.is_dir() else None
    if top is None:
        raise SpecError(f"{place} is in no git repository; set `repository:`")
    return top, (repository.resolve(top, good), repository.resolve(top, bad))


def _between(top: Path, good: str, bad: str) -> list[str]:
    """The commits after good up to bad along first parents, oldest first. SpecError where good is not among them.

    The whole line is asked for, since `good..bad` trusts the dates of the commits.
    """
    found = git.ask(top, "rev-list", "--first-parent", bad).split()
    if good not in found[1:]:
        raise SpecError(
            f"{good[:12]} is not before {bad[:12]} on its line of first parents; name the older commit --good, and "
            "for a side branch the commit where it began"
        )
    return found[: found.index(good)][::-1]


def at_commits(document: Document, good: str, commit: str, added: Sequence[Mapping[str, Any]] = ()) -> Document:
    """The spec with its base arms at `good` and its first feature arm at `commit`. SpecError where it does not lint."""
    arms = document.data["arms"]
    bases = [{**arm, "revision": good} for arm in arms if arm["role"] == "base"]
    feature = next(arm for arm in arms if arm["role"] == "feature")
    made = {**document.data, "arms": [*bases, *added, {**feature, "revision": commit}]}
    changed = dataclasses.replace(document, data=made)
    if wrong := [problem for problem in linting.problems_of(changed) if problem.severity == "error"]:
        raise SpecError(f"{document.path} cannot be bisected: {wrong[0].message}")
    return changed


@dataclass(slots=True, kw_only=True)
class _State:
    """A search on disk, below `workspace/bisect/`, written after each commit; runs lie where they always do."""

    path: Path
    data: dict[str, Any]

    @classmethod
    def begin(
        cls, document: Document, top: Path, good: str, bad: str, overrides: Sequence[str], resume: bool
    ) -> _State:
        base = runs.root(Path.cwd().resolve())
        folder = runs.bisects(base)
        same = {
            "spec": os.path.relpath(document.path.resolve(), base),
            "data": document.data,
            "overrides": list(overrides),
            "good": good,
            "bad": bad,
        }
        if resume:
            for path in sorted(folder.glob("*.json"), reverse=True):
                data = runs.load(path)
                if all(data.get(key) == value for key, value in same.items()):
                    return cls(path=path, data={"again": {}, **data})
            raise SpecError(f"no search of {document.path} from {good[:12]} to {bad[:12]} to go on with, as it is now")
        data = {**same, "created": now(), "commits": _between(top, good, bad), "tried": {}, "again": {}}
        data |= {"added": [], "run": None}
        at_commits(document, good, bad)
        stem = f"{now().replace(':', '').replace('-', '')}-{document.path.stem}"
        return cls(path=next(p for n in range(1000) if not (p := folder / f"{stem}-{n}.json").exists()), data=data)

    def attempt(self, document: Document, commit: str, stream: TextIO, into: str = "tried") -> str:
        """Run one feature arm, and the base arms if it is the first; what came of it.

        `into` is "again" for a commit that has run before: it runs, whatever is known, and no base run is added.
        """
        changed = at_commits(document, self.data["good"], commit, self.data["added"])
        runs.save(self.path, self.data)
        feature = next(arm["name"] for arm in changed.data["arms"] if arm["role"] == "feature")
        options = Options(
            arms=(feature,) if into == "again" else (),
            from_run=self.data["run"] and str(runs.root(Path.cwd().resolve()) / self.data["run"]),
            resume=self.data["run"] is None and self._cut_off(changed),
            overrides=tuple(self.data["overrides"]),
        )
        made = pipeline.run(changed, options, stream)
        report.save(made, ())
        outcome, reason = _outcome(made)
        self.data[into][commit] = {"status": outcome, "reason": reason, "run": made["run"] and made["run"]["folder"]}
        if made["run"] and all(arm["status"] in ("done", "reused") for arm in made["arms"] if arm["role"] == "base"):
            self._keep(made)
        runs.save(self.path, self.data)
        return outcome

    def _cut_off(self, changed: Document) -> bool:
        """Whether the newest run of the spec is the first of this search, interrupted."""
        earlier = runs.latest(runs.root(Path.cwd().resolve()), changed.path)
        return earlier is not None and runs.load(earlier.plan, "plan")["spec"]["data"] == changed.data

    def _keep(self, made: Mapping[str, Any]) -> None:
        """The envelope for the commits to come, with the base arms that this one added."""
        folder = Path(made["run"]["folder"])
        self.data["run"] = os.path.relpath(folder, runs.root(Path.cwd().resolve()))
        known = {arm["name"] for arm in [*self.data["data"]["arms"], *self.data["added"]]}
        last = [arm for arm in self.data["data"]["arms"] if arm["role"] == "base"][-1]
        for arm in runs.load(folder / "plan.json", "plan")["arms"]:
            if arm["added"] and arm["name"] not in known:
                copied = {**last, "name": arm["name"], "revision": self.data["good"]}
                self.data["added"].append({**copied, "perturb": arm["perturb"]} if arm["perturb"] else copied)


def _outcome(made: Mapping[str, Any]) -> tuple[str, str]:
    """The status of a commit, and why. RunError where the base arms, which stay, are to blame."""
    for arm in made["arms"]:
        if arm["role"] == "base" and arm["status"] == "failed":
            raise RunError(f"{arm['name']}, at the good end, failed: {arm['reason']}")
    failed = [arm for arm in made["arms"] if arm["role"] == "feature" and arm["status"] == "failed"]
    if failed:
        return SKIPPED, f"could not run: {failed[0]['reason']}"
    worst = [verdict for verdict in made["verdicts"] if verdict["status"] == made["outcome"]]
    reason = f"{worst[0]['subject']}: {worst[0]['reason']}" if worst else ""
    if made["outcome"] == "ERROR":
        return SKIPPED, f"could not be judged: {reason}"
    return str(made["outcome"]), reason


def _title(top: Path, commit: str) -> str:
    return git.ask(top, "log", "-1", "--no-show-signature", "--format=%h %s", "--abbrev=12", commit)


def _exit_code(search: Search, data: Mapping[str, Any]) -> int:
    codes: dict[str, int] = {"INVESTIGATE": errors.INVESTIGATE, "BLOCKED": errors.BLOCKED}
    if search.found[search.commits[-1]] == "FAIL" and search.undecided is None:
        sure = len(search.suspects) == 1 and not _contradicted(search, data)
        return errors.OK if sure else errors.INVESTIGATE
    status = search.found[search.undecided] if search.undecided else "ERROR"
    return codes.get(status, errors.ERROR)


def _words(search: Search, state: _State, top: Path, good: str, width: int) -> str:
    tried = state.data["tried"]
    lines = [f"good         {_title(top, good)}: the floor, of {_bases(state.data)} base runs"]
    for commit in search.commits:
        if commit in tried:
            lines.append(f"{tried[commit]['status']:<11}  {_title(top, commit)}")
    again = state.data["again"]
    lines += [f"{one['status']:<11}  {_title(top, commit)}, once more" for commit, one in again.items()]
    count = len(tried) + len(again)
    arms = f"{count} feature {'arm' if count == 1 else 'arms'}"
    said = _conclusion(search, state.data, top)
    lines += ["", *wrap(f"{said} ({arms} for {len(search.commits)} commits)", width)]
    last = search.undecided or (search.suspects or search.commits)[-1]
    if run := tried.get(last, {}).get("run"):
        lines += wrap(f"{run}/report.json", width, "report: ")
    return "\n".join(lines)


def _bases(data: Mapping[str, Any]) -> int:
    return len([arm for arm in data["data"]["arms"] if arm["role"] == "base"]) + len(data["added"])


def _conclusion(search: Search, data: Mapping[str, Any], top: Path) -> str:
    last, suspects, tried = search.commits[-1], search.suspects, data["tried"]
    if (unsure := search.undecided) is not None:
        one = tried[unsure]
        said = f"stopped at {_title(top, unsure)}, which is {one['status']}, {one['reason']}"
        left = f"; the turn lies in the {len(suspects)} commits up to {suspects[-1][:12]}" if unsure != last else ""
        return f"{said}{left}"
    if search.found[last] == SKIPPED:
        return f"the bad end {_title(top, last)} {tried[last]['reason']}"
    if search.found[last] != "FAIL":
        return f"the bad end {_title(top, last)} is {search.found[last]}: the verdict does not turn"
    culprit = suspects[-1]
    verdict = f"FAIL, {tried[culprit]['reason']}"
    for commit, one in _contradicted(search, data).items():
        before = f"{search.found[commit]} at first" if commit in search.found else "the good end"
        return (
            f"not certain: {_title(top, culprit)} looked like the culprit, {verdict}, but {_title(top, commit)}, "
            f"{before}, is {one['status']} once more: add base arms or confirm_fail: true, and search again"
        )
    if len(suspects) == 1:
        return f"the culprit is {_title(top, culprit)}: {verdict}"
    others = ", ".join(commit[:12] for commit in suspects[:-1])
    return f"the culprit is {_title(top, culprit)}, or one of {others}, which could not run: {verdict}"
