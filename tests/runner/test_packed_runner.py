"""A runner with `kv_dtype="int4"`: what it says, shares, holds and refuses."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvweave
from decode_batches import decoding
from families import random_tokens, tiny
from head_maps import runner_of
from kvweave import InvalidArgument, PoolFull, Unsupported, ops
from kvweave.adapters.kvpress import PressedCache
from kvweave.lab.eval.corpus import corpus_of
from kvweave.runner import Canary, Healing, Packing, Runner, Segment
from kvweave.runner.kv.beside_packed import NOT_BESIDE_PACKED
from kvweave.runner.kv.packed_pool import format_on
from kvweave.runner.kv.packing import FORMATS
from packed_decoding import PackedDecoding, apart, nothing_is_held, packed_runner, steps_of
from policy_profiles import profile
from ranked_pages import logits_of_steps

STEPS = 70


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", head_dim=64, max_position_embeddings=4096, num_hidden_layers=2)


@pytest.mark.parametrize(
    ("family", "count", "chunk", "page_tokens"),
    [
        ("llama", 300, 2048, 16),
        ("llama", 500, 96, 64),
        ("qwen3", 190, 100, 16),
        ("gemma", 330, 200, 32),
    ],
)
def test_it_is_the_definition(family: str, count: int, chunk: int, page_tokens: int) -> None:
    """Prefill in chunks and decode steps over packed pages, against what these stand for."""
    model = tiny(family, head_dim=64, max_position_embeddings=4096, num_hidden_layers=2)
    tokens = random_tokens(count, count)
    runner = packed_runner(model, chunk_tokens=chunk, page_tokens=page_tokens)
    said, logits = logits_of_steps(runner, tokens, STEPS)
    plain, unpacked = PackedDecoding(model, page_tokens), PackedDecoding(model, page_tokens, None)
    wanted, others = (
        [each.prefill(tokens, chunk), *(each.step(token) for token in said[:-1])]
        for each in (plain, unpacked)
    )
    expect_definition(logits, wanted, others)
    assert nothing_is_held(runner)


def expect_definition(logits: list[Any], wanted: list[Any], unpacked: list[Any]) -> None:
    """That logits are the wanted ones, and not those over exact KV.

    But for rounding nothing differs, save numbers at the edge of two codes.
    """
    effect, error = apart(unpacked, wanted), apart(logits, wanted)
    assert effect > 1e-4
    assert error < 0.02 * effect


@settings(max_examples=10)
@given(count=st.integers(1, 191), steps=st.integers(1, 80), page_tokens=st.sampled_from([16, 32]))
def test_what_stays_exact_changes_no_bit(count: int, steps: int, page_tokens: int) -> None:
    """As long as a text is no longer than sink and newest tokens."""
    model = tiny("llama", num_hidden_layers=2)
    sizes = {"page_tokens": page_tokens, "max_tokens": 512}
    tokens, steps = random_tokens(count, count), min(steps, 192 - count)
    runner = packed_runner(model, **sizes)
    said, logits = logits_of_steps(runner, tokens, steps)
    wanted, others = logits_of_steps(runner_of(model, **sizes), tokens, steps)
    assert said == wanted
    assert all(torch.equal(a, b) for a, b in zip(logits, others, strict=True))
    assert nothing_is_held(runner)


def test_bytes_by_the_allocator(model: Any) -> None:
    """What is packed takes 3.5 times fewer bytes; exact blocks are those of the windows alone."""
    half = tiny("llama", head_dim=64, max_position_embeddings=4096).bfloat16()
    tokens = random_tokens(1500, 1)
    dense, runner = runner_of(half), packed_runner(half)
    assert runner.packed is not None
    with dense.prefill(tokens, "full"), runner.prefill(tokens, "full") as done:
        stats = runner.packed.stats()
        # One more than whole pages: that in progress has its room.
        assert stats["held"] == 24
        assert stats["held_bytes"] == 24 * runner.packed.block_bytes
        block = dense.cache.block_bytes
        assert 24 * 4 * block >= 3.5 * stats["held_bytes"]
        # The sink, what the next row sees of the newest 128 tokens, and the block that it goes to.
        kept = (64 + 1504 - 1360) // 16
        assert runner.cache.stats()["groups"][0]["held"] == kept
        assert done.report.kv_bytes == kept * block + stats["held_bytes"]
        assert dense.cache.stats()["held"] * block > 2.3 * done.report.kv_bytes
    assert nothing_is_held(runner)


@settings(max_examples=40)
@given(
    megabytes=st.integers(0, 40),
    chunk=st.none() | st.integers(1, 3000),
    of=st.sampled_from([16, 64]),
)
def test_both_pools_are_within_their_bytes(megabytes: int, chunk: int | None, of: int) -> None:
    model = tiny("llama", head_dim=16, num_hidden_layers=2)
    given = {"arena_bytes": megabytes << 20, "max_tokens": None, "page_tokens": of}
    with suppress(InvalidArgument):
        runner = packed_runner(model, chunk_tokens=chunk, **given)
        total = runner._decoder.pages.nbytes + runner.packed.nbytes
        assert 0.9 * given["arena_bytes"] < total <= given["arena_bytes"]
        return
    with pytest.raises(InvalidArgument, match="arena_bytes: expected at least") as refused:
        packed_runner(model, chunk_tokens=chunk, **given)
    given["arena_bytes"] = int(str(refused.value).split("at least ")[1].split()[0])
    assert given["arena_bytes"] > megabytes << 20
    runner = packed_runner(model, chunk_tokens=chunk, **given)
    runner.prefill(random_tokens(64, 1), "full").release()


# ---- reuse ----------------------------------------------------------------------------------


def test_packed_pages_are_shared_by_what_begins_alike(model: Any) -> None:
    """A prompt goes on behind the pages of another, which stay as they are, bit for bit."""
    runner, tokens = packed_runner(model), random_tokens(700, 2)
    with runner.prefill(tokens, "prefix") as first:
        blocks = first.kv.packed.request.entries()[:9, 0]
        bytes_of = runner.packed.pages.data.clone()
    other = np.concatenate((tokens[:600], random_tokens(60, 3)))
    with runner.prefill(other, "prefix", reserve_tokens=STEPS) as done:
        assert done.report.reused_prefix == 576
        assert done.report.rows_per_layer == [84] * 2
        assert np.array_equal(done.kv.packed.request.entries()[:9, 0], blocks)
        assert done.report.shared_kv_bytes == 9 * runner.packed.block_bytes + 4 * exact_block(
            runner
        )
        sequence = decoding(runner, done, STEPS + 1)
        logits = [done.logits[-1], *steps_of(runner, sequence, STEPS)]
        runner._decoder.forget()
        said = sequence.tokens
    per_block = runner.packed.block_pages
    for block in blocks.tolist():
        pages = slice(block, block + per_block)
        assert torch.equal(runner.packed.pages.data[pages], bytes_of[pages])
    plain, unpacked = PackedDecoding(model), PackedDecoding(model, meaning=None)
    for each in (plain, unpacked):
        each.prefill(tokens[:576], 2048)
        each.packed_at_least = 576
    wanted, others = (
        [each.prefill(other[576:], 2048), *(each.step(token) for token in said[:-1])]
        for each in (plain, unpacked)
    )
    expect_definition(logits, wanted, others)
    assert nothing_is_held(runner)


def exact_block(runner: Runner) -> int:
    return int(runner.cache.block_bytes)


def encode_by(tokenizer: Any) -> Any:
    return lambda text: tokenizer(text).input_ids


@pytest.mark.parametrize(
    ("count", "again", "found"),
    [(63, 63, 0), (64, 64, 63), (65, 65, 64), (129, 129, 128), (640, 640, 576), (700, 100, 64)],
)
def test_what_is_found_ends_with_a_page(model: Any, count: int, again: int, found: int) -> None:
    runner, tokens = packed_runner(model), random_tokens(count, count)
    cold = runner.prefill(tokens, "prefix")
    cold.release()
    with runner.prefill(tokens[:again], "prefix") as warm:
        assert warm.report.reused_prefix == found
        assert warm.report.recomputed == again - found
    with runner.prefill(tokens[:again], "full") as full:
        assert full.report.reused_prefix == 0
    with runner.prefill(tokens[:again], "prefix", namespace="another") as apart_:
        assert apart_.report.reused_prefix == 0
    assert nothing_is_held(runner)


def test_what_is_not_to_be_remembered_is_not_found(model: Any) -> None:
    runner, tokens = packed_runner(model), random_tokens(300, 4)
    runner.generate(tokens, max_new_tokens=80, remember=False)
    with runner.prefill(tokens, "prefix", remember=False) as done:
        assert done.report.reused_prefix == 0


def test_answers_are_found_too(model: Any) -> None:
    runner, tokens = packed_runner(model), random_tokens(300, 4)
    said = runner.generate(tokens, max_new_tokens=90, stop=[]).tokens
    longer = np.concatenate((tokens, np.asarray(said, np.int32)))
    with runner.prefill(longer, "prefix") as done:
        assert done.report.reused_prefix == (300 + 89) // 64 * 64


def test_without_its_sink_nothing_is_found(model: Any) -> None:
    """Exact pages of the sink were needed by others: all is computed, as in an empty cache."""
    runner, tokens = packed_runner(model), random_tokens(300, 5)
    with runner.prefill(tokens, "prefix") as cold:
        wanted = cold.logits.clone()
    for blocks in range(runner.cache.stats()["arena_pages"] // runner.packed.block_pages, 0, -1):
        with suppress(PoolFull):
            runner.cache.admit(random_tokens(16 * blocks, 6), reuse="none").release()
            break
    regime = runner._prefiller.rotary.regime(300)
    assert runner.cache.match_prefix(tokens, regime=regime) < 64
    assert runner.packed.cache.match_prefix(tokens, regime=regime) == 256
    with runner.prefill(tokens, "prefix") as again:
        assert again.report.reused_prefix < 64
        torch.testing.assert_close(again.logits, wanted, atol=1e-4, rtol=0)
    assert nothing_is_held(runner)


# ---- many requests --------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1024, 8192])
def test_a_batch_says_what_each_says_alone(model: Any, max_tokens: int) -> None:
    """Also where only some of them have room at the same time."""
    prompts = [random_tokens(count, count) for count in (1, 63, 150, 777)]
    runner = packed_runner(model, max_tokens=max_tokens, chunk_tokens=200)
    alone = [runner.generate(p, max_new_tokens=70, remember=False).tokens for p in prompts]
    batch = runner.generate_batch(prompts, max_new_tokens=70, remember=False)
    assert [answer.tokens for answer in batch] == alone
    streamed = [token.token for token in runner.stream(prompts[3], max_new_tokens=70)]
    assert streamed == alone[3]
    assert nothing_is_held(runner)


@settings(max_examples=8)
@given(seed=st.integers(0, 2**20), max_tokens=st.sampled_from([400, 700, 2000]))
def test_an_engine_answers_in_little_room(seed: int, max_tokens: int) -> None:
    """Whoever finds no packed room waits, gives way or fails by type, and nothing stays held."""
    model = tiny("llama", num_hidden_layers=1, max_position_embeddings=4096)
    draws = np.random.default_rng(seed)
    runner = packed_runner(model, max_tokens=max_tokens, chunk_tokens=64)
    engine = runner.engine(token_budget=80, chunk_tokens=48, max_running=4)
    asked = []
    for number in range(5):
        prompt = random_tokens(int(draws.integers(1, 300)), number % 3)
        wanted = int(draws.integers(1, 140))
        asked.append((engine.submit(prompt, max_new_tokens=wanted, stop=[]), wanted))
    for _ in range(5000):
        if not engine.live:
            break
        engine.must_step()
    for request, wanted in asked:
        if request.outcome == "failed":
            with pytest.raises(PoolFull):
                request.result()
        else:
            assert len(request.result().tokens) == wanted
    assert any(request.outcome == "finished" for request, _ in asked)
    assert nothing_is_held(runner)


def test_a_page_is_packed_behind_the_step_that_fills_it(model: Any) -> None:
    """While its token is awaited; where there is no room for that the next step says so."""
    runner = packed_runner(model, max_tokens=1024)
    with runner.prefill(random_tokens(127, 1), "full", remember=False) as done:
        sequence, packed, cache = decoding(runner, done, 200), done.kv.packed, runner.packed.cache
        runner._decoder.step([sequence])
        assert (done.request.length, packed.tokens) == (128, 128)
        free = cache.stats()["total"] - cache.stats()["held"]
        with cache.admit(random_tokens(64 * free, 2), reuse="none"):
            for _ in range(64):
                assert len(runner._decoder.step([sequence])) == 1
            assert (done.request.length, packed.tokens) == (192, 128)
            with pytest.raises(PoolFull) as full:
                runner._decoder.step([sequence])
            assert (full.value.request, done.request.length) == (0, 192)
        runner._decoder.step([sequence])
        assert (done.request.length, packed.tokens) == (193, 192)
    assert nothing_is_held(runner)


def test_extending_is_prefilling(model: Any) -> None:
    """More tokens in one pass read packed pages as a later chunk of a prompt does."""
    runner, tokens = packed_runner(model, chunk_tokens=400), random_tokens(500, 8)
    with runner.prefill(tokens, "full", logits_from=400, remember=False) as whole:
        wanted = whole.logits.clone()
    with runner.prefill(tokens[:400], "full", remember=False) as done:
        torch.testing.assert_close(runner.extend(done, tokens[400:]), wanted, atol=1e-4, rtol=0)
    assert nothing_is_held(runner)


# ---- bad input ------------------------------------------------------------------------------


def test_nan_reaches_its_own_request_alone(model: Any) -> None:
    broken = tiny("llama", head_dim=64, max_position_embeddings=4096)
    broken.get_input_embeddings().weight.data[7] = torch.nan
    good = random_tokens(300, 9)
    good[good == 7] = 8
    bad = good.copy()
    bad[100] = 7
    runner = packed_runner(broken)
    with runner.prefill(good, "full", remember=False) as done:
        wanted = done.logits.clone()
        assert wanted.isfinite().all()
    with runner.prefill(bad, "prefix") as spoiled, runner.prefill(good, "prefix") as done:
        assert spoiled.logits.isnan().all()
        assert done.report.reused_prefix == 64
        torch.testing.assert_close(done.logits, wanted, atol=1e-4, rtol=0)
    assert nothing_is_held(runner)


def test_a_prompt_without_room_takes_nothing(model: Any) -> None:
    runner = packed_runner(model, max_tokens=256)
    for count in (4000, 700):
        with pytest.raises(PoolFull):
            runner.prefill(random_tokens(count, 1), "prefix")
        assert nothing_is_held(runner)
    with pytest.raises(InvalidArgument):
        runner.prefill([], "prefix")
    with pytest.raises(PoolFull, match="packed pages: expected up to .* tokens, got 2199"):
        runner.generate(random_tokens(200, 1), max_new_tokens=2000)
    with pytest.raises(PoolFull, match="packed pages"):
        runner.engine().submit(random_tokens(2000, 1))
    assert nothing_is_held(runner)


def test_who_outgrows_the_packed_pool_gives_way_and_goes_on(model: Any) -> None:
    runner = packed_runner(model, max_tokens=512)
    prompts = [random_tokens(200, seed) for seed in (11, 12)]
    wanted = [runner.generate(p, max_new_tokens=150, remember=False, stop=[]) for p in prompts]
    engine = runner.engine()
    asked = [engine.submit(p, max_new_tokens=150, remember=False, stop=[]) for p in prompts]
    engine.run()
    assert engine.metrics()["preempted"] > 0
    said = [request.result().tokens for request in asked]
    assert [len(tokens) for tokens in said] == [150, 150]
    alone = [answer.tokens for answer in wanted]
    # Together they need a ninth page when both have 320 tokens. Whoever gives way then reads its
    # newest tokens packed from there on.
    assert [tokens[:120] for tokens in said] == [tokens[:120] for tokens in alone]
    assert nothing_is_held(runner)


def refusals(runner: Runner, model: Any, name: str) -> dict[str, Any]:
    """Of everything that does not go with packed pages: what asks for it."""
    tokens = random_tokens(100, 1)
    stated = profile(fingerprint=runner.spec.fingerprint)

    def turn_with_a_document() -> None:
        with runner.conversation("naive") as conversation:
            conversation.ask(tokens, max_new_tokens=2)
            conversation.ask([Segment(tokens=tokens.tolist())])

    return {
        "profile": [lambda: packed_runner(model, kv_dtype=name, profile=stated)],
        "canary": [
            lambda: packed_runner(model, kv_dtype=name, canary=Canary(share=1.0, bound=1.0))
        ],
        "healing": [lambda: runner.generate(tokens, healing=Healing())],
        "later documents": [turn_with_a_document],
        "pin": [lambda: runner.pin(tokens)],
        "zero_on_free": [lambda: packed_runner(model, kv_dtype=name, zero_on_free=True)],
        "bounds_dtype": [lambda: packed_runner(model, kv_dtype=name, bounds_dtype="fp8")],
    }


@pytest.mark.parametrize("name", FORMATS)
def test_what_does_not_go_with_it_is_refused_by_name(model: Any, name: str) -> None:
    runner = packed_runner(model, kv_dtype=name)
    asked = refusals(runner, model, name)
    assert asked.keys() == NOT_BESIDE_PACKED.keys()
    for what, calls in asked.items():
        for call in calls:
            with pytest.raises(Unsupported, match=f"^{what}: .* beside packed pages"):
                call()
            assert nothing_is_held(runner), what


@pytest.mark.parametrize("given_", ["fp8", "INT4", "", 4, True, np.zeros(2), ["int4"]])
def test_what_is_no_dtype_of_pages_is_refused(model: Any, given_: Any) -> None:
    with pytest.raises(InvalidArgument, match="kv_dtype: expected None or one of int4,"):
        runner_of(model, kv_dtype=given_)


def test_what_cannot_be_packed_is_refused(model: Any) -> None:
    for page_tokens in (0, 24, 128):
        with pytest.raises(InvalidArgument, match="page_tokens: expected a divisor of 64"):
            packed_runner(model, page_tokens=page_tokens)
    with pytest.raises(Unsupported, match="without sliding windows beside 'int4', got one"):
        packed_runner(tiny("mistral", head_dim=64))
    with pytest.raises(InvalidArgument, match="head_dim"):
        packed_runner(tiny("llama", head_dim=24))


@pytest.mark.parametrize("wrong", [(128, 64, "bf16"), (64, 32, "bf16"), (64, 64, "f16")])
def test_a_format_of_other_sizes_is_refused(model: Any, wrong: tuple[int, int, str]) -> None:
    """Whoever is given one, it is never replaced by another."""
    of = ops.PackedFormat("top-r", *wrong, kept=16, group=4, numbers="fp8")
    expected = "kv_dtype: expected a format with head_dim=64, page_tokens=64 and scales='bf16'"
    for made in (packed_runner, kvweave.PagedCache, PressedCache):
        with pytest.raises(InvalidArgument, match=re.escape(expected)):
            made(model, kv_dtype=of)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 64), (torch.float16, 64), (None, 80)])
def test_what_no_kernel_reads_is_refused_by_its_format(dtype: Any, dim: int) -> None:
    dtype = dtype or torch.bfloat16
    scales = "f16" if dtype == torch.float16 else "bf16"
    of = ops.PackedFormat("top-r", dim, 64, scales, kept=16, group=2, numbers="bf16")
    with pytest.raises(Unsupported, match=f"^kv_dtype: .* beside {re.escape(repr(of))} on cuda"):
        format_on(Packing(of), dim, dtype, torch.device("cuda"))
    assert format_on(Packing(of), dim, dtype, torch.device("cpu")) is of


# ---- a real model ---------------------------------------------------------------------------


@pytest.mark.long
def test_a_real_model_stays_close(smollm2: Any) -> None:
    """KL a token of known text behind 900 tokens of which most are packed."""
    model, tokenizer = smollm2
    text = corpus_of("python").token_slice(np.random.default_rng(0), encode_by(tokenizer), 1000)
    tokens = np.asarray(text, np.int32)
    given = {"max_tokens": 2048, "check": False, "progress": False}
    runners = Runner(model, **given), Runner(model, kv_dtype="int4", **given)
    said = []
    for runner in runners:
        with runner.prefill(tokens[:900], "full", remember=False) as done:
            said.append(runner.extend(done, tokens[900:1000]).log_softmax(-1))
    kl = (said[0].exp() * (said[0] - said[1])).sum(-1)
    assert 1e-6 < float(kl.mean()) < 0.01
