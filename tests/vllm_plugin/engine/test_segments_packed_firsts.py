"""A packed store whose documents keep their first tokens: who reads them, who has room for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvweave.adapters.vllm.segments import document_shards
from kvweave.adapters.vllm.segments.packed_room import PackedRoom
from kvweave.adapters.vllm.segments.store import SegmentStore
from kvweave.cache import KvShape
from kvweave.errors import CorruptShard, InvalidArgument
from kvweave.policies import Naive
from kvweave.runner.kv.pool_bases import SHARED, UNROTATED
from test_segments_packed_folder import IDS, TOKENS, Folder, basis_made, expect_same_reads
from versions import needs_cuda
from vllm_packed_store import DIM, HEADS, LAYERS, PAGE, Engine, turned
from vllm_segments import text

DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
FORMATS = [("half-int4", None, 1), ("planes-3", 5, 5), ("int4", 64, 64), ("quarter-bf16", 2, 2)]
"""A format, what is asked of first tokens, and how many of them are exact then."""


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no engine, and so no group of ranks to ask."""
    monkeypatch.setattr(document_shards, "all_of", lambda holds: holds)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def stores_of(kind: str, count: int | None, **settings: Any) -> list[Engine]:
    """One whose first tokens are exact, and one without, both with the same bases."""
    engines = [Engine(kind, exact_first=first, **settings) for first in (count, 0)]
    for engine in engines:
        basis_made(engine)
    bases, others = (engine.store.bases for engine in engines)
    if bases is not None:
        assert others is not None
        for number in (UNROTATED, SHARED):
            others.write(number, bases.on_host(number))
    return engines


def read(engine: Engine, prompt: list[int], at: int, count: int, **asked: Any) -> torch.Tensor:
    """A document's KV in the engine's pages, once a prompt that marks it was prefilled."""
    spans = [(at, at + count)]
    admitted, blocks, _ = engine.prefill(prompt, asked.pop("chunk", 1000), spans=spans, **asked)
    admitted.release()
    return engine.read(blocks, np.arange(at, at + count))


def expect_first(
    got: torch.Tensor, exact: torch.Tensor, without: torch.Tensor, count: int, delta: int
) -> None:
    """That so many tokens [layers, heads, n, 2, D] are the exact ones, and the others as without.

    Values to the bit, and keys too unless they were moved.
    """
    first, wanted = got[:, :, :count], exact[:, :, :count]
    torch.testing.assert_close(first.double(), turned(wanted, delta), atol=2e-5, rtol=0)
    assert torch.equal(
        first if delta == 0 else first[..., 1, :], wanted if delta == 0 else wanted[..., 1, :]
    )
    assert torch.equal(got[:, :, count:], without[:, :, count:])
    apart = (without[:, :, :count].double() - turned(wanted, delta)).abs().amax((0, 1, 3, 4))
    assert (apart > 1e-3).all()


# ---- reading --------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "asked", "count"), FORMATS)
@pytest.mark.parametrize("sizes", [(16,), (32, 64)])
@pytest.mark.parametrize("chunk", [7, 100, 1000])
@pytest.mark.parametrize("device", DEVICES)
def test_they_are_exact_wherever_a_document_is_read(
    kind: str, asked: int | None, count: int, sizes: tuple[int, ...], chunk: int, device: str
) -> None:
    """At the beginning of a prompt, at a page's, within one, twice, and in chunks of any size."""
    engine, plain = stores_of(kind, asked, sizes=sizes, device=device)
    document, prompts = text(150, 3), []
    for each in (engine, plain):
        request, exact = each.encode(document)
        request.freeze("one", 0, 150)
        request.release()
    for before in (0, 64, 37):
        prompts.append(([*text(before, 5), *document, 1], before))
    prompts.append(([*document, *text(9, 6), *document, 1], 159))
    for prompt, at in prompts:
        got, without = (read(each, prompt, at, 150, chunk=chunk) for each in (engine, plain))
        # The last token of a prompt is computed, no other.
        expect_first(got, exact, without, count, at)
    engine.store.cache.check()
    assert engine.store.cache.stats()["held"] == engine.store.cache.stats()["frozen"]


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_they_are_to_the_bit_what_an_exact_store_reads(count: int, dtype: torch.dtype) -> None:
    """Which turns its keys by the same copy, and rounds them once."""
    engine, exact = (Engine("half-int4", exact_first=count, dtype=dtype) for _ in range(2))
    exact.store = SegmentStore(engine.store.geometry, 1 << 22, 0.5, "m")  # type: ignore[assignment]
    found = []
    for each in (engine, exact):
        request, _ = each.encode(text(150, 3))
        found.append(read(each, [*text(37, 5), *text(150, 3), 1], 37, 150))
        request.release()
    assert torch.equal(found[0][:, :, :count], found[1][:, :, :count])
    assert not torch.equal(found[0], found[1])


