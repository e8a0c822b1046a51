"""The command line. Commands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlspec import __version__, errors

if TYPE_CHECKING:
    from rlspec.model import Document, Problem

CONTEXT = {"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "RLSPEC", "max_content_width": 100}
PATHS = click.Path(path_type=Path)
EXITS = """
\b
Exit codes
  0  all PASS, MEASURED or N/A, with at least one PASS or MEASURED (or as expected)
  1  FAIL            2  bad spec or usage, nothing ran
  3  INVESTIGATE     4  ERROR: could not be judged
  5  BLOCKED, or nothing judged        130/143  interrupted
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
        sys.stdout = None
        raise SystemExit(errors.ERROR) from None


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        with _for_people():
            return super().invoke(ctx)


@click.group(cls=_Group, context_settings=CONTEXT, epilog=EXITS)
@click.version_option(__version__, prog_name="rlspec")
def main() -> None:
    """Did the numbers change, and is that the code or the noise?

    A spec in YAML names the model, the mesh, the arms and the judgments. rlspec lints it, renders identical run
    files, executes the arms in order and judges what they measured against a tolerance contract.

    \b
    rlspec init correctness > my-branch.yaml   a commented spec to start from
    rlspec lint my-branch.yaml                 every problem, with line and column
    rlspec plan my-branch.yaml                 what would run
    rlspec run my-branch.yaml                  run it, and the verdict
    rlspec judge base0.log base1.log feat0.log --reader pithtrain
                                               the verdict on logs that you have
    """


_no_report_if_ok = click.option("--investigate-ok", is_flag=True, help="Exit 0 instead of 3 on INVESTIGATE.")
_blocked_ok = click.option("--blocked-ok", is_flag=True, help="Exit 0 instead of 5 on BLOCKED.")
_outputs = click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    type=PATHS,
    help="Write the report here, too; the suffix picks the format (.json .md .xml). May be repeated.",
)
_verbose = click.option("-v", "--verbose", is_flag=True, help="Print every figure of every verdict.")
_set = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Lay a value over the spec.")


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
@click.argument("paths", nargs=-1, required=True, type=PATHS)
@click.option("--format", "how", type=click.Choice(["text", "json", "github"]), help="Default: text, github in Actions.")
@click.option("--strict", is_flag=True, help="Warnings count as errors.")
def lint(paths: tuple[Path, ...], how: str | None, strict: bool) -> None:
    """Report every problem of every spec at and below PATHS.

    Runs nothing, needs no GPU and does not import torch. `rlspec explain RL203` explains a rule.
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
    """Print the resolved spec, the steps in order, their commands and files, and the cost. Writes nothing."""
    from rlspec import planning

    for document in _linted([path], overrides):
        click.echo(planning.text(document))


@main.command()
@click.argument("path", type=PATHS)
@_set
def render(path: Path, overrides: tuple[str, ...]) -> None:
    """Write the run files of a spec into a new run folder, and run nothing."""
    from rlspec import planning

    for document in _linted([path], overrides):
        for file in planning.render_files(document):
            click.echo(file)


@main.command()
@click.argument("paths", nargs=-1, required=True, type=PATHS)
@click.option("--arm", "arms", multiple=True, metavar="NAME", help="Run this arm only; the others come from --from.")
@click.option("--from", "from_run", metavar="RUN", help="Use the arms of this run that are still valid.")
@click.option("--resume", is_flag=True, help="Go on with the newest run of the spec: run the arms that have not run.")
@click.option("--retry-errors", is_flag=True, help="As --resume, and run the failed arms again.")
@click.option("--keep-going", is_flag=True, help="Start the next arm even after one has failed.")
@click.option("-k", "only", metavar="TEXT", help="Only specs whose name contains TEXT.")
@click.option("--dry-run", is_flag=True, help="Print the plan and run nothing.")
@_set
@_outputs
@_no_report_if_ok
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
    """Lint, render, execute, judge and report every spec at and below PATHS.

    Arms run strictly one after the other. Everything of a run lies in workspace/ and logging/ below the top of
    the git repository that holds the current folder. Progress goes to stderr, the verdict table to stdout.
    """
    from rlspec import linting, pipeline, planning, report, verdicts

    report.known(outputs)
    _repair(paths)  # first: after a kill, the specs themselves may be those of another commit
    documents = _linted(paths, overrides)
    documents = [d for d in documents if not only or only in linting.name(d)]
    if not documents:
        raise errors.SpecError("no spec there" + (f" whose name contains {only!r}" if only else ""))
    if dry_run:
        for document in documents:
            click.echo(planning.text(document))
        return
    if len(documents) > 1 and outputs:
        raise errors.SpecError("-o takes one report, here are several specs; each run folder holds its report.json")
    options = pipeline.Options(
        arms=arms,
        from_run=from_run,
        resume=resume,
        retry_errors=retry_errors,
        keep_going=keep_going,
        overrides=overrides,
    )
    codes = []
    for document in documents:
        made = _one(document, options)
        codes.append(_report(made, outputs, verbose, investigate_ok, blocked_ok))
    raise SystemExit(verdicts.combine(codes))


def _repair(paths: Sequence[Path]) -> None:
    from rlspec import launch, repository

    with launch.signals():
        for path in paths:
            for line in repository.repair_around(path):
                click.echo(line, err=True)


def _one(document: Document, options: Any) -> dict[str, Any]:
    from rlspec import launch, pipeline

    try:
        return pipeline.run(document, options, sys.stderr)
    except launch.Interrupted as interrupted:
        click.echo("interrupted; `rlspec run --resume` goes on with what is left", err=True)
        raise SystemExit(interrupted.exit_code) from None


def _report(
    made: dict[str, Any], outputs: Sequence[Path], verbose: bool, investigate_ok: bool, blocked_ok: bool
) -> int:
    from rlspec import report

    allowed = (errors.INVESTIGATE,) * investigate_ok + (errors.BLOCKED,) * blocked_ok
    if made["exit_code"] in allowed:
        made["exit_code"] = errors.OK
    report.save(made, outputs)
    report.summary(made, os.environ)
    click.echo(report.screen(made, os.environ, sys.stdout.isatty(), verbose), nl=False)
    return int(made["exit_code"])


@main.command()
@click.argument("files", nargs=-1, type=PATHS)
@click.option("--reader", metavar="NAME", help="How the logs are read; see `rlspec list readers`.")
@click.option("--kind", type=click.Choice(["correctness", "performance", "parity"]), default="correctness")
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="Judge this metric, as the trainer prints it.")
@click.option("--pattern", metavar="RE", help="For reader regex: named groups step and one a metric.")
@click.option("--contract", metavar="NAME", help="Judge by the rows of this contract.")
@click.option("--base", "bases", multiple=True, type=PATHS, help="A base log; the first is base0. May be repeated.")
@click.option("--feature", "features", multiple=True, type=PATHS, help="A feature log. May be repeated.")
@_outputs
@_no_report_if_ok
@_blocked_ok
@_verbose
def judge(
    files: tuple[Path, ...],
    reader: str | None,
    kind: str,
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
    """Judge logs that you have, or a finished RUN again.

    \b
    rlspec judge base0.log base1.log feat0.log --reader pithtrain
    rlspec judge --base mon.jsonl --base tue.jsonl --feature new.jsonl --reader jsonl --metric loss
    rlspec judge rollout.jsonl train.jsonl --kind parity        (rollout first, then the trainer)
    rlspec judge RUN                                            (a run folder, its name, or its report.json)

    Without --base and --feature, files whose names begin with base and feat have these roles.
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
    raise SystemExit(_report(made, outputs, verbose, investigate_ok, blocked_ok))


