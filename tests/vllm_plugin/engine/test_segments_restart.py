"""Knowledge bases that outlive their engine: the next one reads its documents from a folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from answer_schema import answered, undescribed
from families import tiny
from kvweave.adapters.vllm.segments import worker
from kvweave.adapters.vllm.segments.document_shards import DocumentShards
from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from kvweave.adapters.vllm.server.knowledge import PATH
from kvweave.adapters.vllm.server.openapi import PATHS
from kvweave.errors import ForeignStore, PoolFull, UnknownSegment
from kvweave.store import Store
from vllm_engines import Answer, same
from vllm_segments import (
    BOTH,
    DOCUMENT,
    OTHER,
    SECOND,
    SIZES,
    Marked,
    ask,
    segments,
    settings,
    text,
)

PART = "rank-0-of-1"
BLOCK_BYTES = 32 * 1024
"""Of the tiny model's store: 16 tokens of 2 layers."""

ALONE = Marked([text(20, 1), DOCUMENT, text(15, 2)])
ALONE_AGAIN = Marked([text(31, 3), DOCUMENT, text(15, 2)])


def refuse_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on an engine that computes a document fails."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a document is computed")

    monkeypatch.setattr(worker, "encode_document", refused)


@contextmanager
def restarted(
    model: Path, folder: Path, arena: int = 1 << 24, **changes: Any
) -> Iterator[tuple[Any, Any, KnowledgeBase]]:
    """An engine whose documents are kept in a folder, its counts and its knowledge base.

    All of a prompt's documents are read, whatever computing these few tokens would take.
    """
    kept = {"store": str(folder), "store_reads": "always", **changes}
    with segments(model, settings(arena=arena, **kept)) as (llm, counts):
        yield llm, counts, KnowledgeBase(llm.collective_rpc)


def first_run(model: Path, folder: Path, **changes: Any) -> Answer:
    """Inserts both documents for a tenant; what the engine then answers."""
    with restarted(model, folder, **changes) as (llm, counts, base):
        for name, tokens in (("handbook", DOCUMENT), ("letters/2026", OTHER)):
            entry = base.insert(name, tokens, "acme")
            assert entry["kept"], entry
        said = ask(llm, BOTH, namespace="acme", policy="naive")
        assert counts.total.hits["frozen"] == len(DOCUMENT) + len(OTHER)
    return said


def shards(folder: Path) -> list[Path]:
    return sorted((folder / PART / "shards").iterdir())


PLANES = {"segment_dtype": "planes-3"}


@pytest.mark.parametrize(
    ("packed", "blocks"),
    [({}, (7, 5)), ({"segment_dtype": "int4"}, (2, 2)), (PLANES, (2, 2))],
)
def test_a_restarted_engine_says_the_same(
    checkpoint, tmp_path: Path, monkeypatch, packed: dict, blocks: tuple[int, int]
) -> None:
    """From the folder, for the first prompt that marks a document; other tenants find nothing.

    A store in packed pages has them there as they lie, in fewer bytes, and with their bases: those
    of planes are of another text than what the next engine packs first.
    """
    model = checkpoint("llama")
    said = first_run(model, tmp_path, **packed)
    refuse_encoding(monkeypatch)
    with restarted(model, tmp_path, **packed) as (llm, counts, base):
        assert base.entries("other") == []
        waiting = [(e["name"], e["tokens"], e["resident_blocks"]) for e in base.entries("acme")]
        assert waiting == [("handbook", 100, 0), ("letters/2026", 70, 0)]
        for seed in (40, 41):
            ask(llm, Marked([tuple(text(400, seed))]), 1, namespace="other", policy="full")
        ask(llm, BOTH, namespace="other", policy="naive")
        assert counts.total.reused_tokens == base.store()["brought_documents"] == 0
        same([ask(llm, BOTH, namespace="acme", policy="naive")], [said])
        assert counts.total.hits["frozen"] == len(DOCUMENT) + len(OTHER)
        there = [(entry["resident_blocks"], entry["kept"]) for entry in base.entries()]
        assert there == [(count, True) for count in blocks]
        same([ask(llm, BOTH, namespace="acme", policy="naive")], [said])
        assert base.store()["brought_documents"] == 2
        # What is inserted again is read too, under another name as well.
        assert base.insert("handbook", DOCUMENT, "acme")["kept"]
        assert base.insert("another name", OTHER, "acme")["kept"]
        base.delete("handbook", "acme")
        base.delete("letters/2026", "acme")
        assert [entry["name"] for entry in base.entries()] == ["another name"]
        with pytest.raises(UnknownSegment):
            base.delete("handbook", "acme")
    assert len(shards(tmp_path)) == 1


