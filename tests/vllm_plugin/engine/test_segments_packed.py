"""Segments in packed pages: the store against its definition, and engines that have one."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from kvweave.adapters.vllm.segments.packed_store import page_tokens_of
from kvweave.adapters.vllm.segments.store import AdmittedPrompt
from kvweave.errors import InvalidArgument, NamespaceConflict, PoolFull, Unsupported
from kvweave.policies import Naive, SparseX
from versions import needs_cuda
from vllm_engines import Answer
from vllm_packed_store import DIM, HEADS, LAYERS, PAGE, Engine, packed, turned
from vllm_segments import SIZES, Marked, ask, segments, settings, text


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("chunk", [7, 64, 100, 1000])
@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_what_is_reused_is_what_pages_stand_for(
    kind: str, chunk: int, size: int, device: str
) -> None:
    """A document elsewhere, and a prefix that ends inside a page, whatever the chunks."""
    engine = Engine(kind, sizes=(size,), device=device)
    document = text(150, 3)
    first = [*text(40, 1), *document, *text(21, 2)]
    admitted, blocks, came = engine.prefill(first, chunk, spans=[(40, 190)])
    assert not came
    values = engine.read(blocks, np.arange(len(first)))
    pages = [packed(values[:, :, at : at + PAGE], kind) for at in range(0, len(first), PAGE)]
    wanted = torch.cat(pages, 2)
    admitted.release()
    engine.store.cache.check()

    moved = [*text(77, 5), *document, *text(9, 6)]
    admitted, _, came = engine.prefill(moved, chunk, spans=[(77, 227)])
    assert len(came) >= 140
    for position, found in came.items():
        expected = turned(wanted[:, :, position - 37], 37)
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)
    admitted.release()

    longer = [*first[:100], *text(80, 9)]
    admitted, blocks, came = engine.prefill(longer, chunk)
    # The last token of what is shared may be computed anew, no other.
    assert len(came) >= 99
    for position, found in came.items():
        torch.testing.assert_close(found, wanted[:, :, position], atol=0, rtol=0)
    admitted.release()

    # The page in which the prefix ended was packed again, with what came behind it.
    values = engine.read(blocks, np.arange(len(longer)))
    again, _, came = engine.prefill([*longer, 1], 1000)
    expected = torch.cat([packed(values[:, :, a : a + PAGE], kind) for a in (64, 128)], 2)
    for position in range(64, 170):
        torch.testing.assert_close(came[position], expected[:, :, position - 64], atol=0, rtol=0)
    again.release()
    engine.store.cache.check()
    assert engine.store.cache.stats()["held"] == 0


@pytest.mark.parametrize("chunk", [7, 64, 100, 1000])
@pytest.mark.parametrize("sizes", [(16, 16), (48, 16), (32, 64)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_a_window_keeps_all_of_a_page_until_it_is_packed(
    chunk: int, sizes: tuple[int, int], device: str
) -> None:
    """Windows as long as a page, in blocks of another size than other heads'."""
    size = page_tokens_of(math.lcm(*sizes))
    engine = Engine("int4", sizes=sizes, device=device, window=size)
    document = text(150, 3)
    first = [*text(140, 1), *document, *text(21, 2)]
    admitted, _, came = engine.prefill(first, chunk, spans=[(140, 290)])
    assert not came
    values = torch.stack([engine.written[at] for at in range(len(first))], 2)
    ends = range(0, len(first), size)
    wanted = torch.cat([packed(values[:, :, at : at + size], "int4", size) for at in ends], 2)
    assert wanted.isfinite().all()
    admitted.release()

    longer, _, came = engine.prefill([*first[:200], *text(150, 9)], chunk)
    assert len(came) >= 199
    for position, found in came.items():
        torch.testing.assert_close(found, wanted[:, :, position], atol=0, rtol=0)
    longer.release()

    moved, _, came = engine.prefill([*text(9, 6), *document, *text(30, 7)], chunk, spans=[(9, 159)])
    assert len(came) >= 150 - size
    for position, found in came.items():
        expected = turned(wanted[:, :, position + 131], -131)
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)
    moved.release()

    # What was packed anew behind the prefix has lost nothing either.
    again, _, came = engine.prefill([*first[:200], *text(150, 9), 1], 1000)
    assert len(came) >= 350
    assert all(bool(found.isfinite().all()) for found in came.values())
    again.release()
    engine.store.cache.check()


