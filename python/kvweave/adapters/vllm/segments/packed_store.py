"""A store of segments in packed pages: several times as many tokens in the same memory.

A page is packed once all its tokens lie in vLLM's own pages, from there, reused ones among them.
So what is stored ends with a page until the prompt does, and what an exact prefix has of a page
that another prompt goes on from is read where it lies until that page is packed anew. Tokens that
are reused are unpacked into a few exact pages, whose keys turn on the way into vLLM's.

Formats in a basis are packed in the one that the first tokens make, whoever's they are. Documents
of an earlier store bring theirs: what is unpacked together is of one basis, and turned out of it.

The first tokens of a document or a prompt, which such formats fit worst, lie beside its pages as
they were computed. Whoever reuses it from there on has these copied instead, keys turned as others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvweave import ops
from kvweave.adapters.vllm.options import PackedKind
from kvweave.adapters.vllm.require import require
from kvweave.adapters.vllm.segments.attention_layers import AttentionLayers, HeadPart
from kvweave.adapters.vllm.segments.measured_pages import (
    MOST_PAGES,
    first_tokens,
    measured_pages,
)
from kvweave.adapters.vllm.segments.packed_room import PackedRoom
from kvweave.adapters.vllm.segments.store import (
    PAGE_TOKENS,
    AdmittedPrompt,
    Copies,
    DocumentRoom,
    Geometry,
    Piece,
    Rows,
    SegmentStore,
    runs_of,
)
from kvweave.cache import KvCache, KvRequest, KvShape
from kvweave.device_memory import arena_pages, needs_memory
from kvweave.errors import InvalidArgument, Unsupported
from kvweave.payload import KvPayload
from kvweave.payload.transfer import admit_kv
from kvweave.policies import Full
from kvweave.runner.kv.exact_firsts import ExactFirsts, firsts_counts
from kvweave.runner.kv.packed_pool import on_host
from kvweave.runner.kv.packing import Packing
from kvweave.runner.kv.pool_bases import UNROTATED, PoolBases, basis_shape, some_queries

LEAST_TOKENS, MOST_TOKENS = 64, 256
"""Of a packed page; the steps of a page's keys are shared by its tokens."""