def test_keys_that_do_not_turn_are_the_same() -> None:
    """By a policy that reads them as they lie."""
    engine, _ = stores_of("half-int4", 2)
    request, exact = engine.encode(text(150, 3))
    prompt, policy = [*text(37, 5), *text(150, 3), 1], Naive(delta_rope=False)
    got = read(engine, prompt, 37, 150, policy=policy)
    assert torch.equal(got[:, :, :2], exact[:, :, :2])
    request.release()


def test_a_part_of_a_document_and_others_are_read_packed() -> None:
    """From behind its first tokens on, fewer than these, and a text that a prompt computed."""
    engine, plain = stores_of("half-int4", 3)
    document = text(150, 3)
    for each in (engine, plain):
        each.encode(document)[0].release()
        # It begins as the document does, but was computed behind other text.
        each.prefill([*text(40, 1), *document[:3], *text(140, 2)], 1000, spans=[(40, 183)])
    behind = [*text(9, 5), *document[64:], 1]
    other = [*text(77, 6), *document[:3], *text(140, 2), 1]
    for prompt, at, count in ((behind, 9, 86), (other, 77, 143)):
        got, without = (read(each, prompt, at, count) for each in (engine, plain))
        assert torch.equal(got, without)
    # A prompt that goes on otherwise within them has another beginning.
    for shared, same in ((2, True), (3, False), (70, False)):
        prompt = [*document[:shared], *text(60, 8)]
        got, without = (read(each, prompt, 0, shared) for each in (engine, plain))
        assert torch.equal(got, without) == same


def test_two_documents_that_begin_alike_share_them_in_one_namespace() -> None:
    engine, _ = stores_of("planes-3", 4)
    texts = [[*text(4, 1), *text(90, seed)] for seed in (2, 3)]
    kept = [engine.encode(tokens, space)[0] for tokens in texts for space in ("a", "b")]
    # The prompt that made the basis has the third.
    assert engine.store.counts()["firsts"] == 3
    assert engine.store.bytes_by_state()["firsts"] == 3 * 4 * LAYERS * HEADS * 2 * DIM * 4
    for request in kept:
        request.release()


@pytest.mark.parametrize(("kind", "asked", "count"), FORMATS)
@pytest.mark.parametrize("sizes", [(16,), (32, 64)])
@pytest.mark.parametrize("chunk", [7, 100, 1000])
@pytest.mark.parametrize("device", DEVICES)
def test_so_are_those_of_a_prompt_to_who_goes_on_from_it(
    kind: str, asked: int | None, count: int, sizes: tuple[int, ...], chunk: int, device: str
) -> None:
    """And to who marks what it began with elsewhere; what it has of others is read packed."""
    engine, plain = stores_of(kind, asked, sizes=sizes, device=device)
    prompt = text(200, 3)
    for each in (engine, plain):
        each.prefill(prompt, chunk, spans=[(0, 130)])[0].release()
    exact = torch.stack([engine.written[at] for at in range(130)], 2)
    for longer, at in (([*prompt[:130], *text(80, 9)], 0), ([*text(37, 5), *prompt[:130], 1], 37)):
        got, without = (read(each, longer, at, 128, chunk=chunk) for each in (engine, plain))
        expect_first(got, exact[:, :, :128], without, count, at)
    behind = [*text(9, 5), *prompt[64:128], 1]
    got, without = (read(each, behind, 9, 64, chunk=chunk) for each in (engine, plain))
    assert torch.equal(got, without)


def test_what_the_engine_had_of_a_prompt_is_not_taken_for_exact() -> None:
    """vLLM may have copied it from packed pages; nor what a policy left out of its layers."""
    engine, tokens = Engine("half-int4", exact_first=2), text(100, 3)
    for name, value in (("computed_from", 64), ("exact", 1)):
        admitted = engine.store.admit(tokens, [], "", Naive(), discover=False)
        setattr(admitted, name, value)
        blocks = engine.blocks(100)
        engine.write(blocks, np.arange(100))
        engine.store.keep(admitted, 100, engine.layers, blocks)
        admitted.release()
        engine.store.cache.forget(None)
        assert engine.store.counts()["firsts"] == 0
    engine.prefill(tokens, 100)[0].release()
    assert engine.store.counts()["firsts"] == 1


# ---- rooms ----------------------------------------------------------------------------------


