"""A mixed load on an engine of many parts, and a quiet one beside it: a short `benchmarks` soak.

A longer one: SOAK_SECONDS=600 pytest tests/vllm_plugin/engine/test_soak.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.vllm import soak
from benchmarks.vllm.soak_engine import written

SECONDS = float(os.environ.get("SOAK_SECONDS", "9"))


def test_a_mixed_load_leaves_nothing_and_answers_as_in_quiet(tmp_path: Path) -> None:
    """Blocks, prompts, memory, metrics and logs; then every answer that can be compared."""
    written(tmp_path)
    assert soak.load(tmp_path, SECONDS, seed=0)["complaints"] == []
    compared = soak.compare(tmp_path, SECONDS / 2, seed=0)
    assert compared["complaints"] == []
    assert compared["same"] > 0