@main.command(name="report")
@click.argument("run")
@_outputs
@_verbose
def report_(run: str, outputs: tuple[Path, ...], verbose: bool) -> None:
    """Print the report of a finished RUN again, or write it in another format."""
    from rlspec import report, runs

    report.known(outputs)
    path = Path(run)
    if not (path.is_file() and path.suffix == ".json"):
        path = runs.find(runs.root(Path.cwd()), run).report
    made = runs.load(path, "report")
    report.save(made, outputs, again=False)
    click.echo(report.screen(made, os.environ, sys.stdout.isatty(), verbose), nl=False)


@main.command()
@click.argument("kind")
def init(kind: str) -> None:
    """Print a commented spec of KIND to start from."""
    from rlspec import schema

    path = Path(__file__).parent / "templates" / kind / "init.yaml"
    if kind not in schema.KINDS:
        raise errors.SpecError(f"unknown kind {kind!r}; {schema.suggestion(kind, schema.KINDS)}")
    click.echo(path.read_text(encoding="utf-8"), nl=False)


@main.command(name="list")
@click.argument("what", type=click.Choice(["models", "contracts", "workloads", "trainers", "readers", "judgments", "runs"]))
def list_(what: str) -> None:
    """List what there is of one sort, with a line about each."""
    from rlspec import listing

    click.echo(listing.table(what, Path.cwd()))


@main.command()
@click.argument("name")
def explain(name: str) -> None:
    """Explain a lint rule (RL203), a judgment (drift) or a contract row (training/drift)."""
    from rlspec import listing

    click.echo(listing.explain(name, Path.cwd()))


@main.command()
@click.argument("name", metavar="KIND")
def schema(name: str) -> None:
    """Print the JSON Schema of a spec of KIND, or of model, contract, records, plan or report."""
    import json

    from rlspec import schema as schemas

    known = sorted(path.name.removesuffix(".schema.json") for path in schemas.FOLDER.glob("*.schema.json"))
    known.remove("common")
    if name not in known:
        raise errors.SpecError(f"no schema {name!r}; {schemas.suggestion(name, known)}")
    click.echo(json.dumps(schemas.load(name), indent=2, ensure_ascii=False))


@main.command()
@click.argument("paths", nargs=-1, type=PATHS)
def doctor(paths: tuple[Path, ...]) -> None:
    """Show what this machine can run, and which of the specs at PATHS would be BLOCKED."""
    from rlspec import listing

    click.echo(listing.doctor(paths))


@main.command()
@click.option("--keep", default=5, show_default=True, type=click.IntRange(min=0), help="Runs of each spec to keep.")
@click.option("--yes", is_flag=True, help="Do it without asking.")
def clean(keep: int, yes: bool) -> None:
    """Remove old runs, leftover worktrees and nothing else, after showing what and how much."""
    from rlspec import cleaning

    found = cleaning.find(Path.cwd(), keep)
    if not found.paths:
        click.echo("nothing to remove")
        return
    click.echo(found.text)
    if not yes and not click.confirm("remove them?", default=False):
        click.echo("nothing removed")
        return
    cleaning.remove(found)
    click.echo(f"removed {len(found.paths)} folders")
