"""Documents of several formats in the host's memory: they come back as they were, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from decode_batches import decoding
from families import random_tokens
from final_tiers import DOC, SHORT, SIGHTS, final_runner, leave_the_device, same
from kvweave import InvalidArgument, OutOfMemory
from kvweave.cache import KvRequest
from kvweave.runner.tiers.document import Document
from kvweave.runner.tiers.host_documents import HostDocuments
from packed_decoding import steps_of
from strategy_runners import BLOCKS, LONG, all_is_back, held_back, text_of, uneven_model
from tiered_runners import logits_behind, prompt_of

MUCH = 1 << 23


@pytest.fixture(scope="module")
def model() -> Any:
    return uneven_model()


def documents_of(count: int, tokens: int = 300) -> list[list[int]]:
    return [random_tokens(tokens + seed, 40 + seed).tolist() for seed in range(count)]


@pytest.mark.parametrize("sights", [None, SIGHTS])
@pytest.mark.parametrize("kind", ["int4", "int8", "quarter-bf16"])
def test_documents_come_back_as_they_were(model: Any, kind: str, sights: Any) -> None:
    """At other places too, and whatever the pool's memory has had meanwhile."""
    runner = final_runner(model, kind, sights=sights, document_bytes=MUCH)
    report = runner.encode(DOC, "long").packing
    runner.insert(SHORT, "short")
    runner.flush()
    assert len(report.formats) > 1
    asked = [(DOC, SHORT), (SHORT, DOC)]
    wanted = [logits_behind(runner, *docs)[0] for docs in asked]
    kept = runner.packed.stats()["final_bytes"]
    for order, logits in zip(asked, wanted, strict=True):
        leave_the_device(runner)
        got, found = logits_behind(runner, *order)
        assert found == ["host", "host"]
        assert same(got, logits)
        assert logits_behind(runner, *order)[1] == ["device", "device"]
    assert runner.packed.stats()["final_bytes"] == kept
    assert runner.packing_stats()["final"] + runner.packing_stats()["kept"] == 2
    leave_the_device(runner)


def test_what_is_not_final_comes_back_as_it_was_packed_first(model: Any, monkeypatch: Any) -> None:
    """Of one that is deleted before, and one that stays in the pool."""
    runner = final_runner(model, "int4", 0.3, document_bytes=MUCH)
    with held_back(monkeypatch) as go:
        report = runner.encode(DOC, "long").packing
        wanted, found = logits_behind(runner, DOC)
        assert found == ["device"]
        runner.delete("long")
        go.set()
        runner.flush()
    assert report.why == "deleted before it was packed finally"
    report = runner.encode(SHORT, "short").packing
    runner.flush()
    assert report.why == "as little is lost in the pool's format, which has no more bytes"
    alone = logits_behind(runner, SHORT)[0]
    leave_the_device(runner)
    for doc, logits in ((DOC, wanted), (SHORT, alone)):
        got, found = logits_behind(runner, doc)
        assert found == ["host"]
        assert same(got, logits)
    assert runner.packed.stats()["final_blocks"] == 0


def test_one_that_is_inserted_again_comes_from_the_host(model: Any) -> None:
    """Nothing is computed, or packed anew; it stays until its name is deleted."""
    runner = final_runner(model, document_bytes=MUCH)
    runner.insert(DOC, "long")
    runner.flush()
    wanted = logits_behind(runner, DOC)[0]
    leave_the_device(runner)
    runner.insert(DOC, "again")
    runner.forget("")
    assert text_of(runner).held.length == LONG
    got, found = logits_behind(runner, DOC)
    assert found == ["device"]
    assert same(got, wanted)
    assert runner.packing_stats()["final"] == 1
    runner.delete("again")
    assert all_is_back(runner)


# ---- room on the device -------------------------------------------------------------------


