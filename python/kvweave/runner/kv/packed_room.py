"""`make_packed_pool`: both pools of a runner with packed pages, and how large each of them is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvweave import ops
from kvweave.cache import HeadClassMap, KvShape
from kvweave.device_memory import needs_memory
from kvweave.errors import InvalidArgument
from kvweave.packed_page import PAGE_TOKENS
from kvweave.runner.kv.aside import Aside
from kvweave.runner.kv.exact_firsts import ExactFirsts, first_rooms
from kvweave.runner.kv.final_texts import extra_blocks, make_books
from kvweave.runner.kv.packed_heads import PackedHeads
from kvweave.runner.kv.packed_pool import (
    BOUND_BYTES,
    CHUNK_TOKENS,
    EXACT_SHARE,
    MOST_CHUNK_TOKENS,
    RECENT_TOKENS,
    SINK_TOKENS,
    ExactPool,
    PackedPool,
    exact_windows,
    format_of,
    strategy_formats,
)
from kvweave.runner.kv.packing import Packing
from kvweave.runner.kv.pool_bases import (
    OWN_SHARE,
    PoolBases,
    PositionRange,
    basis_bytes,
    basis_shape,
    check_basis,
    shared_bases,
)
from kvweave.runner.kv.text_memory import TextMemory, memory_bytes
from kvweave.runner.model.model_spec import KV_DTYPES, ModelSpec
from kvweave.runner.model.rope import Rotary


@dataclass(frozen=True)
class PoolSizes:
    """How large the two pools of a model are, by the tokens that they have room for.

    `exact` and `packed`: geometries, of which the former is cut into `windows`. `page_bytes`: of a
    packed page and its bounds, where it has any, and `basis_bytes` of a basis, of which `shared`
    belong to no document. `chunk_tokens`: rows of a prompt that are computed at once, where the
    caller says so. `has_own`: whether documents may have bases of their own. `final_share`: so many
    of their bytes packed pages have beside them for texts that are packed finally, in
    `final_formats`, whose pages have `bound_bytes` of bounds. `first_bytes`: of a
    document's exact first tokens.
    """

    exact: KvShape
    packed: KvShape
    windows: HeadClassMap
    page_bytes: int
    basis_bytes: int
    shared: int
    chunk_tokens: int | None
    has_own: bool = True
    final_share: float = 0.0
    final_formats: tuple[ops.PackedFormat, ...] = ()
    bound_bytes: int = 0
    first_bytes: int = 0

    def exact_blocks(self, tokens: int) -> int:
        """Blocks of the exact pool beside packed pages of so many tokens.

        It has a share of them, and no less than a chunk of a prompt and two requests' windows take.
        """
        window = SINK_TOKENS + RECENT_TOKENS
        least = min(tokens, self.chunk_tokens or CHUNK_TOKENS) + 2 * window + PAGE_TOKENS
        return self.exact.blocks_for_tokens(max(tokens // EXACT_SHARE, least)) + 1

    def chunk(self, tokens: int) -> int:
        """Rows of a prompt that are computed at once, in pools of so many tokens.

        A chunk unpacks all that lies before it, so fewer of them cost less: half of the share that
        exact pages have is theirs, and windows of other requests keep the rest.
        """
        share = tokens // (2 * EXACT_SHARE) // PAGE_TOKENS * PAGE_TOKENS
        return self.chunk_tokens or min(max(CHUNK_TOKENS, share), MOST_CHUNK_TOKENS)

    def packed_pages(self, tokens: int) -> int:
        """Pages of the packed pool."""
        return self.packed.pages_for_blocks(self.packed_blocks(tokens))

    def packed_blocks(self, tokens: int) -> int:
        """Its blocks, the null block among them."""
        return self.packed.blocks_for_tokens(tokens) + 1

    def bases(self, tokens: int) -> int:
        """Bases: those of no document, and of as many documents as may have their own at once."""
        if not self.basis_bytes:
            return 0
        if not self.has_own:
            return self.shared
        packed = self.packed_pages(tokens) * self.page_bytes
        return self.shared + packed // (OWN_SHARE * self.basis_bytes)

    def firsts(self, tokens: int) -> int:
        """How many beginnings of documents there is room for, and nobody's room."""
        return 1 + first_rooms(self.packed_blocks(tokens) - 1) if self.first_bytes else 0

    def total_bytes(self, tokens: int) -> int:
        """Bytes of both pools with room for so many tokens, bases and first ones among them."""
        exact = self.exact.pages_for_blocks(self.exact_blocks(tokens), self.windows)
        packed = self.packed_pages(tokens) * self.page_bytes
        packed += self.bases(tokens) * self.basis_bytes + self.firsts(tokens) * self.first_bytes
        if self.final_formats:
            of_texts = self.final_bytes(tokens)
            bounded = extra_blocks(of_texts, self.least_final)
            packed += self.packed.pages_for_blocks(bounded) * self.bound_bytes
            packed += memory_bytes(of_texts, self.final_formats)
        return exact * self.exact.page_bytes + packed

    def final_bytes(self, tokens: int) -> int:
        """The most bytes of texts that are packed finally."""
        return int(self.final_share * self.packed_pages(tokens) * self.page_bytes)

    @property
    def least_final(self) -> int:
        """The fewest bytes that a block of such a text has; 0 where there are none."""
        least = min((of.page_bytes for of in self.final_formats), default=0)
        return self.packed.layers * self.packed.kv_heads * least

    def tokens_within(self, arena_bytes: int) -> int:
        """The most tokens, in whole pages, for which both pools take no more bytes.

        # Errors
        `InvalidArgument` for bytes that hold no page beside what is exact.
        """
        most = max(0, arena_bytes) // (self.page_bytes * self.packed.layers * self.packed.kv_heads)

        def taken(blocks: int) -> int:
            return self.total_bytes(blocks * PAGE_TOKENS)

        blocks = bisect_right(range(most + 1), arena_bytes, key=taken) - 1
        if blocks < 1:
            raise InvalidArgument(
                f"arena_bytes: expected at least {taken(1)} beside packed pages, got {arena_bytes}"
            )
        return blocks * PAGE_TOKENS