def test_pages_of_another_format_are_computed_anew(checkpoint, tmp_path: Path) -> None:
    """An exact store knows no packed pages, and what it writes anew a packed one packs."""
    model, said, sizes = checkpoint("llama"), [], []
    for packed, found in (({"segment_dtype": "int4"}, 0), ({}, 0), ({"segment_dtype": "int4"}, 1)):
        with restarted(model, tmp_path, **packed) as (llm, counts, base):
            ask(llm, ALONE, policy="naive")
            brought = base.store()
            assert (brought["brought_documents"], brought["brought_refused"]) == (found, 0)
            assert base.insert("handbook", DOCUMENT)["kept"]
            said.append(ask(llm, ALONE_AGAIN, policy="naive"))
            assert counts.total.hits["frozen"] >= len(DOCUMENT)
        [shard] = shards(tmp_path)
        sizes.append(shard.stat().st_size)
    same([said[2]], [said[0]])
    assert sizes[2] == sizes[1] > 2 * sizes[0]


def test_a_text_that_a_chat_trimmed_is_its_documents(checkpoint, tmp_path: Path) -> None:
    """It lacks the last tokens; a text that begins otherwise is nobody's."""
    model = checkpoint("llama")
    with restarted(model, tmp_path) as (_, _, base):
        base.insert("handbook", DOCUMENT)
    with restarted(model, tmp_path) as (llm, counts, base):
        ask(llm, Marked([text(20, 1), DOCUMENT[1:], text(15, 2)]), policy="naive")
        assert base.store()["brought_documents"] == counts.total.reused_tokens == 0
        ask(llm, Marked([text(20, 1), DOCUMENT[:-3], text(15, 2)]), policy="naive")
        assert base.store()["brought_documents"] == 1
        # Blocks that are whole in both are found.
        assert counts.total.hits["frozen"] >= 96


def test_a_document_that_is_computed_sooner_is_not_read(
    checkpoint, tmp_path: Path, monkeypatch
) -> None:
    """Of a folder that takes a second a document one is read, by which that is known."""
    model = checkpoint("llama")
    first_run(model, tmp_path)
    monkeypatch.setattr(DocumentShards, "read", slowly(DocumentShards.read))
    with restarted(model, tmp_path, store_reads="faster") as (llm, counts, base):
        ask(llm, Marked([text(20, 1), DOCUMENT, text(15, 2)]), namespace="acme", policy="naive")
        found = base.store()
        assert (found["brought_documents"], found["brought_declined"]) == (1, 0)
        # The second one is computed with its prompt, and found by the next.
        for seed in (3, 5):
            counts.anew()
            given = Marked([text(20, seed), OTHER, text(15, 4)])
            ask(llm, given, namespace="acme", policy="naive")
            found = base.store()
            assert (found["brought_documents"], found["brought_declined"]) == (1, 1)
        assert counts.total.hits == {"request": len(OTHER)}


def slowly(read: Any) -> Any:
    def waiting(*asked: Any) -> Any:
        time.sleep(1.0)
        return read(*asked)

    return waiting


def test_what_is_spoiled_is_computed(checkpoint, tmp_path: Path) -> None:
    """One byte of one document, the end of the other; the engine lives and puts them anew."""
    model = checkpoint("llama")
    first_run(model, tmp_path)
    spoiled, cut = shards(tmp_path)
    data = bytearray(spoiled.read_bytes())
    data[-5000] ^= 1
    spoiled.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-4096])
    with segments(model, settings()) as (llm, _):
        wanted = ask(llm, BOTH, policy="naive")
    with restarted(model, tmp_path) as (llm, counts, base):
        same([ask(llm, BOTH, namespace="acme", policy="naive")], [wanted])
        assert counts.total.reused_tokens == 0
        assert base.store()["brought_refused"] == 2
        for name, tokens in (("handbook", DOCUMENT), ("letters/2026", OTHER)):
            assert base.insert(name, tokens, "acme")["kept"]
    store = Store(tmp_path / PART)
    assert store.verify_documents() == []
    for shard in store.list():
        store.verify(shard.name)


