"""A worker's store of computed KV: kvweave's own cache, in an arena on the worker's device.

A prompt is admitted whole and shares the blocks of what it reuses: its table then says, for every
token, where its KV lies and how far its key has to turn. Blocks of its own receive the KV that is
computed, so that later prompts find it. What is reused cannot be evicted until the prompt is let
go of. With tensor parallelism every rank holds its own heads and, asked the same, does the same.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.dlpack import from_dlpack

from kvweave import ops
from kvweave.adapters.vllm.segments.attention_layers import AttentionLayers, HeadPart
from kvweave.adapters.vllm.segments.memory_mark import MemoryMark
from kvweave.adapters.vllm.segments.outcome import PromptOutcome
from kvweave.cache import FrozenSegment, KvCache, KvRequest, KvShape
from kvweave.device_memory import arena_pages, sent
from kvweave.errors import InvalidArgument, PoolFull
from kvweave.payload import KvPayload, export_kv
from kvweave.payload.pages import Places
from kvweave.payload.transfer import admit_kv
from kvweave.policies import Full, Policy

PAGE_TOKENS = 16
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
Rows = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Geometry:
    """KV of one rank: L layers, G KV heads of size D, their dtype and device.

    `inv_freq` f64 [rotary_dim / 2] of every layer.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    inv_freq: npt.NDArray[np.float64]


class AdmittedPrompt:
    """A prompt of T tokens in the store, until its prefill is over.

    `prefix` leading tokens are exact in the store, `segments` are the spans whose KV comes from
    another context, `fresh` i32 [F] the tokens that the store has not. `keeps`: what is computed
    of it is stored; the engine had the tokens before `computed_from` already. `sources` i32 [C, 6],
    rows (block, slot, own block, own slot, count, delta): what its own blocks are to have of
    others', and is read there until it is stored.
    """

    def __init__(self, request: KvRequest, policy: Policy) -> None:
        self.request = request
        self.policy = policy
        plan = request.plan
        self.tokens = int(plan.tokens)
        self.sources: Rows = np.zeros((0, 6), np.int32)
        self.prefix = int(plan.reused_prefix)
        self.fresh: Rows = plan.rows()
        self.segments = [(s.start, s.end) for s in plan.spans if s.kind == "segment"]
        self.exact = self.segments[0][0] if self.segments else self.tokens
        self.stored = 0
        self.keeps = True
        self.computed_from = 0

    @cached_property
    def reused(self) -> npt.NDArray[np.bool_]:
        """Which tokens the store has, bool [T]."""
        mask = np.ones(self.tokens, bool)
        mask[self.fresh] = False
        return mask

    @property
    def begun(self) -> list[tuple[int, int, str]]:
        """Texts that are reused from what was their first token on: [start, end), namespace."""
        known = [(s.start, s.end) for s in self.request.plan.spans if s.kind != "recompute"]
        return [
            (start, end, self.request.namespace)
            for start, end in known
            if self._held[start, 2] == start
        ]

    @cached_property
    def places(self) -> Rows:
        """Block, slot and delta of every token, i32 [T, 3]; no delta where keys stay unturned."""
        places: Rows = self._held.copy()
        if not self.policy.delta_rope:
            places[:, 2] = 0
        for source, ours in self._copied:
            block, slot, _, own_slot, _, moved = source
            places[ours, 1] += slot - own_slot
            places[ours, 0], places[ours, 2] = block, moved
        return places

    @property
    def copied(self) -> Rows:
        """Positions that its own blocks are to have of others'."""
        found = [np.flatnonzero(ours).astype(np.int32) for _, ours in self._copied]
        every: Rows = np.concatenate([np.zeros(0, np.int32), *found])
        return every

    @cached_property
    def _copied(self) -> list[tuple[Rows, npt.NDArray[np.bool_]]]:
        """The sources, and which tokens each has."""
        block, at, _ = self._held.T
        found = []
        for source in self.sources:
            _, _, own, first, count, _ = source
            found.append((source, (block == own) & (first <= at) & (at < first + count)))
        return found

    @cached_property
    def _held(self) -> Rows:
        """Block, slot and delta of every token as its table has them, i32 [T, 3]."""
        read = Places.read_by(self.request, 0)
        held = np.zeros((self.tokens, 3), np.int32)
        held[read.positions] = np.column_stack((read.blocks, read.slots, read.deltas))
        return held

    def new(self, end: int) -> Rows:
        """Positions before `end` that the store has not, and that were not stored yet."""
        first, last = np.searchsorted(self.fresh, (self.stored, end))
        new: Rows = self.fresh[first:last]
        return new

    def release(self) -> None:
        """Lets go of all blocks; what was stored stays cached."""
        self.request.release()


