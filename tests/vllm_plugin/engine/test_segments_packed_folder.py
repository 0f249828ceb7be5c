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
from kvweave.runner.kv.pool_bases import SHARED, UNROTATED
from kvweave.runner.tiers.packed_form import PackedDocument
from kvweave.store import Provenance, Store
from vllm_packed_store import DIM, HEADS, LAYERS, Engine
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


def basis_made(engine: Engine) -> None:
    """Has an engine's shared basis made of other tokens, where pages have any."""
    admitted, _, _ = engine.prefill(text(700, 20), 700)
    admitted.release()


def expect_same_reads(one: Engine, other: Engine) -> None:
    """That a prompt of the document's namespace has the same bits of it from both."""
    prompt, found = [*text(30, 1), *TOKENS, 1], []
    for engine in (one, other):
        asked, _, came = engine.prefill(prompt, 1000, spans=[(30, 180)], namespace="a")
        assert len(came) == 150
        found.append(torch.stack([came[at] for at in range(30, 180)]))
        asked.release()
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["int4", "int8", "half-int4", "planes-3"])
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
    """Into a store that never saw them, nothing packed, whatever an earlier prompt had of them.

    Where pages have bases they come along, and the other store has its own.
    """
    engine, other = Engine(kind, sizes=sizes), Engine(kind, sizes=sizes, seed=1)
    if shared:
        earlier = engine.store.admit([*TOKENS[:shared], 7], [], "a", Full(), discover=False)
        places = engine.blocks(shared + 1)
        engine.write(places, np.arange(shared + 1))
        engine.store.keep(earlier, shared + 1, engine.layers, places)
        earlier.release()
    basis_made(engine)
    basis_made(other)
    name, written = folder.insert(engine.store)
    wanted = pages_of(engine, written).clone()
    assert len(wanted) == blocks
    sizes_of = {"tokens": 4 * 150, "pages": wanted.nbytes}
    if engine.store.bases is not None:
        sizes_of |= {"which": 4 * blocks, "bases": engine.store.bases.basis_bytes}
        # Of keys and values of the first token, which is exact.
        sizes_of |= {"firsts": LAYERS * HEADS * 2 * DIM * 4}
    assert folder.store.shard(name).parts == sizes_of
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


@pytest.mark.parametrize(("kind", "count"), [("half-int4", 1), ("planes-3", 2)])
def test_a_document_in_several_bases_is_read_in_each(folder: Folder, kind: str, count: int) -> None:
    """One that was packed while the shared basis was made; what nothing is rotated in is known."""
    engine, other = Engine(kind), Engine(kind, seed=1)
    engine.prefill(text(384, 20), 384)
    basis_made(other)
    written, _, _ = engine.prefill(TOKENS, 64, namespace="a")
    assert engine.store.bases is not None
    assert other.store.bases is not None
    numbers = engine.store.bases.numbers(written.request.entries()[:, 0])
    assert numbers.tolist() == [UNROTATED, SHARED, SHARED]
    name = folder.of(engine.store).write(written.request, None)  # type: ignore[arg-type]
    parts = folder.store.shard(name).parts
    assert parts["bases"] == count * engine.store.bases.basis_bytes
    found = folder.read(other.store)
    assert found is not None
    came = folder.of(other.store).admit(found[0], "a")
    assert other.store.bases.held() == count
    assert torch.equal(pages_of(other, came), pages_of(engine, written.request))
    expect_same_reads(engine, other)


def test_pages_of_another_kind_are_not_found(folder: Folder) -> None:
    """By format, tokens of a page, namespace and weights; nor does an exact store read them."""
    engine = Engine("int4")
    folder.insert(engine.store)
    assert folder.read(engine.store) is not None
    for kind in ("int8", "half-int4", "quarter-bf16", "planes-3", "planes-2.5"):
        assert folder.read(Engine(kind).store) is None
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


def spoiled_parts(parts: dict[str, bytes], how: str) -> dict[str, bytes]:
    """Parts of a shard in bases with something wrong in them."""
    which = np.frombuffer(parts["which"], np.int32).copy()
    bases = np.frombuffer(parts["bases"], np.float32).copy()
    if how == "no basis":
        return {name: part for name, part in parts.items() if name != "bases"}
    if how == "not said":
        return {name: part for name, part in parts.items() if name != "which"}
    if how == "short":
        bases = bases[:-1]
    elif how == "too many":
        bases = np.concatenate((bases, bases))
    elif how in ("nan", "infinite"):
        bases[-1] = np.nan if how == "nan" else np.inf
    else:
        which[-1] = {"another": len(which) + 1, "next": which.max() + 1, "negative": -1}[how]
    return {**parts, "which": which.tobytes(), "bases": bases.tobytes()}


HOSTILE = ["no basis", "not said", "short", "too many", "nan", "infinite", "another", "next"]


