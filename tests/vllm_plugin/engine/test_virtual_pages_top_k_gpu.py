"""Heads that choose pages of virtual pages on a GPU, whose pages leave for the host's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from ranked_pages import FULL, WINDOW, top_k
from test_gpu import MEMORY, MODES, pytestmark
from test_top_k import CHANGES, KINDS, defined, written
from test_virtual_pages import residency_of, virtual
from test_virtual_pages_top_k import (
    KINDS_OF_HOST,
    LONG,
    expect_bounds,
    manager_of,
    nothing_is_left,
    sizes_of,
    with_host,
)
from vllm_engines import Answer, answers, engine, metric, prompt, same

__all__ = ["pytestmark"]

PROMPTS = [prompt(length, seed) for seed, length in enumerate([5, 40, 100, 200, 33, 64, 2, 250])]
STEPS = 24
BOTH = pytest.mark.parametrize("mode", ["graphs", "eager"])


def started(model: Path, choice: dict[str, Any], mode: str, dtype: str, **changes: Any) -> Any:
    # Graphs of an engine that is gone leave a pool behind that another cannot capture into.
    type(current_platform)._global_graph_pool = None
    options = {"block_size": 16, "dtype": dtype, **MEMORY, **MODES[mode]}
    return engine(model, {**options, **choice}, **changes)


@BOTH
@pytest.mark.parametrize("chunk", [2048, 64])
def test_few_pages_are_the_definition(checkpoint, tmp_path, mode, chunk) -> None:
    """In f32; with chunks of 64 rows prefills and decodes share steps. Windows beside them too."""
    model = checkpoint("llama", **CHANGES)
    for kinds in (KINDS, [top_k(4), WINDOW, FULL, top_k(3), WINDOW]):
        wanted = [defined("llama", kinds, given, STEPS) for given in PROMPTS]
        choice = virtual("llama", written(tmp_path, kinds))
        with started(model, choice, mode, "float32", max_num_batched_tokens=chunk) as llm:
            got = answers(llm, PROMPTS, STEPS)
            assert residency_of(llm).layout.choosing
        same(got, wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bounds_are_of_the_keys(checkpoint, tmp_path, dtype: str) -> None:
    model = checkpoint("llama", **CHANGES)
    changes = {"enable_prefix_caching": True}
    with started(
        model, virtual("llama", written(tmp_path, KINDS)), "graphs", dtype, **changes
    ) as llm:
        answers(llm, PROMPTS, STEPS)
        assert expect_bounds(llm) > 30


def far_answers(model: Path, path: Path, mode: str, dtype: str, requests: float) -> list[Answer]:
    """What an engine says in memory for so many requests of 512 tokens that all stay."""
    slots, charged = sizes_of(path, spills=True, dtype=getattr(torch, dtype), device="cuda")
    blocks = int(requests * charged / slots)
    changes = {"enable_prefix_caching": False, "num_gpu_blocks_override": blocks}
    with started(model, with_host(path), mode, dtype, **changes) as llm:
        got = answers(llm, LONG, 40)
        assert metric(llm, "num_preemptions") == 0
        spilled = manager_of(llm).far.spilled
        assert (spilled > 20) is (requests < 2)
        nothing_is_left(llm)
        again = answers(llm, LONG, 40)
        nothing_is_left(llm)
    same(again, got)
    return got


@BOTH
@pytest.mark.parametrize("every", [1, 16])
def test_pages_leave_for_the_host_and_answers_stay(checkpoint, tmp_path, mode, every) -> None:
    kinds = [top_k(4, every), FULL]
    model, path = checkpoint("llama", **CHANGES), written(tmp_path, kinds)
    wanted = [defined("llama", kinds, given, 40, paced=every > 1) for given in LONG]
    same(far_answers(model, path, mode, "float32", 1.3), wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pages_of_16_bits_come_back_as_they_were(checkpoint, tmp_path, dtype: str) -> None:
    model, path = checkpoint("llama", **CHANGES), written(tmp_path, KINDS_OF_HOST)
    some, all_ = (far_answers(model, path, "graphs", dtype, room) for room in (1.3, 9.0))
    alike = sum(a.tokens == b.tokens for a, b in zip(some, all_, strict=True))
    # Batches are other ones, and with them roundings.
    assert alike >= len(LONG) - 1
