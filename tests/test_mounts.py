from __future__ import annotations

from pathlib import Path

import pytest

from rlspec.mounts import Move

MOVES = [
    ("/net/x/repo", "/data/x/repo", "/net/x/repo/specs/a.yaml", "/data/x/repo/specs/a.yaml"),
    ("/net/x/repo", "/data/x/repo", "/net/venv/bin/python", "/data/venv/bin/python"),
    ("/net/x/repo", "/data/x/repo", "/usr/bin/python", "/usr/bin/python"),
    ("/net/x/repo", "/data/x/repo", "/scratch/net/x /network/x", "/scratch/net/x /network/x"),
    ("/net/x/repo", "/data/x/repo", "--out=/net/o 'a':'/net/b',PATH=/net/c:/net/d:/e",
     "--out=/data/o 'a':'/data/b',PATH=/data/c:/data/d:/e"),
    ("/net", "/data", "run(\"/net\")", "run(\"/data\")"),
    ("/repo", "/data/repo", "/repo/a /usr/b", "/data/repo/a /usr/b"),
    ("/data/repo", "/repo", "/data/repo/a /data/b", "/repo/a /data/b"),
    ("/x/re (po)", "/y/re (po)", "/x/re (po)/a", "/y/re (po)/a"),
    ("/x/old", "/x/new.1", r"/x/old/\\1 /x/older", r"/x/new.1/\\1 /x/older"),
    ("/x/old", r"/x/n\1w", "/x/old/a", r"/x/n\1w/a"),
    ("/x/repo", "/x/repo", "/x/repo", "/x/repo"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "text", "here"), MOVES)
def test_paths_of_another_mount(old, new, text, here):
    assert Move(Path(old), Path(new)).text(text) == here
    assert Move(Path(old), Path(new)).value({"a": [text, 1, None]}) == {"a": [here, 1, None]}
