"""How many requests with split heads fit, by vLLM's figure and by its scheduler: no model."""

from __future__ import annotations

import copy
import json
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from vllm import EngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_capacity,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvweave.adapters.vllm import plugin
from kvweave.adapters.vllm.heads.spec import SinkWindowSpec

LENGTH, LAYERS, MEMORY = 65536, 32, 26 << 30
SHAPE = {"head_size": 128, "dtype": torch.bfloat16}
WHOLE, LOCAL = 7 * 16, 16
"""Tokens of a block of the one global head and of the seven others: pages of the same size."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 1024,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": LENGTH,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    """vLLM's configuration for steps of so many tokens, two of them in flight."""
    folder = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    plugin.register()
    made = EngineArgs(
        str(folder),
        skip_tokenizer_init=True,
        max_model_len=LENGTH,
        max_num_seqs=64,
        enable_prefix_caching=False,
    ).create_engine_config()

    def changed(chunk: int, longest: int = LENGTH, caching: bool = False) -> VllmConfig:
        config = copy.deepcopy(made)
        config.scheduler_config.max_num_batched_tokens = chunk
        config.scheduler_config.async_scheduling = True
        config.model_config.max_model_len = longest
        config.cache_config.enable_prefix_caching = caching
        config.cache_config.kv_cache_layout = "LBHNC"  # What our backend asks 0.33 for.
        assert config.max_in_flight_tokens == 2 * chunk
        return config

    return changed


def heads_of(sink: int = 16, recent: int = 256) -> dict[str, Any]:
    whole = FullAttentionSpec(block_size=WHOLE, num_kv_heads=1, **SHAPE)
    window = {"sliding_window": recent, "sink": sink, "full_block_size": WHOLE}
    local = SinkWindowSpec(block_size=LOCAL, num_kv_heads=7, **SHAPE, **window)
    return {
        f"{n}{kind}": spec for n in range(LAYERS) for kind, spec in (("g", whole), ("l", local))
    }


STOCK = {str(n): FullAttentionSpec(block_size=16, num_kv_heads=8, **SHAPE) for n in range(LAYERS)}


def fitted(config: VllmConfig, specs: dict[str, Any], memory: int = MEMORY) -> tuple[Any, float]:
    """As an engine starts: what it gives its scheduler, and how many requests it says fit."""
    # Since 0.33 the groups are made apart.
    made = getattr(core, "get_global_kv_cache_groups", None)
    groups = [] if made is None else [made(config, [specs])]
    kept = generate_scheduler_kv_cache_config(
        core.get_kv_cache_configs(config, [specs], [memory], *groups)
    )
    config.cache_config.num_gpu_blocks = kept.num_blocks
    return kept, get_kv_cache_capacity(config, kept)[1]


@pytest.mark.parametrize(("chunk", "times"), [(2048, 7.3), (8192, 6.9), (16384, 6.3)])
def test_an_eighth_of_global_heads_fits_many_times_as_often(config_of, chunk, times) -> None:
    stock = fitted(config_of(chunk), STOCK)[1]
    assert fitted(config_of(chunk), heads_of())[1] >= times * stock


