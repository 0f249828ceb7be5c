"""A runner whose pages are packed in a basis: what it says, shares, holds and refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from decode_batches import decoding
from document_decoding import DocumentDecoding, documents, fresh, insert_all
from families import random_tokens, tiny
from kvweave import InvalidArgument
from kvweave.runner import Packing
from kvweave.runner.kv.pool_bases import SHARED, SHARED_TOKENS, UNROTATED
from packed_decoding import PackedDecoding, nothing_is_held, packed_runner, steps_of
from page_meaning import random_packing
from ranked_pages import logits_of_steps

STEPS = 70
NAMES = ["half-int4", "quarter-bf16"]
SIZES = {"head_dim": 64, "max_position_embeddings": 4096, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", **SIZES)


def pages_of(model: Any) -> int:
    """Pages of a block."""
    return int(model.config.num_hidden_layers * model.config.num_key_value_heads)


def apart(one: list[Any], other: list[Any]) -> float:
    """The largest difference of logits."""
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def expect_definition(logits: list[Any], wanted: list[Any], unpacked: list[Any]) -> None:
    """That logits are the wanted ones, and not those over exact KV."""
    effect, error = apart(unpacked, wanted), apart(logits, wanted)
    assert effect > 1e-3
    assert error < 0.02 * effect


# ---- what is said ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("family", "count", "chunk", "page_tokens"),
    [("llama", 500, 96, 64), ("qwen3", 300, 2048, 16)],
)
def test_it_is_the_definition(
    name: str, family: str, count: int, chunk: int, page_tokens: int
) -> None:
    """Prefill in chunks and decode steps over packed pages, against what these stand for."""
    model, tokens = tiny(family, **SIZES), random_tokens(count, count)
    packing, meaning = random_packing(name, pages_of(model), 64)
    runner = packed_runner(model, kv_dtype=packing, chunk_tokens=chunk, page_tokens=page_tokens)
    said, logits = logits_of_steps(runner, tokens, STEPS)
    doubles = (PackedDecoding(model, page_tokens, of) for of in (meaning, None))
    wanted, others = (
        [each.prefill(tokens, chunk), *(each.step(token) for token in said[:-1])]
        for each in doubles
    )
    expect_definition(logits, wanted, others)
    assert nothing_is_held(runner)


@pytest.mark.parametrize("name", NAMES)
def test_documents_are_read_as_what_they_stand_for(name: str, model: Any) -> None:
    """At any position, in the basis that they were packed in."""
    docs = documents([300, 40, 129])
    prompt = [fresh(70, 1), docs[0], docs[1], docs[2], fresh(30, 2)]
    packing, meaning = random_packing(name, pages_of(model), 64)
    runner = packed_runner(model, kv_dtype=packing, max_tokens=16384, chunk_tokens=150)
    insert_all(runner, docs)
    asked = {"reserve_tokens": 200, "remember": False, "watched": False}
    with runner.prefill(prompt, "naive", **asked) as done:
        sequence = decoding(runner, done, 200)
        logits = [done.logits[-1], *steps_of(runner, sequence, 199)]
        said = sequence.tokens
    doubles = (DocumentDecoding(model, 150, 16, of) for of in (meaning, None))
    wanted, others = (
        [each.prefill(prompt), *(each.step(token) for token in said[:-1])] for each in doubles
    )
    expect_definition(logits, wanted, others)
    for segment in runner.segments():
        runner.delete(segment.name)
    assert nothing_is_held(runner)


def test_prefixes_batches_and_streams_say_what_each_says_alone(model: Any) -> None:
    packing, _ = random_packing("half-int4", pages_of(model), 64)
    runner = packed_runner(model, kv_dtype=packing, max_tokens=4096, chunk_tokens=200)
    prompts = [random_tokens(count, count) for count in (63, 150, 777)]
    how = {"max_new_tokens": 70, "remember": False, "stop": []}
    alone = [runner.generate(prompt, **how).tokens for prompt in prompts]
    assert [answer.tokens for answer in runner.generate_batch(prompts, **how)] == alone
    assert [token.token for token in runner.stream(prompts[2], **how)] == alone[2]
    engine = runner.engine(token_budget=400, chunk_tokens=64)
    asked = [engine.submit(prompt, **how) for prompt in prompts]
    engine.run()
    assert [len(request.result().tokens) for request in asked] == [70, 70, 70]
    runner.prefill(prompts[2], "prefix").release()
    with runner.prefill(prompts[2], "prefix") as again:
        assert again.report.reused_prefix == 768
        assert again.logits.isfinite().all()
    assert nothing_is_held(runner)


# ---- bases ----------------------------------------------------------------------------------


def test_the_shared_basis_is_made_of_the_first_tokens(model: Any) -> None:
    """Until there are enough nothing is rotated; pages keep the basis that they were packed in."""
    runner = packed_runner(model, kv_dtype="half-int4", max_tokens=4096)
    pool = runner.packed
    assert pool is not None
    assert pool.bases is not None
    tokens = random_tokens(300, 1)
    with runner.prefill(tokens, "prefix") as few:
        assert pool.bases.wants_moments
        blocks = few.kv.packed.request.entries()[:4, 0]
        assert (pool.bases.numbers(blocks) == UNROTATED).all()
        with runner.prefill(random_tokens(SHARED_TOKENS, 2), "prefix") as more:
            assert not pool.bases.wants_moments
            found = more.kv.packed.request.entries()[:8, 0]
            assert (pool.bases.numbers(found) == SHARED).all()
            assert (pool.bases.numbers(blocks) == UNROTATED).all()
    basis = pool.bases.bases.data[SHARED, :, :, 1:].double()
    torch.testing.assert_close(basis @ basis.mT, torch.eye(64).double().expand_as(basis))
    # What was packed before is read in its own basis, beside pages of the other.
    longer = np.concatenate((tokens, random_tokens(300, 3)))
    with runner.prefill(longer, "prefix", reserve_tokens=40) as done:
        assert done.report.reused_prefix == 256
        said = done.kv.packed.request.entries()[:9, 0]
        assert pool.bases.numbers(said).tolist() == [UNROTATED] * 4 + [SHARED] * 5
        logits = [done.logits[-1], *steps_of(runner, decoding(runner, done, 41), 40)]
    assert all(row.isfinite().all() for row in logits)
    assert nothing_is_held(runner)


def test_bytes_by_the_allocator() -> None:
    half = tiny("llama", **{**SIZES, "head_dim": 128}).bfloat16()
    runner = packed_runner(half, kv_dtype="half-int4", max_tokens=16384)
    assert runner.packed is not None
    with runner.prefill(random_tokens(1500, 1), "full"):
        stats = runner.packed.stats()
        assert stats["held"] == 24
        assert 24 * 4 * runner.cache.block_bytes >= 5 * stats["held_bytes"]
    assert runner.packed.nbytes == runner.packed.pages.data.nbytes + (
        (2 + stats["own_bases_most"]) * stats["basis_bytes"]
    )
    assert runner.packed.pages.data.nbytes >= 8 * stats["own_bases_most"] * stats["basis_bytes"]


@pytest.mark.parametrize("megabytes", [1, 3, 20])
def test_both_pools_and_the_bases_are_within_their_bytes(megabytes: int) -> None:
    model = tiny("llama", head_dim=16, num_hidden_layers=2)
    given = {"arena_bytes": megabytes << 20, "max_tokens": None, "kv_dtype": "half-int4"}
    runner = packed_runner(model, **given, chunk_tokens=100)
    total = runner._decoder.pages.nbytes + runner.packed.nbytes
    assert 0.9 * given["arena_bytes"] < total <= given["arena_bytes"]


# ---- bad input ------------------------------------------------------------------------------


def test_what_is_no_packing_is_refused(model: Any) -> None:
    for basis in (np.zeros(3), 1.0, "own"):
        with pytest.raises(InvalidArgument, match="basis: expected a tensor or None, got"):
            Packing("half-int4", basis)  # type: ignore[arg-type]
    packing, _ = random_packing("half-int4", pages_of(model), 64)
    assert packing.basis is not None
    spoiled = packing.basis.clone()
    spoiled[1, 0, 3, 5] = torch.nan
    for basis in (spoiled, packing.basis[:2], packing.basis[..., :32]):
        with pytest.raises(InvalidArgument, match="basis: expected finite numbers .4, 2, 65, 64."):
            packed_runner(model, kv_dtype=Packing("half-int4", basis))
    with pytest.raises(InvalidArgument, match="basis: expected None beside kv_dtype='int4'"):
        packed_runner(model, kv_dtype=Packing("int4", packing.basis))
    with pytest.raises(InvalidArgument, match="kv_dtype: expected None or one of int4, .* got"):
        Packing("int5")
    with pytest.raises(InvalidArgument, match="copy_bytes"):
        Packing("half-int4", copy_bytes=-1)


def test_nan_reaches_its_own_request_alone() -> None:
    broken = tiny("llama", **SIZES)
    broken.get_input_embeddings().weight.data[7] = torch.nan
    good = random_tokens(600, 9)
    good[good == 7] = 8
    bad = good.copy()
    bad[100] = 7
    runner = packed_runner(broken, kv_dtype="half-int4", chunk_tokens=200)
    assert runner.packed is not None
    with runner.prefill(bad, "full", remember=False) as spoiled:
        assert spoiled.logits.isnan().all()
    assert runner.packed.bases is not None
    assert runner.packed.bases.bases.data.isfinite().all()
    with runner.prefill(good, "full", remember=False) as done:
        assert done.logits.isfinite().all()
    assert nothing_is_held(runner)