@pytest.mark.parametrize("kind", ["half-int4", "planes-3"])
@pytest.mark.parametrize("how", [*HOSTILE, "negative"])
def test_bases_that_are_none_are_refused(folder: Folder, kind: str, how: str) -> None:
    """Whatever a file's own checksums say; the document is encoded as if it were not there."""
    engine, other = Engine(kind), Engine(kind, seed=1)
    basis_made(engine)
    name, written = folder.insert(engine.store)
    shard = folder.store.shard(name)
    parts = {part: shard.read(part) for part in ("pages", "which", "bases")}
    of = shard.provenance
    folder.store.delete(name)
    folder.store.put(of, IDS, spoiled_parts(parts, how))
    basis_made(other)
    assert other.store.bases is not None
    before = other.store.bases.bases.data.clone()
    assert folder.read(other.store) is None
    [error] = folder.refused
    assert isinstance(error, CorruptShard)
    assert torch.equal(other.store.bases.bases.data, before)
    with folder.insert(other.store)[1] as request:
        assert request.length == written.length


def test_bits_without_room_and_another_version_are_refused(folder: Folder) -> None:
    """Planes whose codes would reach out of a page; a layout of another version is not found."""
    engine = Engine("planes-3")
    basis_made(engine)
    name, _ = folder.insert(engine.store)
    shard = folder.store.shard(name)
    parts = {part: shard.read(part) for part in ("pages", "which", "bases")}
    of = shard.provenance
    bases = np.frombuffer(parts["bases"], np.float32).copy().reshape(LAYERS * HEADS, 2, -1, DIM)
    bases[:, :, 1] = 8
    folder.store.delete(name)
    assert of.layout.startswith("packed/1/")
    fields = ["dtype", "layers", "kv_heads", "head_dim", "namespace", "regime", "heads"]
    same = {field: getattr(of, field) for field in fields}
    layout = of.layout.replace("packed/1/", "packed/2/")
    folder.store.put(Provenance(of.model, layout=layout, **same), IDS, parts)
    assert folder.read(engine.store) is None
    assert folder.refused == []
    folder.store.put(of, IDS, {**parts, "bases": bases.tobytes()})
    assert folder.read(engine.store) is None
    [error] = folder.refused
    assert isinstance(error, CorruptShard)
    assert "bits of a basis" in str(error)


def test_a_document_whose_bases_have_no_room_no_rank_takes(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is held or written, on the rank that has room as well."""
    full, free = Engine("half-int4", arena=1 << 19), Engine("half-int4")
    assert full.store.bases is not None
    assert free.store.bases is not None
    assert full.store.room.bases == 3
    folders = [Folder(tmp_path / str(number)) for number in range(2)]
    for number, one in enumerate(folders):
        writer = Engine("half-int4", seed=number)
        basis_made(writer)
        one.insert(writer.store)[1].release()
    first, second = (one.read(full.store) for one in folders)
    assert first is not None
    assert second is not None
    taken = folders[0].of(full.store).admit(first[0], "a")
    assert full.store.bases.held() == 1
    # On this rank nobody else has room for one more; the other one would have.
    assert folders[1].read(full.store) is None
    [error] = folders[1].refused
    assert isinstance(error, PoolFull)
    monkeypatch.setattr(document_shards, "all_of", lambda holds: False)
    before = free.store.cache.stats(), free.store.bases.bases.data.clone()
    assert folders[1].read(free.store) is None
    assert len(folders[1].refused) == 1
    assert free.store.cache.stats() == before[0]
    assert torch.equal(free.store.bases.bases.data, before[1])
    monkeypatch.setattr(document_shards, "all_of", lambda holds: holds)
    # Once what has the basis is evicted, there is room.
    taken.release()
    tokens = full.store.cache.stats()["total"] * 64
    admitted, _, _ = full.prefill(text(tokens, 60), 700)
    admitted.release()
    assert folders[1].read(full.store) is not None


@pytest.mark.parametrize("kind", ["half-int4", "planes-3"])
def test_a_basis_that_nobody_has_any_more_has_room_for_another(
    folder: Folder, tmp_path: Path, kind: str
) -> None:
    """Documents of one earlier engine after the other, in a store with room for one such basis."""
    small = Engine(kind, arena=1 << 19)
    assert small.store.room.bases == 3
    for number in range(4):
        one, writer = Folder(tmp_path / str(number)), Engine(kind, seed=number)
        basis_made(writer)
        name, written = one.insert(writer.store)
        wanted = pages_of(writer, written)
        found = one.read(small.store)
        assert found is not None, number
        with one.of(small.store).admit(found[0], "a") as request:
            assert torch.equal(pages_of(small, request), wanted)
            # Nobody takes the basis of what is held.
            other, another = Folder(tmp_path / f"{number} b"), Engine(kind, seed=90 + number)
            basis_made(another)
            other.insert(another.store)
            assert other.read(small.store) is None
            assert found[1] == name
        small.store.cache.forget(None)