def _final_sizes(spec: ModelSpec, packing: Packing) -> dict[str, Any]:
    """What `PoolSizes` are told of texts that are packed finally: nothing where there are none."""
    strategy = packing.strategy
    if strategy is None:
        return {}
    formats = strategy_formats(spec, packing)
    return {"has_own": False, "final_share": strategy.final_share, "final_formats": formats}


def _text_memory(sizes: PoolSizes, tokens: int, device: torch.device) -> TextMemory | None:
    """Where texts lie that are packed finally, of a pool of so many tokens; None without any."""
    formats = sizes.final_formats
    return TextMemory(sizes.final_bytes(tokens), formats, device) if formats else None


def _bases(
    spec: ModelSpec, packing: Packing, pages: ops.PackedPages, tokens: int
) -> PoolBases | None:
    """The bases of a pool of so many tokens; None in a format without any.

    Where frequencies of RoPE depend on the length, keys have no other positions.
    """
    if pages.bases is None:
        return None
    rotary, positions = Rotary(spec), None
    if rotary.keys and rotary.is_fixed:
        most = tokens if spec.positions is None else min(tokens, spec.positions)
        positions = PositionRange(rotary.fixed(1).rope, most, spec.kv_heads)
    known = pages.bases, pages.format, len(spec.layers) * spec.kv_heads, packing.basis
    return PoolBases(*known, refines=packing.refines, positions=positions)


def make_packed_pool(
    spec: ModelSpec,
    page_tokens: int,
    packing: Packing,
    make_exact: Callable[[int, HeadClassMap], ExactPool],
    chunk_tokens: int | None,
    rooms: tuple[int | None, int],
    heads: HeadClassMap | None,
    **settings: Any,
) -> tuple[ExactPool, PackedPool]:
    """The exact pool, made of so many blocks and a head map, and the packed one beside it.

    `rooms`: bytes of both together, or None, and tokens otherwise. `heads`: what heads read, if
    not all. `settings` are `KvCache`'s own.

    # Errors
    As `format_of`, `PoolSizes`, `PoolBases` and `PackedHeads`; `InvalidArgument` for a basis beside
    a format that has none; `OutOfMemory` for what the device cannot hold.
    """
    of, (arena_bytes, tokens) = format_of(spec, page_tokens, packing), rooms
    geometry, dtype = (len(spec.layers), spec.kv_heads, spec.head_dim), KV_DTYPES[spec.dtype]
    per_block = len(spec.layers) * spec.kv_heads
    one = basis_bytes(of, per_block)
    check_basis(packing, of, per_block)
    exact_shape = KvShape(*geometry, page_tokens, dtype)
    reads = PackedHeads(exact_shape, heads, spec.fingerprint, SINK_TOKENS, RECENT_TOKENS)
    bound_bytes = BOUND_BYTES * spec.head_dim if reads.budgets else 0
    page_bytes, first_tokens = of.page_bytes + bound_bytes, packing.first_tokens(of)
    sizes = PoolSizes(
        exact_shape,
        KvShape(*geometry, PAGE_TOKENS, dtype),
        exact_windows(len(spec.layers), spec.kv_heads, spec.fingerprint),
        page_bytes,
        one,
        shared_bases(refines=packing.refines),
        chunk_tokens,
        bound_bytes=bound_bytes,
        first_bytes=first_tokens * exact_shape.token_bytes,
        **_final_sizes(spec, packing),
    )
    if arena_bytes is not None:
        tokens = sizes.tokens_within(arena_bytes)
    exact = make_exact(sizes.exact_blocks(tokens), sizes.windows)
    memory = _text_memory(sizes, tokens, spec.device)
    counted = sizes.packed_blocks(tokens), memory, sizes.least_final
    cache, final = make_books(sizes.packed, *counted, **settings)
    count = sizes.packed_pages(tokens)
    wanted = f"{count * page_bytes + sizes.bases(tokens) * one} bytes on {spec.device}"

    @needs_memory("packed pages", wanted)
    def made() -> tuple[ops.PackedPages, torch.Tensor | None]:
        bases = bounds = None
        if one:
            shape = basis_shape(of, per_block)
            bases = torch.zeros((sizes.bases(tokens), *shape), device=spec.device)
        if reads.budgets:
            # Of all blocks that are counted, those of texts that are packed finally among them.
            pages = cache.stats()["arena_pages"]
            bounds = torch.zeros((pages, 3, spec.head_dim), device=spec.device)
        return ops.PackedPages.zeros(count, of, spec.device, bases=bases), bounds

    pages, bounds = made()
    bases = _bases(spec, packing, pages, tokens)
    known = spec.layers, packing, cache, pages, exact[1], bases, reads, bounds
    aside = Aside(spec.device) if packing.beside else None
    of_firsts = exact_shape, first_tokens, spec.dtype, spec.device
    firsts = ExactFirsts.made(sizes.firsts(tokens), *of_firsts)
    return exact, PackedPool(*known, sizes.chunk(tokens), aside, final, firsts)
