"""What zeroing of freed blocks costs: the same requests with and without it.

Each request takes blocks that the one before it has given back, so all of what it writes is zeroed
once for each of them. Rows are of requests that compute a prompt and a few tokens, and of documents
that come from the host's memory, where little is computed beside the bytes. Both runners are in one
process and take turns. Beside that what zeroing itself takes, and its bytes in a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.device.models import random_model
from kvweave import Runner, Segment
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import compare
from kvweave.models import load_smollm2
from kvweave.runner.tiers.measured import Measured

ANSWER = 8


def run(quick: bool) -> list[Row]:
    if torch.cuda.is_available():
        name, tokens = "Llama-3.1-8B", 2048 if quick else 16384
        model: Any = random_model(name)
    else:
        name, tokens = "SmolLM2-135M", 256 if quick else 1024
        model = load_smollm2()[0]
    runners = {zeroes: _runner(model, tokens, zeroes) for zeroes in (False, True)}
    rounds = 3 if quick else 9
    rows = [
        _row(f"{name}, {tokens} tokens computed", runners, tokens, _computed, rounds),
        _row(f"{name}, {tokens} tokens from the host", runners, tokens, _brought, rounds),
        _filling(name, runners[True], tokens, rounds),
    ]
    for runner in runners.values():
        runner.close()
    return rows


def _runner(model: Any, tokens: int, zeroes: bool) -> Runner:
    shape = Runner(model, max_tokens=64, check=False, progress=False).cache.shape
    return Runner(
        model,
        max_tokens=2 * tokens,
        document_bytes=2 * tokens * shape.token_bytes,
        frozen_share=0.9,
        zero_on_free=zeroes,
        check=False,
        progress=False,
    )


def _computed(runner: Runner, tokens: list[int]) -> list[int]:
    """Answers a prompt that nobody finds again: all of its blocks go back."""
    how: dict[str, Any] = {"max_new_tokens": ANSWER, "stop": (), "remember": False}
    return runner.generate(tokens, "full", **how).tokens


def _brought(runner: Runner, tokens: list[int]) -> list[int]:
    """The same of a document that lies in the host's memory."""
    assert runner.tiers is not None
    if not runner.tiers.stats()["host"]["cached"]:
        runner.insert(tokens, "document")
        runner.cache.delete("document")
    runner.cache.forget()
    # What was never measured is tried: a slow moment has no document computed.
    runner.tiers.measured = Measured()
    prompt = [Segment(tokens=tokens), Segment(tokens=tokens[:9])]
    how: dict[str, Any] = {"max_new_tokens": ANSWER, "stop": (), "remember": False}
    done = runner.generate(prompt, "naive", **how)
    sources = [one.source for one in done.report.documents[:1]]
    expect(sources == ["host"], f"expected the document from the host, got {sources}")
    return done.tokens


def _row(
    title: str,
    runners: dict[bool, Runner],
    tokens: int,
    answer: Callable[[Runner, list[int]], list[int]],
    rounds: int,
) -> Row:
    vocabulary = runners[True].spec.vocabulary
    text = np.random.default_rng(7).integers(0, vocabulary, tokens).tolist()
    said = {zeroes: answer(runner, text) for zeroes, runner in runners.items()}
    expect(said[False] == said[True], f"expected one answer, got {said}")
    calls = {f"{zeroes}": lambda r=runner: answer(r, text) for zeroes, runner in runners.items()}
    spent = compare(calls, rounds=rounds)
    plain, zeroed = spent["False"], spent["True"]
    beside = {"without, s": plain.median_s}
    ratio = zeroed.median_s / plain.median_s
    return Row(f"{title}, ÷ without", ratio, "×", zeroed.p95_s / plain.median_s, beside)


def _filling(name: str, runner: Runner, tokens: int, rounds: int) -> Row:
    """Seconds in which the blocks of so many tokens are zeroed."""
    cache, device = runner.cache, runner.spec.device
    spent = []
    for _ in range(rounds):
        cache.admit(np.zeros(tokens, np.int32), reuse="none").release()
        _wait(device)
        begun = time.perf_counter()
        cache.zero_freed()
        _wait(device)
        spent.append(time.perf_counter() - begun)
    size = tokens * cache.shape.token_bytes
    median = float(np.median(spent))
    title = f"{name}, blocks of {tokens} tokens zeroed"
    return Row(title, median, "s", float(np.percentile(spent, 95)), {"GB/s": size / median / 1e9})


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
