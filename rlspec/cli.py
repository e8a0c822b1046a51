"""The command line. Commands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlspec import __version__, errors

if TYPE_CHECKING:
    from rlspec.model import Document, Problem

CONTEXT = {"help_option_names": ["-h", "--help"]}
PATHS = click.Path(path_type=Path)
EXITS = """
\b
Exit codes of run and judge (of several specs, the worst: 4, 1, 3, 5, 0)
  0  PASS or MEASURED, or as the spec expects
  1  FAIL            2  bad spec or usage, nothing ran
  3  INVESTIGATE     4  ERROR: could not be judged
  5  BLOCKED, or nothing judged        130, 143  interrupted

Every option can be set by a variable: RLSPEC_RUN_KEEP_GOING=1.
"""


@contextlib.contextmanager
def _for_people() -> Iterator[None]:
    """Errors meant for people, as one line and an exit code."""
    try:
        yield
    except errors.SpecError as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(errors.USAGE) from None
    except errors.RunError as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(errors.ERROR) from None
    except BrokenPipeError:
        _hush()
        raise SystemExit(errors.ERROR) from None
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        click.echo(f"error: {place}{error.strerror or error}", err=True)
        raise SystemExit(errors.ERROR) from None
    except KeyboardInterrupt:
        raise SystemExit(errors.INTERRUPTED) from None
    except (click.exceptions.Exit, click.ClickException, click.Abort):
        raise
    except Exception:  # a bug of ours must not exit 1, which is FAIL
        traceback.print_exc()
        raise SystemExit(errors.ERROR) from None


def _hush() -> None:
    """Whoever read our output is gone; what is still to come goes nowhere, and so does what is left in the buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams() -> None:
    """A standard stream that the caller closed goes nowhere, and no file of a run ever gets its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: those below are open by now
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


class _Group(click.Group):
    def main(self, *args: Any, **options: Any) -> Any:
        _open_streams()
        return super().main(*args, **options)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Every option can be set by a variable of its own name, such as RLSPEC_RUN_KEEP_GOING."""
        for option in cmd.params:
            if isinstance(option, click.Option):
                words = [str(name or cmd.name), *max(option.opts, key=len).strip("-").split("-")]
                option.envvar = "_".join(["RLSPEC", *words]).upper()
        super().add_command(cmd, name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they are used."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        with _for_people():
            return super().invoke(ctx)


@click.group(cls=_Group, context_settings=CONTEXT, epilog=EXITS)
@click.version_option(__version__, prog_name="rlspec", help="Print the version and exit.")
def main() -> None:
    """Did the numbers change, and is that the code or the noise?

    A spec in YAML names the model, the mesh, the arms and the judgments.
    rlspec lints it, renders identical run files, executes the arms in order
    and judges what they measured against a tolerance contract.

    \b
      rlspec init correctness > my.yaml   a commented spec to start from
      rlspec lint my.yaml                 every problem, with line and column
      rlspec plan my.yaml                 what would run
      rlspec run my.yaml                  run it, and the verdict

    \b
      rlspec judge base0.log base1.log feat0.log --reader pithtrain
                                          the verdict on logs that you have
    """


_investigate_ok = click.option("--investigate-ok", is_flag=True, help="Exit 0 instead of 3 on INVESTIGATE.")
_blocked_ok = click.option("--blocked-ok", is_flag=True, help="Exit 0 instead of 5 on BLOCKED.")
_outputs = click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    type=PATHS,
    metavar="FILE",
    help="Write the report to FILE, too, in the format of its suffix: .json, .md (Markdown) or .xml (JUnit); the last "
    "two hold those of several specs. May be repeated.",
)
_verbose = click.option("-v", "--verbose", is_flag=True, help="Print every figure of every verdict.")
_set = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Lay a value over the spec, such as trainer.steps=8 or arms.2.revision=HEAD. May be repeated; recorded.",
)


