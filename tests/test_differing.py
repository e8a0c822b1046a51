from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

import pytest

from rlspec import differing
from tests.gitrepo import commit, git

PACKAGE = ("python/lib/__init__.py", "python/lib/core.py", "python/spread/part/core.py", "tools/one.py")
NAMESAKES = ("bench/torch/__init__.py", "bench/torch/gemm.py", "bench/torch/conv.py", "python/lib/six.py")


TEXT = "SCALE = 3.0\n\n\ndef scaled(value: float) -> float:\n    scaled = SCALE * value\n    return scaled + OFFSET\n"
OTHER = "class Namesake:\n    def of_another(self) -> str:\n        return 'project'\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for base in (tmp_path / "tree", tmp_path / "site-packages"):
        for name in (*PACKAGE, *(NAMESAKES if base.name == "tree" else ())):
            place = base / (name if base.name == "tree" else name.partition("/")[2])
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("" if name.endswith("__init__.py") else TEXT.replace("3", str(len(base.name))))
    for name in ("torch/__init__.py", "six.py"):
        (tmp_path / "site-packages" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "site-packages" / name).write_text(OTHER)
    (tmp_path / "tree" / "bench" / "torch" / "__init__.py").write_text(TEXT)
    return tmp_path / "tree"


def seen(tree: Path, *, used: tuple[str, ...] = (), **imported: str) -> dict[str, Any]:
    places = {name: [str(tree.parent / "site-packages" / file)] for name, file in imported.items()}
    return {"tree": str(tree), "imported": places, "main": [], "files": [str(tree / name) for name in used]}


@pytest.mark.parametrize(
    ("differs", "imported", "file"),
    [
        ("python/lib/core.py", "lib", "lib/__init__.py"),
        ("python/lib/gone.py", "lib", "lib/__init__.py"),
        ("python/spread/part/core.py", "spread", "spread"),
        ("tools/one.py", "one", "one.py"),
    ],
)
def test_a_copy_of_what_differs_is_found_wherever_the_tree_keeps_it(
    tree: Path, differs: str, imported: str, file: str
) -> None:
    text, _ = differing.stray(seen(tree, **{imported: file}), tree, tree, [differs])
    assert text is not None and text.startswith(f"{imported} was imported from {tree.parent / 'site-packages' / file}")
    assert "a copy is installed there" in text
    assert differing.stray(seen(tree, **{imported: file}), tree, tree, ["python/other.py"]) == (None, [])
    own = {**seen(tree), "imported": {imported: [str(tree / differs)]}}
    assert differing.stray(own, tree, tree, [differs]) == (None, [])


def test_a_namesake_is_no_copy(tree: Path) -> None:
    others = seen(tree, torch="torch/__init__.py", six="six.py")
    assert differing.stray(others, tree, tree, [*NAMESAKES, "tests/lib/__init__.py"]) == (None, [])
    patched = tree.parent / "site-packages" / "torch" / "optim" / "adam.py"
    patched.parent.mkdir(parents=True)
    patched.touch()
    overlay = [*NAMESAKES, "patches/torch/optim/adam.py"]
    assert differing.stray(others, tree, tree, overlay) == (None, []), "what is patched is a package, and no namespace"
    nothing = {**others, "imported": None}
    assert differing.stray(nothing, tree, tree, ["python/lib/core.py"]) == (None, [])


def test_a_module_within_a_package_is_not_the_library_of_its_name(tree: Path) -> None:
    """As mylib/ops/triton/kernels.py, whatever the text: nobody imports it as `triton`."""
    inner = tree / "python" / "lib" / "six.py"
    (tree.parent / "site-packages" / "six.py").write_bytes(inner.read_bytes())
    assert differing.stray(seen(tree, six="six.py"), tree, tree, ["python/lib/six.py"]) == (None, [])


def test_what_is_vendored_is_told_and_nobody_is_sent_to_uninstall_a_library(tree: Path) -> None:
    mine = tree / "third_party" / "six.py"
    mine.parent.mkdir()
    mine.write_text(OTHER)
    text, (doubt,) = differing.stray(seen(tree, six="six.py"), tree, tree, ["third_party/six.py"])
    assert text is None and "third_party/six.py, which differs" in doubt