@pytest.mark.parametrize("foreign", ["weights", "rope", "dtype"])
def test_documents_of_another_model_are_none(checkpoint, tmp_path: Path, foreign: str) -> None:
    """A folder of another model is refused at start, unless several are to use it."""
    model, changes = checkpoint("llama"), {}
    first_run(model, tmp_path / "store")
    if foreign == "weights":
        other = tiny("llama", **SIZES)
        with torch.no_grad():
            other.model.layers[2].self_attn.k_proj.weight[0, 0] += 1
        model = tmp_path / "model"
        other.save_pretrained(model)
    shared = {"store_shared": True} if foreign == "weights" else {}
    choice = settings(store=str(tmp_path / "store"), **shared)
    if foreign == "rope":
        rope = {"rope_type": "default", "rope_theta": 5e5}
        choice["hf_overrides"] = {**choice["hf_overrides"], "rope_parameters": rope}
    if foreign == "dtype":
        changes = {"dtype": "bfloat16"}
    if foreign == "rope":
        with pytest.raises(ForeignStore, match="or set store_shared"), segments(model, choice):
            pass
        return
    with segments(model, choice, **changes) as (llm, counts):
        base = KnowledgeBase(llm.collective_rpc)
        assert len(ask(llm, BOTH, namespace="acme", policy="naive").tokens) == 6
        assert counts.total.reused_tokens == base.store()["brought_documents"] == 0


def test_more_documents_than_the_device_holds(checkpoint, tmp_path: Path, monkeypatch) -> None:
    """Those used last are frozen; the others are read when a prompt marks them."""
    model, documents = checkpoint("llama"), {f"document {n}": tuple(text(90, n)) for n in range(9)}
    few = {"arena": 40 * BLOCK_BYTES, "frozen_share": 0.4}
    prompts = [Marked([text(7, 50), tokens, text(9, 51)]) for tokens in documents.values()]
    with segments(model, settings()) as (llm, _):
        base = KnowledgeBase(llm.collective_rpc)
        for name, tokens in documents.items():
            base.insert(name, tokens)
        wanted = [ask(llm, given, policy="naive") for given in prompts]
    with restarted(model, tmp_path, **few) as (_, _, base):
        for name, tokens in documents.items():
            assert base.insert(name, tokens)["kept"]
        with pytest.raises(PoolFull, match="frozen share"):
            base.insert("too long", text(300, 60))
    refuse_encoding(monkeypatch)
    with restarted(model, tmp_path, **few) as (llm, counts, base):
        same([ask(llm, given, policy="naive") for given in prompts], wanted)
        assert counts.total.reused_tokens == 9 * 90
        resident = [entry["name"] for entry in base.entries() if entry["resident_blocks"]]
        assert resident[-1] == "document 8"
        assert len(resident) < 9 == len(base.entries())


def test_a_folder_without_room_says_so(checkpoint, tmp_path: Path) -> None:
    """The document is there for this engine; the next one has none."""
    model = checkpoint("llama")
    with restarted(model, tmp_path, store_bytes=50_000) as (llm, counts, base):
        entry = base.insert("handbook", DOCUMENT)
        assert undescribed(entry, answered(PATHS, "post", PATH)) == []
        assert not entry["kept"]
        assert "room" in entry["not_kept"] or "bytes" in entry["not_kept"], entry
        assert [(e["name"], e["kept"]) for e in base.entries()] == [("handbook", False)]
        ask(llm, SECOND, policy="naive")
        assert counts.total.hits["frozen"] == len(DOCUMENT)
    with restarted(model, tmp_path) as (_, _, base):
        assert base.entries() == []


def test_a_folder_of_other_ranks_of_another_model_is_refused(checkpoint, tmp_path: Path) -> None:
    """It need not be read: it is a folder below the one that belongs to a model."""
    Store(tmp_path / "rank-1-of-2", hash="sha256", model="another")
    (tmp_path / "rank-0-of-2").mkdir()
    (tmp_path / "rank-0-of-2" / "store.json").write_text("spoiled")
    choice = settings(store=str(tmp_path))
    with pytest.raises(ForeignStore, match="rank-1-of-2"), segments(checkpoint("llama"), choice):
        pass
