from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlspec import provenance
from rlspec.errors import SpecError

FAKE_TORCH = """
__version__ = "9.9.9"
class version: cuda, git_version, hip = "13.1", "abc", None
import sys; sys.modules["torch.version"] = version
class cuda:
    is_initialized = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 8)
    get_device_name = staticmethod(lambda i: "Fake H200")
    get_device_capability = staticmethod(lambda i: (9, 0))
    class nccl: version = staticmethod(lambda: (2, 28, 3))
class backends:
    class cudnn: version = staticmethod(lambda: 91002); allow_tf32 = True
    class cuda:
        class _matmul:
            @property
            def allow_tf32(self): raise RuntimeError("mixed old and new settings")
        matmul = _matmul()
def are_deterministic_algorithms_enabled():
    import warnings; warnings.warn("this would go into the log of the arm")
    return True
get_num_threads = lambda: 3
"""


def write(place: Path, text: str = "") -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    return place


def observe(
    folder: Path,
    *command: object,
    tree: Path | None = None,
    python: Path | str = sys.executable,
    code: int = 0,
    stderr: str = "",
    more: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run Python observed, and read what each process wrote."""
    folder.mkdir(exist_ok=True)
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | dict(more or {})
    child = {**inherited, **provenance.environment(tree, folder, inherited)}
    done = subprocess.run(
        [str(python), *map(str, command)], env=child, cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (code, stderr), done.stderr
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def collected(folder: Path, tree: Path | None = None, run_file: Path | None = None) -> dict[str, Any]:
    return provenance.collect(folder, commit="c" * 40, dirty=False, run_file=run_file, tree=tree)


# --- the environment of a child


def test_environment(tmp_path: Path) -> None:
    tree, folder = tmp_path / "tree", tmp_path / "observed"
    tree.mkdir()
    made = provenance.environment(tree, folder, {"PYTHONPATH": "/mine:/also", "TERM": "xterm"})
    assert made["PYTHONPATH"] == f"{provenance.OBSERVER}:{tree}:/mine:/also"
    assert made["RLSPEC_OBSERVE"] == str(folder)
    assert (made["TERM"], made["NO_COLOR"], made["WANDB_MODE"]) == ("dumb", "1", "disabled")
    (tree / "src").mkdir()
    made = provenance.environment(tree, folder, {})
    assert made["PYTHONPATH"] == f"{provenance.OBSERVER}:{tree}:{tree / 'src'}", "an empty entry would be the cwd"
    assert provenance.environment(None, folder, {})["PYTHONPATH"] == str(provenance.OBSERVER)


def test_what_the_spec_declares_wins_but_the_observer_stays_first(tmp_path: Path) -> None:
    declared = {"TERM": "vt100", "PYTHONPATH": "/spec", "WANDB_MODE": "online", "RLSPEC_OBSERVE": "/elsewhere"}
    made = provenance.environment(None, tmp_path, {"PYTHONPATH": "/mine"}, declared)
    assert (made["TERM"], made["WANDB_MODE"], made["NO_COLOR"]) == ("vt100", "online", "1")
    assert (made["PYTHONPATH"], made["RLSPEC_DECLARED_PATH"]) == (f"{provenance.OBSERVER}:/spec", "/spec")
    assert provenance.environment(None, tmp_path, {"RLSPEC_DECLARED_PATH": "/outer"})["RLSPEC_DECLARED_PATH"] == ""
    assert made["RLSPEC_OBSERVE"] == str(tmp_path)


def test_a_path_with_a_colon_is_refused(tmp_path: Path) -> None:
    tree = tmp_path / "a:b"
    tree.mkdir()
    with pytest.raises(SpecError, match="a:b.*PYTHONPATH"):
        provenance.environment(tree, tmp_path, {})


# --- the observer


@pytest.mark.parametrize("how", ["-c", "-m", "script"])
def test_observed_however_python_starts(tmp_path: Path, how: str) -> None:
    tree = tmp_path / "tr ee\nü"
    lib = write(tree / "lib" / "__init__.py", "import lib.part\nimport json\n")
    part = write(tree / "lib" / "part.py")
    main = write(tree / "lib" / "__main__.py", "import lib\n")
    script = write(tmp_path / "run.py", "import lib\n")
    command = {"-c": ("-c", "import lib"), "-m": ("-m", "lib", "x"), "script": (script, "x")}[how]
    (record,) = observe(tmp_path / "o", *command, tree=tree)
    assert record["files"] == [str(lib), str(part)]
    assert record["imported"]["lib"] == str(lib)
    assert "json" not in record["imported"] and "sitecustomize" not in record["imported"]
    assert record["main"] == {"-c": [], "-m": [str(main)], "script": [str(script)]}[how]
    words = {"-c": ["-c"], "-m": ["-m", "lib"], "script": [str(script), "x"]}[how]
    assert record["command"] == [sys.executable, *words]
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert not list(tree.rglob("__pycache__")), "no litter, and no stale bytecode for the next checkout"


def test_forked_and_spawned_processes(tmp_path: Path) -> None:
    code = "import os, sys\nif os.fork() == 0:\n    import csv, mine\n    sys.exit()\nos.wait()"
    write(tmp_path / "tree" / "mine.py")
    first, second = observe(tmp_path / "a", "-c", code, tree=tmp_path / "tree")
    assert first["pid"] != second["pid"] and ("mine" in first["imported"]) != ("mine" in second["imported"])
    for method, count in (("fork", 1 if sys.version_info < (3, 13) else 2), ("spawn", 2)):
        text = "import multiprocessing as m, mine\nif __name__ == '__main__':\n"
        text += f"    p = m.get_context('{method}').Process(target=print)\n    p.start()\n    p.join()\n"
        script = write(tmp_path / f"{method}.py", text)
        records = observe(tmp_path / method, script, tree=tmp_path / "tree")
        seen = [record for record in records if "mine" in record["imported"]]
        assert count >= len(seen) >= (2 if method == "spawn" else 1)
        assert all(script.name == Path(record["main"][0]).name for record in seen)


def test_the_users_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    mine = write(tmp_path / "mine" / "sitecustomize.py", "import sys; sys.mine = __name__, __file__; marker = 1\n")
    code = "import sys, sitecustomize; print(*sys.mine, sitecustomize.marker, file=sys.stderr)"
    expected = f"sitecustomize {mine} 1\n"
    (record,) = observe(tmp_path / "o", "-c", code, more={"PYTHONPATH": str(mine.parent)}, stderr=expected)
    assert record["imported"]["sitecustomize"] == str(mine)


@pytest.mark.parametrize("body", ["1 / 0", "import no_such_module", "raise ImportError('x')"])
def test_a_broken_sitecustomize_of_the_user_says_so_as_without_us(tmp_path: Path, body: str) -> None:
    mine = write(tmp_path / "mine" / "sitecustomize.py", body + "\n").parent
    plain = subprocess.run(
        [sys.executable, "-c", "pass"], env={"PYTHONPATH": str(mine)}, capture_output=True, text=True, check=True
    )
    assert "sitecustomize" in plain.stderr
    assert len(observe(tmp_path / "o", "-c", "pass", more={"PYTHONPATH": str(mine)}, stderr=plain.stderr)) == 1


def test_the_observer_never_disturbs(tmp_path: Path) -> None:
    code = """
import sys
class Awkward:
    def __getattr__(self, name): raise RuntimeError(name)
    def __getattribute__(self, name): raise RuntimeError(name)
sys.modules.update(odd=None, odder=Awkward(), oddest=3)
"""
    (record,) = observe(tmp_path / "o", "-c", code)
    assert "odd" not in record["imported"]
    assert observe(tmp_path / "gone", "-c", f"import shutil; shutil.rmtree({str(tmp_path / 'gone')!r})") == []
    assert not (tmp_path / "gone").exists()
    assert observe(tmp_path / "code", "-c", "import sys; sys.exit(7)", code=7)[0]["files"] == []
    assert observe(tmp_path / "hard", "-c", "import os; os._exit(0)") == []
    assert observe(tmp_path / "isolated", "-I", "-c", "pass") == []


def test_torch_is_looked_at_only_where_it_is_loaded(tmp_path: Path) -> None:
    write(tmp_path / "fake" / "torch.py", FAKE_TORCH)
    (record,) = observe(tmp_path / "a", "-c", "pass", more={"PYTHONPATH": str(tmp_path / "fake")})
    assert record["device"] is None and record["flags"] is None and "torch" not in record["versions"]
    (record,) = observe(tmp_path / "b", "-c", "import torch", more={"PYTHONPATH": str(tmp_path / "fake")})
    assert record["versions"]["torch"] == "9.9.9" and record["versions"]["torch_cuda"] == "13.1"
    assert record["device"] == {
        "name": "Fake H200", "capability": "9.0", "visible": 8, "cudnn": 91002, "nccl": "2.28.3"
    }  # fmt: skip
    assert record["flags"]["deterministic_algorithms"] is True and record["flags"]["num_threads"] == 3
    assert record["flags"]["matmul_allow_tf32"] is None, "one look that fails takes no other with it"


def test_flags_of_the_real_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = "import torch; torch.set_num_threads(1); torch.use_deterministic_algorithms(True); "
    code += "torch.backends.cuda.matmul.allow_tf32 = True; torch.set_default_dtype(torch.float64)"
    observe(tmp_path / "o", "-c", code)
    made = collected(tmp_path / "o")
    flags = made["flags"]
    assert flags["deterministic_algorithms"] is True and flags["matmul_allow_tf32"] is True
    assert flags["num_threads"] == 1 and flags["default_dtype"] == "torch.float64"
    assert set(provenance.machine(made)) >= {"torch", "image"}


def test_secrets_are_never_written(tmp_path: Path) -> None:
    hidden = {
        "WANDB_API_KEY": "s3cret1", "NCCL_AUTH": "s3cret2", "TORCH_HUB_TOKEN": "s3cret3", "VLLM_API_KEY": "s3cret4",
        "TRITON_PASSWORD": "s3cret5", "XLA_Secret_x": "s3cret6", "CUDA_CREDENTIALS": "s3cret7", "HOSTNAME_X": "s3cret8",
        "TRITON_MIRROR": "ftp://user:s3cret9@host",
    }  # fmt: skip
    seen = {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "8", "PYTHONHASHSEED": "0"}
    script = write(tmp_path / "run.py")
    (record,) = observe(tmp_path / "o", script, "--api-key", "s3cretA", "--token=s3cretB", more=hidden | seen)
    assert "s3cret" not in json.dumps(record)
    assert record["command"] == [sys.executable, str(script)]
    (other,) = observe(tmp_path / "p", script, "--token=s3cretB")
    assert "s3cret" not in json.dumps(other)
    assert {name: record["environment"][name] for name in seen} == seen
    made = collected(tmp_path / "o")
    assert {name: made["environment"][name] for name in seen} == seen


# --- the account


def test_nothing_observed_is_null(tmp_path: Path) -> None:
    run_file = write(tmp_path / "run.py", "print(1)\n")
    made = collected(tmp_path, run_file=run_file)
    assert made["run_file_digest"] == hashlib.sha256(b"print(1)\n").hexdigest()
    assert made["commit"] == "c" * 40 and made["dirty"] is False and made["processes"] == 0
    for part in ("imported", "files", "main", "versions", "device", "flags", "environment", "machine", "ranks"):
        assert made[part] is None
    assert provenance.machine(made) == {} and provenance.hosts(made) == []
    assert provenance.wrong_imports(made, tmp_path, tmp_path, required=False) is None
    assert "cannot be shown" in str(provenance.wrong_imports(made, tmp_path, tmp_path, required=True))
    assert provenance.unused_tree(made, tmp_path) is None


def test_a_record_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path / "1-a.json", json.dumps(record(imported={}, files=[])))
    write(tmp_path / "2-b.json", '{"cut')
    made = collected(tmp_path)
    assert made["processes"] == 1 and made["unreadable"] == ["2-b.json"]
    assert "2-b.json" in str(provenance.wrong_imports(made, tmp_path, tmp_path, required=True))


def record(**parts: Any) -> dict[str, Any]:
    return {"pid": 1, "command": ["python"], "main": [], "imported": {}, "files": [], "ranks": {}, **parts}


def test_processes_are_merged_and_the_launcher_does_not_count(tmp_path: Path) -> None:
    flags = {"num_threads": 8, "matmul_allow_tf32": False}
    write(tmp_path / "0.json", json.dumps(record(flags=flags, versions={"torch": "1"}, imported={"a": "/x/a.py"})))
    for rank in (1, 0, 10):
        ranked = record(
            flags={"num_threads": rank, "matmul_allow_tf32": True},
            versions={"torch": "2", "torch_cuda": "13.0"},
            imported={"a": f"/{rank}/a.py"},
            files=[f"/{rank}/a.py"],
            ranks={"RANK": str(rank), "WORLD_SIZE": "11"},
            device={"name": "H200"},
            machine={
                "host": f"n{rank}",
                "os": "debian 12",
                "image": None,
                "arch": "x86_64",
                "cpu": "EPYC",
                "driver": "5",
            },
            environment={"NCCL_ALGO": "Ring", "NCCL_API_KEY": "secret of a foreign record"},
        )
        write(tmp_path / f"{rank}-r.json", json.dumps(ranked))
    made = collected(tmp_path)
    assert made["processes"] == 4 and made["ranks"] == [0, 1, 10] and made["world_size"] == "11"
    assert made["flags"] == {"num_threads": [0, 1, 10], "matmul_allow_tf32": True}
    assert made["versions"] == {"torch": "2", "torch_cuda": "13.0"}
    assert made["imported"] == {"a": ["/0/a.py", "/1/a.py", "/10/a.py", "/x/a.py"]}
    assert made["files"] == ["/0/a.py", "/1/a.py", "/10/a.py"]
    assert made["environment"] == {"NCCL_ALGO": "Ring"}
    assert made["commands"] == [["python"]]
    assert provenance.hosts(made) == ["n0", "n1", "n10"]
    assert provenance.machine(made) == {
        "torch": "2", "cuda": "13.0", "driver": "5", "gpu": "H200", "image": "debian 12 x86_64", "cpu": "EPYC"
    }  # fmt: skip


def test_a_process_that_kept_silent_about_its_imports_makes_them_unknown(tmp_path: Path) -> None:
    write(tmp_path / "1.json", json.dumps(record()))
    write(tmp_path / "2.json", json.dumps(record(imported=None)))
    assert collected(tmp_path)["imported"] is None


def test_a_container_is_the_image(tmp_path: Path) -> None:
    observe(tmp_path / "o", "-c", "pass", more={"APPTAINER_CONTAINER": "/images/train.sif"})
    made = collected(tmp_path / "o")
    assert provenance.machine(made)["image"] == f"/images/train.sif {os.uname().machine}"
    assert provenance.hosts(made) == [os.uname().nodename]


# --- imports from another tree


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A user's checkout with packages at the top, below src and below python, and an arm's tree of the same."""
    root = tmp_path / "repo"
    for base in (root, root / "workspace" / "run" / "abc"):
        for name in ("flat/__init__.py", "src/inner/__init__.py", "src/single.py", "python/deep/__init__.py"):
            write(base / name, "import sys\n")
    return root


def ran(folder: Path, python: Path | str, code: str, tree: Path) -> dict[str, Any]:
    run_file = write(tree.parent / "abc-feat0.py", code)
    observe(folder, run_file, tree=tree, python=python)
    return collected(folder, tree, run_file)


def wrong(seen: dict[str, Any], tree: Path, repo: Path) -> str:
    return str(provenance.wrong_imports(seen, tree, repo, required=True))


def test_imports_from_the_tree_are_right(repo: Path, tmp_path: Path) -> None:
    tree = repo / "workspace" / "run" / "abc"
    seen = ran(tmp_path / "o", sys.executable, "import flat, inner, single, json\n", tree)
    assert wrong(seen, tree, repo) == "None"
    assert provenance.unused_tree(seen, tree) is None
    assert Path(seen["imported"]["inner"][0]).is_relative_to(tree)


def test_an_import_from_the_users_checkout_is_found(repo: Path, tmp_path: Path) -> None:
    tree = repo / "workspace" / "run" / "abc"
    for number, (place, name) in enumerate((("", "flat"), ("src", "inner"), ("src", "single"), ("python", "deep"))):
        code = f"import sys; sys.path.insert(0, {str(repo / place)!r}); import {name}\n"
        text = wrong(ran(tmp_path / f"o{number}", sys.executable, code, tree), tree, repo)
        assert text.startswith(f"{name} was imported from {repo / place / name}")
        assert str(tree) in text and "isolation: checkout" in text


def test_a_part_of_a_package_from_the_users_checkout_is_found(repo: Path, tmp_path: Path) -> None:
    tree = repo / "workspace" / "run" / "abc"
    write(repo / "flat" / "kernel.py")
    code = f"import flat; flat.__path__.append({str(repo / 'flat')!r}); import flat.kernel\n"
    assert "kernel was imported from" in wrong(ran(tmp_path / "o", sys.executable, code, tree), tree, repo)


def test_a_script_of_the_users_checkout_is_found(repo: Path, tmp_path: Path) -> None:
    tree = repo / "workspace" / "run" / "abc"
    script = write(repo / "scripts" / "train.py", "import flat\n")
    observe(tmp_path / "o", script, tree=tree)
    assert "train was run from" in wrong(collected(tmp_path / "o", tree), tree, repo)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    return tmp_path / "venv" / "bin" / "python"


def packages(python: Path) -> Path:
    return next(python.parents[1].glob("lib/python*/site-packages"))


def test_editable_installs(repo: Path, tmp_path: Path, python: Path) -> None:
    tree = repo / "workspace" / "run" / "abc"
    write(packages(python) / "editable.pth", f"{repo / 'src'}\n{repo / 'python'}\n")
    assert wrong(ran(tmp_path / "a", python, "import inner\n", tree), tree, repo) == "None", "the tree comes first"
    text = wrong(ran(tmp_path / "b", python, "import deep\n", tree), tree, repo)
    assert text.startswith(f"deep was imported from {repo / 'python' / 'deep'}") and "isolation: checkout" in text
    assert wrong(ran(tmp_path / "c", python, "import deep\n", repo), repo, repo) == "None", "isolation: checkout"
    (packages(python) / "linked").symlink_to(repo / "python" / "deep")
    assert "linked was imported from" in wrong(ran(tmp_path / "d", python, "import linked\n", tree), tree, repo)


def test_a_copy_in_site_packages(repo: Path, tmp_path: Path, python: Path) -> None:
    tree = repo / "workspace" / "run" / "abc"
    write(packages(python) / "deep" / "__init__.py")
    write(packages(python) / "inner" / "__init__.py")
    first = f"import sys; sys.path.insert(0, {str(packages(python))!r}); "
    text = wrong(ran(tmp_path / "a", python, first + "import inner\n", tree), tree, repo)
    assert "a copy is installed there; uninstall it" in text
    seen = ran(tmp_path / "b", python, "import deep\n", tree)
    assert wrong(seen, tree, repo) == "None"
    assert "no Python file of" in str(provenance.unused_tree(seen, tree))
    (packages(python) / "elsewhere.py").touch()
    seen = ran(tmp_path / "c", python, "import elsewhere\n", repo / "tree")
    assert "no Python file of" in str(provenance.unused_tree(seen, repo)), "the run file is no part of the commit"


def test_a_copy_in_an_environment_inside_the_repository(repo: Path, tmp_path: Path) -> None:
    place = repo / ".venv" / "lib" / "python3" / "site-packages"
    write(place / "inner" / "__init__.py")
    write(place / "other.py")
    code = f"import sys; sys.path.insert(0, {str(place)!r}); import "
    for tree in (repo, repo / "workspace" / "run" / "abc"):
        folder = tmp_path / f"of-{tree.name}"
        folder.mkdir()
        assert "a copy is installed" in wrong(ran(folder / "a", sys.executable, code + "inner\n", tree), tree, repo)
        assert wrong(ran(folder / "b", sys.executable, code + "other\n", tree), tree, repo) == "None"


def test_the_same_words_are_secret_in_the_arm_and_here() -> None:
    """The observer stands alone, in whatever Python the arm has."""
    source = (Path(provenance.__file__).parent / "observer" / "sitecustomize.py").read_text(encoding="utf-8")
    (there,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SECRET"
    ]
    assert provenance.SECRET.pattern == "|".join(there)
