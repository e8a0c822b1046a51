"""Run files: one template filled in once for all arms, so that they are identical by construction; or one an engine."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlspec import catalog
from rlspec.checks import chain, operators, parity
from rlspec.contract import Contract
from rlspec.errors import SpecError
from rlspec.model import Spec, Step
from rlspec.mounts import Move

PLACEHOLDER = re.compile(r"<[a-z]+(?:[-_][a-z]+)+>|<[A-Z]{2,}(?:[-_][A-Z]+)*>")
_QUOTED_HOLE = re.compile(r"""['"]\s*\{\{|\}\}\s*['"]""")
_PLAIN = (str, int, float, bool, type(None))


class _Literal(str):
    """Text that a quoting filter made."""


def _python(value: Any) -> _Literal:
    if isinstance(value, Undefined):
        value._fail_with_undefined_error()
    _require_plain(value)
    return _Literal(repr(value))


def _shell(value: Any) -> _Literal:
    if isinstance(value, Undefined):
        value._fail_with_undefined_error()
    if not isinstance(value, (str, int, float)):
        raise SpecError(f"| sh quotes one word, not {type(value).__name__}")
    return _Literal(shlex.quote(str(value)))


def _require_plain(value: Any) -> None:
    if isinstance(value, dict):
        for item in value.values():
            _require_plain(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _require_plain(item)
    elif not isinstance(value, _PLAIN):
        raise SpecError(f"| py writes plain values, not {type(value).__name__}")


def _only_quoted(value: Any) -> str:
    if isinstance(value, Undefined):
        value._fail_with_undefined_error()
    if not isinstance(value, _Literal):
        raise SpecError(f"a value enters unquoted ({str(value)[:40]!r}); end the expression with | py or | sh")
    return value


def context(spec: Spec) -> dict[str, Any]:
    """What the template of a trainer can name."""
    assert spec.trainer is not None
    folder = spec.path.parent.resolve()
    return {
        "kind": spec.kind,
        "model": catalog.whole(spec.data["model"], spec.path.parent),
        "mesh": {axis: getattr(spec.mesh, axis) for axis in ("pp", "dp", "cp", "ep")},
        "world_size": spec.launch.world_size,
        "sequence_length": spec.sequence_length,
        "dtype": spec.dtype,
        "steps": spec.trainer.steps,
        "settings": dict(spec.trainer.settings),
        "spec_dir": str(folder),
        "group": f"{spec.kind}/{spec.model}",
    }


def text(template: Path, values: Mapping[str, Any]) -> str:
    """The filled-in template. Raises SpecError with the template's line."""
    source = template.read_text(encoding="utf-8")
    if found := _QUOTED_HOLE.search(source):
        line = source.count("\n", 0, found.start()) + 1
        raise SpecError(f"{template}:{line}: quotes around a value; the filters | py and | sh write them")
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, finalize=_only_quoted, keep_trailing_newline=True, autoescape=False
    )
    environment.filters.update(py=_python, sh=_shell)
    try:
        made = environment.from_string(source).render(values)
    except TemplateError as error:
        at: int | None = getattr(error, "lineno", None) or _line_of(error)
        raise SpecError(f"{template}:{at or 1}: {error.message}") from None
    except SpecError as error:
        raise SpecError(f"{template}:{_line_of(error) or 1}: {error}") from None
    if left := PLACEHOLDER.search(made):
        raise SpecError(f"{template}: the rendered file still holds the placeholder {left.group()}")
    return made


def _line_of(error: BaseException) -> int | None:
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def has_files(spec: Spec) -> bool:
    """Whether any arm has a run file."""
    return spec.run_template is not None or any(arm.template for arm in spec.arms)


def write(spec: Spec, steps: Sequence[Step], contract: Contract, move: Move | None = None) -> dict[str, str]:
    """Write the run files of all steps; arm -> digest of its run file, of those that have one.

    `move`: a run that goes on here was planned where the same file system is mounted elsewhere, so its run files are
    written again with the paths of this machine.
    """
    content = {arm: made.encode() for arm, made in check(spec, contract).items()}
    digests = {arm: hashlib.sha256(made).hexdigest() for arm, made in content.items()}
    for step in steps:
        if step.run_file is None:
            continue
        made = content[step.arm.name]
        if not step.run_file.exists() or (move is not None and _moved(step.run_file, move) == made):
            step.run_file.write_bytes(made)
        if hashlib.sha256(step.run_file.read_bytes()).hexdigest() != digests[step.arm.name]:
            raise SpecError(f"{step.run_file} is not what the template renders; the arms would run other files")
    return digests


def _moved(run_file: Path, move: Move) -> bytes:
    return move.text(run_file.read_text(encoding="utf-8", errors="replace")).encode()


def check(spec: Spec, contract: Contract) -> dict[str, str]:
    """Arm -> the text of its run file, valid Python where its name says so. Raises SpecError."""
    if spec.run_template is None:
        return {arm.name: _checked(arm.template, parity.context(spec, arm)) for arm in spec.arms if arm.template}
    own = chain if spec.chain else operators
    values = context(spec) if spec.trainer else own.context(spec, contract)
    return dict.fromkeys((arm.name for arm in spec.arms), _checked(spec.run_template, values))


def _checked(template: Path, values: Mapping[str, Any]) -> str:
    made = text(template, values)
    if template.name.removesuffix(".j2").endswith(".py"):
        try:
            compile(made, str(template), "exec")
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            raise SpecError(f"{template}: the rendered file is not valid Python, line {line}: {error}") from None
    return made
