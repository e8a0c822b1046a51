from __future__ import annotations

from rlspec.cli import main

if __name__ == "__main__":
    main(prog_name="rlspec")
