"""The attention backend in a real engine: what it answers is what vLLM's own answers."""

from __future__ import annotations

import pytest
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from kvweave.adapters.vllm.backend.attention import PagedAttention
from kvweave.adapters.vllm.backend.paged_backend import PagedBackend
from vllm_engines import OURS, STOCK, answers, engine, metric, prompt, same, sampling

MIXED = [prompt(length, seed) for seed, length in enumerate([5, 40, 100, 200, 33, 64, 1, 250])]


def layers(llm) -> list:
    """The attention layers of the model that an engine runs."""
    config = llm.llm_engine.vllm_config.compilation_config
    known = config.static_forward_context.values()
    return [layer for layer in known if isinstance(layer, Attention)]


@pytest.mark.parametrize(
    "family", ["llama", "llama3-rope", "qwen2", "qwen3", "qwen3-moe", "mistral", "gemma2"]
)
def test_tokens_are_stocks(checkpoint, family: str) -> None:
    """Eight prompts at once in chunks of 64 rows: prefills and decodes share steps."""
    model = checkpoint(family)
    with engine(model, STOCK) as llm:
        assert all(layer.attn_backend is CPUAttentionBackend for layer in layers(llm))
        wanted = answers(llm, MIXED, 12)
    with engine(model, OURS) as llm:
        assert all(layer.attn_backend is PagedBackend for layer in layers(llm))
        assert all(isinstance(layer.impl, PagedAttention) for layer in layers(llm))
        got = answers(llm, MIXED, 12)
    same(got, wanted)


@pytest.mark.parametrize("block", [16, 48, 128])
def test_blocks_of_any_size(checkpoint, block: int) -> None:
    """Large blocks are cut into pages, whatever the size."""
    model = checkpoint("llama")
    with engine(model, STOCK, block_size=32) as llm:
        wanted = answers(llm, MIXED, 6)
    with engine(model, OURS, block_size=block) as llm:
        got = answers(llm, MIXED, 6)
    same(got, wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(checkpoint, dtype: str) -> None:
    """First tokens' probabilities agree with those in f32 as closely as vLLM's own."""
    model = checkpoint("qwen3", initializer_range=0.1)
    found = {}
    for name, choice, kind in [
        ("exact", STOCK, "float32"),
        ("stock", STOCK, dtype),
        ("ours", OURS, dtype),
    ]:
        with engine(model, choice, dtype=kind) as llm:
            found[name] = [a.logprobs[0] for a in answers(llm, MIXED, 1)]
    off = {
        name: max(abs(a - b) for a, b in zip(found[name], found["exact"], strict=True))
        for name in ("stock", "ours")
    }
    assert off["ours"] <= 2 * off["stock"] + 1e-3


def test_preempted_requests_go_on(checkpoint) -> None:
    """With 20 blocks for eight requests, some are thrown out and computed anew."""
    model = checkpoint("llama")
    prompts = [prompt(60, seed) for seed in range(8)]
    with engine(model, OURS, enable_prefix_caching=False) as llm:
        wanted = answers(llm, prompts, 40)
        assert metric(llm, "num_preemptions") == 0
    with engine(model, OURS, enable_prefix_caching=False, num_gpu_blocks_override=20) as llm:
        got = answers(llm, prompts, 40)
        assert metric(llm, "num_preemptions") > 0
    same(got, wanted)


def test_an_aborted_request_disturbs_nobody(checkpoint) -> None:
    model = checkpoint("llama")
    with engine(model, OURS) as llm:
        wanted = answers(llm, MIXED[:4], 12)
    with engine(model, OURS) as llm:
        inner, done = llm.llm_engine, {}
        for number, given in enumerate([*MIXED[:4], prompt(230, 77)]):
            inner.add_request(str(number), given, sampling(12))
        for step in range(200):
            if not inner.has_unfinished_requests():
                break
            if step == 3:
                inner.abort_request(["4"])
            done |= {out.request_id: out for out in inner.step() if out.finished}
        assert sorted(done) == ["0", "1", "2", "3"]
        got = [list(done[str(number)].outputs[0].token_ids) for number in range(4)]
    assert got == [a.tokens for a in wanted]


def test_cached_prefixes_are_read(checkpoint) -> None:
    model = checkpoint("qwen3")
    ids = prompt(150, 5)["prompt_token_ids"]
    prompts = [{"prompt_token_ids": ids[:end]} for end in (150, 100, 149)]
    with engine(model, STOCK, enable_prefix_caching=False) as llm:
        wanted = [answers(llm, [given], 8)[0] for given in prompts]
    with engine(model, OURS, enable_prefix_caching=True) as llm:
        got = [answers(llm, [given], 8)[0] for given in prompts]
    assert [a.cached for a in got] == [0, 96, 128]
    same(got, wanted)
