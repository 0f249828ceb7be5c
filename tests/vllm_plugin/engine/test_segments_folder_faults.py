"""A folder of documents whose disk, device or other engines do what nobody expects. No engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvweave.adapters.vllm.segments import document_shards, kept_documents, worker
from kvweave.adapters.vllm.segments.kept_documents import KeptDocuments
from kvweave.adapters.vllm.segments.kept_weights import KeptWeights
from kvweave.adapters.vllm.segments.worker import SegmentWorker
from kvweave.errors import (
    CorruptPayload,
    OutOfMemory,
    PoolFull,
    StoreUnavailable,
    UnknownSegment,
)
from kvweave.policies import Full, Naive
from kvweave.store import Store
from vllm_packed_store import PAGE, Engine
from vllm_segments import text

READ = SimpleNamespace(
    flops=lambda start, end: end - start,
    is_worth_reading=lambda *_: True,
    was_read=lambda *_: None,
)
"""What weighs documents, and finds each worth reading."""


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no engine, and so no group of ranks to ask."""
    group = SimpleNamespace(rank_in_group=0, world_size=1)
    monkeypatch.setattr(kept_documents, "get_tp_group", lambda: group)
    for module in (document_shards, kept_documents, worker):
        monkeypatch.setattr(module, "all_of", lambda holds: holds)
    monkeypatch.setattr(kept_documents, "agreed", lambda name: name)


