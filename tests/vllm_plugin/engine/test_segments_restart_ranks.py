"""A knowledge base on two ranks after a restart: each rank keeps its heads, and all plan alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import vllm_restarted_ranks


def ran(folder: Path) -> tuple[list[Any], dict[str, Any]]:
    """Entries, and what was answered, of an engine in processes of its own."""
    script = Path(vllm_restarted_ranks.__file__)
    paths = [str(script.parent), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=400,
        check=True,
    )
    entries, said = (json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{")
    return entries["entries"], said


def test_ranks_find_their_heads_again(tmp_path: Path) -> None:
    """And where one rank's part of a document is spoiled, no rank reads any of it."""
    entries, first = ran(tmp_path)
    assert entries == [["a", True], ["b", True]]
    assert first["store"]["brought_documents"] == 0
    entries, again = ran(tmp_path)
    assert entries == [["a", True], ["b", True]]
    assert again["tokens"] == first["tokens"]
    assert abs(again["first"] - first["first"]) < 1e-5
    assert again["store"]["brought_documents"] == 2
    parts = [tmp_path / "store" / f"rank-{rank}-of-2" / "shards" for rank in range(2)]
    names = [sorted(path.name for path in part.iterdir()) for part in parts]
    assert len(names[0]) == len(names[1]) == 2
    path = next(parts[1].iterdir())
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    _, spoiled = ran(tmp_path)
    assert spoiled["store"]["brought_documents"] == 1
    assert len(spoiled["tokens"]) == 6