def _linted(paths: Sequence[Path], overrides: Sequence[str] = (), strict: bool = False) -> list[Document]:
    """The sound specs among the paths; with any error, print all of them and exit 2."""
    from rlspec import linting

    specs, problems = linting.lint(paths, overrides)
    serious = [p for p in problems if p.severity == "error" or strict]
    _print_problems(problems if serious else [], "text")
    if serious:
        raise SystemExit(errors.USAGE)
    for problem in problems:
        click.echo(f"{_place(problem)}: {problem.rule} warning: {problem.message}", err=True)
    return specs


def _place(problem: Problem) -> str:
    return f"{problem.path}:{problem.line}:{problem.column}"


def _print_problems(problems: Sequence[Problem], how: str) -> None:
    if how == "json":
        import json

        rows = [
            {
                "path": str(p.path),
                "line": p.line,
                "column": p.column,
                "rule": p.rule,
                "severity": p.severity,
                "pointer": p.pointer,
                "message": p.message,
                "hint": p.hint,
            }
            for p in problems
        ]
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for p in problems:
        if how == "github":
            text = f"{p.message}; {p.hint}" if p.hint else p.message
            text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
            click.echo(f"::{p.severity} file={p.path},line={p.line},col={p.column},title={p.rule}::{text}")
            continue
        word = "warning: " if p.severity == "warning" else ""
        click.echo(f"{_place(p)}: {p.rule} {word}{p.message}")
        if p.hint:
            click.echo(f"  hint: {p.hint}")


@main.command()
@click.argument("kind")
def init(kind: str) -> None:
    """Print a commented spec of KIND to start from.

    KIND is correctness, performance, operators, chain or parity. What is to be
    filled in stands in <angle brackets>; `rlspec lint` names what is left over.
    """
    from rlspec import schema

    if kind not in schema.KINDS:
        raise errors.SpecError(f"unknown kind {kind!r}; {schema.suggestion(kind, schema.KINDS)}")
    path = Path(__file__).parent / "templates" / kind / "init.yaml"
    click.echo(path.read_text(encoding="utf-8"), nl=False)


@main.command()
@click.argument("paths", nargs=-1, required=True, type=PATHS)
@click.option(
    "--format",
    "how",
    type=click.Choice(["text", "json", "github"]),
    help="How problems are printed: text, a JSON list, or annotations of GitHub Actions (the default there).",
)
@click.option("--strict", is_flag=True, help="Warnings count as errors.")
def lint(paths: tuple[Path, ...], how: str | None, strict: bool) -> None:
    """Report every problem of every spec at and below PATHS.

    Runs nothing, needs no GPU and does not import torch. A problem has a
    place, a rule, what is wrong and a hint; `rlspec explain RL203` explains a
    rule. Exit 0 if there is no error, else 2.
    """
    from rlspec import linting

    _, problems = linting.lint(paths)
    how = how or ("github" if os.environ.get("GITHUB_ACTIONS") == "true" else "text")
    _print_problems(problems, how)
    count = sum(p.severity == "error" or strict for p in problems)
    number = len(linting.files(paths))
    if how == "text":
        warnings = len(problems) - count
        click.echo(f"{number} files, {count} errors, {warnings} warnings", err=True)
    if number == 0:
        raise errors.SpecError("no .yaml file there")
    if count:
        raise SystemExit(errors.USAGE)


@main.command()
@click.argument("path", type=PATHS)
@_set
def plan(path: Path, overrides: tuple[str, ...]) -> None:
    """Print what a run of the spec at PATH would do, and write nothing.

    The resolved spec with its defaults, the contract rows it is judged by, the
    arms in order with commit, command and files, and what they cost.
    """
    from rlspec import planning

    for document in _linted([path], overrides):
        click.echo(planning.text(document, _width()))


def _width() -> int:
    import shutil

    from rlspec.report import terminal

    return terminal.width(os.environ, shutil.get_terminal_size().columns)