@dataclass(frozen=True)
class Piece:
    """Tokens that are copied at once: rows i32 [C, 6] for `ops.copy_rerotate`.

    `packs` i32 [N, 3] for `ops.unpack_pages`: the packed blocks that these read, which are all in
    one `basis` where pages have any; None where what they read is exact.
    """

    rows: torch.Tensor
    packs: torch.Tensor | None = None
    basis: int = 0


@dataclass(frozen=True)
class Copies:
    """Tokens that go from the store to vLLM's pages, the same in all layers.

    `pieces`, one after the other, of which blocks are seen from the first page of each layer.
    `moved`: tokens whose keys turn.
    """

    pieces: list[Piece]
    tokens: int
    moved: int


@dataclass(frozen=True)
class DocumentRoom:
    """Where a document is encoded: `pages`, and in their cache a request of all its tokens.

    `take_queries`, if any, wants the queries [R, H, D] of some rows, the rank of the first page of
    a block that they read, a KV head of a layer, and of how many.
    """

    cache: KvCache
    pages: torch.Tensor
    request: KvRequest
    take_queries: Callable[[torch.Tensor, int, int], None] | None = None

    def payload(self, rope: ops.RopeTable) -> KvPayload:
        """The document's exact KV, once it is there."""
        return export_kv(self.cache, self.pages, self.request, rope=rope, whole=True)


