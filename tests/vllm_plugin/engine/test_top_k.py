"""Heads that choose pages in a real engine, against transformers' own decoding as defined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention import Attention

from families import tiny
from kvweave import Unsupported
from kvweave.adapters.vllm.top_k.backend import ChoosingBackend
from kvweave.adapters.vllm.top_k.bounds_cache import BoundsCache
from ranked_pages import FULL, WINDOW, PlainDecoding, top_k
from test_head_split import SIZES, checkpoint_of
from test_head_split import ours as with_map
from vllm_engines import STOCK, Answer, answers, engine, metric, prompt, same, sampling

PAGE, LAYERS, HEADS = 16, 4, SIZES["num_key_value_heads"]
PROMPTS = [prompt(length, seed) for seed, length in enumerate([5, 40, 100, 200, 33, 64, 1, 250])]
CHANGES = {"head_dim": 32, "initializer_range": 0.15, **SIZES}
# Dealt out by (layer, KV head): all reads and budgets in each layer.
KINDS = [top_k(4), FULL, top_k(6), top_k(3), top_k(5)]


def written(folder: Path, kinds: list[dict[str, Any]]) -> Path:
    """A map whose classes are dealt out by (layer, KV head), as `PlainDecoding` has them."""
    entries = [
        {"layer": at // HEADS, "head": at % HEADS, "class": kinds[at % len(kinds)]}
        | {"reach": "local" if kinds[at % len(kinds)] is WINDOW else "global"}
        | {"stability": "stable"}
        for at in range(LAYERS * HEADS)
    ]
    made = {"schema_version": 1, "model_fingerprint": "tiny", "layers": LAYERS, "kv_heads": HEADS}
    path = folder / "map.json"
    path.write_text(json.dumps({**made, "heads": entries}))
    return path


def defined(
    family: str, kinds: list[dict[str, Any]], given: Any, count: int, *, paced: bool = False
) -> Answer:
    """What transformers' own decoding says: the prompt reads all, steps what they rank first."""
    model = tiny(family, **CHANGES, sliding_window=None)
    plain = PlainDecoding(model, kinds, PAGE, paced=paced)
    fed, tokens, logprobs = list(given["prompt_token_ids"]), list[int](), list[float]()
    for _ in range(count):
        with torch.no_grad():
            said = plain.feed(fed).log_softmax(-1)
        fed = [int(said.argmax())]
        tokens.append(fed[0])
        logprobs.append(float(said[fed[0]]))
    return Answer(tokens, logprobs, 0)


def layers_of(llm: Any) -> dict[str, Any]:
    return llm.llm_engine.vllm_config.compilation_config.static_forward_context


