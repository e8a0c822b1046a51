"""The whole model beside transformers, same weights, same process: `python tests/bench/bench_chain.py [--json FILE]`.

prefill: 4 x 1024 tokens to all logits. training: forward and backward of the mean log-prob, gradients of all weights
(ours in fp32 on accumulators of their own, theirs in bf16). decode: one token of one sample behind 128, 512 and 1024
others under a CUDA graph, the median of three captures; the floor is the bytes of the weights that a token reads over
4.3 TB/s. transformers runs with SDPA.
Peak memory is of one call with the weights, which both share. Each side alone, in the order ours, theirs, theirs, ours.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench import gpu  # noqa: E402


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--implementation", action="append", help="triton and cuda, if left out")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(words)
    gpu.needed("both sides run on a CUDA device")
    import torch

    from tests.bench import whole_model

    rows = []
    for row in whole_model.rows(given.model, given.implementation or ["triton", "cuda"]):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if given.json:
        versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
        told = {"date": str(datetime.date.today()), "model": given.model, **versions, "rows": rows}
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
