"""What a prompt has packed, as it leaves its pool for a payload."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvweave.packed_page import PAGE_TOKENS
from kvweave.payload.packed import (
    ASIDE,
    ASIDE_ENTRIES,
    BASES,
    BOUNDS,
    ENTRIES,
    PAGES,
    VERSION,
    WHICH,
    Choice,
    PackedHeader,
    PackedTokens,
)
from kvweave.payload.page_format import PageFormat
from kvweave.payload.pages import Places, gather
from kvweave.runner.kv.final_texts import FinalEntries
from kvweave.runner.kv.packed_pool import SINK_TOKENS, PackedPool
from kvweave.runner.kv.packed_prefix import PackedPrefix
from kvweave.runner.kv.pool_bases import basis_shape
from kvweave.runner.kv.sent_texts import sent_texts
from kvweave.runner.kv.tables import Int32, send_index
from kvweave.runner.kv.token_places import places_of


def packed_tokens(packed: PackedPrefix, tokens: int) -> PackedTokens:
    """What coming tokens read of a prompt of so many tokens beside its exact windows."""
    pool, sent = packed.pool, ranks(packed.pool, reads_all=True)
    entries, aside = packed.entries(), packed.exact_entries(SINK_TOKENS)
    final: list[FinalEntries] = []
    if pool.final is not None:
        _, final = pool.final.split(entries)
        entries = entries[~pool.final.are_final(entries[:, 0])]
    blocks, entries = _numbered(entries)
    texts = sent_texts(final, len(blocks), sent)
    entries = np.concatenate((entries, texts.entries))
    entries = entries[np.argsort(entries[:, 3], kind="stable")]
    rows = pool.rows(blocks)
    found = pool.pages.data.index_select(0, pages_of(pool, rows, sent))
    parts = {
        PAGES: found.view(len(blocks), len(sent), pool.pages.format.page_bytes),
        ENTRIES: torch.from_numpy(entries),
        ASIDE: _exact(pool, aside, tokens),
        ASIDE_ENTRIES: torch.from_numpy(_numbered(aside)[1]),
        **texts.parts,
    }
    if len(bounded := choosing_ranks(pool)):
        assert pool.bounds is not None
        named = np.concatenate((blocks, texts.blocks))
        bounds = pool.bounds.index_select(0, pages_of(pool, named, bounded))
        parts[BOUNDS] = bounds.view(len(named), len(bounded), *bounds.shape[1:])
    bases, basis = 0, None
    if pool.bases is not None:
        known, basis = pool.bases.of_text(rows)
        shape, bases = basis_shape(pool.pages.format, pool.block_pages), len(known.bases)
        parts[WHICH] = torch.tensor(known.which.tolist(), dtype=torch.int32)
        parts[BASES] = torch.stack(known.bases) if bases else torch.zeros((0, *shape))
    spans = np.concatenate((entries, aside))
    ends = spans[:, 3] + spans[:, 2] - spans[:, 1]
    header = PackedHeader(
        version=VERSION,
        format=PageFormat.of(pool.pages.format),
        sights=tuple((window, sink) for window, sink in pool.heads.sights.reshape(-1, 2).tolist()),
        choices=choices_of(pool),
        chooses=tuple(pool.heads.budget_of.reshape(-1).tolist()),
        tokens=max(int(ends.max(initial=0)), tokens // PAGE_TOKENS * PAGE_TOKENS),
        blocks=len(blocks),
        entries=len(entries),
        bases=bases,
        basis=basis,
        aside_entries=len(aside),
        aside_tokens=int((aside[:, 2] - aside[:, 1]).sum()),
        texts=texts.listed,
    )
    return PackedTokens(header, parts)


def ranks(pool: PackedPool, *, reads_all: bool) -> npt.NDArray[np.int64]:
    """Of a block's pages those of heads that read all, or those of heads with windows."""
    return np.flatnonzero((pool.heads.sights.reshape(-1, 2)[:, 0] == 0) == reads_all)


def choosing_ranks(pool: PackedPool) -> npt.NDArray[np.int64]:
    """Of a block's pages those of heads that choose among them."""
    return np.flatnonzero(pool.heads.budget_of.reshape(-1) >= 0)


def choices_of(pool: PackedPool) -> tuple[Choice, ...]:
    """How the heads of a pool choose pages, as a payload says it."""
    return tuple((each.pages, each.every, each.score) for each in pool.heads.budgets)


def pages_of(pool: PackedPool, blocks: Int32, some: npt.NDArray[np.int64]) -> torch.Tensor:
    """Pages of some ranks of blocks, by where these lie, block by block, as an index i64.

    Bounds lie by the numbers of blocks in the books, and the pages themselves where `rows` says.
    """
    pages = (blocks[:, None] + some).reshape(-1)
    return send_index(pool.pages.data.device, pages).long()


def _numbered(entries: Int32) -> tuple[Int32, Int32]:
    """The blocks of entries, each once, and the entries over their numbers."""
    blocks, numbers = np.unique(entries[:, 0], return_inverse=True)
    numbered = entries.copy()
    numbered[:, 0] = numbers
    return blocks, numbered


def _exact(pool: PackedPool, aside: Int32, tokens: int) -> torch.Tensor:
    """K and V [L · G, 2, n, D] of exact tokens, in order of their entries."""
    places = places_of(aside, tokens)
    positions = np.flatnonzero(places[:, 0] >= 0).astype(np.int32)
    block, slot, delta = places[positions].T
    return gather(pool.exact, Places(positions, block, slot, delta), pool.block_pages)