def page_tokens_of(block_tokens: int) -> int:
    """Tokens of a packed page that is made of whole blocks of vLLM.

    Errors: `Unsupported` for blocks that make none.
    """
    size = -(-LEAST_TOKENS // block_tokens) * block_tokens
    expected = f"blocks of vLLM that make a page of {LEAST_TOKENS} to {MOST_TOKENS} tokens"
    fits = size <= MOST_TOKENS and size % PAGE_TOKENS == 0
    require("segment_dtype", fits, expected, str(block_tokens))
    return size


def format_of(
    kind: PackedKind, head_dim: int, page_tokens: int, dtype: torch.dtype
) -> ops.PackedFormat:
    """What a packed page of heads of so many channels is.

    Errors: `Unsupported` for a head dim that the format has not.
    """
    scales = "f16" if dtype == torch.float16 else "bf16"
    try:
        return ops.packed_format(kind, head_dim, page_tokens, scales)
    except InvalidArgument as error:
        expected = f"a format that heads of {head_dim} channels have"
        text = f"segment_dtype: expected {expected}, got {kind}: {error}"
        raise Unsupported(text, expected=expected, got=kind) from error


class PackedSegmentStore(SegmentStore):
    """As `SegmentStore`, its pages packed in the format `kind`.

    `page_tokens`: of a packed page, a multiple of those that any of vLLM's blocks has. `others`:
    whether documents of other stores may come, with bases of theirs. `exact_first`: of a document
    so many first tokens stay exact, at most 64; None: as `Packing` has it of the format. `packed`:
    the pages, of which a block has `block_pages`; `bases`: in which, of a format that has any;
    `firsts`: the first tokens that are exact, of a store that has any.

    Errors: as `format_of`, `Packing` and `PackedRoom.within`; `OutOfMemory` where the device has no
    room for all of it.
    """

    def __init__(
        self,
        geometry: Geometry,
        arena_bytes: int,
        frozen_share: float,
        fingerprint: str,
        kind: PackedKind,
        page_tokens: int,
        others: bool = False,
        exact_first: int | None = None,
    ) -> None:
        self.page_tokens, self.others = page_tokens, others
        self.format = format_of(kind, geometry.head_dim, page_tokens, geometry.dtype)
        self.first_tokens = Packing(kind, exact_first=exact_first).first_tokens(self.format)
        super().__init__(geometry, arena_bytes, frozen_share, fingerprint)

    @property
    def block_bytes(self) -> int:
        """Bytes of a packed block."""
        return self.block_pages * self.format.page_bytes

    def _allocate(self, shape: KvShape, arena_bytes: int, settings: dict[str, Any]) -> KvCache:
        geometry, of = self.geometry, self.format
        self.block_pages = geometry.layers * geometry.kv_heads
        # Exact pages that unpacked ones go through are part of what the user gives, as bases are.
        first_bytes = self.first_tokens * shape.token_bytes
        self.room = room = PackedRoom.within(shape, of, arena_bytes, self.others, first_bytes)
        sizes = (1 + room.at_once) * geometry.kv_heads, 2, self.page_tokens, geometry.head_dim
        self._unpacked = arena_pages(sizes, geometry.dtype, geometry.device)

        beside = self._unpacked.nbytes + room.firsts * first_bytes

        @needs_memory("arena", f"{room.nbytes - beside} bytes")
        def made() -> ops.PackedPages:
            bases = None
            if room.bases:
                size = room.bases, *basis_shape(of, self.block_pages)
                bases = torch.zeros(size, device=geometry.device)
            return ops.PackedPages.zeros(room.pages, of, geometry.device, bases=bases)

        self.packed = made()
        self.bases: PoolBases | None = None
        if self.packed.bases is not None:
            self.bases = PoolBases(self.packed.bases, of, self.block_pages, None)
        of_firsts = shape, self.first_tokens, geometry.dtype, geometry.device
        self.firsts = ExactFirsts.made(room.firsts, *of_firsts)
        cache = KvCache(shape, blocks=room.blocks, memory=False, **settings)
        if self.bases is not None:
            # A document's basis has room for another one once nobody has its pages.
            cache.zero_freed_by(self.bases.let_go)
        return cache

    def begin_anew(self) -> None:
        """As `SegmentStore.begin_anew`; pages are packed in a basis that comes of later tokens."""
        super().begin_anew()
        if self.bases is not None:
            self.bases.begin_anew()

    def forget(self, *, documents: bool) -> None:
        """As `SegmentStore.forget`; first tokens stay where a namespace still has documents."""
        super().forget(documents=documents)
        if self.firsts is not None:
            self.firsts.forget_all_but({entry.namespace for entry in self.cache.frozen()})

    def counts(self) -> dict[str, Any]:
        """As `SegmentStore.counts`, and first tokens of documents as `PackedPool.stats`."""
        return super().counts() | firsts_counts(self.firsts)

    def bytes_by_state(self) -> Counter[str]:
        """As `SegmentStore.bytes_by_state`, and bytes of `firsts`, where any are exact."""
        found = super().bytes_by_state()
        if self.firsts is not None:
            found["firsts"] = self.firsts.held * self.firsts.room_bytes
        return found

    def _parts(self) -> list[torch.Tensor]:
        firsts = [] if self.firsts is None else [self.firsts.data]
        return [self._unpacked, self.packed.data, *firsts]

    def _take_copies(self, admitted: AdmittedPrompt) -> None:
        admitted.sources = np.asarray(admitted.request.take_copies(), np.int32).reshape(-1, 6)

    def _pieces(self, runs: Rows) -> list[tuple[Rows, torch.Tensor | None, int]]:
        blocks, at = np.unique(runs[:, 0], return_inverse=True)
        in_basis = np.full_like(blocks, UNROTATED)
        if self.bases is not None:
            in_basis = self.bases.numbers(blocks)
        pieces: list[tuple[Rows, torch.Tensor | None, int]] = []
        for basis in np.unique(in_basis).tolist():
            alike = np.flatnonzero(in_basis == basis)
            for start in range(0, len(alike), self.room.at_once):
                some = alike[start : start + self.room.at_once]
                own = np.zeros_like(blocks)
                own[some] = (np.arange(len(some)) + 1) * self.geometry.kv_heads
                packs = np.column_stack(
                    (blocks[some], np.full_like(some, self.page_tokens), own[some])
                )
                rows = runs[own[at] > 0].copy()
                rows[:, 0] = own[at][own[at] > 0]
                pieces.append((rows, self._sent(packs.astype(np.int32)), basis))
        return pieces

    def copies(
        self, admitted: AdmittedPrompt, positions: Rows, blocks: torch.Tensor, size: int
    ) -> Copies:
        """As `SegmentStore.copies`; first tokens of documents that are exact come from there."""
        if self.firsts is None:
            return super().copies(admitted, positions, blocks, size)
        tokens, rotates = admitted.request.tokens[: admitted.tokens], admitted.policy.delta_rope
        exact = self.firsts.places(tokens, admitted.begun, self.regime, rotates=rotates)
        exact = exact[positions]
        first = exact[:, 0] >= 0
        packed = super().copies(admitted, positions[~first], blocks, size)
        if not first.any():
            return packed
        runs = runs_of(positions[first], exact[first], size)
        moved = packed.moved + int(np.count_nonzero(exact[first, 2]))
        pieces = [*packed.pieces, Piece(self._rows_into(blocks, runs))]
        return Copies(pieces, len(positions), moved)

    def copy(self, copies: Copies, layer: int, part: HeadPart) -> None:
        """Copies K and V of a part of a layer into its pages, unpacked and keys turned."""
        for piece in copies.pieces:
            source = self._source(piece, layer, part)
            self._copy(part, piece.rows, source)

    def _source(self, piece: Piece, layer: int, part: HeadPart) -> torch.Tensor:
        """The exact pages that a piece's rows read, unpacked where they are packed."""
        if piece.packs is None:
            assert self.firsts is not None
            return self.firsts.pages[self._first_page(layer, part) :]
        packed, heads = self._pages_of(layer, part, piece.basis), part.kv_heads
        ops.unpack_pages(packed, self._unpacked, piece.packs, pages=heads, in_order=False)
        return self._unpacked

    def keep(
        self,
        admitted: AdmittedPrompt,
        end: int,
        layers: AttentionLayers,
        blocks: list[torch.Tensor],
    ) -> None:
        """Packs the pages before `end` whose tokens all lie in vLLM's pages."""
        if end < admitted.tokens:
            end = end // self.page_tokens * self.page_tokens
        if end <= admitted.stored:
            return
        numbers, own = self._own_blocks(admitted, end)
        of_class = [
            self._packs(numbers, own, end, first, part.page_tokens)
            for first, part in zip(blocks, layers.classes, strict=True)
        ]
        if len(own):
            size = self.geometry.kv_heads, self.page_tokens
            left_out = 0 if numbers[0] else self.first_tokens
            basis = self._assigned(
                own, numbers, lambda: measured_pages(layers, of_class, *size), left_out
            )
            for layer, parts in enumerate(layers.layers):
                for part in parts:
                    packed, packs = self._pages_of(layer, part, basis), of_class[part.number]
                    ops.pack_pages(part.pages, packed, packs, pages=part.kv_heads)
            if not numbers[0]:
                self._keep_first(admitted, layers, blocks)
        self._commit_whole(admitted, end)

    def _keep_first(
        self, admitted: AdmittedPrompt, layers: AttentionLayers, blocks: list[torch.Tensor]
    ) -> None:
        """Keeps the first tokens of a prompt, where it has computed them."""
        count = min(self.first_tokens, admitted.tokens)
        computed = np.array_equal(admitted.fresh[:count], np.arange(count))
        known = admitted.request.tokens, admitted.request.namespace, self.regime
        if self.firsts is None or not computed or admitted.computed_from:
            return
        if admitted.exact >= count and self.firsts.block_of(*known) is None:
            self.firsts.put_passing(*known, first_tokens(layers, blocks, count))

    @contextmanager
    def encoding(self, admitted: AdmittedPrompt) -> Iterator[DocumentRoom]:
        """Exact pages of all layers for as long as the room is there; they are packed behind it."""
        request = admitted.request
        cache, pages = self._exact(admitted.tokens)
        tokens, of = np.asarray(request.tokens, np.int32), request.namespace
        exact = cache.admit(tokens, namespace=of, reuse="none", regime=self.regime)
        places = np.arange(-(-admitted.tokens // PAGE_TOKENS), dtype=np.int32)
        wanted = self.bases is not None and self.bases.wants_queries(places)
        yield DocumentRoom(cache, pages, exact, self._take_queries if wanted else None)
        self._pack(admitted, pages, exact)

    def take(self, payload: KvPayload, namespace: str) -> KvRequest:
        """As `SegmentStore.take`, by way of exact pages.

        Errors: as `admit_kv`, and `OutOfMemory` where the device has no room for these pages.
        """
        tokens = payload.tokens.tolist()
        cache, pages = self._exact(len(tokens))
        with admit_kv(cache, pages, payload, namespace) as exact:
            admitted = self.admit(tokens, [], namespace, Full(), discover=False)
            try:
                self._pack(admitted, pages, exact)
            except BaseException:
                admitted.release()
                raise
        return admitted.request

    def _take_queries(self, q: torch.Tensor, first: int, kv_heads: int) -> None:
        """Has a basis that is still to be made spend its bits by what these queries read."""
        assert self.bases is not None
        self.bases.add_queries(some_queries(q), first, kv_heads)

    def _exact(self, tokens: int) -> tuple[KvCache, torch.Tensor]:
        """A cache of exact pages with room for a text, and the pages."""
        kept = self.cache.shape
        size = kept.layers, kept.kv_heads, kept.head_dim, PAGE_TOKENS, kept.dtype
        shape = KvShape(*size)
        count = shape.pages_for_blocks(-(-tokens // PAGE_TOKENS))
        sizes = (count, 2, PAGE_TOKENS, kept.head_dim)
        pages = arena_pages(sizes, self.geometry.dtype, self.geometry.device)
        return KvCache(shape, external=pages, fingerprint=self.cache.fingerprint), pages

    def _pack(self, admitted: AdmittedPrompt, pages: torch.Tensor, exact: KvRequest) -> None:
        """Packs a whole text that lies in exact pages of another request, and commits it."""
        numbers, own = self._own_blocks(admitted, admitted.tokens)
        if len(own):
            blocks = self._sent(exact.entries()[:, 0])
            packs = self._packs(numbers, own, admitted.tokens, blocks, PAGE_TOKENS)
            first, count = packs[:MOST_PAGES], self.block_pages
            self._assigned(
                own,
                numbers,
                lambda: on_host(pages, first.cpu().numpy(), count),
                self.first_tokens,
            )
            ops.pack_pages(pages, self.packed, packs, pages=count)
        if self.firsts is not None:
            self.firsts.keep(admitted.request, exact, pages)
        self._commit_whole(admitted, admitted.tokens)

    def _assigned(
        self,
        own: Rows,
        numbers: Rows,
        exact: Callable[[], tuple[torch.Tensor, Rows]],
        left_out: int = 0,
    ) -> int:
        """The basis that own blocks are about to be packed in, which is said of them.

        `numbers`: those of their pages in the prompt. `exact`: pages of theirs on the host, and
        packs of these, which the shared one is made of, but for so many first tokens, which are
        read where they are exact.
        """
        bases = self.bases
        if bases is None:
            return UNROTATED
        if bases.wants_moments:
            bases.add(*exact(), numbers, left_out)
        bases.assign(own, bases.shared)
        return bases.shared

    def _pages_of(self, layer: int, part: HeadPart, basis: int) -> ops.PackedPages:
        """A part's pages from its first one of a block on, all in one basis."""
        page, own = self._first_page(layer, part), None
        if self.bases is not None:
            # A basis knows a page by its rank in a block.
            own = self.bases.of_pages(basis, page, part.kv_heads)
            own = ops.PackedBases(own.data, own.of[page:])
        return ops.PackedPages(self.packed.data[page:], self.format, own)

    def _own_blocks(self, admitted: AdmittedPrompt, end: int) -> tuple[Rows, Rows]:
        """Of the pages before `end` that are not stored yet: numbers in the prompt, and own blocks.

        Those are of tokens that the store has not, and of what they are to have of other blocks.
        """
        size, request = self.page_tokens, admitted.request
        positions = admitted.new(end)
        copied = admitted.copied
        copied = copied[(copied >= admitted.stored) & (copied < end)]
        every = np.concatenate((positions, copied))
        numbers, at = np.unique(every // np.int32(size), return_index=True)
        own: Rows = request.slots(every[at])[:, 0]
        return numbers, own

    def _packs(
        self, numbers: Rows, own: Rows, end: int, blocks: torch.Tensor, size: int
    ) -> torch.Tensor:
        """Rows for `ops.pack_pages`: own blocks take pages of a prompt of `end` tokens.

        `blocks` i32 [N]: the first page of each of its pages of `size` tokens.
        """
        each = self.page_tokens // size
        tokens = np.minimum(end - numbers * self.page_tokens, self.page_tokens)
        read = numbers[:, None] * each + np.arange(each)
        read = np.minimum(read, -(-end // size) - 1)
        head = self._sent(np.column_stack((own, tokens)).astype(np.int32))
        read_blocks = blocks[self._sent(read.astype(np.int64))]
        return torch.cat((head, read_blocks.to(torch.int32)), 1).contiguous()

    def _commit_whole(self, admitted: AdmittedPrompt, end: int) -> None:
        if end == admitted.tokens:
            # All that was read elsewhere is packed here now.
            admitted.request.finish_copies()
        self.commit(admitted, end)
