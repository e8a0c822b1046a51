"""torchtitan 0.2.2 through `specs/examples/torchtitan/branch.yaml`: a repository to run it in, and what came out.

    python tests/bench/bench_torchtitan.py prepare FOLDER      a repository of the installed torchtitan, with branches
    cd FOLDER && git checkout harmless && rlspec run …/branch.yaml --set repository=FOLDER
    python tests/bench/bench_torchtitan.py pack RUN            its records in one file, for evidence, to RUN.jsonl.gz
    python tests/bench/bench_torchtitan.py envelope FILE…      how the base runs of all of them part, in Markdown

The package on PyPI lacks the text and the tokenizer of torchtitan's tests: both are made here, of Python's own prose.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlspec.model import Run

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "specs" / "examples" / "torchtitan"
STEPS = (1, 2, 3, 5, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)
METRICS = ("loss", "grad_norm")


def prepare(folder: Path) -> None:
    """Tag v0.2.2 is the package as installed; the branches are named like the patches of the example."""
    found = importlib.util.find_spec("torchtitan")
    assert found is not None and found.origin is not None, "torchtitan is not installed"
    shutil.copytree(Path(found.origin).parent, folder / "torchtitan", ignore=shutil.ignore_patterns("__pycache__"))
    assets(folder / "tests" / "assets")
    git(folder, "init", "-q", "-b", "main")
    commit(folder, "torchtitan 0.2.2")
    git(folder, "tag", "v0.2.2")
    for patch in sorted(EXAMPLE.glob("*.patch")):
        git(folder, "checkout", "-q", "-b", patch.stem, "main")
        git(folder, "apply", str(patch))
        commit(folder, patch.stem)
    git(folder, "checkout", "-q", "main")


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True)


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=bench", "-c", "user.email=bench@localhost", "commit", "-q", "-m", message)


def assets(folder: Path) -> None:
    from pydoc_data.topics import topics

    import tokenizers

    texts = [topics[name] for name in sorted(topics)]
    (folder / "c4_test").mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "c4_test" / "data.json").write_text(lines, encoding="utf-8")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=2048, special_tokens=["<bos>", "<eos>"])
    made.train_from_iterator(texts, trainer)
    made.save(str(folder / "tokenizer" / "tokenizer.json"))
    ends = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(ends), encoding="utf-8")


def pack(folder: Path) -> None:
    """The records of all arms of a run, one after another; each begins with a line that names its arm."""
    files = sorted(folder.glob("*.records.jsonl"), key=lambda path: path.name)
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    folder.with_suffix(".jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def unpack(path: Path) -> dict[str, Run]:
    """The runs of a packed file by the names of their arms."""
    from rlspec import records
    from rlspec.model import Arm

    found: dict[str, list[str]] = {}
    for line in gzip.decompress(path.read_bytes()).decode().splitlines(keepends=True):
        if '"record": "run"' in line:
            name = json.loads(line)["arm"]
            found[name] = []
        found[name].append(line)
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, lines in found.items():
            file = Path(folder, f"{name}.records.jsonl")
            file.write_text("".join(lines), encoding="utf-8")
            runs[name] = records.read(file, Arm(name=name, role="base" if name.startswith("base") else "feature"))
    return runs


def envelope(paths: list[Path]) -> None:
    """By step the largest and the median difference of two base runs, how it grows, and what a ratio makes of it."""
    found = [run for path in paths for run in unpack(path).values() if run.arm.role == "base"]
    bases = [replace(run, arm=replace(run.arm, name=f"run{number}")) for number, run in enumerate(found)]
    for metric in METRICS:
        series = [dict(zip(run.series[metric].steps, run.series[metric].values, strict=True)) for run in bases]
        last = max(series[0])
        deltas = [[one[step] - other[step] for step in range(1, last + 1)]
                  for one, other in itertools.combinations(series, 2)]  # fmt: skip
        steps = [step for step in STEPS if step <= last]
        print(f"\n{metric} of {len(bases)} base runs, {last} steps, {len(deltas)} pairs\n")
        print(f"| step | {' | '.join(map(str, steps))} |\n| --- |{' --- |' * len(steps)}")
        for what, of in (("largest", max), ("median", statistics.median)):
            print(f"| {what} | {' | '.join(f'{of(abs(delta[step - 1]) for delta in deltas):.1e}' for step in steps)} |")
        print(growth(deltas, last))
        print(triples(bases, metric) if len(bases) > 2 else "")


def growth(deltas: list[list[float]], last: int) -> str:
    """What tells the simulated models of drift apart: where it sets in, how it grows, whether it remembers itself."""
    first = [next((number for number, one in enumerate(delta, 1) if one), None) for delta in deltas]
    ends = [1 + (last - 1) * part // 4 for part in range(5)]  # step 1 precedes any update
    sizes = [
        statistics.mean(abs(delta[step]) for delta in deltas for step in range(start, end))
        for start, end in itertools.pairwise(ends)
    ]
    memory = [lag for delta in deltas if (lag := lag1(delta[1:])) is not None]
    apart = [sum(map(bool, delta[1:])) for delta in deltas]
    seen, never = [number for number in first if number], first.count(None)
    where = f"step {min(seen)} to {max(seen)}, never in {never} pairs" if seen else "no step of any pair"
    return (
        f"\nfirst difference at {where}; steps that differ {min(apart)} to {max(apart)} of {last - 1}; by quarters "
        f"{', '.join(f'{size:.2g}' for size in sizes)}; lag-1 median "
        f"{statistics.median(memory) if memory else float('nan'):.2f} [{min(memory, default=0):.2f}, "
        f"{max(memory, default=0):.2f}]"
    )


def lag1(values: list[float]) -> float | None:
    mean = statistics.mean(values)
    total = sum((value - mean) ** 2 for value in values)
    return sum((a - mean) * (b - mean) for a, b in itertools.pairwise(values)) / total if total else None


def triples(bases: list[Run], metric: str) -> str:
    """Every ordered triple of identical runs, judged as two base runs and a feature run."""
    from rlspec import contract, drift
    from rlspec.model import Judgment

    rows = contract.load("training", ROOT / "specs")
    judged = []
    for base0, base1, other in itertools.permutations(bases, 3):
        feature = replace(other, arm=replace(other.arm, role="feature"))
        judged.append(drift.judge_drift(Judgment(check="drift", metric=metric), (base0, base1, feature), rows.resolve))
    statuses = Counter(one.status for one in judged)
    floors = Counter(one.evidence.get("floor") for one in judged)
    envelopes = [one.evidence.get("envelope") or 0.0 for one in judged]
    shares = ", ".join(f"{name} {100 * count / len(judged):.1f} %" for name, count in statuses.most_common())
    return (
        f"\n{len(judged)} triples of identical runs: {shares}; largest ratio "
        f"{max((one.statistic for one in judged if one.statistic is not None), default=0):.2f}; envelope "
        f"{statistics.median(envelopes):.2g} [{min(envelopes):.2g}, {max(envelopes):.2g}]; floors "
        f"{', '.join(f'{name} {count}' for name, count in floors.most_common())}"
    )


def main() -> None:
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["prepare", "pack", "envelope"])
    parser.add_argument("paths", type=Path, nargs="+")
    options = parser.parse_args()
    if options.action == "envelope":
        envelope(options.paths)
        return
    for path in options.paths:
        prepare(path.absolute()) if options.action == "prepare" else pack(path.absolute())


if __name__ == "__main__":
    main()
