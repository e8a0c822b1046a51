"""The folders of runs: where they lie, what is in them, how one is found again. Nothing overwrites an earlier run."""

from __future__ import annotations

import contextlib
import datetime
import gzip
import json
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlspec import locks, schema, workloads
from rlspec.errors import RunError, SpecError
from rlspec.mounts import Move

_GZIP = b"\x1f\x8b"
_NAMED = re.compile(r"\d{8}T\d{6}Z-")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """The two folders of one run, below `workspace/` and `logging/` of the same root."""

    workspace: Path
    logging: Path

    @property
    def name(self) -> str:
        return self.workspace.name

    @property
    def plan(self) -> Path:
        return self.workspace / "plan.json"

    @property
    def report(self) -> Path:
        return self.workspace / "report.json"

    @property
    def root(self) -> Path | None:
        """The root below which both lie; None if the run was copied away from there."""
        parents = self.workspace.parents
        return parents[3].resolve() if len(parents) > 3 and parents[2].name == "workspace" else None

    def move(self, written: Mapping[str, Any]) -> Move:
        """From the paths in a plan or in the state of an arm, which another machine may have written, to those here."""
        here = self.root or Path(self.workspace.anchor)
        return Move(Path(written["root"]) if self.root and "root" in written else here, here)

    def lock(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Nothing else may run or remove it meanwhile, here or on another machine. SpecError if something does."""
        return locks.held(self.workspace / "lock", what, self.workspace)


def root(start: Path) -> Path:
    """The top of the git repository that holds `start`, else `start`."""
    for folder in (start, *start.parents):
        if (folder / ".git").exists():
            return folder
    return start


def below(kind: str, model: str) -> Path:
    """Where the runs of a kind and model lie, below `workspace/` and `logging/`; a model's file without its suffix."""
    name = _UNSAFE.sub("_", re.sub(r"\.(ya?ml|json)$", "", model)).strip("._")
    return Path(f"validate-{kind}") / (name or "any")


def create(base: Path, kind: str, model: str, stem: str) -> Folder:
    """A new, empty run folder; two runs in the same second get a suffix. Raises SpecError where none can be made."""
    try:
        return _create(base, below(kind, model), _UNSAFE.sub("_", stem))
    except OSError as error:
        raise SpecError(
            f"cannot make a run folder: {error.filename or base}: {error.strerror}; "
            "make the folder writable, or start rlspec in another one"
        ) from None


def _create(base: Path, below: Path, stem: str) -> Folder:
    for top in (base / "workspace", base / "logging"):
        _keep_out_of_git(top)
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        name = f"{now}-{stem}{suffix}"
        workspace = base / "workspace" / below / name
        try:
            workspace.mkdir(parents=True)
        except FileExistsError:
            continue
        logging = base / "logging" / below / name
        logging.mkdir(parents=True, exist_ok=True)
        return Folder(workspace=workspace, logging=logging)
    raise RunError(f"{base / 'workspace' / below}: a thousand runs in one second")


def bisects(base: Path) -> Path:
    """Where searches for a commit keep what they know."""
    _keep_out_of_git(base / "workspace")
    folder = base / "workspace" / "bisect"
    folder.mkdir(exist_ok=True)
    return folder


def _keep_out_of_git(top: Path) -> None:
    top.mkdir(parents=True, exist_ok=True)
    ignore = top / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n", encoding="utf-8")


def publish(folder: Folder) -> None:
    """Point the links `latest` at a run that begins. Raises RunError if something else has that name."""
    for place in (folder.workspace, folder.logging):
        link = place.parent / "latest"
        fresh = place.parent / f".latest-{place.name}"
        try:
            fresh.symlink_to(place.name)
            fresh.replace(link)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise RunError(f"{link}: {error.strerror}; it must be a link of rlspec's own, so move it away") from None


def discard(folder: Folder) -> None:
    """Take back a folder in which nothing has run, with those around it that hold nothing else."""
    for place in (folder.workspace, folder.logging):
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty: other runs lie there
            place.parent.rmdir()
            place.parent.parent.rmdir()
            root = place.parent.parent.parent
            if [path.name for path in root.iterdir()] == [".gitignore"]:
                shutil.rmtree(root)


def folders(base: Path) -> Iterator[Folder]:
    """All run folders below a root, oldest first; also those without a plan, in which nothing ran.

    A folder of the user's among them is none: without a plan, it must have a run's name and hold nothing of others.
    """
    for workspace in sorted((base / "workspace").glob("validate-*/*/*"), key=lambda path: path.name):
        if workspace.is_dir() and not workspace.is_symlink() and _is_run(workspace):
            yield _of(workspace)


def _is_run(workspace: Path) -> bool:
    named = _NAMED.match(workspace.name) is not None
    if (workspace / "plan.json").is_file():
        return named or _has_plan(workspace)
    return named and all(map(_is_ours, workspace.iterdir()))


def _is_ours(path: Path) -> bool:
    """A run file, a lock, a plan that was cut off, or a worktree."""
    return path.suffix == ".py" or path.name in ("lock", ".plan.json.partial") or (path / ".git").is_file()


def _has_plan(workspace: Path) -> bool:
    """Of a run that the user gave another name."""
    try:
        return {"rlspec", "arms"} <= load(workspace / "plan.json").keys()
    except RunError:
        return False


def all_of(base: Path) -> Iterator[Folder]:
    """All runs below a root, oldest first."""
    return (folder for folder in folders(base) if folder.plan.is_file())


def _of(workspace: Path) -> Folder:
    workspace = workspace.absolute()
    if workspace.is_symlink():  # latest; not resolve(), since workspace/ itself may be a link to a larger disk
        workspace = workspace.parent / workspace.readlink()
    if len(workspace.parents) < 4 or workspace.parents[2].name != "workspace":
        return Folder(workspace=workspace, logging=workspace)  # copied from elsewhere, without its logs
    base = workspace.parents[3]
    return Folder(workspace=workspace, logging=base / "logging" / workspace.relative_to(base / "workspace"))


def find(base: Path, run: str) -> Folder:
    """A run by its folder, its report.json or its name. Raises SpecError with the newest names, or if it is not one."""
    path = Path(run)
    if path.name in ("report.json", "plan.json"):
        path = path.parent
    if (path / "plan.json").is_file():
        return _of(path)
    matching = [folder for folder in all_of(base) if folder.name == run]
    if len(matching) == 1:
        return matching[0]
    if matching:
        places = ", ".join(str(folder.workspace) for folder in matching)
        raise SpecError(f"{len(matching)} runs are named {run!r}; name one by its folder: {places}")
    newest = [folder.name for folder in all_of(base)][-3:]
    hint = f"the newest are {', '.join(reversed(newest))}" if newest else f"there is none below {base / 'workspace'}"
    raise SpecError(f"no run {run!r}; {hint}")


def latest(base: Path, spec_path: Path) -> Folder | None:
    """The newest run of a spec, wherever its file system was mounted then. RunError if its plan cannot be read."""
    named = [folder for folder in all_of(base) if f"-{_UNSAFE.sub('_', spec_path.stem)}" in folder.name]
    return next((one for one in reversed(named) if spec_of(one, load(one.plan, "plan")) == spec_path.resolve()), None)


def began(folder: Folder) -> str:
    """When a run began, in UTC, as its name says; such texts sort by time."""
    return folder.name.partition("-")[0]


def spec_of(folder: Folder, plan: Mapping[str, Any]) -> Path:
    """The spec of a run, by its path here."""
    return folder.move(plan).path(plan["spec"]["path"])


def save(path: Path, data: dict[str, Any]) -> None:
    """Write JSON whole or not at all; in ASCII, since a path may hold bytes that are no text. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:  # a full disk does not say which file it has no room for
        raise OSError(error.errno, error.strerror, str(path)) from error


def load(path: Path, name: str | None = None) -> dict[str, Any]:
    """Read JSON back and check it against the schema `name`. Raises RunError."""
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if raw.startswith(_GZIP) else raw)
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile, RecursionError) as error:
        raise RunError(f"{path} is no JSON: {error}") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(data, dict):
        raise RunError(f"{path} holds no JSON object")
    if name and (found := schema.check_value(data, name)):
        raise RunError(f"{path} is no {name} of this version: {found[0]}")
    return data


def seal(plan: Mapping[str, Any]) -> str:
    """SHA-256 over all else that a plan says, as canonical JSON: any edit breaks it."""
    said = json.loads(json.dumps({key: value for key, value in plan.items() if key != "seal"}))
    return workloads.digest(said)


def given(path: Path, name: str) -> dict[str, Any]:
    """The same for a file that the user names. Raises SpecError."""
    try:
        return load(path, name)
    except RunError as error:
        raise SpecError(str(error)) from None