def test_a_prompt_that_ends_early_leaves_nothing_half_packed() -> None:
    engine = Engine()
    tokens = text(200, 1)
    admitted = engine.store.admit(tokens, [], "", Naive(), discover=False)
    blocks = engine.blocks(200)
    engine.write(blocks, np.arange(100))
    engine.store.keep(admitted, 100, engine.layers, blocks)
    assert admitted.stored == 64
    admitted.release()
    assert (
        engine.store.cache.match_prefix(
            np.asarray(tokens, np.int32), "", regime=engine.store.regime
        )
        == 64
    )


def test_more_blocks_than_are_unpacked_at_once() -> None:
    engine = Engine(arena=1 << 20)
    assert 1 <= engine.store.room.at_once < 8
    tokens = text(700, 7)
    admitted, blocks, _ = engine.prefill(tokens, 700)
    values = engine.read(blocks, np.arange(700))
    admitted.release()
    admitted, _, came = engine.prefill([*tokens, 1], 701)
    assert len(came) == 700
    for page in range(11):
        expected = packed(values[:, :, page * PAGE : (page + 1) * PAGE], "int8")
        for slot in range(expected.shape[2]):
            assert torch.equal(came[page * PAGE + slot], expected[:, :, slot])
    admitted.release()


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_a_document_is_encoded_in_exact_pages_and_packed_behind_it(kind: str) -> None:
    engine = Engine(kind)
    tokens = text(150, 4)
    admitted: AdmittedPrompt = engine.store.admit(tokens, [], "", Naive(), discover=False)
    draws = np.random.default_rng(2)
    with engine.store.encoding(admitted) as room:
        assert len(room.request.entries()) == 10
        drawn = torch.from_numpy(draws.normal(size=(LAYERS, HEADS, 150, 2, DIM)).astype("f4"))
        for position, (block, slot) in enumerate(
            room.request.slots(np.arange(150, dtype=np.int32)).tolist()
        ):
            for layer in range(LAYERS):
                for head in range(HEADS):
                    page = block + layer * HEADS + head
                    room.pages[page, :, slot] = drawn[layer, head, position]
    admitted.request.freeze("one", 0, 150)
    admitted.release()
    payload = room.payload(engine.store.rope)
    expect_document(engine, tokens, drawn, kind)

    # Another store takes what that one exported, and packs the same.
    other = Engine(kind)
    request = other.store.take(payload, "")
    assert other.store.cache.stats()["held"] > 0
    request.freeze("one", 0, 150)
    request.release()
    expect_document(other, tokens, drawn, kind)
    with pytest.raises(NamespaceConflict):
        other.store.take(payload, "another")
    small = Engine(kind, arena=1 << 16)
    small_free = small.store.cache.stats()["free"]
    with pytest.raises(PoolFull):
        small.store.take(payload, "")
    assert small.store.cache.stats()["free"] == small_free


def expect_document(engine: Engine, tokens: list[int], exact: torch.Tensor, kind: str) -> None:
    """A prompt reuses a document elsewhere as what its pages stand for."""
    asked, _, came = engine.prefill([*text(30, 1), *tokens, 1], 1000, spans=[(30, 180)])
    wanted = torch.cat([packed(exact[:, :, at : at + PAGE], kind) for at in range(0, 150, PAGE)], 2)
    assert len(came) == 150
    for position, found in came.items():
        expected = turned(wanted[:, :, position - 30], 30)
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)
    asked.release()