class Server:
    """A worker over a small packed store, half of which may be frozen, and a folder."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.engine = Engine("int4", arena=1 << 19, seed=seed)
        self.store = self.engine.store
        weighs: Any = READ
        self.kept = KeptDocuments(self.store, folder, "weights", weighs, KeptWeights([]))
        self.worker = SegmentWorker([], self.store, 512, self.kept)
        self.most = self.store.cache.stats()["total"] // 2

    def insert(self, name: str, tokens: list[int], namespace: str = "a") -> str | None:
        """As a worker does, of a model whose keys and values are random; why it is not kept."""
        if self.kept.take(name, tokens, namespace):
            return None
        admitted = self.store.admit(tokens, [], namespace, Full(), discover=False)
        try:
            with self.store.encoding(admitted) as room:
                room.pages.normal_()
            self.kept.freeze(admitted.request, name)
            return self.kept.keep(admitted.request, room, name)
        finally:
            admitted.release()

    def found(self, tokens: list[int], namespace: str = "a") -> int:
        """How many of a marked text's tokens a prompt reuses, behind others."""
        prompt, spans = [*text(20, 1), *tokens, 1, 2], [(20, 20 + len(tokens))]
        asked = prompt, spans, namespace, Naive(), False
        admitted = self.store.admit(*asked)
        if self.kept.bring(prompt, admitted, spans):
            admitted.release()
            admitted = self.store.admit(*asked)
        count = int(admitted.reused.sum())
        admitted.release()
        return count

    @property
    def frozen(self) -> list[str]:
        return sorted(entry.name for entry in self.store.frozen("a"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def server(folder: Path) -> Server:
    return Server(folder)


def small(number: int) -> list[int]:
    return text(2 * PAGE, 40 + number)


def test_a_document_that_is_too_large_drives_out_none(folder: Path, server: Server) -> None:
    """Neither when it is inserted nor when a prompt marks it: a larger store wrote it."""
    for number in range(3):
        assert server.insert(str(number), small(number)) is None
    large = text(PAGE * (server.most + 1), 50)
    with pytest.raises(PoolFull, match="frozen share of the store: expected"):
        server.insert("large", large)
    assert server.frozen == ["0", "1", "2"]
    writer = Server(folder, seed=1)
    writer.engine = Engine("int4", arena=1 << 22)
    writer.store = writer.engine.store
    weighs: Any = READ
    writer.kept = KeptDocuments(writer.store, folder, "weights", weighs, KeptWeights([]))
    assert writer.insert("large", large) is None
    assert [name for _, name, _ in server.kept.names("a")] == ["0", "1", "2", "large"]
    server.store.cache.forget(None)
    assert server.found(large) == 0
    assert server.frozen == ["0", "1", "2"]
    assert server.kept.counts()["brought_refused"] == 0


def test_those_used_least_make_room(server: Server) -> None:
    count = server.most // 2 + 3
    for number in range(count):
        assert server.insert(str(number), small(number)) is None
    assert len(server.frozen) == server.most // 2
    assert "0" not in server.frozen
    server.store.cache.forget(None)
    assert server.found(small(0)) == 2 * PAGE
    assert "0" in server.frozen


def test_a_text_that_another_engine_replaced_is_read(folder: Path, server: Server) -> None:
    """Under its old name, whose former text this one still has."""
    other = Server(folder, seed=1)
    assert server.insert("one", small(1)) is None
    assert other.insert("one", small(2)) is None
    assert server.found(small(2)) == 2 * PAGE
    assert server.kept.counts()["brought_documents"] == 1
    assert server.frozen == ["one"]


class Disk:
    """A store of which some calls do something else; what it would do is `store`'s."""

    def __init__(self, store: Store, **others: Callable[..., Any]) -> None:
        self.store, self.others = store, others

    def __getattr__(self, name: str) -> Any:
        return self.others.get(name) or getattr(self.store, name)


def refused(*_: Any, **__: Any) -> None:
    raise StoreUnavailable("store: expected a disk, got none")


def test_a_document_is_weighed_by_its_bytes_without_being_opened_again(
    folder: Path, server: Server
) -> None:
    """Each is opened once to be listed, however often a prompt marks its text."""
    other, told, opened = Server(folder, seed=1), [], []
    for number in range(2):
        assert other.insert(str(number), text((1 + number) * PAGE, 60 + number)) is None
    kept, store = server.kept, server.kept.store

    def shard(name: str) -> Any:
        opened.append(name)
        return store.shard(name)

    def declined(size: int, *_: int) -> bool:
        told.append(size)
        return False

    kept.store = Disk(store, shard=shard)
    kept.weighing = SimpleNamespace(is_worth_reading=declined)
    for number in (0, 1, 0, 1):
        assert server.found(text((1 + number) * PAGE, 60 + number)) == 0
    names = [name for *_, name in sorted(store.documents())]
    sizes = [sum(store.shard(name).parts.values()) for name in names]
    assert told == sizes * 2
    assert sizes[0] < sizes[1]
    assert sorted(opened) == sorted(names)
    assert kept.counts()["brought_declined"] == 4


def test_a_document_goes_from_the_device_whatever_its_folder_does(server: Server) -> None:
    """Else ranks whose disks do not fail alike would have other documents."""
    assert server.insert("one", small(1)) is None
    store = server.kept.store
    server.kept.store = Disk(store, forget=refused)
    with pytest.raises(StoreUnavailable):
        server.worker.delete("one", "a")
    assert server.frozen == []
    server.kept.store = store
    server.worker.delete("one", "a")
    with pytest.raises(UnknownSegment):
        server.worker.delete("one", "a")


@pytest.mark.parametrize("meanwhile", ["named", "removed"])
def test_another_engine_is_faster(folder: Path, server: Server, meanwhile: str) -> None:
    """At the shard that a deleted or replaced document had: what was asked for is done."""
    other = Store(folder / "rank-0-of-1", hash="sha256")
    for number in range(2):
        assert server.insert(str(number), small(number)) is None
    store = server.kept.store

    def delete(shard: str) -> None:
        if meanwhile == "named":
            other.name("a", "theirs", shard)
        else:
            other.delete(shard)
        store.delete(shard)

    server.kept.store = Disk(store, delete=delete)
    server.worker.delete("0", "a")
    assert server.insert("1", small(7)) is None
    assert server.frozen == ["1"]
    assert server.found(small(7)) == 2 * PAGE
    theirs = ["theirs"] if meanwhile == "named" else []
    assert [name for _, name, _ in server.kept.names("a")] == ["1", *theirs]


@pytest.mark.parametrize("error", [OutOfMemory, CorruptPayload])
def test_a_document_that_a_device_does_not_take_is_computed(
    server: Server, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    """Said once, counted, and nothing is held; the prompt goes on."""
    assert server.insert("one", small(1)) is None
    server.store.forget(documents=True)
    server.kept.all_went()

    def failing(*_: Any, **__: Any) -> None:
        raise error("arena: expected memory, got none")

    monkeypatch.setattr(server.kept._shards, "admit", failing)
    for _ in range(2):
        assert server.found(small(1)) == 0
    assert server.kept.counts()["brought_refused"] == 2
    assert server.store.cache.stats()["held"] == 0
    monkeypatch.undo()


def test_a_document_that_another_rank_does_not_take_is_given_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.insert("one", small(1)) is None
    server.store.forget(documents=True)
    server.kept.all_went()
    monkeypatch.setattr(kept_documents, "all_of", lambda _: False)
    read = server.kept._shards.read("a", np.asarray(small(1), np.uint32))
    assert read is not None
    assert not server.kept._bring(read[0], ("a", "one"), np.asarray(small(1), np.uint32))
    assert server.store.cache.stats()["held"] == 0
    assert server.frozen == []


def test_no_rank_encodes_where_another_has_no_room(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each raises before any of them computes: the others would wait for it for ever."""
    computed: list[Any] = []
    monkeypatch.setattr(worker, "encode_document", lambda *_: computed.append(1))
    monkeypatch.setattr(worker, "all_of", lambda _: False)
    config: Any = None
    with pytest.raises(OutOfMemory, match="expected room on all ranks"):
        server.worker.insert(None, "one", small(1), "a", config)
    monkeypatch.setattr(worker, "all_of", lambda holds: holds)

    def failing(*_: Any, **__: Any) -> None:
        raise OutOfMemory("arena: expected memory, got none")

    monkeypatch.setattr(server.store, "_exact", failing)
    with pytest.raises(OutOfMemory, match="arena"):
        server.worker.insert(None, "one", small(1), "a", config)
    assert computed == []
    assert server.store.cache.stats()["held"] == 0
    assert server.frozen == []


def test_a_thousand_inserts_and_deletes_leave_nothing(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Kept ones, and such that the folder does not take: what is told is told once."""
    store = server.kept.store
    for number in range(1000):
        if number == 500:
            server.kept.store = Disk(store, name=refused)
        why = server.insert(f"document {number}", text(PAGE, number))
        assert (why is None) is (number < 500)
        server.worker.delete(f"document {number}", "a")
    server.kept.store = store
    kept = server.kept
    assert kept.names(None) == []
    assert kept.counts()["kept_documents"] == 0
    assert [len(found) for found in (kept._frozen, kept._texts, kept._listed)] == [0, 0, 0]
    assert len(kept._told) == len(caplog.records) == 1
    stats = server.store.cache.stats()
    assert stats["held"] == stats["frozen"] == 0
    server.store.cache.check()