class SegmentStore:
    """The store of one rank: `arena_bytes` of pages, of which `frozen_share` may be frozen.

    `regime` names the frequencies of RoPE that keys are rotated by. `page_tokens`: of a block.
    """

    page_tokens = PAGE_TOKENS

    def __init__(
        self, geometry: Geometry, arena_bytes: int, frozen_share: float, fingerprint: str
    ) -> None:
        if geometry.dtype not in NAMES:
            expected = ", ".join(NAMES.values())
            raise InvalidArgument(f"segments: expected KV in {expected}, got {geometry.dtype}")
        self.geometry, self.frozen_share = geometry, frozen_share
        digest = hashlib.sha256(geometry.inv_freq.tobytes()).digest()
        self.regime = int.from_bytes(digest[:8], "little")
        frequencies = np.tile(geometry.inv_freq.astype(np.float32), (geometry.layers, 1))
        self.rope, self.rope_of_layer = ops.RopeTable(frequencies), ops.RopeTable(frequencies[:1])
        shape = KvShape(
            geometry.layers,
            geometry.kv_heads,
            geometry.head_dim,
            self.page_tokens,
            NAMES[geometry.dtype],
        )
        settings: dict[str, Any] = {"frozen_share": frozen_share, "fingerprint": fingerprint}
        self.cache = self._allocate(shape, arena_bytes, settings)
        self._mark = MemoryMark(geometry.device)

    def _allocate(self, shape: KvShape, arena_bytes: int, settings: dict[str, Any]) -> KvCache:
        if self.geometry.device.type == "cpu":
            cache = KvCache(shape, arena_bytes=arena_bytes, **settings)
            self.pages: torch.Tensor = from_dlpack(cache.arena)
            return cache
        sizes = (arena_bytes // shape.page_bytes, 2, self.page_tokens, self.geometry.head_dim)
        self.pages = arena_pages(sizes, self.geometry.dtype, self.geometry.device)
        return KvCache(shape, external=self.pages, **settings)

    def admit(
        self,
        tokens: list[int],
        spans: list[tuple[int, int]],
        namespace: str,
        policy: Policy,
        discover: bool,
    ) -> AdmittedPrompt:
        """Looks a prompt up and takes room for what the store does not have of it.

        Errors: `PoolFull` when there is no room, `InvalidArgument` for tokens that are none,
        `OutOfMemory` when the device has none for tables. Nothing is held then.
        """
        segments = policy.reuse == "segments"
        request = self.cache.admit(
            np.asarray(tokens, np.int32),
            namespace=namespace,
            segments=[(start, end, namespace) for start, end in spans] if segments else (),
            discover=discover and segments,
            reuse=policy.reuse,
            mode="share",
            regime=self.regime,
        )
        admitted = AdmittedPrompt(request, policy)
        try:
            self._take_copies(admitted)
        except BaseException:
            admitted.release()
            raise
        return admitted

    def _take_copies(self, admitted: AdmittedPrompt) -> None:
        """Copies what is shared only in part, as where an exact prefix ends inside a block."""
        copies = admitted.request.take_copies()
        if len(copies):
            ops.copy_rerotate(self.pages, copies, self.rope, kv_heads=self.geometry.kv_heads)
        admitted.request.finish_copies()

    def copies(
        self, admitted: AdmittedPrompt, positions: Rows, blocks: torch.Tensor, size: int
    ) -> Copies:
        """Tokens of an admitted prompt on their way to vLLM's pages of `size` tokens.

        `blocks` i32 [N]: the number of the first head's page, of each page of the prompt.
        """
        places = admitted.places[positions]
        pieces = []
        for runs, packs, basis in self._pieces(runs_of(positions, places, size)):
            pieces.append(Piece(self._rows_into(blocks, runs), packs, basis))
        return Copies(pieces, len(positions), int(np.count_nonzero(places[:, 2])))

    def _rows_into(self, blocks: torch.Tensor, runs: Rows) -> torch.Tensor:
        """Runs whose target blocks are pages of a prompt, as rows into these very pages."""
        rows = self._sent(runs)
        rows[:, 2] = blocks.index_select(0, rows[:, 2])
        return rows

    def _pieces(self, runs: Rows) -> list[tuple[Rows, torch.Tensor | None, int]]:
        """Runs of tokens, as they are copied at once, with the `packs` and `basis` of each."""
        return [(runs, None, 0)]

    def copy(self, copies: Copies, layer: int, part: HeadPart) -> None:
        """Copies K and V of a part of a layer into its pages, keys turned on the way."""
        source = self.pages[self._first_page(layer, part) :]
        for piece in copies.pieces:
            self._copy(part, piece.rows, source)

    def _copy(self, part: HeadPart, rows: torch.Tensor, source: torch.Tensor) -> None:
        rope, heads = self.rope_of_layer, part.kv_heads
        ops.copy_rerotate(part.pages, rows, rope, kv_heads=heads, source=source)

    def keep(
        self,
        admitted: AdmittedPrompt,
        end: int,
        layers: AttentionLayers,
        blocks: list[torch.Tensor],
    ) -> None:
        """Stores K and V of tokens before `end`, which lie in vLLM's pages, for later prompts.

        As in `copies`, `blocks` of each class.
        """
        positions = admitted.new(end)
        if len(positions):
            self._write(admitted, positions, layers, blocks)
        self.commit(admitted, end)

    def _write(
        self,
        admitted: AdmittedPrompt,
        positions: Rows,
        layers: AttentionLayers,
        blocks: list[torch.Tensor],
    ) -> None:
        places = np.zeros((len(positions), 3), np.int32)
        places[:, :2] = admitted.request.slots(positions)
        of_class = []
        for first, part in zip(blocks, layers.classes, strict=True):
            runs = runs_of(positions, places, part.page_tokens)
            rows = self._sent(runs[:, [2, 3, 0, 1, 4, 5]])
            rows[:, 0] = first.index_select(0, rows[:, 0])
            of_class.append(rows)
        for layer, parts in enumerate(layers.layers):
            for part in parts:
                ops.copy_rerotate(
                    self.pages[self._first_page(layer, part) :],
                    of_class[part.number],
                    self.rope_of_layer,
                    kv_heads=part.kv_heads,
                    source=part.pages,
                )

    def _first_page(self, layer: int, part: HeadPart) -> int:
        """The part's first page of a block: from there on a block's number is its page's."""
        return layer * self.geometry.kv_heads + part.first_head

    @contextmanager
    def encoding(self, admitted: AdmittedPrompt) -> Iterator[DocumentRoom]:
        """Where all of an admitted prompt is written, which is stored when this is left.

        Errors: `OutOfMemory` when the device has no room for what is written.
        """
        yield DocumentRoom(self.cache, self.pages, admitted.request)
        self.commit(admitted, admitted.tokens)

    def take(self, payload: KvPayload, namespace: str) -> KvRequest:
        """A request of a document whose exact KV comes from elsewhere, stored as if computed here.

        Errors: as `admit_kv`. Nothing is held then.
        """
        return admit_kv(self.cache, self.pages, payload, namespace)

    def commit(self, admitted: AdmittedPrompt, computed: int) -> None:
        """Says that the KV of [0, computed) is stored; later prompts may find it."""
        admitted.stored = computed
        admitted.request.commit(computed, min(computed, admitted.exact))

    def frozen(self, namespace: str | None) -> list[FrozenSegment]:
        """The knowledge base's entries of a namespace, or of all."""
        return self.cache.frozen(namespace)

    def require_room(
        self,
        name: str,
        tokens: list[int],
        namespace: str,
        going: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Refuses a document that could not be frozen, before anything of it is computed.

        What an entry of the same name has is given back, as is what those of `going` have, each a
        namespace and a name. Blocks that another entry has frozen need no room.

        Errors: `PoolFull` without room for it, or beyond the frozen share.
        """
        ids = np.asarray(tokens, np.int32)
        self.cache.require_frozen_room(name, ids, namespace, regime=self.regime, going=going)

    def admit_document(
        self,
        name: str,
        tokens: list[int],
        namespace: str,
        going: Sequence[tuple[str, str]] = (),
    ) -> AdmittedPrompt:
        """Takes room for a document that is to be encoded and then frozen; arguments as above.

        Errors: as `admit`, and `PoolFull` for what could not be frozen now that others gave way.
        """
        admitted = self.admit(tokens, [], namespace, Full(), discover=False)
        try:
            admitted.request.require_frozen_room(name, going=going)
        except BaseException:
            admitted.release()
            raise
        return admitted

    def require_room_alone(self, tokens: int) -> None:
        """Refuses a document of so many tokens that could not be frozen without any other.

        Errors: `PoolFull` beyond the frozen share.
        """
        needed = -(-tokens // self.page_tokens)
        # The cache rounds the share to a whole per cent so.
        free = int(self.cache.stats()["total"]) * int(self.frozen_share * 100 + 0.5) // 100
        if needed > free:
            expected, got = f"{needed} blocks to be available", str(free)
            text = f"frozen share of the store: expected {expected}, got {got}"
            raise PoolFull(text, expected=expected, got=got)

    def forget(self, *, documents: bool) -> None:
        """Has nothing be found any more that requests left, and no `documents` where these go too.

        What prompts still hold stays, and is found again once they let go of it.
        """
        if documents:
            for entry in self.cache.frozen():
                self.cache.delete(entry.name, entry.namespace)
        self.cache.forget(None)

    def is_intact(self) -> bool:
        """Whether its memory is what it was; waits for the device."""
        return self._mark.is_there()

    def begin_anew(self) -> None:
        """Has it be empty, whatever lies in its memory now; nobody may hold anything of it."""
        self.forget(documents=True)
        for part in self._parts():
            part.zero_()
        self._mark.renew()

    def _parts(self) -> list[torch.Tensor]:
        """All of its memory."""
        return [self.pages]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the arena."""
        return self.cache.block_bytes

    def counts(self) -> dict[str, Any]:
        """Blocks by what holds them, evictions and look-ups so far: `KvCache.stats`."""
        return self.cache.stats()

    def bytes_by_state(self) -> Counter[str]:
        """Bytes of the arena that are free, held, cached and, among the latter two, frozen."""
        found, size = self.cache.stats(), self.block_bytes
        return Counter({name: found[name] * size for name in ("free", "held", "cached", "frozen")})

    def _sent(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return sent(array, self.geometry.device)


def outcome_of(admitted: AdmittedPrompt) -> PromptOutcome:
    """What a look-up found."""
    outcome = PromptOutcome()
    for span in admitted.request.plan.spans:
        size = span.end - span.start
        if span.kind == "prefix":
            outcome.found["prefix"] += size
        elif span.kind == "segment":
            outcome.found["request" if span.source == "request" else "frozen"] += size
        else:
            outcome.missed[str(span.reason)] += size
    return outcome


def runs_of(positions: Rows, places: Rows, size: int) -> Rows:
    """Copies i32 [C, 6] of tokens at ascending positions, all that lie side by side as one.

    places i32 [n, 3]: block, slot and delta of each in the store. The target's block is the number
    of the position's page, of `size` tokens, among those of its prompt.
    """
    page, at = np.divmod(positions, np.int32(size))
    apart = np.ones(len(positions), bool)
    step = np.diff(np.column_stack((positions, places)), axis=0)
    apart[1:] = (step != (1, 0, 1, 0)).any(1) | (at[1:] == 0)
    first = np.flatnonzero(apart)
    count = np.diff(np.append(first, len(positions)))
    block, slot, delta = places[first].T
    columns = (block, slot, page[first], at[first], count, delta)
    runs: Rows = np.column_stack(columns).astype(np.int32)
    return runs
