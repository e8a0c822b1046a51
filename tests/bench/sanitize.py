"""Every CUDA kernel once or twice at small sizes, for compute-sanitizer: `python tests/bench/sanitize.py [NAME...]`.

    compute-sanitizer --tool memcheck --leak-check no python tests/bench/sanitize.py
    compute-sanitizer --tool racecheck python tests/bench/sanitize.py attention

Forward, backward and the sums of weights' gradients, at row counts at the edges of tiles, packed, padded and decoded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench import gpu  # noqa: E402


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help="an operator, or sums; all, if left out")
    wanted = parser.parse_args(words).name
    gpu.needed("the kernels run on a CUDA device")
    import torch

    from tests.bench import every_cuda_kernel

    torch.manual_seed(0)
    for name, call in every_cuda_kernel.calls():
        if not wanted or name.split()[0] in wanted:
            call()
            torch.cuda.synchronize()
            print(name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
