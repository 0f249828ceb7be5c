"""The pages of a `PagedCache`: how many there are, and in which form."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvweave import ops
from kvweave.adapters.transformers.kv_geometry import KvGeometry
from kvweave.adapters.transformers.packed_layers import LayerBases, LayeredPool
from kvweave.adapters.transformers.page_pool import PagePool
from kvweave.adapters.transformers.ranked_rows import FEWEST_PAGES
from kvweave.arguments import flag, whole, word
from kvweave.cache import KvCache
from kvweave.device_memory import needs_memory
from kvweave.errors import InvalidArgument, Unsupported
from kvweave.packed_page import PAGE_TOKENS
from kvweave.policies import Policy, policy_of
from kvweave.runner.kv.packed_heads import PackedHeads
from kvweave.runner.kv.packed_pool import (
    BOUND_BYTES,
    RECENT_TOKENS,
    SINK_TOKENS,
    check_pages,
    exact_windows,
    format_on,
)
from kvweave.runner.kv.packed_room import PoolSizes
from kvweave.runner.kv.packing import Packing
from kvweave.runner.kv.pages import make_cache_of
from kvweave.runner.kv.pool_bases import (
    PositionRange,
    basis_bytes,
    basis_shape,
    check_basis,
    shared_bases,
)

_ROW_TOKENS = SINK_TOKENS + 2 * (RECENT_TOKENS + PAGE_TOKENS)
"""Exact tokens of a row beside packed pages: its sink, and its window before and behind a forward
of several tokens."""

_TOKENS = 32768
"""Tokens that there is room for where nobody says how many."""


@dataclass(frozen=True)
class CacheForm:
    """What a `PagedCache` was asked for: `packing` says how full pages are packed, if they are.

    Beside these there are exact tokens of so many rows.
    """

    page_tokens: int
    policy: Policy
    discover: bool
    eviction: str
    packing: Packing | None
    top_k_pages: int | None
    max_rows: int

    @staticmethod
    def of(
        geometry: KvGeometry,
        *,
        page_tokens: int,
        policy: str | Policy,
        discover: bool,
        eviction: str,
        kv_dtype: object,
        top_k_pages: int | None,
        max_rows: int,
    ) -> CacheForm:
        """The form that a caller asks for.

        # Errors
        `InvalidArgument` for settings that are none; `Unsupported` for a policy of several passes
        or layers that differ, and, beside packed pages, for text that nobody marked, for models
        with sliding windows, and for what the kernels do not read.
        """
        whole("page_tokens", page_tokens, 1)
        whole("max_rows", max_rows, 1)
        if top_k_pages is not None:
            whole("top_k_pages", top_k_pages, FEWEST_PAGES)
        packing, named = Packing.of(kv_dtype), word("eviction", eviction)
        form = CacheForm(
            page_tokens,
            _one_pass(policy),
            flag("discover", discover),
            named,
            packing,
            top_k_pages,
            max_rows,
        )
        if packing is not None:
            packing.expect_no_documents("a PagedCache")
            check_pages(page_tokens, geometry.windows, packing)
            check_basis(packing, form._format(geometry, packing), form._block_pages(geometry))
            if discover:
                form.expect_exact("discover")
        return form

    def expect_exact(self, what: str) -> None:
        """Refuses what packed pages do not serve.

        # Errors
        `Unsupported` naming both.
        """
        if self.packing is not None:
            raise Unsupported(
                f"{what}: expected a cache of exact pages, got kv_dtype={self.packing.named}: "
                "segments are not moved out of packed pages here; kvweave.Runner(kv_dtype=…) reads "
                "packed documents anywhere"
            )

    def exact_pool(
        self,
        geometry: KvGeometry,
        rope: ops.RopeTable,
        blocks: int | None,
        arena_bytes: int | None = None,
    ) -> PagePool:
        """Pages that keep everything exactly: so many blocks, or bytes of them."""
        shape, place = geometry.shape(self.page_tokens), (geometry.dtype, geometry.device)
        cache, pages = make_cache_of(
            shape, *place, blocks=blocks, arena_bytes=arena_bytes, eviction=self.eviction
        )
        space = _workspace(geometry)
        return PagePool(geometry, cache, pages, rope, self.policy, self.discover, space)

    def pool(
        self,
        geometry: KvGeometry,
        rope: ops.RopeTable,
        max_tokens: int | None,
        arena_bytes: int | None,
    ) -> PagePool:
        """Pages with room for `max_tokens`, or of `arena_bytes`.

        # Errors
        `InvalidArgument` for both, or numbers that are none; `OutOfMemory`.
        """
        if arena_bytes is not None:
            if max_tokens is not None:
                raise InvalidArgument("arena: expected arena_bytes or max_tokens, got both")
            whole("arena_bytes", arena_bytes)
        tokens = _TOKENS if max_tokens is None else whole("max_tokens", max_tokens, 1)
        if self.packing is not None:
            return self._packed_pool(geometry, rope, self.packing, tokens, arena_bytes)
        blocks = None if arena_bytes is not None else -(-tokens // self.page_tokens) + 1
        return self.exact_pool(geometry, rope, blocks, arena_bytes)

    def _packed_pool(
        self,
        geometry: KvGeometry,
        rope: ops.RopeTable,
        packing: Packing,
        tokens: int,
        arena_bytes: int | None,
    ) -> PagePool:
        of, per_block = self._format(geometry, packing), self._block_pages(geometry)
        bound = 0 if self.top_k_pages is None else BOUND_BYTES * geometry.head_dim
        sizes = PoolSizes(
            geometry.shape(self.page_tokens),
            geometry.shape(PAGE_TOKENS),
            exact_windows(geometry.layers, geometry.kv_heads),
            of.page_bytes + bound,
            basis_bytes(of, per_block),
            shared_bases(refines=packing.refines),
            self.max_rows * _ROW_TOKENS,
            has_own=False,
        )
        if arena_bytes is not None:
            tokens = sizes.tokens_within(arena_bytes)
        exact, pages = make_cache_of(
            sizes.exact,
            geometry.dtype,
            geometry.device,
            blocks=sizes.exact_blocks(tokens),
            heads=sizes.windows,
            eviction=self.eviction,
        )
        blocks, count = sizes.packed_blocks(tokens), sizes.packed_pages(tokens)
        cache = KvCache(sizes.packed, blocks=blocks, memory=False, eviction=self.eviction)
        wanted = f"{count * sizes.page_bytes} bytes on {geometry.device}"

        @needs_memory("packed pages", wanted)
        def made() -> tuple[ops.PackedPages, torch.Tensor | None]:
            bases = bounds = None
            if one := basis_shape(of, geometry.kv_heads):
                shape = sizes.shared * geometry.layers, *one
                bases = torch.zeros(shape, device=geometry.device)
            if bound:
                bounds = torch.zeros((count, 3, geometry.head_dim), device=geometry.device)
            return ops.PackedPages.zeros(count, of, geometry.device, bases=bases), bounds

        packed, bounds = made()
        layers = None
        if packed.bases is not None:
            positions = PositionRange(rope, tokens, geometry.kv_heads)
            layers = LayerBases(packed.bases, of, packing.basis, positions)
        reads = PackedHeads(sizes.exact, None, "", SINK_TOKENS, RECENT_TOKENS)
        pool = LayeredPool(
            layers=(),
            packing=packing,
            cache=cache,
            pages=packed,
            exact=pages,
            bases=None,
            heads=reads,
            bounds=bounds,
            by_layer=layers,
            most=self.top_k_pages or 0,
        )
        space = _workspace(geometry)
        return PagePool(geometry, exact, pages, rope, self.policy, False, space, pool)

    def _format(self, geometry: KvGeometry, packing: Packing) -> ops.PackedFormat:
        return format_on(packing, geometry.head_dim, geometry.dtype, geometry.device)

    def _block_pages(self, geometry: KvGeometry) -> int:
        return geometry.layers * geometry.kv_heads


def _workspace(geometry: KvGeometry) -> ops.Workspace | None:
    return ops.Workspace(geometry.device) if geometry.device.type == "cuda" else None


def _one_pass(policy: str | Policy) -> Policy:
    """A policy that a model's own forward can carry out: one pass, the same rows in all layers."""
    chosen = policy_of(policy)
    if chosen.measures or chosen.passes != 1:
        raise Unsupported(
            f"policy: expected one of a single pass that measures nothing (full, prefix, naive, "
            f"random, epic), got {chosen.name}; kvweave.Runner has all of them"
        )
    return chosen
