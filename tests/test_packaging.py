"""Wheels and an sdist of a copy of the checkout, built without a network: what is in them, and that it works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DATA = ("csrc", "kernels", "observer", "schemas", "specs", "templates")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def python(*words, cwd, path=""):
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def build(what, tree, into):
    into.mkdir(exist_ok=True)
    return into / python("-c", BUILD, f"build_{what}", into, cwd=tree).splitlines()[-1]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a copy of the checkout and what is built from it: wheel, sdist, and a wheel from the sdist."""
    folder = tmp_path_factory.mktemp("packaging")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("setup.py", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("rlspec", "csrc", "kernels", "schemas", "specs", "templates"):
        ignored = shutil.ignore_patterns("__pycache__", ".*", "workspace", "logging")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    with tarfile.open(build("sdist", tree, folder)) as archive:
        archive.extractall(folder / "sdist", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = (folder / "sdist").iterdir()
    return {
        "tree": tree,
        "wheel": build("wheel", tree, folder / "wheel"),
        "wheel from sdist": build("wheel", unpacked, folder / "again"),
    }


def contents(wheel):
    """Path to bytes of all files but RECORD, which holds the archive's own digests."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


@pytest.fixture(scope="module")
def installed(made, tmp_path_factory):
    """A folder for sys.path that holds the wheel's files."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(made["wheel"]) as archive:
        archive.extractall(folder)
    return folder


def test_rlspec_is_the_only_name_that_the_wheel_claims(made):
    files = contents(made["wheel"])
    (info,) = {name.partition("/")[0] for name in files if ".dist-info/" in name}
    assert files[f"{info}/top_level.txt"] == b"rlspec\n"
    assert {name.partition("/")[0] for name in files} == {"rlspec", info}


def test_the_wheel_holds_every_file_of_the_package(made):
    package = made["tree"] / "rlspec"
    folders = {name: (package / name).resolve() for name in DATA}
    wanted = {f"rlspec/{path.relative_to(package)}" for path in package.rglob("*.py")}
    for name, folder in folders.items():
        wanted |= {f"rlspec/{name}/{path.relative_to(folder)}" for path in folder.rglob("*") if path.is_file()}
    missing = wanted - set(contents(made["wheel"]))
    assert not missing, f"add a package or a pattern of package_data to setup.cfg for {sorted(missing)}"


def test_the_wheel_from_the_sdist_is_the_same(made):
    one, other = contents(made["wheel"]), contents(made["wheel from sdist"])
    assert set(one) == set(other)
    assert [name for name in one if one[name] != other[name]] == []


def test_metadata(made):
    files = {name.partition(".dist-info/")[2]: text.decode() for name, text in contents(made["wheel"]).items()
             if ".dist-info/" in name}  # fmt: skip
    assert "rlspec = rlspec.cli:main" in files["entry_points.txt"]
    needs = [line.split()[1] for line in files["METADATA"].splitlines() if line.startswith("Requires-Dist: ")]
    assert {"torch", "triton", "wandb"} <= {need.partition(">")[0].rstrip(";") for need in needs}
    assert "Apache License" in files["licenses/LICENSE"]


def test_an_installed_wheel_works(installed, tmp_path):
    specs = installed / "rlspec" / "specs"
    found = python("-c", "import rlspec; print(rlspec.__file__)", cwd=tmp_path, path=installed)
    assert Path(found).is_relative_to(installed)
    assert "char-gpt" in python("-m", "rlspec", "list", "models", cwd=tmp_path, path=installed)
    python("-m", "rlspec", "lint", specs, cwd=tmp_path, path=installed)
    python("-m", "rlspec", "run", specs / "parity" / "example.yaml", cwd=tmp_path, path=installed)


def test_data_files_have_real_paths(installed, tmp_path):
    code = "from importlib.resources import files; print(files('rlspec') / 'schemas' / 'parity.schema.json')"
    assert Path(python("-c", code, cwd=tmp_path, path=installed)).is_file()


@pytest.mark.parametrize("mode", ["lenient", "strict"])
def test_an_editable_install_leads_to_the_checkout(made, tmp_path, mode):
    wheel = tmp_path / "wheel"
    wheel.mkdir()
    code = (
        "import sys; from setuptools import build_meta; "
        "build_meta.build_editable(sys.argv[1], {'editable-mode': sys.argv[2]})"
    )
    python("-c", code, wheel, mode, cwd=made["tree"])
    site = tmp_path / "site"
    with zipfile.ZipFile(next(wheel.glob("*.whl"))) as archive:
        archive.extractall(site)
    code = (
        "import site, sys; site.addsitedir(sys.argv[1]); import rlspec.kernels, rlspec.model; "
        "from pathlib import Path; print(Path(rlspec.__file__).parent)"
    )
    # -S leaves out what else is installed, such as an editable install of this very checkout.
    found = Path(python("-S", "-c", code, site, cwd=tmp_path))
    assert found.is_relative_to(made["tree"])
    assert (found / "schemas" / "parity.schema.json").is_file()
