"""Head maps with windows beside packed pages: these read exact pages alone, other heads all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from decode_batches import decoding
from document_decoding import DocumentDecoding, documents, fresh, insert_all
from families import random_tokens, tiny
from head_maps import class_map
from kvweave import CorruptHeadMap, Unsupported
from kvweave.errors import KvweaveError
from kvweave.runner import Runner
from packed_decoding import PackedDecoding, apart, nothing_is_held, packed_runner, steps_of
from page_meaning import Meaning, random_packing
from ranked_pages import kinds_map, logits_of_steps, top_k
from versions import needs_cuda

SIZES = {"head_dim": 64, "max_position_embeddings": 4096, "num_hidden_layers": 2}
SIGHTS = np.array([[[100, 20], [0, 0]], [[0, 0], [0, 0]]], np.int32)
MIXED = np.array([[[128, 64], [16, 0]], [[0, 0], [17, 1]]], np.int32)
KINDS = ["int4", "half-int4", "planes-2.5"]
STEPS = 60


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", **SIZES)


def runner_of(model: Any, kind: str, sights: Any, **settings: Any) -> tuple[Runner, Meaning]:
    plain = Runner(model, max_tokens=64, check=False, progress=False)
    heads = class_map(sights, plain.spec.fingerprint)
    packing, meaning = random_packing(kind, 4, 64)
    given = {"max_tokens": 8192, "chunk_tokens": 150, **settings}
    return packed_runner(model, kv_dtype=packing, heads=heads, **given), meaning


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sights", [SIGHTS, MIXED])
def test_it_is_the_definition(model: Any, kind: str, sights: Any) -> None:
    runner, meaning = runner_of(model, kind, sights)
    tokens = random_tokens(500, 1)
    said, logits = logits_of_steps(runner, tokens, STEPS)
    doubles = (
        PackedDecoding(model, 16, of, seen)
        for of, seen in ((meaning, sights), (None, sights), (meaning, None))
    )
    wanted, exact, dense = (
        [each.prefill(tokens, 150), *(each.step(token) for token in said[:-1])] for each in doubles
    )
    error = apart(logits, wanted)
    assert min(apart(exact, wanted), apart(dense, wanted)) > 1e-4
    assert error < 0.02 * min(apart(exact, wanted), apart(dense, wanted))
    assert nothing_is_held(runner)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_seen_through_windows(model: Any, kind: str) -> None:
    runner, meaning = runner_of(model, kind, SIGHTS)
    docs = documents([300, 129])
    insert_all(runner, docs)
    prompt = [fresh(70, 1), *docs, fresh(30, 2)]
    asked = {"reserve_tokens": 150, "remember": False, "watched": False}
    with runner.prefill(prompt, "naive", **asked) as done:
        logits = [done.logits[-1], *steps_of(runner, decoding(runner, done, 151), 150)]
        said = [int(row.argmax()) for row in logits]
    known = {"exact_first": runner.packed.first_tokens}
    doubles = (
        DocumentDecoding(model, 150, 16, meaning, sights=seen, **known) for seen in (SIGHTS, None)
    )
    wanted, dense = (
        [each.prefill(prompt), *(each.step(token) for token in said[:-1])] for each in doubles
    )
    assert apart(logits, wanted) < 0.02 * apart(dense, wanted)
    for segment in runner.segments():
        runner.delete(segment.name)
    assert nothing_is_held(runner)


def test_batches_and_turns_say_what_each_says_alone(model: Any) -> None:
    # Exact pages have room for all of them, so nobody gives way.
    runner, _ = runner_of(model, "half-int4", SIGHTS, max_tokens=1 << 16)
    prompts = [random_tokens(count, count) for count in (1, 150, 400, 777)]
    how = {"max_new_tokens": 70, "remember": False, "stop": []}
    alone = [runner.generate(prompt, **how).tokens for prompt in prompts]
    assert [answer.tokens for answer in runner.generate_batch(prompts, **how)] == alone
    with runner.prefill(prompts[2], "prefix", remember=False) as done:
        wanted = runner.extend(done, random_tokens(40, 7).tolist())[-1]
    with runner.conversation("prefix", remember=False) as conversation:
        conversation.prefill(prompts[2])
        got = conversation.prefill(random_tokens(40, 7).tolist()).logits[-1]
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=0)
    assert nothing_is_held(runner)


def test_all_full_changes_no_bit(model: Any) -> None:
    tokens = random_tokens(400, 3)
    runner, _ = runner_of(model, "int4", np.zeros((2, 2, 2), np.int32))
    said, logits = logits_of_steps(runner, tokens, 30)
    plain = packed_runner(model, max_tokens=8192, chunk_tokens=150)
    others, wanted = logits_of_steps(plain, tokens, 30)
    assert said == others
    assert all(torch.equal(a, b) for a, b in zip(logits, wanted, strict=True))


@pytest.mark.parametrize(
    ("sights", "said"),
    [([129, 64], "got 129 and 64"), ([128, 65], "got 128 and 65"), ([4000, 0], "got 4000 and 0")],
)
def test_windows_beyond_what_is_kept_are_refused(model: Any, sights: Any, said: str) -> None:
    with pytest.raises(Unsupported, match=f"heads: expected windows of up to 128 newest .*{said}"):
        runner_of(model, "int4", np.tile(np.array(sights, np.int32), (2, 2, 1)))


def test_maps_that_do_not_go_are_refused(model: Any) -> None:
    plain = Runner(model, max_tokens=64, check=False, progress=False)
    estimating = kinds_map(plain.spec, [top_k(4, estimate=True), top_k(4)])
    with pytest.raises(Unsupported, match="heads: expected top_k heads without estimate beside"):
        packed_runner(model, heads=estimating)
    narrow = kinds_map(plain.spec, [top_k(2), top_k(4)])
    with pytest.raises(CorruptHeadMap, match="top_k.pages of more than 2 beside packed pages"):
        packed_runner(model, heads=narrow)
    other = class_map(SIGHTS, "another model")
    with pytest.raises(KvweaveError, match="model"):
        packed_runner(model, heads=other)


@pytest.mark.parametrize("sights", [SIGHTS, MIXED])
def test_what_heads_read_is_made_once(model: Any, sights: Any) -> None:
    """Graphs of decode steps go on reading the copies that a reach has on the device."""
    heads = runner_of(model, "int4", sights)[0].packed.heads
    for of in (heads.windows, heads.others, heads.unranked):
        assert all(of(layer) is of(layer) for layer in range(2))


@needs_cuda
@pytest.mark.parametrize("kind", KINDS)
def test_later_requests_are_answered_by_graphs_as_the_first(kind: str) -> None:
    model = tiny("llama", **SIZES).bfloat16().to("cuda")
    runner, _ = runner_of(model, kind, MIXED)
    first = logits_of_steps(runner, random_tokens(500, 1), 20)
    for seed in (2, 1, 3, 1):
        again = logits_of_steps(runner, random_tokens(500, seed), 20)
        if seed == 1:
            assert again[0] == first[0]
            assert apart(again[1], first[1]) == 0.0
