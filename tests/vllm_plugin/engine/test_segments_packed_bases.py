"""A packed store whose pages lie in bases: how these are made, what pages mean, who has room."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch

from families import tiny
from kvweave import ops
from kvweave.adapters.vllm.options import PackedKind
from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from kvweave.adapters.vllm.segments.measured_pages import MOST_PAGES
from kvweave.adapters.vllm.segments.packed_room import MOST_OTHERS
from kvweave.adapters.vllm.segments.packed_store import PackedSegmentStore, format_of
from kvweave.adapters.vllm.segments.store import Geometry
from kvweave.cache import KvShape
from kvweave.errors import InvalidArgument, Unsupported
from kvweave.ops.packed_kv import Preset
from kvweave.policies import Full
from kvweave.runner.kv.pool_bases import QUERY_ROWS, SHARED, SHARED_TOKENS, UNROTATED
from packed_decoding import SeenDecoding
from page_meaning import of_format
from versions import needs_cuda
from vllm_packed_store import DIM, HEADS, INV_FREQ, LAYERS, PAGE, Engine, expect_top_r, turned
from vllm_segments import SIZES, segments, settings, text

KINDS = ["half-int4", "quarter-bf16", "planes-3", "planes-2.5"]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
SEVERAL = pytest.mark.parametrize("sizes", [(16,), (32, 64)])


def basis_of(engine: Engine, number: int) -> torch.Tensor:
    """A basis of the store [layers, heads, 2, rows, D]."""
    assert engine.store.bases is not None
    data = engine.store.bases.bases.data[number].cpu()
    return data.unflatten(0, (LAYERS, HEADS))


def expect_meant(
    kind: str, exact: torch.Tensor, found: torch.Tensor, basis: torch.Tensor, delta: int = 0
) -> None:
    """That tokens [layers, heads, n, 2, D] came as what a basis makes of the exact ones.

    Keys that were moved by `delta` positions are turned back.
    """
    found = turned(found, -delta)
    exact = exact.double()
    if kind.startswith("planes"):
        for layer in range(LAYERS):
            sides = exact[layer, :, :, 0], exact[layer, :, :, 1]
            means = of_format(ops.packed_format(kind, DIM), basis.flatten(0, 1))
            wanted = torch.stack(means(layer, sides), 2)
            # At the edge of two codes either is right.
            apart = (found[layer] - wanted).abs().amax(-1)
            assert (apart > 2e-5).double().mean() < 0.01
        return
    for layer in range(LAYERS):
        for head in range(HEADS):
            for side in range(2):
                pair = exact[layer, head, :, side], found[layer, head, :, side]
                expect_top_r(*pair, basis[layer, head, side], kind)


@pytest.mark.parametrize("kind", KINDS)
@SEVERAL
@pytest.mark.parametrize("device", DEVICES)
def test_pages_are_what_their_basis_makes_of_them(
    kind: str, sizes: tuple[int, ...], device: str
) -> None:
    """Those of the first tokens in no basis, later ones in theirs; both in one prompt, moved."""
    engine = Engine(kind, sizes=sizes, device=device, exact_first=0)
    tokens = text(1000, 3)
    admitted, _, came = engine.prefill(tokens, 200)
    assert not came
    written = torch.stack([engine.written[at] for at in range(len(tokens))], 2)
    admitted.release()
    bases = engine.store.bases
    assert bases is not None
    assert bases.shared == SHARED
    assert not bases.wants_moments
    # Pages that are whole after 200 and 400 tokens are packed before there are enough of them.
    first = 400 // PAGE * PAGE
    assert 600 // PAGE * PAGE >= SHARED_TOKENS > first

    for prompt, moved in (([*tokens, 1], 0), ([*text(37, 5), *tokens, 1], 37)):
        spans = [(moved, moved + 1000)] if moved else []
        asked, _, came = engine.prefill(prompt, 300, spans=spans)
        assert len(came) == 1000
        found = torch.stack([came[at + moved] for at in range(1000)], 2)
        for some, number in ((slice(first), UNROTATED), (slice(first, None), SHARED)):
            basis = basis_of(engine, number)
            expect_meant(kind, written[:, :, some], found[:, :, some], basis, moved)
        asked.release()
    engine.store.cache.check()
    assert engine.store.cache.stats()["held"] == 0


@pytest.mark.parametrize("kind", ["half-int4", "planes-3"])
@SEVERAL
@pytest.mark.parametrize("exact_first", [0, 1, 20])
def test_the_basis_is_of_the_first_tokens(
    kind: str, sizes: tuple[int, ...], exact_first: int
) -> None:
    """As numpy finds it, but for those that are exact; of a long text of the first pages alone."""
    engine = Engine(kind, arena=1 << 24, sizes=sizes, exact_first=exact_first)
    count = (MOST_PAGES + 3) * PAGE
    engine.prefill(text(count, 3), count)
    basis = basis_of(engine, SHARED).double().numpy()
    tokens = [engine.written[at] for at in range(exact_first, MOST_PAGES * PAGE)]
    values = torch.stack(tokens, 3).double().numpy()
    for layer in range(LAYERS):
        for head in range(HEADS):
            for side in range(2):
                x = values[layer, head, side]
                mean, spread = x.mean(0), np.cov(x.T, bias=True)
                rows = basis[layer, head, side]
                np.testing.assert_allclose(rows[0], mean, atol=1e-6)
                if kind == "half-int4":
                    spreads = np.sort(np.linalg.eigvalsh(spread))[::-1]
                    along = rows[1:] @ spread @ rows[1:].T
                    np.testing.assert_allclose(along, np.diag(spreads), atol=1e-5)


@pytest.mark.parametrize("kind", ["half-int4", "planes-3"])
def test_a_document_that_is_encoded_makes_the_basis(kind: str) -> None:
    """Of its exact pages, whose tokens are those that vLLM's pages would have."""
    engine, other = Engine(kind), Engine(kind)
    tokens = text(640, 4)
    admitted, _, _ = engine.prefill(tokens, 640)
    taken = other.store.admit(tokens, [], "", Full(), discover=False)
    with other.store.encoding(taken) as room:
        for position, (block, slot) in enumerate(
            room.request.slots(np.arange(640, dtype=np.int32)).tolist()
        ):
            value = engine.written[position].flatten(0, 1)
            room.pages[block : block + LAYERS * HEADS, :, slot] = value
    for number in (UNROTATED, SHARED):
        assert torch.equal(basis_of(engine, number), basis_of(other, number))
    ends = [one.request.entries()[:, 0].astype(int) for one in (admitted, taken)]
    stores = engine.store, other.store
    for blocks in zip(*ends, strict=True):
        pages = [s.packed.data[b : b + LAYERS * HEADS] for s, b in zip(stores, blocks, strict=True)]
        assert torch.equal(*pages)


