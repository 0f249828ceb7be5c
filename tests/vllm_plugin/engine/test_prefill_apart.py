"""Prefill in one engine and decode in another, which reads its blocks over NIXL."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import vllm_apart
from vllm_engines import OURS, STOCK, answers, engine, long_with, prompt

pytestmark = long_with("nixl", "NIXL")
PROMPTS = [prompt(length, seed) for seed, length in enumerate([5, 40, 100, 200, 33, 64, 1, 250])]
CHOICES = {"ours": OURS, "stock": STOCK}
COUNT = 12


class Far:
    """An engine in a process of its own that is asked line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def heard(self) -> dict[str, Any]:
        """The next line of results; libraries print others."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError(f"expected an answer, got an end with {self.process.wait()}")

    def ask(self, tokens: list[int], count: int, transfer: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        asked = {"prompt": tokens, "count": count, "transfer": transfer}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return self.heard()


@contextmanager
def apart(model: Path, prefills: str, decodes: str) -> Iterator[tuple[Far, Far]]:
    """An engine that prefills and one that decodes, each with a backend by its name."""
    started = []
    # Engines listen long after this; the system gives these ports to nobody meanwhile.
    ports = iter(random.sample(range(20_000, 30_000), 2))
    for role, backend in (("kv_producer", prefills), ("kv_consumer", decodes)):
        connector = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        choice = {**CHOICES[backend], "kv_transfer_config": connector}
        given = {"model": str(model), "choice": choice, "changes": {}}
        paths = os.pathsep.join(path for path in sys.path if path)
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(next(ports))
        command = [sys.executable, vllm_apart.__file__, json.dumps(given)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=env, text=True, **pipes))
    try:
        first, second = Far(started[0]), Far(started[1])
        assert first.heard() == second.heard() == {"ready": True}
        yield first, second
    finally:
        for process in started:
            process.stdin.close()
        for process in started:
            process.wait(60)
            process.stdout.close()


def handed_on(first: Far, second: Far, tokens: list[int]) -> dict[str, Any]:
    """What the second engine says of a prompt that the first one prefilled.

    The first one says one token and where its blocks are, as a proxy asks it to.
    """
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    return second.ask(tokens, COUNT, first.ask(tokens, 1, asked)["transfer"])


@pytest.mark.parametrize("backend", CHOICES)
def test_what_was_prefilled_elsewhere_is_decoded(checkpoint, backend: str) -> None:
    """Prompts of one step and of several, that fill their blocks and that do not."""
    model = checkpoint("llama")
    with engine(model, STOCK) as llm:
        wanted = answers(llm, PROMPTS, COUNT)
    read = 0
    with apart(model, backend, backend) as engines:
        for given, alone in zip(PROMPTS, wanted, strict=True):
            said = handed_on(*engines, given["prompt_token_ids"])
            assert said["tokens"] == alone.tokens
            assert said["logprobs"] == pytest.approx(alone.logprobs, abs=2e-3)
            read += len(given["prompt_token_ids"])
            assert said["read"] == read


@pytest.mark.parametrize(("prefills", "decodes"), [("ours", "stock"), ("stock", "ours")])
def test_another_backends_blocks_are_not_read(checkpoint, prefills: str, decodes: str) -> None:
    """Backends lay blocks out in ways of their own, and vLLM compares their names."""
    with apart(checkpoint("llama"), prefills, decodes) as engines:
        said = handed_on(*engines, PROMPTS[2]["prompt_token_ids"])
    assert (said["tokens"], said["ended"]) == ([], "error")
