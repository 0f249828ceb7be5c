"""Documents of a packed store in a folder: their pages as they lie, and no others for these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvweave import ops
from kvweave.adapters.vllm.segments import document_shards
from kvweave.adapters.vllm.segments.document_shards import DocumentShards, Found
from kvweave.adapters.vllm.segments.store import SegmentStore
from kvweave.cache import KvRequest
from kvweave.errors import CorruptShard, KvweaveError, NamespaceConflict, PoolFull
from kvweave.payload import KvPayload
from kvweave.policies import Full, Naive
from kvweave.runner.tiers.packed_form import PackedDocument
from kvweave.store import Store
from vllm_packed_store import HEADS, LAYERS, Engine
from vllm_segments import text

TOKENS = text(150, 4)
IDS = np.asarray(TOKENS, np.uint32)


def no_packing(*_: Any, **__: Any) -> None:
    raise AssertionError("pages are packed")


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no engine, and so no group of ranks to ask."""
    monkeypatch.setattr(document_shards, "all_of", lambda holds: holds)


def exact_store() -> SegmentStore:
    return SegmentStore(Engine().store.geometry, 1 << 22, 0.5, "m")


class Folder:
    """The shards of one rank: `refused` are the errors of those that were not read."""

    def __init__(self, path: Path) -> None:
        self.store = Store(path, hash="sha256")
        self.refused: list[KvweaveError] = []

    def of(self, segments: SegmentStore, model: str = "weights") -> DocumentShards:
        flops = lambda start, end: end - start  # noqa: E731
        append = self.refused.append
        return DocumentShards(segments, self.store, model, "rank-0-of-1", flops, append)

    def read(self, segments: SegmentStore, namespace: str = "a", **of: str) -> Found | None:
        return self.of(segments, **of).read(namespace, IDS)

    def insert(self, segments: SegmentStore) -> tuple[str, KvRequest]:
        """A document of random numbers, in the folder; its shard, and its request."""
        admitted = segments.admit(TOKENS, [], "a", Full(), discover=False)
        draws = np.random.default_rng(5)
        with segments.encoding(admitted) as room:
            numbers = draws.normal(size=room.pages.shape).astype(np.float32)
            room.pages.copy_(torch.from_numpy(numbers))
        return self.of(segments).write(admitted.request, room), admitted.request


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def pages_of(engine: Engine, request: KvRequest) -> torch.Tensor:
    """The bytes of a request's blocks [blocks, pages, bytes]."""
    entries = request.entries()
    assert (entries[:, 1] == 0).all()
    assert (entries[:, 4] == 0).all()
    each = torch.arange(LAYERS * HEADS)
    return engine.store.packed.data[torch.from_numpy(entries[:, 0]).long()[:, None] + each]


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize(("sizes", "blocks"), [((16,), 3), ((112, 16), 2)])
@pytest.mark.parametrize("shared", [0, 128, 141])
def test_pages_come_back_bit_for_bit(
    folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    sizes: tuple[int, ...],
    blocks: int,
    shared: int,
) -> None:
    """Into a store that never saw them, nothing packed; those of an earlier prompt among them."""
    engine, other = Engine(kind, sizes=sizes), Engine(kind, sizes=sizes)
    if shared:
        earlier = engine.store.admit([*TOKENS[:shared], 7], [], "a", Full(), discover=False)
        places = engine.blocks(shared + 1)
        engine.write(places, np.arange(shared + 1))
        engine.store.keep(earlier, shared + 1, engine.layers, places)
        earlier.release()
    name, written = folder.insert(engine.store)
    wanted = pages_of(engine, written).clone()
    assert len(wanted) == blocks
    assert folder.store.shard(name).parts == {"tokens": 4 * 150, "pages": wanted.nbytes}
    monkeypatch.setattr(ops, "pack_pages", no_packing)
    # Blocks that are taken already have other numbers than in the first store.
    before = other.store.admit(text(70, 9), [], "a", Full(), discover=False)
    found = folder.read(other.store)
    assert found is not None
    assert found[1] == name
    with folder.of(other.store).admit(found[0], "a") as request:
        assert torch.equal(pages_of(other, request), wanted)
        request.freeze("one", 0, 150)
    before.release()
    other.store.cache.check()
    assert folder.refused == []
    # The document is found elsewhere in a prompt of its namespace, and of no other.
    prompt = [*text(30, 1), *TOKENS, 1]
    for namespace, count in (("a", 150), ("b", 0)):
        asked = other.store.admit(prompt, [(30, 180)], namespace, Naive(), discover=False)
        assert int(asked.reused.sum()) == count
        asked.release()


