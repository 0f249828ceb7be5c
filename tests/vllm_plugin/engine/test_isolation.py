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

WITH_TIERS = versions.is_known(vllm.__version__, versions.WITH_TIERS)


@pytest.mark.parametrize("words", [["prompts", "documents"], ["host", "disk"], ["--server"]])
def test_each_tenant_finds_his_own_alone(words: list[str], tmp_path: Path) -> None:
    """Held trial by trial; in a process of its own, as what it takes is an engine's all."""
    # What a server streams says nothing of documents, and nothing lies in tiers.
    if (words[0] == "prompts") == WITH_TIERS:
        pytest.skip("asked in vLLM 0.26, or of its newer parts")
    ours = [str(Path(__file__).parent), str(Path(__file__).parents[3])]
    paths = os.pathsep.join([*ours, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "benchmarks.vllm.isolation", *words, "--trials", "6"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "run.json")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["case"] == ("vllm_isolation_server" if "--server" in words else "vllm_isolation")
    assert [row["of"]["trials"] for row in run["rows"]] == [6] * 4
