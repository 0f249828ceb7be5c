"""`PackedPrefix`: the packed pages of one request, written as its pages fill and read as they are.

The exact pool lets go of what lies behind the newest tokens, so a page has to be packed before:
whoever moves a request on has its full pages packed first. Packed pages are a prefix of a text:
requests that begin alike share them, and nobody writes one a second time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvweave import ops
from kvweave.cache import KvRequest
from kvweave.ops import Table
from kvweave.plan import Rows
from kvweave.runner.kv.packed_pool import (
    PAGE_TOKENS,
    RECENT_TOKENS,
    SCRATCH_TOKENS,
    SINK_TOKENS,
    PackedPool,
)
from kvweave.runner.kv.tables import Int32, send
from kvweave.runner.model.model_spec import LayerSpec

States = tuple[torch.Tensor, torch.Tensor]
"""Attention over some of the keys: out [R, H, D], and its log-sum-exp f32 [R, H]."""


class PackedPrefix:
    """The packed pages of one request: those of its first `tokens` tokens, whole pages.

    `reserve_tokens`: room is set aside behind the prompt's own. `reuse` as for `KvCache.admit`.

    # Errors
    `PoolFull` when prompt and reserve do not fit; nothing is held then.
    """

    def __init__(
        self,
        pool: PackedPool,
        tokens: Rows,
        *,
        namespace: str,
        reuse: str,
        regime: int,
        reserve_tokens: int = 0,
    ) -> None:
        self.pool = pool
        found = 0 if reuse == "none" else pool.found_prefix(tokens, namespace, regime)
        # The last token of an admission is never reused, and a prefix is taken in whole pages.
        first = tokens[: found + 1]
        self.request = pool.cache.admit(
            first,
            namespace=namespace,
            reuse=reuse,
            reserve_tokens=len(tokens) + reserve_tokens - len(first),
            regime=regime,
        )
        self.tokens = self.request.plan.reused_prefix // PAGE_TOKENS * PAGE_TOKENS
        self.request.take_copies()
        self.request.finish_copies()
        self._blocks = self.request.entries()[: self.tokens // PAGE_TOKENS, 0]

    @property
    def full_at(self) -> int:
        """Tokens that the request has when its next page is full."""
        return self.tokens + PAGE_TOKENS

    def reused(self, exact: int) -> int:
        """The rows that need not be computed, where `exact` are in exact pages at the start.

        Packed pages count where the sink is there, which is never read from one.
        """
        return max(exact, self.tokens) if exact == SINK_TOKENS else exact

    def pack(self, request: KvRequest, done: int) -> None:
        """Packs the pages that are full now that `done` tokens of the request have their KV.

        # Errors
        `PoolFull` without room; nothing has changed then.
        """
        if done < self.full_at:
            return
        end = done // PAGE_TOKENS * PAGE_TOKENS
        length = self.request.length
        if end > length:
            self.request.append(request.tokens[length:end])
        blocks = self.request.entries()[: end // PAGE_TOKENS, 0]
        new = np.arange(self.tokens // PAGE_TOKENS, end // PAGE_TOKENS)
        self._convert(True, request, new, blocks)
        self._blocks, self.tokens = blocks, end

    def unpack_newest(self, request: KvRequest) -> None:
        """Fills the newest exact pages of a request whose rows go on behind what is packed."""
        first = max(SINK_TOKENS, self.tokens - RECENT_TOKENS) // PAGE_TOKENS
        pages = np.arange(first, self.tokens // PAGE_TOKENS)
        self._convert(False, request, pages, self._blocks)

    def _convert(
        self, pack: bool, request: KvRequest, pages: npt.NDArray[np.int64], blocks: Int32
    ) -> None:
        """Packs or unpacks some pages in a row, of all layers and heads in one launch."""
        if not len(pages):
            return
        pool, entries = self.pool, request.entries()
        size = pool.exact.shape[2]
        starts = np.arange(pages[0] * PAGE_TOKENS, (pages[-1] + 1) * PAGE_TOKENS, size)
        at = np.searchsorted(entries[:, 3], starts)
        assert np.array_equal(entries[at, 3], starts), "what is packed lies in exact pages"
        packs = packs_of(blocks[pages], entries[at, 0].reshape(len(pages), -1))
        (table,) = send(pool.spec.device, packs)
        if pack:
            ops.pack_pages(pool.exact, pool.pages, table, pages=pool.block_pages)
        else:
            ops.unpack_pages(pool.pages, pool.exact, table, pages=pool.block_pages)

    def commit(self) -> None:
        """Lets later prompts find what is packed."""
        if self.tokens:
            self.request.commit(self.tokens, self.tokens)

    def kv_bytes(self) -> tuple[int, int]:
        """Bytes of packed blocks that this request alone pays for, and of those that it shares."""
        page = self.pool.cache.shape.page_bytes
        own, shared = self.request.kv_bytes()
        size = self.pool.pages.format.page_bytes
        return own // page * size, shared // page * size

    def release(self) -> None:
        """Gives the blocks back; safe to call twice."""
        self.request.release()

    # ---- reading --------------------------------------------------------------------------

    def entries(self) -> Int32:
        """All packed pages behind the sink, i32 [N, 5]; a decode step cuts them by its position."""
        blocks = self._blocks[SINK_TOKENS // PAGE_TOKENS :]
        rows = np.zeros((len(blocks), 5), np.int32)
        rows[:, 0], rows[:, 2] = blocks, PAGE_TOKENS
        rows[:, 3] = SINK_TOKENS + PAGE_TOKENS * np.arange(len(blocks))
        return rows

    def end_of_gap(self, request: KvRequest) -> int:
        """Where exact pages begin again behind the sink: what lies between is read packed."""
        starts = request.entries()[:, 3]
        behind = starts[starts >= SINK_TOKENS]
        return int(behind[0]) if len(behind) else SINK_TOKENS

    def merged(
        self,
        layer: int,
        of: LayerSpec,
        rope: ops.RopeTable,
        rows: tuple[torch.Tensor, Table],
        gap_end: int,
        exact: States,
    ) -> torch.Tensor:
        """Attention of a prompt's rows over packed pages and, as `exact` has it, over the others.

        `rows`: queries [R, H, D] and their positions i32 [R], all of them at or behind `gap_end`.
        Packed pages of this layer are unpacked into scratch, `SCRATCH_TOKENS` at once: each chunk
        of a prompt reads all before it so, and unpacking costs what a copy of it does.
        """
        (q, positions), (out, lse) = rows, exact
        for first in range(SINK_TOKENS, gap_end, SCRATCH_TOKENS):
            pages, entries = self._unpacked(layer, first, min(gap_end, first + SCRATCH_TOKENS))
            heads = self.pool.spec.kv_heads
            kv = ops.PagedKv(pages, 0, heads, of.scale, rope, None, of.softcap)
            part = ops.attend_prefill(q, positions, entries, kv)
            outs, lses = torch.stack((out, part[0])), torch.stack((lse, part[1]))
            out, lse = ops.merge_states(outs, lses)
        return out

    def _unpacked(self, layer: int, first: int, end: int) -> tuple[torch.Tensor, Table]:
        """One layer's packed tokens [first, end) in pages of their own, and entries of them."""
        pool, heads = self.pool, self.pool.spec.kv_heads
        size, dim = pool.exact.shape[2:]
        packed = self._blocks[first // PAGE_TOKENS : -(-end // PAGE_TOKENS)] + layer * heads
        # Behind a null block of one page a head.
        exact = heads * np.arange(1, len(packed) * PAGE_TOKENS // size + 1, dtype=np.int32)
        shape = (int(exact[-1]) + heads, 2, size, dim)
        pages = torch.empty(shape, dtype=pool.exact.dtype, device=pool.exact.device)
        entries = np.zeros((-(-(end - first) // size), 5), np.int32)
        entries[:, 0] = exact[: len(entries)]
        entries[:, 3] = first + size * np.arange(len(entries))
        entries[:, 2] = np.minimum(size, end - entries[:, 3])
        packs = packs_of(packed, exact.reshape(len(packed), -1))
        table, listed = send(pool.spec.device, packs, entries)
        ops.unpack_pages(pool.pages, pages, table, pages=heads)
        return pages, listed


def packs_of(packed: Int32, exact: Int32) -> Int32:
    """Whole packed blocks [N] and the exact ones [N, n] of each, as `ops.pack_pages` wants them."""
    full = np.full(len(packed), PAGE_TOKENS, np.int32)
    return np.column_stack((packed, full, exact)).astype(np.int32)