def test_bits_are_shared_out_by_what_a_documents_queries_read(checkpoint: Any) -> None:
    """Of a model's own keys, values and queries, as transformers' attention has them."""
    tokens, own = text(8 * PAGE, 4), SeenDecoding(tiny("llama", **SIZES), meaning=None)
    own.prefill(tokens, len(tokens))
    choice = settings(segment_dtype="planes-3", exact_first=0)
    with segments(checkpoint("llama", **SIZES), choice) as (llm, seen):
        KnowledgeBase(llm.collective_rpc).insert("one", tokens)
        store = seen.worker.store
        got = store.bases.bases.data[SHARED].cpu()
        layers, heads, dim = store.geometry.layers, store.geometry.kv_heads, store.geometry.head_dim
    exact = torch.zeros(1 + 8, layers, heads, 2, PAGE, dim)
    for layer, (_, *sides) in enumerate(own.seen):
        for side, part in enumerate(sides):
            exact[1:, layer, :, side] = part.view(heads, 8, PAGE, dim).transpose(0, 1)
    blocks = layers * heads * np.arange(1, 9)
    packs = np.column_stack((blocks, np.full(8, PAGE), blocks)).astype(np.int32)
    of = ops.packed_format("planes-3", dim)
    told, untold = (ops.Moments(of, layers * heads) for _ in range(2))
    for moments in (told, untold):
        moments.add(exact.flatten(0, 2), packs)
    for layer, (query, *_) in enumerate(own.seen):
        rows = query[:, :: len(tokens) // QUERY_ROWS].transpose(0, 1).contiguous()
        told.add_queries(rows, first=layer * heads, kv_heads=heads)
    wanted, others = (torch.from_numpy(moments.basis()) for moments in (told, untold))
    # Bits of each channel; without queries others have them.
    assert torch.equal(got[:, :, 1], wanted[:, :, 1])
    assert not torch.equal(got[:, :, 1], others[:, :, 1])
    sides = own.seen[0][1].double(), own.seen[0][2].double()
    pairs = [of_format(of, basis)(0, sides) for basis in (got, wanted)]
    for one, other in zip(*pairs, strict=True):
        assert ((one - other).abs() > 1e-3).double().mean() < 0.01


@pytest.mark.parametrize("kind", get_args(PackedKind))
@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("arena", [1 << 20, 1 << 22, 1 << 24])
@pytest.mark.parametrize("first", [None, 0, 3, 64])
def test_bytes_are_the_formula(kind: Any, others: bool, arena: int, first: int | None) -> None:
    """What the store takes is within its bytes, bases and all; nearly all of them are used."""
    store = Engine(kind, arena, others=others, exact_first=first).store
    taken = [store._unpacked, store.packed.data]
    if store.bases is not None:
        rows = {"half-int4": 1 + DIM, "quarter-bf16": 1 + DIM}.get(kind, 2 + 2 * DIM)
        one = LAYERS * HEADS * 2 * rows * DIM * 4
        count = 2 + others * max(min((arena - taken[0].nbytes) // (8 * one), MOST_OTHERS), 1)
        assert store.bases.nbytes == count * one
        taken += [store.bases.bases.data, store.bases.bases.of]
        taken.append(store.bases.of_pages(0, 0, 1).of)
    tokens, slack = store.first_tokens, 0
    assert tokens == (store.bases is not None if first is None else first)
    if tokens:
        assert store.firsts is not None
        taken.append(store.firsts.data)
        slack = tokens * LAYERS * HEADS * 2 * DIM * 4
        count = store.room.blocks - 1
        assert store.firsts.nbytes == (1 + max(min(count, 64), count // 4)) * slack
    assert sum(part.nbytes for part in taken) == store.room.nbytes <= arena
    assert arena - store.room.nbytes < 2 * (store.block_bytes + slack) + 8 * LAYERS * HEADS
    assert store.cache.stats()["total"] <= store.room.blocks


def test_names_are_those_of_formats() -> None:
    assert set(get_args(PackedKind)) == set(get_args(Preset))


def geometry(head_dim: int) -> Geometry:
    return Geometry(LAYERS, HEADS, head_dim, torch.float32, torch.device("cpu"), INV_FREQ)


@pytest.mark.parametrize("kind", get_args(PackedKind))
def test_a_head_dim_that_a_format_has_not_is_refused(kind: Any) -> None:
    with pytest.raises(Unsupported, match="segment_dtype: expected a format that heads of 24 chan"):
        PackedSegmentStore(geometry(24), 1 << 22, 0.5, "m", kind, PAGE)
    for head_dim in (16, 64, 80, 96, 112, 128, 256):
        assert format_of(kind, head_dim, PAGE, torch.float16).head_dim == head_dim


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_without_room_for_its_bases_is_refused(kind: Any) -> None:
    """At start, with what it needs; with a byte less it is refused, and with these it is made."""
    with pytest.raises(InvalidArgument, match="segment_bytes: expected at least") as refused:
        Engine(kind, 1 << 16)
    least = int(str(refused.value.expected).split()[2].rstrip(","))
    assert Engine(kind, least).store.room.blocks == 1
    with pytest.raises(InvalidArgument, match="segment_bytes: expected at least"):
        Engine(kind, least - 1)
    shape = KvShape(LAYERS, HEADS, DIM, PAGE, "float32")
    assert Engine(kind, least).store.room.pages == shape.pages_for_blocks(1)
