"""What is kept of a shell: short digests, and neither secrets nor what differs from session to session."""

from __future__ import annotations

from types import SimpleNamespace

from rlspec import surroundings
from rlspec.model import Arm, Verdict


def test_what_is_kept_of_a_shell():
    found = surroundings.shell({
        "OMP_NUM_THREADS": "1", "SSH_TTY": "x", "PWD": "/x", "MY_TOKEN": "x", "PROXY": "http://user:pass@host",
    })  # fmt: skip
    assert list(found) == ["OMP_NUM_THREADS"] and len(found["OMP_NUM_THREADS"]) == 12


def noted(*arms):
    """Verdicts of arms of (shell, reused from, declared)."""
    steps = [
        SimpleNamespace(arm=Arm(name=f"a{n}", role="base", environment=declared), argv=("x",), stem=f"a{n}")
        for n, (_, _, declared) in enumerate(arms)
    ]
    states = {
        f"a{n}": {"status": "done", "shell": surroundings.shell(shell), "reused_from": reused}
        for n, (shell, reused, _) in enumerate(arms)
    }
    return surroundings.noted([Verdict(judgment="drift", subject="loss", status="PASS", reason="r")], steps, states)


def test_an_arm_of_an_earlier_run_in_another_shell_is_told():
    here, there = {"SHIFT": "1"}, {"SHIFT": "2"}
    (verdict,) = noted((here, "earlier", {}), (there, None, {}))
    told = f"a0, of an earlier run, and the other arms {surroundings.UNDECLARED}: SHIFT"
    assert verdict.notes == (told,) and verdict.evidence["surroundings"] == ["SHIFT"]
    moved = {"PATH": "/x", "PYENV_DIR": "/x"}
    (verdict,) = noted((here, "earlier", {}), (here | moved, None, {}))
    assert verdict.notes[0].endswith(": PATH, PYENV_DIR") and "surroundings" not in verdict.evidence, "nothing to blame"
    (verdict,) = noted((here, "earlier", {}), (there | moved, None, {}))
    assert verdict.notes[0].endswith(": SHIFT, PATH, PYENV_DIR") and verdict.evidence["surroundings"] == ["SHIFT"]
    for arms in (
        ((here, None, {}), (there, None, {})),  # one run
        ((here, "earlier", {}), (here, None, {})),
        ((here, "earlier", here), (there, None, there)),  # declared by both
    ):
        assert noted(*arms)[0].notes == ()