def test_what_is_cached_makes_room_for_what_comes(model: Any) -> None:
    """The one that was used least recently; not those with a name, and none that is read."""
    runner = final_runner(model, "int8", 0.9, 0.06, document_bytes=MUCH)
    docs = documents_of(4)
    wanted = []
    for number, doc in enumerate(docs):
        runner.insert(doc, str(number))
        runner.flush()
        wanted.append(logits_behind(runner, doc)[0])
        leave_the_device(runner)
    size, sources = runner.packed.final.memory.most_bytes, []
    for number in (0, 1, 2, 0, 3, 0, 1, 2, 3):
        got, found = logits_behind(runner, docs[number])
        assert found in (["host"], ["device"])
        sources.append(found[0])
        assert same(got, wanted[number])
        assert runner.packed.final.nbytes <= size
    assert len(runner.packed.final.texts) == 2
    assert sources == ["host"] * 3 + ["host", "host", "device", "host", "host", "host"]
    first = np.asarray(docs[0], np.int32)
    logits_behind(runner, docs[0])
    logits_behind(runner, docs[1])
    runner.insert(docs[0], "stays")
    for number in (1, 2, 3, 2, 1):
        assert same(logits_behind(runner, docs[number])[0], wanted[number])
        assert runner.packed.final.text_of(first, "", runner._prefiller.rotary.regime(300))
    runner.delete("stays")
    runner.forget("")
    assert all_is_back(runner)


def test_one_without_room_is_computed_and_who_reads_goes_on(model: Any) -> None:
    """What another request reads is not made room of; not for a second document either."""
    runner = final_runner(model, "int8", 0.9, 0.03, document_bytes=MUCH, max_tokens=1 << 14)
    docs = documents_of(3, 700)
    for number, doc in enumerate(docs):
        runner.insert(doc, str(number))
        runner.flush()
        leave_the_device(runner)
    alone = [steps_behind(runner, doc) for doc in docs]
    with runner.prefill(prompt_of(docs[0]), "naive", **ASKED) as done:
        sequence = decoding(runner, done, 20)
        logits = steps_of(runner, sequence, 3)
        fit = runner.packed.final.memory.most_bytes // text_of(runner).nbytes
        assert fit == 1
        got, found = logits_behind(runner, docs[1])
        assert found == ["computed"]
        assert got.isfinite().all()
        logits += steps_of(runner, sequence, 5)
    assert all(map(torch.equal, logits, alone[0]))
    with runner.prefill(prompt_of(docs[1], docs[2]), "naive", **ASKED) as both:
        why = [one.why for one in both.report.documents[1:-1]]
        assert [one.source for one in both.report.documents[1:-1]] == ["host", "computed"]
        assert why[1] == "there was no room for it on the device"
    runner.forget("")
    assert all_is_back(runner)


ASKED: dict[str, Any] = {"reserve_tokens": 20, "remember": False, "watched": False}


def steps_behind(runner: Any, doc: list[int]) -> list[torch.Tensor]:
    with runner.prefill(prompt_of(doc), "naive", **ASKED) as done:
        assert done.report.documents[1].source in ("host", "device")
        return steps_of(runner, decoding(runner, done, 20), 8)


def test_who_shares_one_that_came_reads_it_together(model: Any) -> None:
    """In a batch, at several places, each says what it says alone; it goes when all have ended."""
    runner = final_runner(model, document_bytes=MUCH, max_tokens=1 << 14, chunk_tokens=4096)
    docs = [DOC, SHORT]
    for number, doc in enumerate(docs):
        runner.insert(doc, str(number))
    runner.flush()
    prompts = [prompt_of(DOC, SHORT), prompt_of(SHORT, DOC), prompt_of(SHORT, SHORT)]
    how = {"max_new_tokens": 40, "remember": False, "stop": []}
    alone = [runner.generate(prompt, "naive", **how).tokens for prompt in prompts]
    leave_the_device(runner)
    engine = runner.engine(token_budget=4096, chunk_tokens=400)
    asked = [engine.submit(prompt, "naive", **how) for prompt in prompts]
    left = engine.submit(prompts[0], "naive", max_new_tokens=200, stop=[], remember=False)
    while not left.tokens:
        engine.step()
    assert engine.cancel(left)
    runner.forget("")
    engine.run()
    assert [request.result().tokens for request in asked] == alone
    runner.forget("")
    assert all_is_back(runner)


