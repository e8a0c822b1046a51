"""Identical code on a GPU, judged: what shares of PASS, INVESTIGATE and FAIL does the drift judgment give?

    python tests/bench/bench_identical.py train FOLDER     on a machine with a GPU: 12 runs of each configuration
    python tests/bench/bench_identical.py judge FOLDER     anywhere: all triples, as a table in Markdown

Every run is a process of its own, from one run file, with the settings of a correctness spec and no deterministic
algorithms. A triple is two base runs and a feature run, in order, out of runs of the same code.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNS = 12
TINY = {
    "name": "tiny-moe", "model_type": "qwen3_moe", "layers": 4, "hidden_size": 64, "heads": 4, "kv_heads": 2,
    "head_dim": 16, "experts": {"count": 8, "top_k": 2, "intermediate_size": 64, "normalised": True},
    "vocabulary_size": 257, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "tokenizer": "byte", "load_balance_type": "global-batch",
}  # fmt: skip
SMALL = TINY | {
    "name": "small-moe", "layers": 8, "hidden_size": 512, "heads": 8, "head_dim": 64,
    "experts": {"count": 16, "top_k": 4, "intermediate_size": 512, "normalised": True},
}  # fmt: skip
WARM_UP = {"start_learning_rate": 1e-6, "learning_rate": 1e-5}
LIVELY = {"start_learning_rate": 3e-4, "learning_rate": 3e-4}
CONFIGURATIONS = {
    "tiny-moe, warm-up to 1e-5": (TINY, 128, {"global_batch_size": 32, "micro_batch_size": 8, **WARM_UP}),
    "small-moe (106 M), warm-up to 1e-5": (SMALL, 256, {"global_batch_size": 48, "micro_batch_size": 16, **WARM_UP}),
    "small-moe (106 M), 3e-4 from step 1": (SMALL, 256, {"global_batch_size": 48, "micro_batch_size": 16, **LIVELY}),
}


def prepare(folder: Path) -> list[Path]:
    """One folder a configuration, with a plan and the same run file under twelve names."""
    files = []
    for number, (title, (model, length, settings)) in enumerate(CONFIGURATIONS.items()):
        place = folder / f"c{number}"
        place.mkdir(parents=True)
        config = {
            "kind": "correctness", "group": "bench", "model": model, "mesh": {"pp": 1, "dp": 1, "cp": 1, "ep": 1},
            "world_size": 1, "sequence_length": length, "dtype": "bf16", "steps": 32, "settings": settings,
            "spec_dir": str(ROOT),
        }  # fmt: skip
        arms = [{"name": f"run{n}", "stem": f"run{n}", "role": "base"} for n in range(RUNS)]
        (place / "plan.json").write_text(json.dumps({"title": title, "arms": arms, "config": config}))
        for arm in arms:
            file = place / f"{arm['stem']}.py"
            file.write_text(f"from rlspec.device import worker\n\nworker.main(__file__, {config!r})\n")
            files.append(file)
    return files


def train(folder: Path, at_once: int) -> None:
    waiting, running = prepare(folder), []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    began = time.time()
    while waiting or running:
        while waiting and len(running) < at_once:
            file = waiting.pop(0)
            log = file.with_suffix(".log").open("w")
            child = subprocess.Popen([sys.executable, str(file)], env=environment, stdout=log, stderr=log)
            running.append((file, child))
        time.sleep(0.1)
        for file, child in [pair for pair in running if pair[1].poll() is not None]:
            running.remove((file, child))
            if child.returncode:
                print(f"{file}: ended with {child.returncode}\n{file.with_suffix('.log').read_text()[-2000:]}")
    print(f"{len(list(folder.glob('*/*.records.jsonl')))} runs in {time.time() - began:.0f} s")


def judge(folder: Path) -> None:
    from rlspec import contract, drift, records
    from rlspec.model import Arm, Judgment

    rows = contract.load("training", ROOT / "specs")
    print("| runs | metric | triples | PASS | INVESTIGATE | FAIL | largest | envelope | steps that differ | floors |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for place in sorted(path.parent for path in folder.glob("*/plan.json")):
        title = json.loads((place / "plan.json").read_text())["title"]
        paths = sorted(place.glob("*.records.jsonl"))
        names = [path.name.partition(".")[0] for path in paths]
        loaded = [records.read(p, Arm(name=n, role="base")) for p, n in zip(paths, names, strict=True)]
        for metric in ("cross-entropy-loss", "load-balance-loss", "gradient-norm"):
            statuses, floors, ratios, envelopes, differing = Counter(), Counter(), [], [], []
            for base0, base1, feature in itertools.permutations(loaded, 3):
                runs = (base0, base1, _as_feature(feature))
                made = drift.judge_drift(Judgment(check="drift", metric=metric), runs, rows.resolve)
                statuses[made.status] += 1
                floors[made.evidence.get("floor")] += 1
                ratios += [made.statistic] if made.statistic is not None else []
                envelopes.append(made.evidence.get("envelope") or 0.0)
                differing.append(int((made.evidence.get("base_steps_differing") or "0 ").split()[0]))
            total = sum(statuses.values())
            shares = [f"{100 * statuses[s] / total:.1f} %" for s in ("PASS", "INVESTIGATE", "FAIL")]
            spread = f"{statistics.median(envelopes):.2g} [{min(envelopes):.2g}, {max(envelopes):.2g}]"
            kinds = ", ".join(f"{k} {v}" for k, v in floors.most_common())
            cells = [title, metric, str(total), *shares, f"{max(ratios, default=0):.2f}", spread,
                     f"{min(differing)} to {max(differing)}", kinds]  # fmt: skip
            print(f"| {' | '.join(cells)} |")


def _as_feature(run):
    from dataclasses import replace

    return replace(run, arm=replace(run.arm, role="feature"))


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.bench import gpu

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["train", "judge"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--at-once", type=int, default=4, help="processes that share the GPU")
    options = parser.parse_args()
    if options.action == "train":
        gpu.needed("the runs train on a CUDA device")
        train(options.folder, options.at_once)
    else:
        judge(options.folder)


if __name__ == "__main__":
    main()