def test_the_least_used_goes_and_its_document_is_read_packed() -> None:
    engine = Engine("half-int4", arena=1 << 19)
    basis_made(engine)
    firsts = engine.store.firsts
    assert firsts is not None
    texts = [[at, *text(20, 40 + at)] for at in range(firsts.most + 1)]
    for tokens in texts[:-1]:
        engine.encode(tokens)[0].release()
    assert firsts.held == firsts.most
    read(engine, [7, *texts[0], 1], 1, 21)
    request, exact = engine.encode(texts[-1])
    regime = engine.store.regime
    has = [firsts.block_of(np.asarray(t, np.int32), "", regime) is not None for t in texts]
    assert has == [True, False, *[True] * (len(texts) - 2)]
    got = read(engine, [7, *texts[-1], 1], 1, 21)
    torch.testing.assert_close(
        got[:, :, :1].double(), turned(exact[:, :, :1], 1), atol=2e-5, rtol=0
    )
    request.release()


def test_a_store_that_begins_anew_has_none() -> None:
    """As when its memory is lost; a reset leaves those of namespaces that have documents."""
    engine = Engine("half-int4", exact_first=2)
    firsts = engine.store.firsts
    assert firsts is not None
    assert any(part is firsts.data for part in engine.store._parts())
    for space in ("a", "b"):
        request, _ = engine.encode(text(100, 3), space)
        if space == "a":
            request.freeze("one", 0, 100)
        request.release()
    engine.store.forget(documents=False)
    known = np.asarray(text(100, 3), np.int32), engine.store.regime
    assert [firsts.of_text(known[0], space, known[1]) is None for space in "ab"] == [False, True]
    firsts.data.fill_(torch.nan)
    engine.store.begin_anew()
    assert engine.store.counts()["firsts"] == engine.store.bytes_by_state()["firsts"] == 0
    assert not firsts.data.any()
    request, exact = engine.encode(text(100, 3), "a")
    got = read(engine, [5, *text(100, 3), 1], 1, 100, namespace="a")
    torch.testing.assert_close(
        got[:, :, :2].double(), turned(exact[:, :, :2], 1), atol=2e-5, rtol=0
    )
    request.release()


def test_without_room_for_them_a_store_is_refused() -> None:
    """In a format without bases too, with what it needs."""
    shape = KvShape(LAYERS, HEADS, DIM, PAGE, "f32")
    of, asked = Engine("int4").store.format, (False, 64 * shape.token_bytes)
    with pytest.raises(InvalidArgument, match="segment_bytes: expected at least") as refused:
        PackedRoom.within(shape, of, 1 << 15, *asked)
    least = int(str(refused.value.expected).split()[2].rstrip(","))
    room = PackedRoom.within(shape, of, least, *asked)
    assert (room.blocks, room.firsts, room.nbytes) == (1, 1, least)
    with pytest.raises(InvalidArgument):
        PackedRoom.within(shape, of, least - 1, *asked)


@pytest.mark.parametrize("wrong", [-1, 65, True, 1.5, "1"])
def test_other_numbers_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="exact_first: expected"):
        Engine("half-int4", exact_first=wrong)


# ---- what is made without them --------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 20])
def test_the_basis_is_of_the_other_tokens(count: int) -> None:
    """As numpy has the mean of what a document has behind them."""
    engine = Engine("half-int4", arena=1 << 24, exact_first=count)
    request, exact = engine.encode(text(640, 3))
    assert engine.store.bases is not None
    basis = engine.store.bases.bases.data[SHARED].unflatten(0, (LAYERS, HEADS))
    wanted = exact[:, :, count:].double().mean(2)
    torch.testing.assert_close(basis[..., 0, :].double(), wanted, atol=1e-6, rtol=1e-5)
    request.release()


@pytest.mark.parametrize("kind", ["half-int4", "planes-3"])
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_a_document_may_be_exact_altogether(kind: str, tokens: int) -> None:
    """No basis is made of it, whether it comes first of all or later."""
    for later in (False, True):
        engine = Engine(kind, exact_first=20)
        if later:
            basis_made(engine)
        assert engine.store.bases is not None
        before = engine.store.bases.bases.data[SHARED].clone()
        request, exact = engine.encode(text(tokens, 3))
        assert torch.equal(engine.store.bases.bases.data[SHARED], before)
        assert engine.store.bases.bases.data.isfinite().all()
        got = read(engine, [7, *text(tokens, 3), 1], 1, tokens)
        torch.testing.assert_close(got.double(), turned(exact, 1), atol=2e-5, rtol=0)
        request.release()


