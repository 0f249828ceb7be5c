"""Neither prompts nor documents of another tenant are found: a short `benchmarks` case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import vllm

from kvweave.adapters.vllm import versions

SHORT = ["--trials", "6"]
WITH_TIERS = versions.is_known(vllm.__version__, versions.WITH_TIERS)


@pytest.mark.parametrize(
    "words", [["prompts", "documents"], ["host", "disk"], ["documents", "--server"]]
)
@pytest.mark.long
def test_each_tenant_finds_his_own_alone(words: list[str], tmp_path: Path) -> None:
    """Held trial by trial; in a process of its own, as what it takes is an engine's all."""
    # Streams of 0.26 say nothing of documents, and it has no tiers.
    if (words[0] == "prompts") == WITH_TIERS:
        pytest.skip("the older vLLM is asked for what the newer is not, and the other way round")
    ours = [str(Path(__file__).parent), str(Path(__file__).parents[3])]
    paths = os.pathsep.join([*ours, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "benchmarks.vllm.isolation", *words, *SHORT]
    # A block of vLLM's has 128 tokens on a CPU, where prompts are found by whole ones.
    command += [] if words[0] == "prompts" else ["--text", "64"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "run.json")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    run = json.loads((tmp_path / "run.json").read_text())
    kinds = [word for word in words if word != "--server"]
    ends = "_server" * ("--server" in words) + "_tiers" * ("disk" in kinds)
    assert run["case"] == f"vllm_isolation{ends}"
    assert [row["of"]["trials"] for row in run["rows"]] == [6] * 2 * len(kinds)