@main.command()
@click.argument("path", type=PATHS)
@_set
def render(path: Path, overrides: tuple[str, ...]) -> None:
    """Write the run files of the spec at PATH into a new run folder.

    Nothing is run. Prints the paths of the files, one an arm, which are the
    same to the byte.
    """
    from rlspec import planning

    for document in _linted([path], overrides):
        for file in planning.render_files(document):
            click.echo(file)


@main.command()
@click.argument("paths", nargs=-1, required=True, type=PATHS)
@click.option(
    "--arm",
    "arms",
    multiple=True,
    metavar="NAME",
    help="Run this arm only; the others come from --from, --resume or --retry-errors. May be repeated.",
)
@click.option(
    "--from",
    "from_run",
    metavar="RUN",
    help="Use the arms of RUN that are still valid: same run file, commit, command, declared environment, build, "
    "reader, records, tokens and weights; of an arm without a revision, same code and tracked files. In what else the "
    "shells and packages differ is said beside the verdict.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with the newest run of the spec, at the commits with which it began: run the arms that have not run.",
)
@click.option("--retry-errors", is_flag=True, help="As --resume, and run the failed arms again.")
@click.option("--keep-going", is_flag=True, help="Start the next arm even after one has failed.")
@click.option("-k", "only", metavar="TEXT", help="Only specs whose name contains TEXT.")
@click.option("--dry-run", is_flag=True, help="Print the plan and run nothing.")
@_set
@_outputs
@_investigate_ok
@_blocked_ok
@_verbose
def run(
    paths: tuple[Path, ...],
    arms: tuple[str, ...],
    from_run: str | None,
    resume: bool,
    retry_errors: bool,
    keep_going: bool,
    only: str | None,
    dry_run: bool,
    overrides: tuple[str, ...],
    outputs: tuple[Path, ...],
    investigate_ok: bool,
    blocked_ok: bool,
    verbose: bool,
) -> None:
    """Lint, render, execute, judge and report the specs at PATHS.

    A folder stands for every spec below it. If one spec is bad, none runs. Arms run strictly one after the other.
    Everything of a run lies in workspace/ and logging/ at the top of the git
    repository that holds the current folder, or else in that folder. Progress
    goes to stderr, the verdict table to stdout.

    RUN is such a folder or its name: `rlspec list runs`.
    """
    from rlspec import linting, pipeline, planning, report, verdicts
    from rlspec.arms import Options

    report.known(outputs)
    _repair(paths)  # first: after a kill, the specs themselves may be those of another commit
    documents = _linted(paths, overrides)
    documents = [d for d in documents if not only or only in linting.name(d)]
    if not documents:
        raise errors.SpecError("no spec there" + (f" whose name contains {only!r}" if only else ""))
    if dry_run:
        for document in documents:
            click.echo(planning.text(document, _width()))
        return
    several = len(documents) > 1
    report.known(outputs, several)
    options = Options(
        arms=arms,
        from_run=from_run,
        resume=resume,
        retry_errors=retry_errors,
        keep_going=keep_going,
        overrides=overrides,
        outputs=outputs,
    )
    each = pipeline.of_suite(documents, options) if several else [options]
    sound = [pipeline.check(*one)[:2] for one in zip(documents, each, strict=True)] if several else []
    codes: list[int] = []
    reports: list[dict[str, Any]] = []
    for document, own in zip(documents, each, strict=True):
        try:
            made = _one(document, own)
        except (errors.SpecError, errors.RunError) as error:
            if not several:
                raise
            click.echo(f"error: {error}", err=True)
            codes.append(errors.ERROR)
            made = pipeline.broken(*sound[len(reports)], own, str(error))
            report.summary(made, os.environ)
        else:
            codes.append(_report(made, () if several else outputs, verbose, investigate_ok, blocked_ok))
            _track(made)
        reports.append(made)
        if several:
            codes.append(_written(outputs, reports))  # after each, so that what was found outlives an interruption
    raise SystemExit(verdicts.combine(codes))


