"""Heads that choose pages on a GPU, eager and captured: `VLLM_TARGET_DEVICE=cuda pytest …`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from ranked_pages import FULL, top_k
from test_gpu import MEMORY, MODES, pytestmark
from test_head_split import ours as with_map
from test_top_k import CHANGES, KINDS, defined, layers_of, written
from vllm_engines import OURS, Answer, answers, engine, prompt, same

__all__ = ["pytestmark"]

# As many as a captured step has, none of them a single row: steps are prefills or decodes.
PROMPTS = [prompt(length, seed) for seed, length in enumerate([5, 40, 100, 200, 33, 64, 2, 250])]
STEPS = 24


def served(
    model: Path, choice: dict[str, Any], mode: str, dtype: str, prompts: list[Any], **changes: Any
) -> list[Answer]:
    """What an engine answers that computes all prompts in one step."""
    # Graphs of an engine that is gone leave a pool behind that another cannot capture into.
    type(current_platform)._global_graph_pool = None
    options = {"block_size": 16, "dtype": dtype, "max_num_batched_tokens": 2048, **MEMORY}
    with engine(model, {**options, **MODES[mode], **changes, **choice}) as llm:
        kinds = {type(layer).__name__ for layer in layers_of(llm).values()}
        assert ("BoundsCache" in kinds) is ("hf_overrides" in choice)
        return answers(llm, prompts, STEPS)


@pytest.mark.parametrize("mode", ["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_as_many_pages_as_there_are_change_no_bit(checkpoint, tmp_path, mode, dtype) -> None:
    """Beside our own backend, whose heads know of no choice."""
    model = checkpoint("llama", **CHANGES)
    choice = with_map(written(tmp_path, [top_k(32), FULL]))
    wanted = served(model, OURS, mode, dtype, PROMPTS)
    got = served(model, choice, mode, dtype, PROMPTS)
    assert [a.tokens for a in got] == [a.tokens for a in wanted]
    assert [a.logprobs for a in got] == [a.logprobs for a in wanted]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_captured_steps_answer_as_eager_ones(checkpoint, tmp_path, dtype) -> None:
    model, choice = checkpoint("llama", **CHANGES), with_map(written(tmp_path, KINDS))
    eager, captured = (served(model, choice, mode, dtype, PROMPTS) for mode in ("eager", "graphs"))
    same(captured, eager)
    dense = served(model, OURS, "graphs", dtype, PROMPTS)
    assert any(a.tokens != b.tokens for a, b in zip(captured, dense, strict=True))


@pytest.mark.parametrize("chunk", [2048, 64])
def test_few_pages_are_the_definition(checkpoint, tmp_path, chunk) -> None:
    """In f32; with chunks of 64 rows prefills and decodes share steps."""
    model, choice = checkpoint("llama", **CHANGES), with_map(written(tmp_path, KINDS))
    wanted = [defined("llama", KINDS, given, STEPS) for given in PROMPTS]
    changes = {"max_num_batched_tokens": chunk}
    got = served(model, choice, "graphs", "float32", PROMPTS, **changes)
    same(got, wanted)


def test_what_is_found_in_the_prefix_cache_is_read_whole_by_a_prompts_last_row(
    checkpoint, tmp_path
) -> None:
    """That row is in a captured step, among others that choose."""
    model, choice = checkpoint("llama", **CHANGES), with_map(written(tmp_path, KINDS))
    ids = prompt(257, 5)["prompt_token_ids"]
    prompts = [{"prompt_token_ids": ids}]
    changes: dict[str, Any] = {"enable_prefix_caching": True}
    type(current_platform)._global_graph_pool = None
    options = {"block_size": 16, "dtype": "float32", **MEMORY, **MODES["graphs"], **changes}
    with engine(model, {**options, **choice}) as llm:
        first, second = (answers(llm, prompts, STEPS)[0] for _ in range(2))
    assert (first.cached, second.cached) == (0, 256)
    same([first, second], [defined("llama", KINDS, prompts[0], STEPS)] * 2)


def test_bounds_on_a_gpu_take_one_block_of_seventeen(checkpoint, tmp_path) -> None:
    model, counts = checkpoint("llama", **CHANGES), []
    for choice in (OURS, with_map(written(tmp_path, [top_k(4)]))):
        options = {"block_size": 16, "dtype": "float16", **MEMORY, **MODES["eager"]}
        with engine(model, {**options, **choice}) as llm:
            counts.append(llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)
            dtypes = {
                layer.values().dtype
                for layer in layers_of(llm).values()
                if hasattr(layer, "vectors")
            }
    assert dtypes == {torch.float16}
    assert abs(counts[1] - counts[0] * 16 / 17) <= 1
