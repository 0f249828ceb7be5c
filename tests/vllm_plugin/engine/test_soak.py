"""A mixed load on an engine of many parts, and a quiet one beside it: a short `benchmarks` soak.

A longer one: SOAK_SECONDS=600 pytest tests/vllm_plugin/engine/test_soak.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import vllm

from benchmarks.vllm import soak
from kvweave.adapters.vllm import versions

SECONDS = os.environ.get("SOAK_SECONDS", "9")


def _modes() -> list[Any]:
    far = versions.is_known(vllm.__version__, versions.WITH_VIRTUAL_PAGES)
    modes = (mode for mode in soak.MODES if far or mode != "far")
    longer = [pytest.mark.long]
    return [pytest.param(mode, marks=() if mode == "segments" else longer) for mode in modes]


@pytest.mark.parametrize("mode", _modes())
def test_a_mixed_load_leaves_nothing_and_answers_as_in_quiet(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], mode: str
) -> None:
    """Blocks, prompts, memory, metrics and logs; then every answer that can be compared.

    In processes of their own: a process's metrics are those of all its engines.
    """
    ours = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(ours))
    complaints = soak.main(["--seconds", SECONDS, "--mode", mode])
    assert not complaints, capfd.readouterr().out[-2000:]