def _written(outputs: Sequence[Path], reports: Sequence[dict[str, Any]]) -> int:
    """The code of writing all reports so far: a suite goes on where a file of them cannot be written."""
    from rlspec import report

    code = errors.OK
    for path in outputs:
        try:
            report.write(path, *reports)
        except errors.RunError as error:
            click.echo(f"error: {error}", err=True)
            code = errors.ERROR
    return code


def _repair(paths: Sequence[Path]) -> None:
    from rlspec import launch, repository

    try:
        with launch.signals():
            for path in paths:
                for line in repository.repair_around(path):
                    click.echo(line, err=True)
    except launch.Interrupted as interrupted:
        raise SystemExit(interrupted.exit_code) from None


def _one(document: Document, options: Any) -> dict[str, Any]:
    from rlspec import launch, pipeline

    try:
        return pipeline.run(document, options, sys.stderr)
    except pipeline.NothingRan as interrupted:
        click.echo(f"interrupted before anything of {document.path} ran", err=True)
        raise SystemExit(interrupted.exit_code) from None
    except launch.Interrupted as interrupted:
        click.echo(f"interrupted; `rlspec run {document.path} --resume` goes on with what is left", err=True)
        raise SystemExit(interrupted.exit_code) from None


def _report(
    made: dict[str, Any],
    outputs: Sequence[Path],
    verbose: bool,
    investigate_ok: bool,
    blocked_ok: bool,
    again: bool = True,
) -> int:
    """Write and print a report; its exit code. `again`: its run folder gets a report.json, too."""
    from rlspec import report

    allowed = (errors.INVESTIGATE,) * investigate_ok + (errors.BLOCKED,) * blocked_ok
    if made["exit_code"] in allowed:
        made["exit_code"] = errors.OK
    report.save(made, (), again)
    _print(made, verbose)
    report.save(made, outputs, again=False)
    report.summary(made, os.environ)
    return int(made["exit_code"])


def _track(made: dict[str, Any]) -> None:
    """Send a run to W&B where its spec says so; what goes wrong there changes no verdict."""
    from rlspec.report import tracking

    try:
        problem = tracking.send(made) if tracking.wanted(made) else None
    except (errors.RunError, OSError) as error:
        problem = str(error)
    if problem:
        click.echo(f"warning: {problem}", err=True)


def _print(made: dict[str, Any], verbose: bool) -> None:
    from rlspec import report

    try:
        screen = report.screen(made, os.environ, sys.stdout.isatty(), verbose)
        click.echo(screen, nl=False, color=True)  # what colours there are, the report has decided
    except BrokenPipeError:  # `… | head` has seen enough; the exit code still says what came out
        _hush()


