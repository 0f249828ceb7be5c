"""What a store of packed segments makes of its bytes.

Blocks, pages to unpack into, bases, and rooms for the exact first tokens of documents.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from kvweave import ops
from kvweave.adapters.vllm.require import require
from kvweave.cache import KvShape
from kvweave.errors import InvalidArgument
from kvweave.runner.kv.exact_firsts import first_rooms
from kvweave.runner.kv.pool_bases import OWN_SHARE, basis_bytes, shared_bases

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
    for a format without any, and `firsts` rooms for first tokens, nobody's among them, 0 where
    none are exact. `nbytes` of all together.
    """

    at_once: int
    blocks: int
    pages: int
    bases: int
    firsts: int
    nbytes: int

    @classmethod
    def within(
        cls,
        shape: KvShape,
        of: ops.PackedFormat,
        arena_bytes: int,
        others: bool,
        first_bytes: int = 0,
    ) -> PackedRoom:
        """The most blocks within so many bytes; `others`: whether documents of other stores come.

        Those bring their bases, of which all ranks have room for as many. `first_bytes`: of a
        document's exact first tokens, 0 for none.

        Errors: `InvalidArgument` for bytes in which no block has room beside the bases and them.
        """
        exact = shape.kv_heads * shape.page_bytes
        at_once = max(min(int(AT_ONCE_SHARE * arena_bytes / exact) - 1, MOST_AT_ONCE), 1)
        one = basis_bytes(of, shape.layers * shape.kv_heads)
        page_bytes = of.page_bytes + (NUMBER_BYTES if one else 0)
        beside, bases = (1 + at_once) * exact, 0
        if one:
            some = (arena_bytes - beside) // (OWN_SHARE * one)
            bases = shared_bases(refines=False)
            bases += max(min(some, MOST_OTHERS), 1) if others else 0
            beside += bases * one

        def firsts(blocks: int) -> int:
            return 1 + first_rooms(blocks - 1) if first_bytes else 0

        def taken(blocks: int) -> int:
            pages = shape.pages_for_blocks(blocks) * page_bytes
            return beside + pages + firsts(blocks) * first_bytes

        expected = f"at least {taken(1)}, with {bases} bases of {one} bytes"
        enough = not (one or first_bytes) or arena_bytes >= taken(1)
        require("segment_bytes", enough, expected, str(arena_bytes), InvalidArgument)
        most = (arena_bytes - beside) // (page_bytes * shape.layers * shape.kv_heads)
        blocks = max(bisect_right(range(1, most + 1), arena_bytes, key=taken), 1)
        pages = shape.pages_for_blocks(blocks)
        return cls(at_once, blocks, pages, bases, firsts(blocks), taken(blocks))
