"""What a checkout must look like: links that point home, no stray packages, an import that needs next to nothing."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest

ROOT = Path(__file__).parents[1]
LINKS = ("csrc", "kernels", "schemas", "specs", "templates")


def python(*words, cwd=ROOT, path="", check=True):
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", LINKS)
def test_the_package_links_to_the_folders_at_the_top(name):
    link = ROOT / "rlspec" / name
    assert link.is_symlink() and os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name and link.is_dir()


@pytest.mark.parametrize("name", LINKS)
def test_git_stores_a_link_and_files_below_it(name):
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    stored = subprocess.run(["git", "ls-files", "-s", f"rlspec/{name}"], cwd=ROOT, capture_output=True, text=True)
    assert stored.stdout.startswith("120000 "), "git would check out a text file"
    below = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", name], cwd=ROOT, capture_output=True)
    assert below.stdout, f"git keeps no empty folder: rlspec/{name} would dangle in a clone"


@pytest.mark.parametrize("name", (*LINKS, "rlspec/observer"))
def test_folders_that_are_not_packages(name):
    assert not list((ROOT / name).rglob("__init__.py")), f"{name} at the top of sys.path would hide another {name}"


def test_setup_cfg_lists_every_package():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    found = {path.parent.relative_to(ROOT) for path in (ROOT / "rlspec").rglob("__init__.py")}
    listed = config["options"]["packages"].split()
    assert sorted(listed) == sorted({*(".".join(path.parts) for path in found), "rlspec.kernels"})


def test_another_package_named_kernels_stays_visible_from_the_top(tmp_path):
    theirs = tmp_path / "kernels"
    theirs.mkdir()
    (theirs / "__init__.py").write_text("def get_kernel(): return 'theirs'\n")
    code = "import rlspec.kernels; from kernels import get_kernel; print(get_kernel(), rlspec.kernels.__path__[0])"
    assert python("-c", code, path=tmp_path).split() == ["theirs", str(ROOT / "rlspec" / "kernels")]


BLOCKED = """
import importlib, sys
from contextlib import suppress

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Block())
for name in {names}:
    with suppress(ImportError):
        importlib.import_module(name)
        raise AssertionError(name)
import rlspec.__main__
from rlspec.cli import main
main(["lint", "specs"], standalone_mode=False)
print("linted")
"""


def test_the_host_needs_neither_torch_nor_triton_nor_wandb():
    assert python("-c", BLOCKED.format(names=["torch", "triton", "wandb", "numpy"])).splitlines()[-1:] == ["linted"]


def test_runs_from_a_checkout_without_an_install():
    assert python("-S", "-c", "import rlspec; print(rlspec.__version__)").strip()
    assert "Usage: rlspec" in python("-m", "rlspec", "--help")


@pytest.mark.parametrize("name", conftest.LONGEST)
def test_the_longest_test_files_are_where_they_are_looked_for(name):
    """A worker takes a file at a time: one that loses its place may be left over, alone, at the end."""
    assert len(list((ROOT / "tests").rglob(f"test_{name}.py"))) == 1