def expect_bounds(llm: Any) -> int:
    """Compares bounds with the keys of blocks that later requests may find; how many there are."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    found = [block.block_id for block in pool.blocks if block.block_hash is not None]
    known = layers_of(llm)
    for name, layer in known.items():
        if isinstance(layer, BoundsCache):
            cache = known[name.removesuffix("_bounds")].kv_cache
            keys = cache.view(-1, HEADS, 2, PAGE, layer.head_size)[found, :, 0]
            bounds = layer.values().view(-1, HEADS, 3, layer.head_size)[found]
            assert torch.equal(bounds[:, :, 0], keys.amin(2))
            assert torch.equal(bounds[:, :, 1], keys.amax(2))
    return len(found)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3-moe", "mistral"])
def test_few_pages_are_the_definition(checkpoint, tmp_path, family: str) -> None:
    """Eight prompts at once in chunks of 64 rows: prefills and decodes share steps."""
    path, model = written(tmp_path, KINDS), checkpoint_of(checkpoint, family)
    wanted = [defined(family, KINDS, given, 20) for given in PROMPTS]
    with engine(model, with_map(path, family), enable_prefix_caching=True) as llm:
        layers = [x for x in layers_of(llm).values() if isinstance(x, Attention)]
        assert all(layer.attn_backend is ChoosingBackend for layer in layers)
        got = answers(llm, PROMPTS, 20)
        assert expect_bounds(llm) > 30
    same(got, wanted)
    dense = [defined(family, [FULL], given, 20) for given in PROMPTS]
    assert dense[3].tokens != wanted[3].tokens


def test_a_layer_without_top_k_heads_reads_all(checkpoint, tmp_path) -> None:
    kinds = [FULL] * HEADS + [top_k(3)] * HEADS
    path, model = written(tmp_path, kinds), checkpoint_of(checkpoint, "llama")
    wanted = [defined("llama", kinds, given, 12) for given in PROMPTS]
    with engine(model, with_map(path)) as llm:
        bounded = [x for x in layers_of(llm).values() if isinstance(x, BoundsCache)]
        assert len(bounded) == LAYERS // 2
        got = answers(llm, PROMPTS, 12)
    same(got, wanted)


def test_as_many_pages_as_there_are_answer_as_stock(checkpoint, tmp_path) -> None:
    model = checkpoint_of(checkpoint, "llama")
    with engine(model, STOCK) as llm:
        wanted = answers(llm, PROMPTS, 12)
    with engine(model, with_map(written(tmp_path, [top_k(32), FULL]))) as llm:
        got = answers(llm, PROMPTS, 12)
    same(got, wanted)


def test_what_is_found_in_the_prefix_cache_has_its_bounds(checkpoint, tmp_path) -> None:
    """A prompt of which one token is left has one row, and yet reads all."""
    path, model = written(tmp_path, KINDS), checkpoint_of(checkpoint, "qwen3")
    ids = prompt(257, 5)["prompt_token_ids"]
    prompts = [{"prompt_token_ids": ids[:end]} for end in (257, 257, 193, 250, 161)]
    wanted = [defined("qwen3", KINDS, given, 20) for given in prompts]
    with engine(model, with_map(path, "qwen3"), enable_prefix_caching=True) as llm:
        got = [answers(llm, [given], 20)[0] for given in prompts]
        assert [a.cached for a in got] == [0, 256, 192, 240, 160]
        same(got, wanted)
        # In one step: whoever comes second finds what the first one computes in that very step.
        fresh = prompt(49, 6)["prompt_token_ids"]
        both = [{"prompt_token_ids": fresh}, {"prompt_token_ids": [*fresh[:48], 7]}]
        got = answers(llm, both, 20)
        assert got[1].cached == 48
        assert expect_bounds(llm) > 15
    same(got, [defined("qwen3", KINDS, given, 20) for given in both])


def test_what_was_decoded_by_choice_is_nobodys_prefix(checkpoint, tmp_path) -> None:
    """Of the turn before its prompt is found, and the answer while nobody chose: three pages."""
    path, model = written(tmp_path, KINDS), checkpoint_of(checkpoint, "llama")
    with engine(model, with_map(path), enable_prefix_caching=True) as llm:
        for length, said, found in [(161, 40, 160), (10, 60, 48), (20, 20, 32)]:
            ids = prompt(length, length)["prompt_token_ids"]
            answer = answers(llm, [{"prompt_token_ids": ids}], said)[0].tokens
            turn = {"prompt_token_ids": [*ids, *answer, 3, 4]}
            (got,) = answers(llm, [turn], 8)
            assert got.cached == found
            same([got], [defined("llama", KINDS, turn, 8)])


def test_blocks_that_change_hands_have_bounds_of_their_new_content(checkpoint, tmp_path) -> None:
    """Twenty blocks for requests of seventeen, one after the other."""
    path, model = written(tmp_path, KINDS), checkpoint_of(checkpoint, "llama")
    prompts = [prompt(length, seed) for seed, length in enumerate([250, 240, 200, 255])]
    wanted = [defined("llama", KINDS, given, 16) for given in prompts]
    few = {"enable_prefix_caching": False, "num_gpu_blocks_override": 20, "max_model_len": 288}
    with engine(model, with_map(path), **few) as llm:
        got = [answers(llm, [given], 16)[0] for given in prompts]
    same(got, wanted)


def test_preempted_requests_go_on(checkpoint, tmp_path) -> None:
    """Whoever comes back has its answer computed anew, densely: with all pages nothing changes."""
    model, prompts = checkpoint_of(checkpoint, "llama"), [prompt(60, seed) for seed in range(8)]
    few = {"enable_prefix_caching": False, "num_gpu_blocks_override": 40}
    with engine(model, with_map(written(tmp_path, [top_k(32)])), **few) as llm:
        got = answers(llm, prompts, 60)
        assert metric(llm, "num_preemptions") > 0
    with engine(model, with_map(written(tmp_path, KINDS)), enable_prefix_caching=False) as llm:
        alone = answers(llm, prompts, 60)
    with engine(model, with_map(written(tmp_path, KINDS)), **few) as llm:
        choosing = answers(llm, prompts, 60)
        assert metric(llm, "num_preemptions") > 0
    with engine(model, STOCK, enable_prefix_caching=False) as llm:
        same(got, answers(llm, prompts, 60))
    assert all(len(a.tokens) == 60 for a in choosing)
    # Some were never thrown out.
    assert any(a.tokens == b.tokens for a, b in zip(choosing, alone, strict=True))


def test_an_aborted_request_disturbs_nobody(checkpoint, tmp_path) -> None:
    path, model = written(tmp_path, KINDS), checkpoint_of(checkpoint, "llama")
    wanted = [defined("llama", KINDS, given, 12) for given in PROMPTS[:4]]
    with engine(model, with_map(path)) as llm:
        inner, done = llm.llm_engine, {}
        for number, given in enumerate([*PROMPTS[:4], prompt(230, 77)]):
            inner.add_request(str(number), given, sampling(12))
        for step in range(200):
            if not inner.has_unfinished_requests():
                break
            if step == 8:
                inner.abort_request(["4"])
            done |= {out.request_id: out for out in inner.step() if out.finished}
        got = [list(done[str(number)].outputs[0].token_ids) for number in range(4)]
    assert got == [a.tokens for a in wanted]


def test_bounds_are_taken_out_of_vllms_own_memory(checkpoint, tmp_path) -> None:
    """Three vectors of f32 for sixteen keys and values of f32: three in thirty-two."""
    model, blocks = checkpoint_of(checkpoint, "llama"), []
    for kinds in ([top_k(4)], [FULL] * HEADS + [top_k(4)] * HEADS):
        with engine(model, with_map(written(tmp_path, kinds))) as llm:
            config = llm.llm_engine.vllm_config.cache_config
            held = [layer.kv_cache for layer in layers_of(llm).values()]
            assert all(len(part) == config.num_gpu_blocks for part in held)
            size = sum(part.numel() * part.element_size() for part in held)
            # No room for a block more.
            assert 0 <= 2**30 - size < 2 * size // config.num_gpu_blocks
            blocks.append(config.num_gpu_blocks)
    page = PAGE * 2 * CHANGES["head_dim"] * 4 * HEADS * LAYERS
    assert blocks[0] == 2**30 // (page * 35 // 32)
    assert blocks[1] == 2**30 // (page * 67 // 64)


REFUSED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "windows": ([top_k(4), WINDOW], {}, "top-k heads: expected none beside head classes"),
    "blocks": ([top_k(4)], {"block_size": 48}, "block_size: expected one of 16, 32, 64 beside"),
    "metrics": (
        [top_k(4)],
        {
            "kv_transfer_config": {
                "kv_connector": "KvweaveHeads",
                "kv_role": "kv_producer",
                "kv_connector_module_path": "kvweave.adapters.vllm.heads.connector",
            }
        },
        "KvweaveHeads: expected a head map with a window among its heads",
    ),
}


@pytest.mark.parametrize(("kinds", "changes", "says"), REFUSED.values(), ids=REFUSED)
def test_what_they_do_not_compose_with(checkpoint, tmp_path, kinds, changes, says) -> None:
    path, model = written(tmp_path, kinds), checkpoint_of(checkpoint, "llama")
    with pytest.raises(Unsupported, match=says), engine(model, with_map(path), **changes):
        pass


@pytest.mark.parametrize(
    ("family", "changes"),
    # Windows in some of Qwen2's layers alone vLLM itself refuses, so here all have one.
    [("mistral", {"sliding_window": 64}), ("qwen2-sliding", {"max_window_layers": 0})],
)
def test_models_with_a_window_of_their_own_are_refused(
    checkpoint, tmp_path, family: str, changes: dict[str, int]
) -> None:
    path = written(tmp_path, [top_k(4)])
    model = checkpoint(family, **SIZES, **changes)
    expected = "sliding_window: expected layers that see the whole context beside top-k heads"
    with (
        pytest.raises(Unsupported, match=expected),
        engine(model, with_map(path, family.removesuffix("-sliding"))),
    ):
        pass
