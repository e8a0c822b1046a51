"""The files that differ between the commits of the arms: did the arms use them, and each from its own tree?"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from rlspec import git, provenance
from rlspec.changes import listed, shown

ASIDE = frozenset({"test", "tests", "doc", "docs"})
VENDORED = frozenset({"third_party", "thirdparty", "3rdparty", "vendor", "vendored", "_vendor", "external", "extern"})
TOOLS = frozenset({"setup.py", "conftest.py", "noxfile.py"})
TEXTS = frozenset({".md", ".rst"})
COMPILED = frozenset({".cu", ".cuh", ".cpp", ".cc", ".cxx", ".c", ".h", ".hpp", ".rs", ".pyx"})
LOOKED_AT = 200  # files of a package, by which a copy is told from a namesake
SHORT = 10  # bytes of a line below which it tells nothing
SAME, UNLIKE = 0.5, 0.1  # share of their lines that two files have in common: of one project, of two
FEWEST = 3  # such lines


def between(repo: Path, commits: Collection[str]) -> list[str]:
    """Names of the files in which the commits differ."""
    first, *others = dict.fromkeys(commits) or [""]
    found = (git.names(repo, "diff", "--name-only", "-z", "--no-renames", first, other) for other in others)
    return sorted({name for one in found for name in one})


def stray(
    seen: Mapping[str, Any], tree: Path, repo: Path, names: Sequence[str], commits: Collection[str] = ()
) -> tuple[str | None, list[str]]:
    """A sentence if an arm took one of these files from a copy outside its tree, wherever in the tree it lies.

    And a sentence for each namesake of which that cannot be told. `commits` are those between which the files differ.
    """
    tree = tree.resolve()
    doubts: dict[str, str] = {}
    for name in names:
        if not name.endswith(".py") or aside(name):
            continue
        for module, file, place, rest in _namesakes(tree, name, seen):
            alike = _alike(place, file, rest, _earlier(repo, name, commits))
            if alike == "copy" and VENDORED.isdisjoint(PurePath(name).parts):
                said = provenance.sentence(f"{module} was imported", file, tree, repo.resolve())
                return f"{said}. The tree has it as {shown(name)}; only its top and `src` are put on PYTHONPATH", []
            if alike != "other":  # what is vendored is another project's, of which the environment may have its own
                doubts.setdefault(
                    module,
                    f"{module} was imported from {file}, and {shown(name)}, which differs between the commits, was not "
                    "used: if that is the same code, the arms ran a copy of it that no commit changes",
                )
    return None, list(doubts.values())


def aside(name: str) -> bool:
    """Tests and documentation, which no trainer runs."""
    path = PurePath(name)
    return path.suffix in TEXTS or not ASIDE.isdisjoint(path.parts[:-1])


def remarks(names: Sequence[str], seen: Sequence[Mapping[str, Any] | None], built: bool) -> list[str]:
    """Sentences for the report where no arm used what differs, or where what differs would have to be built.

    `seen` is what was observed of the arms that have a commit, None where an arm did not end well.
    """
    if not names or any(one is None or one["imported"] is None for one in seen):
        return []
    code = [name for name in names if not aside(name)]
    if not code:
        return [f"the commits differ in tests and documentation alone ({listed(names, 3)})"]
    unbuilt = [name for name in code if PurePath(name).suffix in COMPILED and not built]
    others = [name for name in code if PurePath(name).suffix not in COMPILED]
    used = {name for one in seen if one is not None for name in _used(one)}
    said = []
    if others and not used & set(others):
        said.append(
            f"no arm was seen to run or import a file that differs between the commits ({listed(others, 3)}): unless "
            "it is read in another way, the arms ran the same code"
        )
    elif unused := [name for name in others if name not in used and _runs(name)]:
        said.append(
            f"no arm was seen to run or import {listed(unused, 3)}, of what differs between the commits: what that "
            "changes is not in the verdict"
        )
    if unbuilt:
        said.append(
            f"the commits differ in {listed(unbuilt, 3)} and the spec has no `build:`: unless the trainer compiles it "
            "as it runs, the arms shared one earlier build"
        )
    return said


def read_beside(names: Sequence[str], spec: PurePath, template: str) -> list[str]:
    """A sentence on files below the spec's folder, where the template names that: it is the checkout's in every arm."""
    if not re.search(r"\{\{[^}]*\bspec_dir\b", template):
        return []
    below = [one for one in names if PurePath(one).is_relative_to(spec.parent) and not one.endswith(".py")]
    found = [one for one in below if not aside(one) and PurePath(one) != spec]
    why = "and the template names spec_dir, which is this checkout's folder in every arm"
    return [f"the commits differ in {listed(found, 3)}, {why}: what is read there is the same in all"] if found else []


def _runs(name: str) -> bool:
    """Whether a trainer may run a file."""
    file = PurePath(name).name
    return file.endswith(".py") and file not in TOOLS and not file.startswith("test_")


def _used(seen: Mapping[str, Any]) -> set[str]:
    """Files of an arm's tree that it ran or imported, by their names in the commit; `tree` may be another machine's."""
    files = [PurePath(file) for file in (*(seen["files"] or ()), *(seen["main"] or ()))]
    return {file.relative_to(seen["tree"]).as_posix() for file in files if file.is_relative_to(seen["tree"])}


def _namesakes(tree: Path, name: str, seen: Mapping[str, Any]) -> Iterator[tuple[str, Path, Path, tuple[str, ...]]]:
    """(module, file, place, rest) of what was imported from elsewhere by a name that a file of the tree may have.

    Nothing says by which name a file would be imported, so each folder above it may be the top-level package, unless
    it lies in a package itself. `place` is that folder, or the file, and `rest` what is below it.
    """
    parts, imported = PurePath(name).parts, seen["imported"] or {}
    used = str(tree / name) in {*(seen["files"] or ()), *(seen["main"] or ())}
    for at, part in enumerate(parts):
        top = part.removesuffix(".py")
        files = [Path(file) for file in imported.get(top, ())]
        outside = [file for file in files if not file.is_relative_to(tree) or provenance.installed(file, tree)]
        if not used or len(outside) < len(files):  # else it was used by another name, such as mylib.ops.triton
            for file in outside:
                yield top, file, tree.joinpath(*parts[: at + 1]), parts[at + 1 :]
        if tree.joinpath(*parts[: at + 1], "__init__.py").is_file():
            return


def _alike(mine: Path, theirs: Path, rest: Sequence[str], earlier: Iterable[bytes]) -> str:
    """`copy` by its text, `other` for a namesake such as torch beside benchmarks/torch/, `unknown` where none tells."""
    folder = theirs
    if rest:
        regular = theirs.stem.partition(".")[0] == "__init__"
        folder = theirs.parent if regular else theirs
        if mine.is_dir() and regular != (mine / "__init__.py").is_file():
            return "other"  # a namespace, which others may share, and no package like torch
    elif mine.name != theirs.name:
        return "other"
    if not folder.exists():  # in a container, or on another node
        return "unknown"
    found = _text(folder.joinpath(*rest))
    if found.strip() and found in earlier:
        return "copy"
    if not mine.exists():  # an arm whose commit has it can tell
        return "other"
    here, there = _texts(mine, folder, rest)
    if not here and (mine / "__init__.py").is_file():  # compiled
        return "unknown"
    return _by_lines(here, there)


def _texts(mine: Path, theirs: Path, rest: Sequence[str]) -> tuple[list[bytes], list[bytes]]:
    """What the files of a package hold that both have, or a lone module and its namesake."""
    if not rest:
        return [_text(mine)], [_text(theirs)]
    regular = (mine / "__init__.py").is_file()  # in a namespace, other files may be others' own
    below = [file.relative_to(mine) for file in sorted(mine.rglob("*.py"))] if regular else [PurePath(*rest)]
    names = [name for name in below if not aside(str(name)) and (theirs / name).is_file()][:LOOKED_AT]
    return [_text(mine / name) for name in names], [_text(theirs / name) for name in names]


def _by_lines(mine: Sequence[bytes], theirs: Sequence[bytes]) -> str:
    if any(one.strip() and one == other for one, other in zip(mine, theirs, strict=True)):
        return "copy"
    here, there = _lines(mine), _lines(theirs)
    both = 2 * len(here & there) / max(1, len(here) + len(there))  # the coefficient of Dice
    if both >= SAME and len(here & there) >= FEWEST:
        return "copy"
    return "unknown" if mine and (both >= UNLIKE or not (here and there)) else "other"


def _lines(texts: Iterable[bytes]) -> set[bytes]:
    """Lines that say something: every other project has the short ones and imports the same."""
    lines = {line.strip() for text in texts for line in text.splitlines()}
    return {line for line in lines if len(line) >= SHORT and not line.startswith((b"import ", b"from ", b"#"))}


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _earlier(repo: Path, name: str, commits: Iterable[str]) -> Iterator[bytes]:
    """What a file holds in each of the commits that have it."""
    for commit in dict.fromkeys(commits):
        done = git.run(repo, "show", f"{commit}:{name}")
        if done.returncode == 0:
            yield done.stdout
