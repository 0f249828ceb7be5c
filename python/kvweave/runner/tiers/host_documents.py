"""`HostDocuments`: documents of any number of bytes in the host's memory, as they leave their form.

A cache of its own counts their blocks, so the indexes, the order of eviction and the quotas here
are those of any other cache. Their bytes lie in slots, of which a document takes as many as it
needs, be they more or fewer than its blocks. Where slots are short the cache is asked for blocks
until documents have gone that had enough of them: so its order says whose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from kvweave.cache import KvCache, KvRequest
from kvweave.device_memory import arena_pages, needs_memory
from kvweave.errors import InvalidArgument, PoolFull
from kvweave.runner.kv.host_pages import blocks_of
from kvweave.runner.kv.pinned import pin
from kvweave.runner.kv.tables import Int32
from kvweave.runner.tiers.document import Document
from kvweave.runner.tiers.final_form import FinalForm
from kvweave.runner.tiers.packed_form import PackedDocument

_ALIGNED = 16
"""Where a part of a document may begin."""

_BOUNDS = "bounds"
"""By what heads choose its pages, beside what its form exports."""

_Key = tuple[str, int, bytes]
"""Namespace, regime and tokens."""


@dataclass(frozen=True)
class _Part:
    """A part of a document: where its bytes begin, and what they are."""

    name: str
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False)
class _Kept:
    """A document that is here: its parts and their slots, and the blocks by which it is found.

    Documents that begin alike share blocks: where one of these goes all of them are found no more.
    """

    key: _Key
    parts: tuple[_Part, ...]
    slots: npt.NDArray[np.int64]
    blocks: Int32


class HostDocuments:
    """So many bytes of documents beside a pool that packs them by a strategy.

    `slots` u8 [slots, bytes]. `pinned`: whether a GPU reads them where they lie. `has` is for any
    thread, all else for whoever computes.

    # Errors
    `InvalidArgument` for bytes that hold no block; `OutOfMemory` for what the host cannot hold.
    """

    def __init__(self, form: FinalForm, size: int, *, eviction: str, hash: str) -> None:
        self._form, self._slot_bytes = form, form.pool.block_bytes
        if size < self._slot_bytes:
            raise InvalidArgument(
                f"document_bytes: expected at least {self._slot_bytes}, got {size}"
            )
        count = size // self._slot_bytes
        # As many blocks as the bytes hold of the smallest, a null block, and who looks one up has
        # one more.
        blocks = 2 + size // form.least_block_bytes
        self.cache = KvCache(
            form.cache.shape,
            blocks=blocks,
            memory=False,
            eviction=eviction,
            hash=hash,
            fingerprint=form.cache.fingerprint,
        )
        device = form.pool.device
        self.slots = arena_pages((count, self._slot_bytes), torch.uint8, torch.device("cpu"))
        self.pinned = device.type == "cuda" and pin(self.slots, device)
        self._kept: dict[_Key, _Kept] = {}
        # Who is found by a block, and which are nobody's slots.
        self._by: dict[int, set[_Kept]] = {}
        self._free = np.arange(count, dtype=np.int64)

    def has(self, document: Document) -> bool:
        """Whether all of a document is here."""
        return _key(document) in self._kept and document.is_in(self.cache)

    def keep(self, document: Document, request: KvRequest) -> bool:
        """Copies a document from the request that has it alone; whether it is here now.

        Where room is short others give way, as the cache's order says.
        """
        if self.has(document):
            return True
        stored = dict(self._form.export(request).parts)
        bounds = self._form.bounds(blocks_of(request))
        if bounds is not None:
            stored[_BOUNDS] = bounds
        parts = tuple(_places(stored))
        last = parts[-1]
        slots = -(-(last.begin + stored[last.name].nbytes) // self._slot_bytes)
        if slots > len(self.slots):
            return False
        try:
            with self._taken(document.tokens, document, "none") as home:
                self._drop(self._kept.get(_key(document)))
                self._make_room(slots)
                home.commit(document.length, document.length)
                with self._taken(_followed(document), document, "prefix") as found:
                    blocks = _read_blocks(found, document, self.cache)
                if blocks is None:
                    return False
                taken, self._free = self._free[:slots], self._free[slots:]
                kept = _Kept(_key(document), parts, taken, blocks)
                self._enter(kept)
                try:
                    for part in parts:
                        self._write(kept, part, stored[part.name])
                except BaseException:
                    self._drop(kept)
                    raise
        except PoolFull:
            return False
        return True

    def admit(self, document: Document) -> KvRequest | None:
        """A request on the device that has a document alone, committed; None if it is not here.

        # Errors
        As `DocumentForm.admit`.
        """
        try:
            home = self._taken(_followed(document), document, "prefix")
        except PoolFull:
            return None
        with home:
            kept = self._kept.get(_key(document))
            if kept is None or _read_blocks(home, document, self.cache) is None:
                self._drop(kept)
                return None
            header = self._form.provenance(document.namespace, document.regime)
            stored = PackedDocument(header, document.tokens, _PartsHere(self, kept))
            request = self._form.admit(stored, document.namespace)
            try:
                # By which heads choose, as they were: of the exact keys.
                self._form.put_bounds(blocks_of(request), stored.parts.get(_BOUNDS))
            except BaseException:
                request.release()
                raise
            return request

    def stats(self) -> dict[str, Any]:
        """Counts of blocks as `KvCache.stats` has them, bytes of a slot and of all that are taken.

        And whether the memory is pinned.
        """
        taken = (len(self.slots) - len(self._free)) * self._slot_bytes
        known = {"block_bytes": self._slot_bytes, "taken_bytes": taken, "pinned": self.pinned}
        return {**self.cache.stats(), **known}

    # ---- who is here ----------------------------------------------------------------------

    def _taken(
        self, tokens: Int32, document: Document, reuse: Literal["none", "prefix"]
    ) -> KvRequest:
        """A request of tokens; whoever was found by blocks that it takes for itself is no more.

        # Errors
        `PoolFull` without room.
        """
        request = self.cache.admit(
            tokens, namespace=document.namespace, regime=document.regime, reuse=reuse
        )
        shared = request.plan.reused_prefix // self.cache.shape.page_tokens
        self._drop_of(blocks_of(request)[shared:])
        return request

    def _enter(self, kept: _Kept) -> None:
        self._kept[kept.key] = kept
        for block in kept.blocks.tolist():
            self._by.setdefault(block, set()).add(kept)

    def _drop(self, kept: _Kept | None) -> None:
        """Lets a document go, if there is one: its slots are free."""
        if kept is None:
            return
        del self._kept[kept.key]
        for block in kept.blocks.tolist():
            self._by[block].discard(kept)
            if not self._by[block]:
                del self._by[block]
        self._free = np.sort(np.concatenate((self._free, kept.slots)))

    def _drop_of(self, blocks: Int32) -> int:
        """Lets those go whose blocks were taken for others; how many blocks they had beside."""
        gone = {kept for block in blocks.tolist() for kept in self._by.get(block, ())}
        for kept in gone:
            self._drop(kept)
        had = [kept.blocks for kept in gone]
        return len(np.setdiff1d(np.concatenate(had), blocks)) if had else 0

    def _make_room(self, slots: int) -> None:
        """Has documents go until so many slots are free.

        # Errors
        `PoolFull` where those that nobody holds do not suffice.
        """
        step = 1
        while len(self._free) < slots:
            known = self.cache.stats()
            free, most = known["free"], known["total"] - known["held"]
            if free >= most:
                raise PoolFull(
                    f"documents: expected {slots * self._slot_bytes} bytes of the host's memory "
                    f"that nobody holds, got {len(self._free) * self._slot_bytes}"
                )
            tokens = min(free + step, most) * self.cache.shape.page_tokens
            with self.cache.admit(np.zeros(tokens, np.int32), reuse="none") as room:
                # Of one document the blocks go one after the other.
                step = 1 + self._drop_of(blocks_of(room))

    # ---- their bytes ----------------------------------------------------------------------

    def _write(self, kept: _Kept, part: _Part, data: torch.Tensor) -> None:
        held = data.contiguous().reshape(-1).view(torch.uint8)
        for memory, some in self._pieces(kept, part, held.numel()):
            memory.copy_(held[some])

    @needs_memory("documents")
    def read(self, kept: _Kept, part: _Part) -> torch.Tensor:
        """A part of a document that is here, on the device where it was."""
        made = torch.empty(part.shape, dtype=part.dtype, device=part.device)
        held = made.reshape(-1).view(torch.uint8)
        for memory, some in self._pieces(kept, part, held.numel()):
            held[some].copy_(memory)
        return made

    def _pieces(self, kept: _Kept, part: _Part, count: int) -> Iterator[tuple[torch.Tensor, slice]]:
        """Memory of a part's bytes, piece by piece, and which of them each has."""
        flat, size = self.slots.view(-1), self._slot_bytes
        runs = np.split(kept.slots, np.flatnonzero(np.diff(kept.slots) != 1) + 1)
        begin = 0
        for run in runs:
            end = begin + len(run) * size
            first, last = max(begin, part.begin), min(end, part.begin + count)
            if first < last:
                at = int(run[0]) * size + first - begin
                yield flat[at : at + last - first], slice(first - part.begin, last - part.begin)
            begin = end


