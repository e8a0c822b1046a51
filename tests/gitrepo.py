"""A small git repository to isolate arms in, and what must be the same in it before and after."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ODD = "odd näme\nwith *newline*.txt"
CONFIGURATION = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_NAME": "tester" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "tester@example.org" for who in ("AUTHOR", "COMMITTER")},
}


def configured(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the git settings of whoever runs the tests."""
    return {name: value for name, value in environment.items() if not name.startswith("GIT_")} | CONFIGURATION


def git(repo: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repo), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, env=configured(os.environ))
    return os.fsdecode(done.stdout).strip()


def commit(repo: Path, message: str, files: Mapping[str, str]) -> str:
    for name, text in files.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text(text)
    git(repo, "--literal-pathspecs", "add", "-A", "--force", "--", *files)
    git(repo, "commit", "-q", "-m", message)
    return git(repo, "rev-parse", "HEAD")


def make(root: Path) -> None:
    """`main` has one commit, `feature` (checked out) one more that changes, adds and removes files."""
    root.mkdir()
    git(root, "init", "-q", "-b", "main", "--template=")
    commit(root, "base", {"model.py": "lr = 1\n", ODD: "odd\n", "old/gone.py": "x\n", ".gitignore": "cache/\n*.log\n"})
    git(root, "checkout", "-q", "-b", "feature")
    git(root, "rm", "-q", "old/gone.py")
    commit(root, "feature", {"model.py": "lr = 2\n", "new/added.py": "y\n"})
    (root / "cache").mkdir()
    (root / "cache" / "weights.bin").write_bytes(b"\0weights")
    (root / "run.log").write_text("kept\n")


def state(repo: Path) -> tuple[str, ...]:
    """Branch, commit, how index and files differ from it, ignored files too, and the bytes of every file."""
    files = sorted(path for path in repo.rglob("*") if path.is_file() and ".git" not in path.relative_to(repo).parts)
    status = git(repo, "status", "--porcelain=v2", "--branch", "--ignored", "-z")
    return (status, *(f"{path}: {path.read_bytes()!r}" for path in files))


def worktrees(repo: Path) -> int:
    return git(repo, "worktree", "list", "--porcelain").count("worktree ")


class Child:
    """Python code in a process and a session of its own that has printed `ready`; it is ended in any case."""

    def __init__(self, code: str, *arguments: object, wait: bool = True) -> None:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self.lines: list[str] = []
        assert self.process.stdout is not None
        while wait and self.lines[-1:] not in (["ready"], [""]):
            self.lines.append(self.process.stdout.readline().strip())

    def __enter__(self) -> subprocess.Popen[str]:
        return self.process

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