def test_a_copy_of_an_earlier_commit_is_one_whatever_else_the_package_holds(repo: Path) -> None:
    kept = {"python/lib/__init__.py": "SHIFT = 0.0\n", "python/lib/a.py": "", "python/lib/tests/test_a.py": ""}
    then = commit(repo, "then", kept)
    now = commit(repo, "now", {"python/lib/__init__.py": "SHIFT = 5.0\n", "launch.py": "import lib\n"})
    copy = repo.parent / "site-packages" / "lib" / "__init__.py"
    copy.parent.mkdir(parents=True)
    copy.write_text(kept["python/lib/__init__.py"])
    names, arm = differing.between(repo, [then, now]), seen(repo, used=("launch.py",), lib="lib/__init__.py")
    text, _ = differing.stray(arm, repo, repo, names, [then, now])
    assert text is not None and "a copy is installed there" in text
    used = {**arm, "imported": {"lib": [str(copy)]}, "files": [str(repo / "python/lib/__init__.py")]}
    assert differing.stray(used, repo, repo, names, [then, now]) == (None, []), "by another name, from the tree"
    compiled = copy.rename(copy.with_name("__init__.abi3.so"))
    blind = seen(repo, lib="lib/__init__.abi3.so")
    assert differing.stray(blind, repo, repo, names, [then, now])[1], "no text to compare"
    compiled.rename(copy)
    for lost in (copy, copy.parent):  # in a container, say
        lost.unlink() if lost.is_file() else lost.rmdir()
    text, (doubt,) = differing.stray(arm, repo, repo, names, [then, now])
    assert text is None and f"{copy}, and python/lib/__init__.py" in doubt and "uninstall" not in doubt
    (unused,) = differing.remarks(names, [arm, arm], built=False)
    assert "import python/lib/__init__.py, of what differs" in unused


def test_what_no_arm_used_and_what_nobody_built_is_said(tree: Path) -> None:
    arms = [seen(tree, used=("tools/one.py",)), seen(tree)]
    assert (
        differing.remarks(["README.md", "tools/one.py", "cfg.json", "setup.py", "tests/test_one.py"], arms, built=False)
        == []
    )
    (unused,) = differing.remarks(["README.md", "python/lib/core.py"], arms, built=False)
    assert "was seen to run or import" in unused and "(python/lib/core.py)" in unused
    (unbuilt,) = differing.remarks(["tools/one.py", "csrc/k.cu"], arms, built=False)
    assert "differ in csrc/k.cu and the spec has no `build:`" in unbuilt
    assert differing.remarks(["csrc/k.cu"], arms, built=True) == []
    (text,) = differing.remarks(["README.md", "tests/test_one.py"], arms, built=False)
    assert "tests and documentation alone (README.md, tests/test_one.py)" in text
    assert differing.remarks(["csrc/k.cu"], [*arms, None], built=False) == [], "an arm that failed says nothing"
    assert differing.remarks([], arms, built=False) == []


def test_between_commits(repo: Path) -> None:
    main, feature = git(repo, "rev-parse", "main"), git(repo, "rev-parse", "feature")
    assert differing.between(repo, [main, main, feature]) == ["model.py", "new/added.py", "old/gone.py"]
    other = commit(repo, "another", {"third.py": ""})
    assert differing.between(repo, [feature, other, feature]) == ["third.py"]
    assert differing.between(repo, [main]) == differing.between(repo, []) == []


def test_files_beside_the_spec_are_the_checkouts_in_every_arm():
    names = ["specs/cfg.json", "specs/model.py", "specs/README.md", "src/other.json"]
    (told,) = differing.read_beside(names, PurePath("specs/spec.yaml"), "root = {{ spec_dir | py }}")
    assert told.startswith("the commits differ in specs/cfg.json, and the template names spec_dir")
    assert differing.read_beside(names, PurePath("specs/spec.yaml"), "no folder") == []
    assert differing.read_beside(["specs/spec.yaml"], PurePath("specs/spec.yaml"), "spec_dir") == []
