"""In what the arms of a run differ that no arm declares: arms of an earlier run may have run in another shell."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from rlspec import git, provenance
from rlspec.model import Step, Verdict
from rlspec.reports import CACHES

# What a shell, a terminal, a batch system or a runner says of itself, which differs from session to session.
SESSION = (
    *("SSH_", "XDG_", "DBUS_", "TMUX", "TERM_", "ITERM_", "LC_TERMINAL", "VSCODE_", "SUDO_", "GNOME_", "KDE_", "GPG_"),
    *("KRB5", "SLURM", "SRUN_", "SBATCH_", "PBS_", "LSB_", "PMI_", "PMIX_", "SYSTEMD_", "RLSPEC_", "PYTEST_", "GIT_"),
    *("GITHUB_", "RUNNER_", "BUILDKITE_", "CI_"),
)
LEFT_OUT = frozenset(
    (
        *("_", "SHLVL", "PWD", "OLDPWD", "COLORTERM", "COLUMNS", "LINES", "LS_COLORS", "LESS", "LESSOPEN"),
        *("LESSCLOSE", "PAGER", "EDITOR", "VISUAL", "PS1", "PS2", "MAIL", "PROMPT_COMMAND", "HISTFILE"),
        *("HISTSIZE", "HISTCONTROL", "HISTFILESIZE", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "STY"),
        *("WINDOW", "WINDOWID", "USER", "LOGNAME", "HOST", "HOSTNAME", "SESSION_MANAGER", "DESKTOP_SESSION"),
        *("TMPDIR", "TMP", "TEMP"),  # a batch system's own for each job
        *("INVOCATION_ID", "JOURNAL_STREAM", "FORCE_COLOR", "JOB_ID", "CI", "CONDA_PROMPT_MODIFIER"),
        *provenance.DEFAULTS,
        *git.REDIRECTS,
    )
)
# What says by which way a shell was opened. It is told, but nobody need run again for it.
IDLE = frozenset({"PATH", "MANPATH", "INFOPATH", "VIRTUAL_ENV_PROMPT", "CONDA_SHLVL", "CONDA_EXE", "CONDA_PYTHON_EXE"})
IDLE_SETS = ("PYENV_", "RBENV_", "NVM_", "SDKMAN_", "DIRENV_", "STARSHIP_", "ZSH", "BASH_", "LC_", "LANG", "MODULES_")
UNDECLARED = "differ in their surroundings, which no arm declares"


def shell(environment: Mapping[str, str]) -> dict[str, str]:
    """Name -> short digest of what an arm inherits; what may be a secret, or is the session's own, is left out."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in LEFT_OUT
        and not name.startswith(SESSION)
        and not provenance.SECRET.search(name)
        and "://" not in value
    }
    return {name: hashlib.sha256(kept[name].encode(errors="surrogateescape")).hexdigest()[:12] for name in sorted(kept)}


def noted(made: list[Verdict], steps: Sequence[Step], states: Mapping[str, Mapping[str, Any]]) -> list[Verdict]:
    """The verdicts, each with a note of what differed between arms of which one was taken from an earlier run."""
    running = [step for step in steps if step.argv and (states.get(step.arm.name) or {}).get("status") == "done"]
    if not any(states[step.arm.name].get("reused_from") for step in running):
        return made
    names = _apart(running, states)
    if not names:
        return made
    reused = [step.arm.name for step in running if states[step.arm.name].get("reused_from")]
    names.sort(key=_is_idle)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    note = f"{', '.join(reused)}, of an earlier run, and the other arms {UNDECLARED}: {', '.join(names[:5])}{more}"
    blamed = [name for name in names if not _is_idle(name)]
    more_evidence = {"surroundings": blamed} if blamed else {}
    return [
        dataclasses.replace(one, notes=(*one.notes, note), evidence={**one.evidence, **more_evidence}) for one in made
    ]


def _is_idle(name: str) -> bool:
    return name in IDLE or name.startswith(IDLE_SETS)


def _apart(steps: Sequence[Step], states: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Variables of the shell, variables that were observed, and versions of packages, by name."""
    declared = [set(step.arm.environment) for step in steps]
    kept = [states[step.arm.name] for step in steps]
    shells = [state["shell"] for state in kept if state.get("shell") is not None]
    seen = [state.get("observed") or {} for state in kept]
    observed = [
        {key: value for key, value in found.items() if step.stem not in str(value) and not key.endswith(CACHES)}
        for step, one in zip(steps, seen, strict=True)
        if (found := one.get("environment")) is not None
    ]
    versions = [one["versions"] for one in seen if one.get("versions")]
    variables = (_unlike(shells) - set[str].intersection(*declared)) | (_unlike(observed) - set[str].union(*declared))
    loaded = {name for name in _unlike(versions) if all(name in one for one in versions)}
    return sorted(variables) + sorted(loaded)


def _unlike(values: Sequence[Mapping[str, Any]]) -> set[str]:
    names = {name for one in values for name in one}
    return {name for name in names if any(one.get(name) != values[0].get(name) for one in values)}
