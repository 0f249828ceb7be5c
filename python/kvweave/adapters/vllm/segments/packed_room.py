"""What a store of packed segments makes of its bytes: blocks, pages to unpack into, and bases."""

from __future__ import annotations

from dataclasses import dataclass

from kvweave import ops
from kvweave.adapters.vllm.require import require
from kvweave.cache import KvShape
from kvweave.errors import InvalidArgument
from kvweave.runner.kv.pool_bases import FIRST_OWN, OWN_SHARE, basis_bytes

MOST_AT_ONCE, AT_ONCE_SHARE = 128, 1 / 16
"""Packed blocks that are unpacked together, and the most of the store that they may take for it."""
MOST_OTHERS = 8
"""Bases of documents that an earlier store wrote, at most: one that starts anew makes its own."""
NUMBER_BYTES = 8
"""Of a packed page in a basis: the number of this one among all, and among one alone."""


@dataclass(frozen=True)
class PackedRoom:
    """The sizes of one store.

    `at_once` packed blocks have exact pages to be unpacked into, of the heads of one layer;
    `blocks` packed ones, the null block among them, are `pages` pages; `bases` lie beside them, 0
    for a format without any. `nbytes` of all together.
    """

    at_once: int
    blocks: int
    pages: int
    bases: int
    nbytes: int

    @classmethod
    def within(
        cls, shape: KvShape, of: ops.PackedFormat, arena_bytes: int, others: bool
    ) -> PackedRoom:
        """The most blocks within so many bytes; `others`: whether documents of other stores come.

        Those bring their bases, of which all ranks have room for as many.

        Errors: `InvalidArgument` for bytes in which no block has room beside the bases.
        """
        exact = shape.kv_heads * shape.page_bytes
        at_once = max(min(int(AT_ONCE_SHARE * arena_bytes / exact) - 1, MOST_AT_ONCE), 1)
        one = basis_bytes(of, shape.layers * shape.kv_heads)
        page_bytes = of.page_bytes + (NUMBER_BYTES if one else 0)
        beside, bases = (1 + at_once) * exact, 0
        if one:
            some = (arena_bytes - beside) // (OWN_SHARE * one)
            bases = FIRST_OWN + (max(min(some, MOST_OTHERS), 1) if others else 0)
            beside += bases * one
        least = beside + shape.pages_for_blocks(1) * page_bytes
        expected = f"at least {least}, with {bases} bases of {one} bytes"
        enough = not one or arena_bytes >= least
        require("segment_bytes", enough, expected, str(arena_bytes), InvalidArgument)
        left = arena_bytes - beside
        blocks = max(left // (page_bytes * shape.layers * shape.kv_heads), 1)
        while blocks > 1 and shape.pages_for_blocks(blocks) * page_bytes > left:
            blocks -= 1
        pages = shape.pages_for_blocks(blocks)
        return cls(at_once, blocks, pages, bases, beside + pages * page_bytes)