@main.command()
@click.argument("files", nargs=-1, type=PATHS)
@click.option("--reader", metavar="NAME", help="How the logs are read; see `rlspec list readers`.")
@click.option(
    "--kind",
    type=click.Choice(["correctness", "performance", "parity"]),
    metavar="KIND",
    help="What is asked of the logs: correctness (the default), performance or parity.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="Judge this metric, by the name that the trainer prints. May be repeated. Default: the reader's usual ones.",
)
@click.option("--pattern", metavar="RE", help="For reader regex: named groups step and one a metric.")
@click.option("--contract", metavar="NAME", help="Judge by the rows of this contract; see `rlspec list contracts`.")
@click.option("--base", "bases", multiple=True, type=PATHS, help="A base log; the first is base0. May be repeated.")
@click.option("--feature", "features", multiple=True, type=PATHS, help="A feature log. May be repeated.")
@_outputs
@_investigate_ok
@_blocked_ok
@_verbose
def judge(
    files: tuple[Path, ...],
    reader: str | None,
    kind: str | None,
    metrics: tuple[str, ...],
    pattern: str | None,
    contract: str | None,
    bases: tuple[Path, ...],
    features: tuple[Path, ...],
    outputs: tuple[Path, ...],
    investigate_ok: bool,
    blocked_ok: bool,
    verbose: bool,
) -> None:
    """Judge logs that you have, or a RUN again.

    \b
      rlspec judge base0.log base1.log feat0.log --reader pithtrain
      rlspec judge --base mon.jsonl --base tue.jsonl --feature new.jsonl \\
                   --reader jsonl --metric loss
      rlspec judge rollout.jsonl train.jsonl --kind parity
      rlspec judge RUN

    Files whose names begin with base or feat have that role; --base and
    --feature give it to any file. Of kind parity, the rollout comes first and
    then the trainer. RUN is the folder of a run, its name, or a report.json;
    what was recorded is judged anew, and the report of the run stays as it is.
    """
    from rlspec import judging, report

    report.known(outputs)
    made = judging.judge(
        files=files,
        reader=reader,
        kind=kind,
        metrics=metrics,
        pattern=pattern,
        contract=contract,
        bases=bases,
        features=features,
    )
    folder = made["run"] and Path(made["run"]["folder"])
    again = bool(folder) and not (folder / "report.json").exists()
    raise SystemExit(_report(made, outputs, verbose, investigate_ok, blocked_ok, again))


@main.command()
@click.argument("path", type=PATHS)
@click.option("--good", required=True, metavar="REV", help="A commit that is known to be right; the base arms run it.")
@click.option("--bad", required=True, metavar="REV", help="A later commit, which is expected to FAIL.")
@click.option("--resume", is_flag=True, help="Go on with the newest search of the same spec and ends.")
@_set
def bisect(path: Path, good: str, bad: str, resume: bool, overrides: tuple[str, ...]) -> None:
    """Find the commit at which the verdict of the spec at PATH turns.

    The spec is of kind correctness. Its base arms run once, at --good; the
    bad end and then each midpoint is one feature arm against them, so 32
    commits take 6 feature arms. A commit that cannot run is skipped; a
    midpoint that stays INVESTIGATE ends the search. The commit found and the
    last good one then run once more.

    Exit 0: one commit is named. 3: it stopped, skipped commits leave several,
    or the second runs disagree with the first. 4: the verdict does not turn, or an end cannot run.
    """
    from rlspec import bisecting, launch

    _repair([path])
    documents = _linted([path], overrides)
    if len(documents) != 1:
        raise errors.SpecError(f"{path} holds {len(documents)} specs; name one")
    try:
        words, code = bisecting.bisect(documents[0], good, bad, overrides, resume, sys.stderr, _width())
    except launch.Interrupted as interrupted:
        click.echo("interrupted; the same command with --resume goes on with what is left", err=True)
        raise SystemExit(interrupted.exit_code) from None
    click.echo(words)
    raise SystemExit(code)


@main.command(name="report")
@click.argument("run")
@_outputs
@_verbose
@click.option("--portable", is_flag=True, help="Leave out the paths, host and environment of this machine.")
def report_(run: str, outputs: tuple[Path, ...], verbose: bool, portable: bool) -> None:
    """Print the report of a RUN again, or write it in another format.

    RUN is the folder of a run, its name, or a report.json. Refuses one that
    was edited: its verdicts are derived again from the measurements, which a
    report of operators or of a chain holds, and of other kinds the records of
    its run. Without records only that it agrees with itself is checked.
    """
    from rlspec import judging, report, runs

    report.known(outputs)
    path = Path(run)
    if not (path.is_file() and path.name.endswith((".json", ".json.gz"))):
        folder = runs.find(runs.root(Path.cwd()), run)
        if not folder.report.exists():
            raise errors.SpecError(f"{folder.name} has no report, since it did not end; `rlspec judge {run}` makes one")
        path = folder.report
    made = runs.given(path, "report")
    made = judging.unedited(path, made)
    if portable:
        made = report.portable(made)
    _print(made, verbose)
    report.save(made, outputs, again=False)