# ---- faults -------------------------------------------------------------------------------


def test_without_memory_for_it_a_document_is_computed(model: Any, monkeypatch: Any) -> None:
    runner = final_runner(model, document_bytes=MUCH)
    runner.insert(DOC, "long")
    runner.flush()
    wanted = logits_behind(runner, DOC)[0]
    leave_the_device(runner)
    read, count = HostDocuments.read, 0

    def fails(self: Any, kept: Any, part: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == 3:
            raise OutOfMemory("documents: expected memory for it, got none")
        return read(self, kept, part)

    with monkeypatch.context() as patched:
        patched.setattr(HostDocuments, "read", fails)
        with pytest.warns(match="is refused: documents: expected"):
            got, found = logits_behind(runner, DOC)
    assert found == ["computed"]
    assert got.isfinite().all()
    assert all_is_back(runner)
    got, found = logits_behind(runner, DOC)
    assert found == ["host"]
    assert same(got, wanted)


@pytest.mark.parametrize("where", ["read", "admit", "fork"])
def test_who_is_interrupted_midway_leaves_nothing(model: Any, monkeypatch: Any, where: str) -> None:
    runner = final_runner(model, document_bytes=MUCH)
    runner.insert(DOC, "long")
    runner.flush()
    wanted = logits_behind(runner, DOC)[0]
    leave_the_device(runner)

    def stops(*_given: Any, **_named: Any) -> None:
        raise KeyboardInterrupt

    class Stopping:
        """A request, or a cache, that is interrupted where it is asked for something."""

        def __init__(self, of: Any) -> None:
            self._of = of

        def __getattr__(self, name: str) -> Any:
            if name == where:
                return stops
            found = getattr(self._of, name)
            if name != "admit":
                return found
            return lambda *given, **named: Stopping(found(*given, **named))

    final = runner.packed.final
    with monkeypatch.context() as patched:
        if where == "read":
            patched.setattr(HostDocuments, "read", stops)
        else:
            patched.setattr(final, "_cache", Stopping(final._cache))
        with pytest.raises(KeyboardInterrupt):
            logits_behind(runner, DOC)
    assert all_is_back(runner)
    got, found = logits_behind(runner, DOC)
    assert found == ["host"]
    assert same(got, wanted)


# ---- the host's memory --------------------------------------------------------------------


@pytest.mark.parametrize("eviction", ["lru", "s3-fifo"])
def test_documents_come_and_go_within_their_bytes(model: Any, eviction: str) -> None:
    """In any order what is there comes back as it was; nothing is found that is not there."""
    size = 200_000
    runner = final_runner(
        model, "int4", 0.9, document_bytes=size, eviction=eviction, frozen_share=1.0
    )
    host = runner.tiers.host
    assert host.slots.nbytes <= size
    lengths = [1, 63, 64, 65, 300, 500, 700, 900]
    docs = [random_tokens(length, 60 + length).tolist() for length in lengths]
    wanted, seen = {}, {"host": 0, "computed": 0}
    generator = np.random.default_rng(5)
    for turn in range(32):
        number = turn % len(docs) if turn < len(docs) else int(generator.integers(len(docs)))
        doc = docs[number]
        there = host._kept.keys()
        got, found = logits_behind(runner, doc)
        if number in wanted and found == ["host"]:
            assert same(got, wanted[number])
        if turn >= len(docs):
            seen[found[0]] += 1
        assert (found == ["host"]) <= any(key[2] == bytes_of(doc) for key in there)
        runner.insert(doc, str(number))
        runner.flush()
        wanted[number] = logits_behind(runner, doc)[0]
        leave_the_device(runner)
        host.cache.check()
        check_slots(host)
        assert host.stats()["taken_bytes"] <= size
    assert min(seen["host"], seen["computed"]) > 3


def bytes_of(doc: list[int]) -> bytes:
    return np.asarray(doc, np.int32).tobytes()


def check_slots(host: HostDocuments) -> None:
    """Each slot is one document's or free, and each block is of the documents that it says."""
    slots = [host._free, *(kept.slots for kept in host._kept.values())]
    assert np.array_equal(np.sort(np.concatenate(slots)), np.arange(len(host.slots)))
    found = {block: set() for kept in host._kept.values() for block in kept.blocks.tolist()}
    for kept in host._kept.values():
        for block in kept.blocks.tolist():
            found[block].add(kept)
    assert host._by == found


def test_documents_that_begin_alike_are_kept_side_by_side(model: Any) -> None:
    """Each as it was packed; they share blocks in the books, and go when one of these does."""
    runner = final_runner(model, "int4", 0.9, document_bytes=MUCH)
    whole = random_tokens(640, 77).tolist()
    docs = [whole, whole[:128], whole[:100], whole[:192] + random_tokens(200, 78).tolist()]
    wanted = []
    for number, doc in enumerate(docs):
        runner.insert(doc, str(number))
        runner.flush()
        wanted.append(logits_behind(runner, doc)[0])
        leave_the_device(runner)
    host = runner.tiers.host
    for _ in range(2):
        for doc, logits in zip(docs, wanted, strict=True):
            got, found = logits_behind(runner, doc)
            assert found == ["host"]
            assert same(got, logits)
            leave_the_device(runner)
            check_slots(host)
    assert len(host._kept) == len(docs)
    host._drop_of(host._kept[("", host_regime(host), bytes_of(whole))].blocks[:1])
    check_slots(host)
    assert not host._kept
    assert len(host._free) == len(host.slots)


def host_regime(host: HostDocuments) -> int:
    return next(iter(host._kept))[1]


def test_one_that_is_larger_than_all_of_it_is_not_kept(model: Any) -> None:
    runner = final_runner(model, document_bytes=60_000)
    runner.insert(DOC, "long")
    runner.insert(SHORT, "short")
    runner.flush()
    wanted = logits_behind(runner, SHORT)[0]
    leave_the_device(runner)
    assert logits_behind(runner, DOC)[1] == ["computed"]
    got, found = logits_behind(runner, SHORT)
    assert found == ["host"]
    assert same(got, wanted)
    assert runner.tiers.stats()["documents"]["not on host"] == 1


def test_a_namespace_that_is_forgotten_is_gone_from_both(model: Any) -> None:
    runner = final_runner(model, document_bytes=MUCH)
    runner.insert(DOC, "long", "mine")
    runner.flush()
    leave_the_device(runner)
    assert logits_behind(runner, DOC)[1] == ["computed"]
    assert logits_behind(runner, DOC, namespace="mine")[1] == ["host"]
    assert runner.packed.stats()["final_blocks"] == BLOCKS
    runner.forget("mine")
    assert runner.packed.stats()["final_blocks"] == 0
    assert logits_behind(runner, DOC, namespace="mine")[1] == ["computed"]
    assert all_is_back(runner)


def test_bytes_that_hold_no_block_are_refused(model: Any) -> None:
    with pytest.raises(InvalidArgument, match="document_bytes: expected at least") as refused:
        final_runner(model, document_bytes=1000)
    least = int(str(refused.value).split("at least ")[1].split(",")[0])
    final_runner(model, document_bytes=least)


def test_a_request_that_is_released_holds_nothing(model: Any) -> None:
    """Whoever has a document brought and gives up; what is held is known by itself."""
    runner = final_runner(model, document_bytes=MUCH)
    runner.insert(DOC, "long")
    runner.flush()
    leave_the_device(runner)
    documents, pool = runner.packed.documents, runner.packed
    with runner._prefiller.computing:
        regime = runner._prefiller.rotary.regime(LONG)
        tokens = np.asarray(DOC, np.int32)
        request = runner.tiers.host.admit(Document(tokens, "", regime))
        assert isinstance(request, KvRequest)
        # Nobody else reads it, and still it stays.
        documents.forget_cached("")
        assert pool.stats()["final_blocks"] == BLOCKS
        request.release()
    assert pool.stats()["final_blocks"] == 0
    assert all_is_back(runner)
