"""Commands of the pages on vLLM and of the compose file, read as `vllm serve` reads them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm
import yaml
from typer.testing import CliRunner
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvweave.adapters.vllm import versions
from kvweave.cli import app

DOCS = Path(__file__).parents[3] / "docs"
TOP_K = {"kind": "top_k", "pages": 64, "rerank_every": 16}
LAYERS, KV_HEADS = 4, 2


def commands(page: str) -> list[list[list[str]]]:
    """The words of the commands of each shell block that has one for vLLM."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL):
        text = block.replace("\\\n", " ")
        if text.lstrip().startswith("--"):
            # Options that are added to the command above.
            text = "vllm serve MODEL " + text
        # An option's value may go on in the next line.
        lines = re.split(r"\n(?=vllm |kvweave |curl |pip )", text.strip())
        words = [shlex.split(line.replace("…", ""), comments=True) for line in lines]
        if any(line[:2] == ["vllm", "serve"] for line in words):
            found.append(words)
    return found


BLOCKS = [
    pytest.param(words, id=f"{page}-{number}")
    for page in ("vllm.md", "vllm-start.md")
    for number, words in enumerate(commands(page))
]


def parsed(words: list[str]) -> Any:
    """What `vllm serve` makes of the words behind its name."""
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    return parser.parse_args(["serve", *words])


@pytest.fixture
def model(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model; the current one is another, with a map of it."""
    heads = [
        {"layer": layer, "head": head, "class": kind, "reach": "global", "stability": "stable"}
        for layer in range(LAYERS)
        for head, kind in enumerate((TOP_K, {"kind": "full"}))
    ]
    made = {"schema_version": 1, "model_fingerprint": "m", "layers": LAYERS, "kv_heads": KV_HEADS}
    (tmp_path / "map.json").write_text(json.dumps({**made, "heads": heads}))
    monkeypatch.chdir(tmp_path)
    return Path(checkpoint("llama"))


def served(given: Any, model: Path) -> None:
    """A command asks for a part of the plugin, whose classes are there."""
    assert given.model_tag == str(model)
    connector = given.kv_transfer_config
    if connector is not None and connector.kv_connector != "NixlConnector":
        assert connector.kv_connector_module_path.startswith("kvweave.adapters.vllm.")
    backends = (given.attention_backend, getattr(given.attention_config, "backend", None))
    asked = (given.hf_overrides, connector, given.middleware, *backends)
    assert any(asked)


@pytest.mark.parametrize("block", BLOCKS)
def test_commands_of_a_page_are_options_that_vllm_has(block: Any, model: Path) -> None:
    """`vllm-config` writes its file, and what follows is parsed with it."""
    named = [[str(model) if word == "MODEL" else word for word in words] for words in block]
    tiers = any("--offload-gib" in words for words in named)
    pages = any("--virtual-pages" in words for words in named)
    known = versions.WITH_TIERS if tiers else versions.WITH_VIRTUAL_PAGES
    if (tiers or pages) and not versions.is_known(vllm.__version__, known):
        pytest.skip("not for this version of vLLM")
    for words in named:
        if words[:2] == ["kvweave", "vllm-config"]:
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, done.output
        elif words[:2] == ["vllm", "serve"]:
            served(parsed(words[2:]), model)


def test_the_compose_files_command_starts_a_server(model: Path, tmp_path: Path) -> None:
    """Its shell runs; what it installs and starts is noted by commands that stand in for these."""
    compose = yaml.safe_load((DOCS / "vllm-compose.yaml").read_text())["services"]["vllm"]
    (command,) = compose["command"]
    script = command.replace("$$", "$").replace("/tmp/", "./").replace("/wheels/", f"{tmp_path}/")
    wheel = tmp_path / "kvweave-0.1.0-cp310-abi3-linux_x86_64.whl"
    wheel.touch()
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    for name in ("pip", "vllm"):
        (stand_ins / name).write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/{name}.txt\n')
    (stand_ins / "kvweave").write_text(f'#!/bin/sh\nexec {sys.executable} -m kvweave "$@"\n')
    for path in stand_ins.iterdir():
        path.chmod(0o755)
    env = {**os.environ, "PATH": f"{stand_ins}:{os.environ['PATH']}", "MODEL": str(model)}
    env |= {"SEGMENTS_GIB": "8", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([*compose["entrypoint"], script], env=env, check=True, timeout=120)
    assert (tmp_path / "pip.txt").read_text().split() == ["install", "--quiet", str(wheel)]
    given = parsed((tmp_path / "vllm.txt").read_text().split()[1:])
    served(given, model)
    assert given.additional_config == {"kvweave": {"segment_bytes": 8 << 30}}