class _PartsHere(Mapping[str, torch.Tensor]):
    """The parts of a document, each brought when it is asked for."""

    def __init__(self, of: HostDocuments, kept: _Kept) -> None:
        self._of, self._kept = of, kept
        self._parts = {part.name: part for part in kept.parts}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._of.read(self._kept, self._parts[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _followed(document: Document) -> Int32:
    """A document's tokens and one more: the last token of a prompt is never looked up."""
    return np.append(document.tokens, np.int32(0))


def _read_blocks(request: KvRequest, document: Document, cache: KvCache) -> Int32 | None:
    """The blocks in which a request of a followed document finds it; None if it does not."""
    if request.plan.reused_prefix < document.length:
        return None
    whole, rest = divmod(document.length, cache.shape.page_tokens)
    blocks = blocks_of(request)[:whole]
    # What is left would be copied to the request's own block.
    return np.append(blocks, request.take_copies(0)[0, 0]).astype(np.int32) if rest else blocks


def _key(document: Document) -> _Key:
    tokens = np.ascontiguousarray(document.tokens, np.int32)
    return document.namespace, document.regime, tokens.tobytes()


def _places(parts: Mapping[str, torch.Tensor]) -> Iterator[_Part]:
    """Where the parts of a document lie, one behind the other."""
    begin = 0
    for name, part in parts.items():
        yield _Part(name, begin, tuple(part.shape), part.dtype, part.device)
        begin += -(-part.nbytes // _ALIGNED) * _ALIGNED