class Steps:
    """vLLM's scheduler with two steps in flight, and in place of a model one that says 1."""

    def __init__(self, config: VllmConfig, kept: Any) -> None:
        blocks, unit = resolve_kv_cache_block_sizes(kept, config)
        kept.hash_block_size = unit  # 0.33 reads it here too.
        kept.cache_hit_alignment_tokens = blocks
        structured = StructuredOutputManager(config)
        self.scheduler = AsyncScheduler(config, kept, structured, blocks, hash_block_size=unit)
        self.manager = self.scheduler.kv_cache_manager
        init_none_hash(sha256)
        caching = config.cache_config.enable_prefix_caching
        self.hasher = get_request_block_hasher(unit, sha256) if caching else None
        self.running: list[int] = []
        self.preempted: set[str] = set()
        self.flight: deque[tuple[Any, dict[str, bool]]] = deque()

    def add(self, name: str, ids: list[int], answer: int) -> None:
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
        self.scheduler.add_request(Request(name, ids, sampling, None, block_hasher=self.hasher))

    def run(self, most: int = 5000) -> None:
        """Until all have ended, or for so many steps."""
        for _ in range(most):
            if not self.scheduler.has_unfinished_requests():
                return
            before = [request.request_id for request in self.scheduler.running]
            step = self.scheduler.schedule()
            requests = {request.request_id: request for request in self.scheduler.running}
            self.preempted |= set(before) - requests.keys()
            self.running.append(len(requests))
            ends = {name: not requests[name].is_prefill_chunk for name in step.num_scheduled_tokens}
            self.flight.append((step, ends))
            self.bounded(set(ends))
            while len(self.flight) == 2 or (self.flight and not ends):
                self.answer(*self.flight.popleft())
        raise AssertionError(f"expected all to end within {most} steps")

    def answer(self, step: Any, ends: dict[str, bool]) -> None:
        said = [[1] if end else [] for end in ends.values()]
        index = {name: number for number, name in enumerate(ends)}
        if ends:
            self.scheduler.update_from_output(step, ModelRunnerOutput(list(ends), index, said))

    def bounded(self, scheduled: set[str]) -> None:
        """Local heads hold what each request keeps, and rows in flight once for all of them.

        One whose last token is on its way is not scheduled: it gives back what it has soon.
        """
        local = self.manager.coordinator.single_type_managers[1]
        tables = (local.req_to_blocks[name] for name in scheduled)
        held = sum(not block.is_null for blocks in tables for block in blocks)
        in_flight = -(-self.scheduler.vllm_config.max_in_flight_tokens // LOCAL)
        assert held <= len(scheduled) * local.kv_cache_spec.kept_blocks + in_flight


def test_as_many_are_served_at_once_as_fit(config_of) -> None:
    """At vLLM's usual step of 8192 tokens, and nobody is preempted."""
    config = config_of(8192)
    kept, fit = fitted(config, heads_of())
    steps = Steps(config, kept)
    answer = int(fit) * LENGTH // 8192 + 32
    for number in range(int(fit) + 2):
        steps.add(str(number), [number] * (LENGTH - answer), answer)
    steps.run()
    assert max(steps.running) >= int(fit) >= 23
    assert not steps.preempted


def test_the_least_memory_that_starts_serves_the_longest_request(config_of) -> None:
    config = config_of(8192)
    page = 2 * SHAPE["head_size"] * 2 * WHOLE * LAYERS
    alone = -(-LENGTH // WHOLE) + heads_of()["0l"].max_admission_blocks_per_request(16384, LENGTH)
    with pytest.raises(ValueError, match="KV cache"):
        fitted(config_of(8192), heads_of(), alone * page)
    # One for the null block; 0.33 asks for another one.
    kept, fit = fitted(config, heads_of(), (alone + 2) * page)
    assert 1 <= fit < 1.01
    steps = Steps(config, kept)
    for number in range(2):
        steps.add(str(number), [number] * (LENGTH - 40), 40)
    steps.run()
    assert not steps.preempted


@pytest.mark.parametrize("seed", range(4))
def test_any_traffic_ends_in_little_memory(config_of, seed: int) -> None:
    """Prompts of any length, some with cached prefixes, more than fit, some preempted."""
    numbers = np.random.default_rng(seed)
    longest, chunk = 4096, int(numbers.choice([64, 500, 1024, 4096]))
    sink, recent = int(numbers.choice([0, 20])), int(numbers.choice([1, 100, 1000]))
    config = config_of(chunk, longest, caching=bool(seed % 2))
    specs = heads_of(sink, recent)
    page = 2 * SHAPE["head_size"] * 2 * WHOLE * LAYERS
    alone = -(-longest // WHOLE) + specs["0l"].max_admission_blocks_per_request(2 * chunk, longest)
    kept, fit = fitted(config, specs, int(alone * numbers.uniform(1.05, 3)) * page)
    assert fit >= 1
    steps = Steps(config, kept)
    for number in range(40):
        length = int(numbers.integers(1, longest - 100))
        shared = length if numbers.random() < 0.3 else 0
        ids = [7] * shared + [number] * (length - shared)
        steps.add(str(number), ids, int(numbers.integers(1, 100)))
    steps.run()
    pool = steps.manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