def test_bytes_are_those_of_packed_blocks() -> None:
    arena = 1 << 24
    for kind, least in (("int8", 1.7), ("int4", 3.0)):
        store = Engine(kind, arena).store
        tokens = store.cache.stats()["total"] * PAGE
        dense = tokens * LAYERS * HEADS * 2 * DIM * 2
        scratch = store._unpacked.nbytes
        assert dense / (arena - scratch) > least
        held = store.packed.data.nbytes + scratch
        assert 0.9 * arena < held <= arena
        assert store.bytes_by_state()["free"] == store.cache.stats()["free"] * store.block_bytes


def test_pages_of_the_engine_make_packed_ones() -> None:
    for size, page in ((8, 64), (16, 64), (32, 64), (48, 96), (64, 64), (128, 128), (256, 256)):
        assert Engine(sizes=(size,)).store.page_tokens == page
    for size in (24, 272, 512):
        with pytest.raises(Unsupported, match="segment_dtype: expected blocks of vLLM that make"):
            Engine(sizes=(size,))


def test_a_store_that_is_too_small_takes_no_prompt() -> None:
    engine = Engine(arena=1 << 10)
    with pytest.raises(PoolFull):
        engine.store.admit(text(300, 1), [], "", SparseX(), discover=False)


def apart(one: Answer, other: Answer) -> float:
    """How far the log-probabilities of the first token are apart."""
    return abs(one.logprobs[0] - other.logprobs[0])


LONG = tuple(text(150, 9))
ASKED = [Marked([text(20, 1), LONG, text(15, 2)]), Marked([text(37, 3), LONG, text(21, 4)])]
OF_BASE = Marked([text(9, 6), tuple(text(120, 33)), text(30, 7)])


def asked_of(model: Path, dtype: str | None) -> list[Answer]:
    """What an engine says of documents of a prompt and of its knowledge base."""
    chosen = settings(**({} if dtype is None else {"segment_dtype": dtype}))
    with segments(model, chosen, max_num_batched_tokens=48) as (llm, counts):
        # By then pages that are packed in a basis have one that was made of text.
        for seed in (50, 51):
            ask(llm, Marked([tuple(text(400, seed))]), 1, policy="full")
        said = [ask(llm, one, policy="naive") for one in ASKED]
        base = KnowledgeBase(llm.collective_rpc)
        base.insert("one", text(120, 33))
        assert [entry["tokens"] for entry in base.entries()] == [120]
        said.append(ask(llm, OF_BASE, policy="naive"))
    assert counts.total.hits == {"request": 150, "frozen": 120}
    assert counts.total.reused_tokens == 270
    return said


@cache
def exactly(model: Path) -> list[Answer]:
    return asked_of(model, None)


NEAR = {"int8": 0.02, "int4": 0.4, "half-int4": 1.5, "planes-3": 1.5}
"""How far formats may take the log-probability of a first token of a model without sense."""


@pytest.mark.parametrize("kind", NEAR)
def test_answers_are_near_those_of_exact_segments(checkpoint: Any, kind: str) -> None:
    model = checkpoint("llama", **SIZES)
    exact, said = exactly(model), asked_of(model, kind)
    # What is computed whole is the same; what is reused differs by its codes.
    assert apart(exact[0], said[0]) < 1e-4
    for one, near in zip(exact[1:], said[1:], strict=True):
        assert 0 < apart(one, near) < NEAR[kind]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"segment_dtype": "int3"}, "segment_dtype: expected one of int4, int8, half-int4, "),
        ({"segment_dtype": 4}, "segment_dtype: expected one of int4, int8, half-int4, "),
    ],
)
def test_what_is_no_format_is_refused(given: dict[str, Any], match: str) -> None:
    from kvweave.adapters.vllm.options import options_of

    with pytest.raises(InvalidArgument, match=match):
        options_of({"kvweave": {"segment_bytes": 1 << 20, **given}}, {})
    with pytest.raises(InvalidArgument, match="it beside segment_bytes"):
        options_of({"kvweave": {"segment_dtype": "int4"}}, {})
