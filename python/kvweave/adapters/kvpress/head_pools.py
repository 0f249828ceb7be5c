"""The pools in which heads keep their tokens, and in which form they lie there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvweave import ops
from kvweave.adapters.kvpress.packed_heads import (
    UNPACKED_TOKENS,
    PackedHeadPool,
    PackedHeads,
    PoolBounds,
    packed_count,
)
from kvweave.adapters.transformers.kv_geometry import KvGeometry
from kvweave.adapters.transformers.page_pool import PagePool
from kvweave.adapters.transformers.ranked_rows import FEWEST_PAGES
from kvweave.arguments import whole
from kvweave.cache import KvCache, KvShape
from kvweave.device_memory import needs_memory
from kvweave.errors import Unsupported
from kvweave.packed_page import PAGE_TOKENS
from kvweave.policies import policy_of
from kvweave.runner.kv.packed_pool import format_on
from kvweave.runner.kv.packing import Packing
from kvweave.runner.kv.pages import make_cache_of
from kvweave.runner.kv.pool_bases import (
    OWN_SHARE,
    basis_bytes,
    basis_shape,
    check_basis,
    needs_steps,
)
from kvweave.runner.model.model_spec import KV_DTYPES


@dataclass(frozen=True)
class HeadPools:
    """Where the heads of one layer keep their tokens: exact pages, and packed ones if there are.

    `top_k_pages`: how many pages a head reads in a decode step, None for all, where nobody says it
    of that head.
    """

    exact: PagePool
    packed: PackedHeads | None
    top_k_pages: int | None


@dataclass(frozen=True)
class KeptForm:
    """In which form what is kept of a context lies, and how much of it a decode step reads.

    `packing`: all but a head's first and newest tokens in packed pages. `top_k_pages`: pages that a
    head reads in a decode step, of packed ones where there are any; then what is exact is read
    besides. `answer_tokens`: room for so many tokens of an answer, its question among them.
    """

    page_tokens: int
    packing: Packing | None
    top_k_pages: int | None
    answer_tokens: int

    @staticmethod
    def of(
        geometry: KvGeometry,
        *,
        page_tokens: int,
        kv_dtype: object,
        top_k_pages: int | None,
        answer_tokens: int,
    ) -> KeptForm:
        """The form that a caller asks for.

        # Errors
        `InvalidArgument` for numbers or a format that are none, a basis of other sizes or beside a
        format without any; `Unsupported` for a format that the kernels do not read, and for a model
        with sliding windows.
        """
        if any(window is not None for window in geometry.windows):
            raise Unsupported("model: expected full attention in every layer, got sliding windows")
        whole("page_tokens", page_tokens, 1)
        whole("answer_tokens", answer_tokens, 0)
        if top_k_pages is not None:
            whole("top_k_pages", top_k_pages, FEWEST_PAGES)
        form = KeptForm(page_tokens, Packing.of(kv_dtype), top_k_pages, answer_tokens)
        if form.packing is not None:
            form.packing.expect_no_documents("a PressedCache")
            of = format_on(form.packing, geometry.head_dim, geometry.dtype, geometry.device)
            check_basis(form.packing, of, geometry.layers * geometry.kv_heads)
        return form

    def packed(self, tokens: int) -> int:
        """How many of a head's tokens are packed."""
        return 0 if self.packing is None else packed_count(tokens)

    def most_exact(self, tokens: int) -> int:
        """The most tokens that stay exact of a head that keeps up to so many."""
        return tokens if self.packing is None else min(tokens, UNPACKED_TOKENS)

    def exact_pool(self, geometry: KvGeometry, counts: Sequence[int]) -> PagePool:
        """Exact pages for heads that keep so many tokens each, and for an answer of all of them."""
        # A page in progress is copied when an answer goes on in it.
        answer = 1 + -(-self.answer_tokens // self.page_tokens)
        exact = [count - self.packed(count) for count in counts]
        blocks = sum(answer + -(-count // self.page_tokens) for count in exact)
        return _exact_pool(geometry, self.page_tokens, blocks + 1)

    def packed_pool(
        self, geometry: KvGeometry, counts: Sequence[int], first_layer: int
    ) -> PackedHeadPool | None:
        """Packed pages for such heads, those of whole layers from one on; None where none are."""
        if self.packing is None:
            return None
        of = format_on(self.packing, geometry.head_dim, geometry.dtype, geometry.device)
        dtype = KV_DTYPES[geometry.dtype]
        shape = KvShape(1, 1, geometry.head_dim, PAGE_TOKENS, dtype)
        blocks = 1 + max(1, sum(self.packed(count) // PAGE_TOKENS for count in counts))
        cache = KvCache(shape, blocks=blocks, memory=False)
        pages = int(cache.stats()["arena_pages"])
        given, one = self.packing.basis, basis_shape(of, 1)
        texts = (pages - 1) * of.page_bytes >= OWN_SHARE * len(counts) * basis_bytes(of, 1)
        fits = given is None and (texts or needs_steps(of))

        @needs_memory("packed pages", f"{pages * of.page_bytes} bytes on {geometry.device}")
        def made() -> ops.PackedPages:
            bases = None
            if one:
                own = len(counts) if fits or given is not None else 1
                bases = torch.zeros((own, *one), device=geometry.device)
                if given is not None:
                    first = first_layer * geometry.kv_heads
                    bases[:, 0] = given[first : first + own].to(geometry.device)
                elif not fits:
                    bases[:, :, :, 1:] = torch.eye(of.head_dim)[: of.channels].to(geometry.device)
            return ops.PackedPages.zeros(pages, of, geometry.device, bases=bases)

        packed = made()
        bounds = PoolBounds(packed)
        if self.top_k_pages is not None:
            # Room for them is asked for now, not when a context comes.
            bounds.values()
        return PackedHeadPool(cache, packed, bounds, fits, _unturned())


def _exact_pool(geometry: KvGeometry, page_tokens: int, blocks: int) -> PagePool:
    """Pages of one head each, whichever layer it is of."""
    one = KvGeometry(
        layers=1,
        kv_heads=1,
        head_dim=geometry.head_dim,
        vocabulary=geometry.kv_heads,
        dtype=geometry.dtype,
        device=geometry.device,
        windows=(None,),
    )
    shape = one.shape(page_tokens)
    cache, pages = make_cache_of(shape, one.dtype, one.device, blocks=blocks)
    space = ops.Workspace(one.device) if one.device.type == "cuda" else None
    return PagePool(one, cache, pages, _unturned(), policy_of("full"), False, space)


def _unturned() -> ops.RopeTable:
    """Keys stay where they are: nothing turns them."""
    return ops.RopeTable(np.zeros((1, 1), np.float32), "half")