# ---- a folder -------------------------------------------------------------------------------


def firsts_of(engine: Engine, space: str = "a") -> torch.Tensor | None:
    """The exact first tokens that a store has of the folder's document."""
    assert engine.store.firsts is not None
    return engine.store.firsts.of_text(np.asarray(TOKENS, np.int32), space, engine.store.regime)


@pytest.mark.parametrize(("kind", "asked", "count"), FORMATS)
def test_they_come_back_to_the_bit(
    folder: Folder, kind: str, asked: int | None, count: int
) -> None:
    engine, other = (Engine(kind, exact_first=asked, seed=seed) for seed in range(2))
    basis_made(engine)
    basis_made(other)
    name, written = folder.insert(engine.store)
    wanted = firsts_of(engine)
    assert wanted is not None
    assert folder.store.shard(name).parts["firsts"] == count * LAYERS * HEADS * 2 * DIM * 4
    found = folder.read(other.store)
    assert found is not None
    came = folder.of(other.store).admit(found[0], "a")
    got = firsts_of(other)
    assert got is not None
    assert torch.equal(got, wanted)
    assert firsts_of(other, "") is None
    expect_same_reads(engine, other)
    for request in (written, came):
        request.release()


def test_shards_say_how_many_they_are_and_no_others_are_found(folder: Folder) -> None:
    folder.insert(Engine("half-int4", exact_first=2).store)
    for count in (0, None, 3):
        assert folder.read(Engine("half-int4", exact_first=count).store) is None
    assert folder.read(Engine("half-int4", exact_first=2).store) is not None
    assert folder.refused == []


def test_those_of_exact_documents_are_kept_as_they_come(folder: Folder) -> None:
    exact = SegmentStore(Engine().store.geometry, 1 << 22, 0.5, "m")
    _, written = folder.insert(exact)
    block, slot, *_ = written.entries()[0].tolist()
    wanted = exact.pages[block : block + LAYERS * HEADS, :, slot : slot + 3].clone()
    engine = Engine("half-int4", exact_first=3)
    found = folder.read(engine.store)
    assert found is not None
    for request in (written, folder.of(engine.store).admit(found[0], "a")):
        request.release()
    came = firsts_of(engine)
    assert came is not None
    assert torch.equal(came, wanted)


def spoiled(firsts: torch.Tensor, how: str) -> bytes:
    """A part of a shard that has something wrong in it."""
    if how == "short":
        return firsts.numpy().tobytes()[:-4]
    if how == "long":
        return firsts.numpy().tobytes() + bytes(4)
    if how == "empty":
        return b""
    firsts = firsts.clone()
    firsts[-1, -1, -1, -1] = float(how)
    return firsts.numpy().tobytes()


@pytest.mark.parametrize("how", ["short", "long", "empty", "nan", "inf", "-inf"])
def test_those_that_are_none_are_refused(folder: Folder, how: str) -> None:
    """Whatever a file's own checksums say: nobody reads them, of no other document either."""
    engine, other = (Engine("half-int4", exact_first=2, seed=seed) for seed in range(2))
    basis_made(engine)
    basis_made(other)
    name, written = folder.insert(engine.store)
    wanted, shard = firsts_of(engine), folder.store.shard(name)
    assert wanted is not None
    parts = {part: shard.read(part) for part in shard.parts if part != "tokens"}
    of = shard.provenance
    folder.store.delete(name)
    folder.store.put(of, IDS, {**parts, "firsts": spoiled(wanted, how)})
    before = other.store.cache.stats()
    assert folder.read(other.store) is None
    [error] = folder.refused
    assert isinstance(error, CorruptShard)
    assert "firsts" in str(error)
    assert firsts_of(other) is None
    assert other.store.cache.stats() == before
    # It is computed as if it were not there.
    with folder.insert(other.store)[1] as request:
        assert request.length == written.length
    assert firsts_of(other) is not None


def test_a_shard_without_them_is_read_packed(folder: Folder) -> None:
    """As one is of whose document they had gone when it was written."""
    engine, other = (Engine("half-int4", exact_first=2, seed=seed) for seed in range(2))
    name, written = folder.insert(engine.store)
    folder.store.delete(name)
    assert engine.store.firsts is not None
    engine.store.firsts.forget("a")
    shard = folder.of(engine.store).write(written, None)  # type: ignore[arg-type]
    assert "firsts" not in folder.store.shard(shard).parts
    found = folder.read(other.store)
    assert found is not None
    folder.of(other.store).admit(found[0], "a").release()
    assert firsts_of(other) is None
    expect_same_reads(engine, other)
