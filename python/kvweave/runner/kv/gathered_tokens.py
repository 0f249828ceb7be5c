"""Tokens of one layer brought together into exact pages, in order of position.

A prompt that reads documents where they lie has tokens of them and tokens of its own in turns. The
runs of either may be a token or two, and keys of documents stand at another position than they were
computed at: attention would read a tile of keys for each run, and turn its queries in between.
Bringing all of a layer together costs reading and writing it once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvweave import ops
from kvweave.device_memory import needs_memory
from kvweave.ops import Table
from kvweave.packed_page import PAGE_TOKENS
from kvweave.runner.kv.layer_pages import blocks_of_layer, pages_of_layer
from kvweave.runner.kv.packed_pool import PackedPool
from kvweave.runner.kv.packed_prefix import packs_of
from kvweave.runner.kv.tables import Int32, KvTable, send
from kvweave.runner.kv.token_places import Places, copies_between


@dataclass(frozen=True)
class PackedPlaces:
    """Where tokens lie packed, i32 [n, 3], in blocks of a pool; block −1 for others."""

    pool: PackedPool
    places: Places


@dataclass(frozen=True)
class GatheredTokens:
    """Tokens that follow one another, and from where they come: the same in every layer.

    `arena` [pages, 2, P, D] has the exact ones, `pool` the others, if there are any, in packed
    `blocks` i32 [N]. Copies i32 [C, 6], as `ops.copy_rerotate` takes them, from the pages that
    these are unpacked to, and from the arena. `entries` i32 [M, 5] and `table` list the tokens
    where they come to lie.
    """

    arena: torch.Tensor
    kv_heads: int
    pool: PackedPool | None
    blocks: Int32
    packed_copies: Table
    exact_copies: Table
    entries: Int32
    table: KvTable

    @staticmethod
    def of(
        arena: torch.Tensor,
        kv_heads: int,
        first: int,
        exact: Places,
        packed: PackedPlaces | None = None,
    ) -> GatheredTokens:
        """Of tokens [first, first + n), by their places [n, 3] in an arena, and packed ones.

        One that has both is taken where it is exact; each has one of them.
        """
        count = len(exact)
        at = np.arange(count, dtype=np.int32)
        there = blocks_of_layer(kv_heads, -(-count // PAGE_TOKENS))
        slots = np.stack((there[at // PAGE_TOKENS], at % PAGE_TOKENS), 1)
        places = np.zeros((0, 3), np.int32) if packed is None else packed.places
        held = np.flatnonzero(places[:, 0] >= 0)
        blocks, which = np.unique(places[held, 0], return_inverse=True)
        source = places[held]
        source[:, 0] = blocks_of_layer(kv_heads, len(blocks))[which]
        own = exact[:, 0] >= 0
        entries = np.zeros((len(there), 5), np.int32)
        entries[:, 0], entries[:, 3] = there, first + at[::PAGE_TOKENS]
        entries[:, 2] = np.minimum(first + count - entries[:, 3], PAGE_TOKENS)
        tables = (
            copies_between(source, slots[held]),
            copies_between(exact[own], slots[own]),
            entries,
            np.asarray([0, len(entries)], np.int32),
        )
        from_packed, from_exact, listed, offsets = send(arena.device, *tables)
        return GatheredTokens(
            arena,
            kv_heads,
            None if packed is None else packed.pool,
            blocks,
            from_packed,
            from_exact,
            entries,
            KvTable(listed, offsets),
        )

    def gathered(self, layer: int, rope: ops.RopeTable) -> torch.Tensor:
        """The pages of a layer that its tokens have been brought to: see `pages_of_layer`.

        Keys are turned to where they are read. Exact tokens come second, over packed ones.

        # Errors
        `OutOfMemory` where they do not fit beside the arena.
        """
        pages = self._pages(layer, len(self.entries))
        if self.pool is not None and len(self.blocks):
            unpacked = self._pages(layer, len(self.blocks))
            exact = blocks_of_layer(self.kv_heads, len(self.blocks)) + layer * self.kv_heads
            self.pool.unpack_layer(layer, packs_of(self.blocks, exact[:, None]), unpacked, False)
            self._bring(layer, pages, unpacked, self.packed_copies, rope)
        self._bring(layer, pages, self.arena, self.exact_copies, rope)
        return pages

    @needs_memory("tokens brought together")
    def _pages(self, layer: int, blocks: int) -> torch.Tensor:
        return pages_of_layer(self.arena, self.kv_heads, PAGE_TOKENS, layer, blocks)

    def _bring(
        self,
        layer: int,
        pages: torch.Tensor,
        source: torch.Tensor,
        copies: Table,
        rope: ops.RopeTable,
    ) -> None:
        """Copies one layer's tokens, of blocks that have the pages of its heads in a row."""
        heads = self.kv_heads
        if len(copies):
            here, there = pages[layer * heads :], source[layer * heads :]
            layers = torch.full((heads,), layer, dtype=torch.int32, device=here.device)
            ops.copy_rerotate(here, copies, rope, kv_heads=heads, layers=layers, source=there)