def test_pages_of_another_kind_are_not_found(folder: Folder) -> None:
    """By format, tokens of a page, namespace and weights; nor does an exact store read them."""
    engine = Engine("int4")
    folder.insert(engine.store)
    assert folder.read(engine.store) is not None
    assert folder.read(Engine("int8").store) is None
    assert folder.read(Engine("int4", sizes=(112, 16)).store) is None
    assert folder.read(exact_store()) is None
    assert folder.read(engine.store, "b") is None
    assert folder.read(engine.store, model="others") is None
    assert folder.refused == []


def test_exact_documents_are_packed_as_they_come(folder: Folder) -> None:
    exact = exact_store()
    name, request = folder.insert(exact)
    request.release()
    engine, same = Engine("int4"), Engine("int4")
    found = folder.read(engine.store)
    assert found is not None
    assert found[1] == name
    assert isinstance(found[0], KvPayload)
    came = folder.of(engine.store).admit(found[0], "a")
    wanted = same.store.take(found[0], "a")
    assert torch.equal(pages_of(engine, came), pages_of(same, wanted))


def test_ranks_read_the_same_form(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another rank has no packed document none takes it, and so for the exact one."""
    folder.insert(exact_store())
    engine = Engine("int4")
    folder.insert(engine.store)
    found = folder.read(engine.store)
    assert found is not None
    assert isinstance(found[0], PackedDocument)
    said = iter([False, True])
    monkeypatch.setattr(document_shards, "all_of", lambda holds: holds and next(said))
    found = folder.read(engine.store)
    assert found is not None
    assert isinstance(found[0], KvPayload)
    monkeypatch.setattr(document_shards, "all_of", lambda holds: False)
    assert folder.read(engine.store) is None


@pytest.mark.parametrize("spoiled", ["byte", "cut", "short", "parts"])
def test_a_spoiled_document_is_not_used(folder: Folder, tmp_path: Path, spoiled: str) -> None:
    """Whatever the file says of itself; a document that is put anew is read again."""
    engine = Engine("int4")
    name, request = folder.insert(engine.store)
    shard = folder.store.shard(name)
    of, pages = shard.provenance, shard.read("pages")
    if spoiled in ("byte", "cut"):
        [file] = (tmp_path / "shards").iterdir()
        data = bytearray(file.read_bytes())
        data[-5000] ^= 1
        file.write_bytes(data if spoiled == "byte" else data[:-4096])
    else:
        folder.store.delete(name)
        parts = {"pages": pages[:-1]} if spoiled == "short" else {"others": pages}
        folder.store.put(of, IDS, parts)
    assert folder.read(engine.store) is None
    [error] = folder.refused
    assert isinstance(error, CorruptShard)
    if spoiled in ("byte", "cut"):
        request.release()
        folder.insert(engine.store)
        assert folder.read(engine.store) is not None


def test_pages_of_any_bytes_spoil_no_other_document(folder: Folder) -> None:
    """Scales may be NaN or infinite: whoever reads these reads them, and nobody else."""
    engine = Engine("int4")
    name, request = folder.insert(engine.store)
    shard = folder.store.shard(name)
    of, size = shard.provenance, shard.parts["pages"]
    folder.store.delete(name)
    folder.store.put(of, IDS, {"pages": b"\xff" * size})
    before = pages_of(engine, request).clone()
    found = folder.read(engine.store)
    assert found is not None
    with folder.of(engine.store).admit(found[0], "a") as hostile:
        assert bool((pages_of(engine, hostile) == 255).all())
    assert torch.equal(pages_of(engine, request), before)


def test_a_document_without_room_holds_nothing(folder: Folder) -> None:
    engine, small = Engine("int4"), Engine("int4", arena=1 << 15)
    folder.insert(engine.store)
    found = folder.read(small.store)
    assert found is not None
    free = small.store.cache.stats()["free"]
    with pytest.raises(PoolFull):
        folder.of(small.store).admit(found[0], "a")
    with pytest.raises(NamespaceConflict):
        folder.of(small.store).admit(found[0], "b")
    assert small.store.cache.stats()["free"] == free
