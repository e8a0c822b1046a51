"""Where there is no GPU, a bench that needs one says so in a line, before it starts anything."""

from __future__ import annotations

import sys


def needed(why: str = "this bench runs on a CUDA device") -> None:
    """Exits with 2 unless torch sees a CUDA device."""
    try:
        import torch
    except ImportError:
        missing = "torch is not installed"
    else:
        if torch.cuda.is_available():
            return
        missing = "torch sees none here"
    print(f"{why}, and {missing}", file=sys.stderr)
    sys.exit(2)