@main.command(name="list")
@click.argument(
    "what",
    type=click.Choice(
        ["models", "operators", "contracts", "workloads", "trainers", "engines", "readers", "judgments", "runs"]
    ),
)
def list_(what: str) -> None:
    """List what there is of one sort, a line each.

    Models, contracts and workloads are those that a spec in the current folder
    could name; runs are those below workspace/, the oldest first.
    """
    from rlspec import listing

    click.echo(listing.table(what, Path.cwd()))


@main.command()
@click.argument("name")
def explain(name: str) -> None:
    """Explain a kind, a rule, a judgment, a contract row or an engine.

    NAME is such as parity, RL203, drift, training (all rows) or training/drift.
    """
    from rlspec import listing

    click.echo(listing.explain(name, Path.cwd()))


@main.command()
@click.argument("name", metavar="KIND")
def schema(name: str) -> None:
    """Print the JSON Schema of a spec of KIND.

    Or of one of the files that specs name and runs write: model, contract,
    pins, records, plan, report.
    """
    import json

    from rlspec import schema as schemas

    known = sorted(path.name.removesuffix(".schema.json") for path in schemas.FOLDER.glob("*.schema.json"))
    known.remove("common")
    if name not in known:
        raise errors.SpecError(f"no schema {name!r}; {schemas.suggestion(name, known)}")
    click.echo(json.dumps(schemas.load(name), indent=2, ensure_ascii=False))


@main.command()
@click.argument("folder", type=PATHS)
@click.option(
    "--text", "texts", multiple=True, type=PATHS, help="A .txt, .jsonl or .jsonl.zst file (key text). May be repeated."
)
@click.option("--tokenizer", default="byte", help="byte (the default), bpe:SIZE, or the path of a tokenizer.json.")
@click.option("--end", metavar="TOKEN", help="The token that ends a document, if a tokenizer.json has an unusual one.")
def prepare(folder: Path, texts: tuple[Path, ...], tokenizer: str, end: str | None) -> None:
    """Write a tokenized corpus into FOLDER.

    A spec of the embedded trainer names it: `settings: {corpus: FOLDER}`.

    Without --text it is the prose that ships with Python (pydoc_data.topics),
    as bytes: what the embedded trainer uses where a spec names no corpus.
    """
    from rlspec import preparing

    raise SystemExit(preparing.prepare(folder, texts, tokenizer, end))


@main.command()
@click.argument("paths", nargs=-1, type=PATHS)
def doctor(paths: tuple[Path, ...]) -> None:
    """Show what this machine has, and what specs would miss.

    With PATHS, also which of the specs there would be BLOCKED, and why.
    """
    from rlspec import listing

    click.echo(listing.doctor(paths))


@main.command()
@click.option(
    "--keep",
    default=5,
    show_default=True,
    metavar="N",
    type=click.IntRange(min=0),
    help="Keep the newest N runs of each spec.",
)
@click.option("--yes", is_flag=True, help="Remove without asking.")
def clean(keep: int, yes: bool) -> None:
    """Remove old runs and leftover worktrees, and nothing else.

    A run is a folder with a plan.json of rlspec's, or one of run files alone.
    Shows what would go and how large it is, then asks.
    """
    from rlspec import cleaning

    found = cleaning.find(Path.cwd(), keep)
    if not found.paths:
        click.echo("nothing to remove")
        return
    click.echo(found.text)
    try:
        sure = yes or click.confirm("remove them?", default=False)
    except click.Abort:  # no terminal to answer at, or Ctrl-C
        sure = False
    if not sure:
        click.echo("nothing removed; --yes removes without asking")
        return
    cleaning.remove(found)
    click.echo(f"removed {len(found.paths)} folders")
