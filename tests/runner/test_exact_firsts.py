"""First tokens of packed documents that are exact: who reads them, keeps them, brings them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvweave
from decode_batches import decoding
from document_decoding import DocumentDecoding, documents, fresh, insert_all
from families import random_tokens, tiny
from kvweave import InvalidArgument, KvCache, KvShape, StoreDegraded, Unsupported
from kvweave.adapters.kvpress import PressedCache
from kvweave.cache import KvRequest
from kvweave.ops import Moments
from kvweave.policies import Naive
from kvweave.runner import Packing, Runner, Segment
from kvweave.runner.kv.exact_firsts import ExactFirsts, add_without_first
from kvweave.runner.tiers.choice import Speeds
from packed_decoding import apart, nothing_is_held, packed_runner, steps_of
from page_meaning import random_packing
from tiered_runners import FAST, SLOW, Stated, logits_behind

SIZES = {"head_dim": 64, "max_position_embeddings": 4096, "num_hidden_layers": 2}
ASKED = {"remember": False, "watched": False}


@pytest.fixture(scope="module")
def model() -> Any:
    """One whose first token at position 0 has keys and values that are far from all others."""
    made = tiny("llama", **SIZES)
    made.model.embed_tokens.weight.data[:3] *= 30
    return made


def runner_of(model: Any, name: str, exact_first: int | None, **settings: Any) -> tuple[Any, Any]:
    packing, meaning = random_packing(name, 4, 64)
    packing = replace(packing, exact_first=exact_first)
    given = {"max_tokens": 16384, "kv_dtype": packing, **settings}
    return packed_runner(model, **given), meaning


def aside_of(runner: Runner, prompt: Sequence[Any], policy: Any = "naive") -> Any:
    """The positions that a prompt has exactly, behind its sink."""
    with runner.prefill(prompt, policy, **ASKED) as done:
        found = np.flatnonzero(done.kv.packed.aside[:, 0] >= 0)
        return found[found >= 64].tolist()


# ---- reading --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"), [("half-int4", None), ("planes-3", 5), ("int4", 64), ("quarter-bf16", 1)]
)
def test_it_is_the_definition(model: Any, name: str, count: int | None) -> None:
    """Rows and steps, against transformers' own forward over pages with exact tokens at first.

    Documents behind the sink, across its end and in it; one twice, one shorter than what is exact.
    """
    docs = documents([300, 40, 3])
    prompt = [fresh(20, 1), docs[1], docs[0], fresh(5, 2), docs[2], docs[0], docs[1], fresh(30, 3)]
    runner, meaning = runner_of(model, name, count, chunk_tokens=150)
    insert_all(runner, docs)
    asked = {"reserve_tokens": 70, **ASKED}
    with runner.prefill(prompt, "naive", **asked) as done:
        sequence = decoding(runner, done, 70)
        logits = [done.logits[-1].float().clone(), *steps_of(runner, sequence, 69)]
        said = sequence.tokens
    exact = runner.packed.first_tokens
    assert exact == (1 if count is None else count)
    doubles = (DocumentDecoding(model, 150, 16, meaning, exact_first=n) for n in (exact, 0))
    wanted, packed = (
        [each.prefill(prompt), *(each.step(token) for token in said[:-1])] for each in doubles
    )

    assert apart(packed, wanted) > 1e-4
    assert apart(logits, wanted) < 0.02 * apart(packed, wanted)
    for segment in runner.segments():
        runner.delete(segment.name)
    assert nothing_is_held(runner)


def test_who_has_a_document_has_its_first_tokens_exactly(model: Any) -> None:
    """Marked and found, whatever the pages are in which it is found; a part of it has none."""
    doc = documents([300])[0]
    prompt = [fresh(70, 1), doc, fresh(30, 2)]
    own = [*range(64, 70), *range(370, 400)]
    runner, _ = runner_of(model, "half-int4", 2)
    # What an earlier prompt began with is the same text, in pages that are no document's.
    runner.prefill([doc, fresh(9, 3)], "prefix").release()
    before = runner.packed.cache.stats()["cached"]
    report = runner.encode(doc.tokens, "doc")
    assert report.packed.exact_first == 2
    assert runner.packed.stats()["firsts"] == 1
    assert before > 0
    assert aside_of(runner, prompt) == sorted([*own, 70, 71])
    assert aside_of(runner, prompt, Naive(delta_rope=False)) == sorted([*own, 70, 71])
    unmarked = np.concatenate([np.asarray(part.tokens) for part in prompt])
    with runner.prefill(unmarked, "naive", discover=True, **ASKED) as done:
        found = np.flatnonzero(done.kv.packed.aside[:, 0] >= 0)
    # Whole pages of it are found: its last 44 tokens are not.
    assert {70, 71} <= set(found.tolist())
    assert not {72, 73, 200, 325} & set(found.tolist())
    behind = np.concatenate((random_tokens(100, 5), np.asarray(doc.tokens[64:])))
    with runner.prefill(behind, "naive", discover=True, **ASKED) as done:
        found = np.flatnonzero(done.kv.packed.aside[:, 0] >= 0)
    assert not {100, 101} & set(found.tolist())


@pytest.mark.parametrize("name", ["int4", "int8", "half-int4"])
def test_without_them_no_bit_is_another(model: Any, name: str) -> None:
    docs = documents([300, 40])
    prompt = [fresh(70, 1), *docs, fresh(30, 2)]
    plain, _ = runner_of(model, name, 0)
    usual, _ = runner_of(model, name, None)
    for runner in (plain, usual):
        insert_all(runner, docs)
    assert plain.packed.firsts is None
    assert (usual.packed.firsts is None) == (name != "half-int4")
    assert plain.packed.nbytes <= usual.packed.nbytes
    assert torch.equal(plain.packed.pages.data, usual.packed.pages.data)
    own = [*range(64, 70), *range(410, 440)]
    assert aside_of(plain, prompt) == own
    assert set(aside_of(usual, prompt)) == {*own, *((70, 370) if name == "half-int4" else ())}


# ---- rooms ----------------------------------------------------------------------------------


def request_of(cache: KvCache, tokens: list[int], namespace: str = "") -> KvRequest:
    return cache.admit(np.asarray(tokens, np.int32), namespace=namespace, reuse="none")


def test_rooms_are_of_beginnings_and_the_least_used_goes() -> None:
    shape = KvShape(2, 2, 16, 16, "f32")
    cache = KvCache(shape, blocks=40, memory=False)
    pages = torch.randn(int(cache.stats()["arena_pages"]), 2, 16, 16)
    firsts = ExactFirsts(torch.zeros(1 + 2, 4, 2, 3, 16))
    texts = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2], [7, 8, 9] * 20]
    requests = [request_of(cache, text) for text in texts]
    kept = [firsts.keep(request, request, pages) for request in requests[:3]]
    # The second begins as the first does.
    assert (kept, firsts.held, firsts.most) == ([3, 3, 2], 2, 2)
    for text, request, count in zip(texts, requests[:3], kept, strict=False):
        first = int((requests[0] if count == 3 else request).entries()[0, 0])
        found = firsts.of_text(np.asarray(text), "", 0)
        assert torch.equal(found[:, :, :count], pages[first : first + 4, :, :count])
        assert not found[:, :, count:].any()
    # Nobody else's: of another namespace, of other frequencies, of fewer tokens.
    for tokens, namespace, regime in ([1, 2, 3], "a", 0), ([1, 2, 3], "", 1), ([1], "", 0):
        assert firsts.block_of(np.asarray(tokens), namespace, regime) is None
    firsts.block_of(np.asarray(texts[0]), "", 0)
    firsts.keep(requests[3], requests[3], pages)
    assert firsts.block_of(np.asarray(texts[2]), "", 0) is None
    assert firsts.block_of(np.asarray(texts[0]), "", 0) is not None
    # What comes from elsewhere does not take the place of what is here.
    firsts.put(np.asarray(texts[0]), "", 0, torch.full((4, 2, 3, 16), 5.0))
    assert not (firsts.of_text(np.asarray(texts[0]), "", 0) == 5.0).any()
    firsts.put(np.asarray(texts[2]), "b", 0, torch.full((4, 2, 3, 16), 5.0))
    assert (firsts.of_text(np.asarray(texts[2]), "b", 0) == 5.0).all()
    firsts.forget("b")
    assert (firsts.held, firsts.of_text(np.asarray(texts[2]), "b", 0)) == (1, None)


def test_those_that_no_document_brought_give_way_first() -> None:
    firsts = ExactFirsts(torch.zeros(1 + 2, 4, 2, 1, 16))

    def put(token: int, *, passing: bool, namespace: str = "") -> None:
        of = np.asarray([token], np.int32), namespace, 0, torch.full((4, 2, 1, 16), float(token))
        if passing:
            firsts.put_passing(*of)
        else:
            firsts.put(*of)

    def held() -> set[int]:
        every = [(t, firsts.of_text(np.asarray([t], np.int32), "", 0)) for t in range(1, 9)]
        assert all((found == float(t)).all() for t, found in every if found is not None)
        return {t for t, found in every if found is not None}

    put(1, passing=False)
    put(2, passing=True)
    put(3, passing=True)
    assert held() == {1, 3}
    # A document has the room of a prompt that was used since, not that of another document.
    put(4, passing=False)
    assert held() == {1, 4}
    put(5, passing=True)
    assert held() == {1, 4}
    put(6, passing=False)
    assert held() == {4, 6}
    # What a prompt had first a document may have too.
    firsts.forget("")
    put(7, passing=True)
    put(7, passing=False)
    put(8, passing=False)
    put(5, passing=True)
    assert held() == {7, 8}
    firsts.forget_all_but({"a"})
    assert held() == set()
    put(1, passing=True, namespace="a")
    firsts.forget_all_but({"a"})
    assert firsts.held == 1
    firsts.forget_all_but(set())
    assert firsts.held == 0


def test_a_namespace_that_is_forgotten_keeps_none(model: Any) -> None:
    runner, _ = runner_of(model, "half-int4", None, document_bytes=1 << 20)
    doc = random_tokens(200, 1).tolist()
    runner.insert(doc, "doc", "mine")
    runner.insert(random_tokens(200, 2).tolist(), "other")
    runner.flush()
    runner.forget("mine")
    # It is frozen still.
    assert runner.packed.stats()["firsts"] == 2
    runner.delete("doc", "mine")
    runner.forget("mine")
    assert runner.packed.stats()["firsts"] == 1
    assert runner.tiers.host.firsts.held == 1


def test_they_are_within_the_bytes_of_the_arena(model: Any) -> None:
    for size in (3 << 20, 8 << 20):
        runner, _ = runner_of(model, "planes-3", 8, max_tokens=None, arena_bytes=size)
        pages = runner._decoder.pages.nbytes + runner.packed.nbytes
        assert pages <= size
        firsts = runner.packed.firsts
        assert firsts.nbytes == (1 + firsts.most) * 2 * 2 * 2 * 8 * 64 * 4


# ---- what is made without them --------------------------------------------------------------


@pytest.mark.parametrize("left_out", [0, 1, 20, 64])
def test_moments_are_of_the_other_tokens(left_out: int) -> None:
    of, draws = Packing("half-int4").pages(16, 64, "bf16"), torch.Generator().manual_seed(1)
    cache = torch.randn(1 + 2 * 12, 2, 16, 16, generator=draws)
    packs = np.asarray([[1, 64, 1, 3, 5, 7], [3, 64, 9, 11, 13, 15], [5, 7, 17, 0, 0, 0]], np.int32)
    before, taken = cache.clone(), Moments(of, 2)
    add_without_first(taken, cache, packs, 2, left_out)
    assert torch.equal(cache, before)
    for page in range(2):
        rows = torch.cat([cache[block + page] for block in [1, 3, 5, 7, 9, 11, 13, 15, 17]], 1)
        rows = rows[:, left_out : 64 + 64 + 7].double()
        wanted = rows.mean(1)
        torch.testing.assert_close(
            torch.from_numpy(taken.basis())[page, :, 0].double(), wanted, atol=1e-6, rtol=1e-5
        )


def test_of_a_text_that_is_exact_altogether_nothing_is_chosen() -> None:
    of = Packing("planes-3").pages(16, 64, "bf16")
    taken, cache = Moments(of, 1), torch.randn(2, 2, 64, 16)
    add_without_first(taken, cache, np.asarray([[1, 3, 1]], np.int32), 1, 3)
    assert np.isfinite(taken.basis()).all()
    assert not taken.basis()[:, :, 0].any()


# ---- tiers ----------------------------------------------------------------------------------


def tiered(model: Any, name: str, exact_first: int | None = 2, **settings: Any) -> Runner:
    runner, _ = runner_of(model, name, exact_first, max_tokens=4096, **settings)
    runner.tiers.measured = Stated(Speeds(host=FAST, disk=FAST, compute=SLOW))
    return runner


def leave(runner: Runner) -> None:
    """Has nothing of any document be on the device, in any room."""
    for segment in runner.segments():
        runner.delete(segment.name)
    runner.packed.cache.forget("")
    runner.packed.firsts.forget("")
    runner.packed.firsts.data.fill_(torch.nan)
    runner.packed.pages.data.fill_(0xA5)


@pytest.mark.parametrize("name", ["half-int4", "planes-3", "int4"])
def test_they_come_back_from_the_host_and_a_store_to_the_bit(
    model: Any, name: str, tmp_path: Path
) -> None:
    docs = [random_tokens(200, 1).tolist(), [5], random_tokens(70, 2).tolist()]
    for settings, source in (({"document_bytes": 1 << 21}, "host"), ({"store": tmp_path}, "disk")):
        runner = tiered(model, name, **settings)
        for number, doc in enumerate(docs):
            runner.insert(doc, str(number))
        runner.flush()
        wanted, found = logits_behind(runner, *docs)
        assert found == ["device"] * 3
        leave(runner)
        got, found = logits_behind(runner, *docs)
        assert found == [source] * 3
        assert torch.equal(got, wanted)
        assert runner.packed.stats()["firsts"] == 3
        assert nothing_is_held(runner)
        # Inserted and restored ones have them as well.
        leave(runner)
        runner.insert(docs[0], "again")
        assert torch.equal(logits_behind(runner, *docs)[0], wanted)
    for number, doc in enumerate(docs):
        runner.insert(doc, str(number))
    runner.flush()
    other = tiered(model, name, store=tmp_path)
    assert {"0", "1", "2"} <= {segment.name for segment in other.restore()}
    assert torch.equal(logits_behind(other, *docs)[0], wanted)


def test_shards_say_how_many_they_are_and_no_others_are_found(model: Any, tmp_path: Path) -> None:
    doc = random_tokens(200, 1).tolist()
    first = tiered(model, "half-int4", 2, store=tmp_path)
    first.insert(doc, "doc")
    first.flush()
    for count, source in ((0, "computed"), (1, "computed"), (2, "disk")):
        runner = tiered(model, "half-int4", count, store=tmp_path)
        assert logits_behind(runner, doc)[1] == [source]


@pytest.mark.parametrize("value", [torch.zeros(4, 2, 1, 64), torch.zeros(0), torch.zeros(9999)])
def test_a_shard_with_others_is_refused(model: Any, tmp_path: Path, value: torch.Tensor) -> None:
    first = tiered(model, "half-int4", 2, store=tmp_path)
    form, tokens = first._knowledge._form, random_tokens(192, 2)
    first.insert(tokens, "doc")
    first.flush()
    with first.prefill(tokens, "full") as done:
        document = form.export(done.kv.packed.request)
    assert document.parts["firsts"].shape == (4, 2, 2, 64)
    other = random_tokens(192, 3).astype(np.int32)
    first.tiers.disk.store.put(document.header, other, {**document.parts, "firsts": value})
    runner = tiered(model, "half-int4", 2, store=tmp_path)
    with pytest.warns(StoreDegraded, match="firsts: expected"):
        assert logits_behind(runner, other.tolist())[1] == ["computed"]


def test_bytes_at_home_are_within_what_is_given(model: Any) -> None:
    size = 1 << 20
    tier = tiered(model, "half-int4", 64, document_bytes=size).tiers.host
    assert tier.firsts.most > 0
    assert tier.firsts.nbytes + tier.pages.nbytes <= size


# ---- requests that go on --------------------------------------------------------------------


def test_a_document_that_goes_leaves_who_reads_it_what_it_read(model: Any) -> None:
    doc = documents([300])[0]
    runner, _ = runner_of(model, "half-int4", None)
    insert_all(runner, [doc])
    prompt = [fresh(70, 1), doc, fresh(30, 2)]
    said = []
    for gone in (False, True):
        asked = {"reserve_tokens": 40, **ASKED}
        with runner.prefill(prompt, "naive", **asked) as done, done.fork() as fork:
            if gone:
                runner.delete("0")
                runner.packed.firsts.forget("")
                runner.packed.firsts.data.fill_(torch.nan)
            said.append([steps_of(runner, decoding(runner, one, 20), 19) for one in (done, fork)])
    for one, other in zip(*said, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("wrong", [-1, 65, True, 1.5, "1"])
def test_other_numbers_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="exact_first: expected"):
        Packing("half-int4", exact_first=wrong)


def test_what_has_no_documents_refuses_them(model: Any) -> None:
    for made in (kvweave.PagedCache, PressedCache):
        with pytest.raises(Unsupported, match="Packing without exact_first for a P"):
            made(model, kv_dtype=Packing("half-int4", exact_first=1))
        made(model, kv_dtype=Packing("half-int4", exact_first=0))


def test_segments_of_one_token_are_exact_altogether(model: Any) -> None:
    runner, _ = runner_of(model, "planes-3", 3)
    doc = Segment(tokens=[11, 12])
    insert_all(runner, [doc])
    own = [*range(64, 70), *range(72, 102)]
    assert aside_of(runner, [fresh(70, 1), doc, fresh(30, 2)]) == sorted([*own, 70, 71])
