"""`Strategies`: how documents of a runner are packed by strategies of their own, and where.

Everything but `chosen` is for whoever computes, or is done while nobody does.
"""

from __future__ import annotations

import torch

from kvweave import ops
from kvweave.cache import KvRequest
from kvweave.packed_page import PAGE_TOKENS
from kvweave.runner.kv.final_texts import FinalTexts
from kvweave.runner.kv.packed_pool import PackedPool
from kvweave.runner.kv.pool_bases import OWN_SHARE, basis_bytes
from kvweave.runner.kv.tables import Int32
from kvweave.runner.tiers.chosen_formats import ChosenFormats
from kvweave.runner.tiers.packed_losses import Part


def has_own_basis(pool: PackedPool, of: ops.PackedFormat, blocks: int) -> bool:
    """Whether a text of so many blocks has a basis of its own, of pages of a format."""
    return OWN_SHARE * basis_bytes(of, pool.block_pages) <= blocks * pool.block_bytes


def shared_basis(pool: PackedPool) -> torch.Tensor | None:
    """The basis on the host of text that has none of its own; None in a format without any."""
    return None if pool.bases is None else pool.bases.on_host(pool.bases.shared)


class Strategies:
    """The strategy of a pool's documents, by which they are packed finally."""

    def __init__(self, pool: PackedPool, final: FinalTexts) -> None:
        strategy, of = pool.packing.strategy, pool.pages.format
        assert strategy is not None
        self._pool, self._final, self._bound = pool, final, strategy.bound
        known = of.head_dim, of.page_tokens, of.scales
        self._candidates, self._fallback = strategy.formats(*known)

    @property
    def widest(self) -> ops.PackedFormat:
        """The candidate whose basis has the most directions."""
        return max(self._candidates, key=lambda of: of.channels)

    def chosen(
        self,
        parts: list[Part],
        tokens: int,
        moments: ops.Moments,
        shared: torch.Tensor | None,
    ) -> ChosenFormats:
        """A text packed by what it loses; for any thread.

        It has a basis of its own where this takes an eighth of what its pages take in the pool;
        one that is too short has the shared one where that has all directions, or the axes.
        """
        pool, of = self._pool, self.widest
        rows, pages = of.channels + 1, pool.block_pages
        bases: dict[str, torch.Tensor] = {}
        if has_own_basis(pool, of, -(-tokens // PAGE_TOKENS)):
            bases["own"] = torch.from_numpy(moments.basis())
            bases["own, not centred"] = torch.from_numpy(moments.basis(centred=False))
        if shared is not None and pool.pages.format.kind == "top-r" and shared.shape[2] >= rows:
            bases["shared"] = shared[:, :, :rows]
        if not bases:
            axes = torch.eye(of.head_dim)[: of.channels]
            bases["axes"] = torch.cat((axes.new_zeros(1, of.head_dim), axes)).expand(
                pages, 2, -1, -1
            )
        known = self._candidates, self._fallback, self._bound
        return ChosenFormats(parts, pages, tokens, bases, *known)

    def place(
        self, held: KvRequest, blocks: Int32, made: ChosenFormats, most_lost: float, *, named: bool
    ) -> str:
        """Puts a text in the place of its pages in the pool; why it stays there, or ''.

        `held` has its `blocks`, and no others behind them. `most_lost`: the most that a KV head of
        a layer loses of it there. `named`: it is a document, else a segment of a request's text.

        # Errors
        `OutOfMemory` where the device has none for it on its way; nothing has changed then.
        """
        pool, final = self._pool, self._final
        documents = pool.documents
        assert documents is not None
        if why := documents.why_gone(held, blocks, named):
            return why
        if {pool.pages.format} == {each.format for each in made.made}:
            return "no candidate loses as little as the bound"
        if most_lost <= self._bound and made.nbytes >= len(blocks) * pool.block_bytes:
            return "as little is lost in the pool's format, which has no more bytes"
        sizes = [size for each in made.made for size in each.sizes]
        if not documents.make_room(len(blocks), sizes):
            return "no room beside the pool for one more document"
        own = held.fork()
        try:
            text = final.take(own, blocks, made.made, (made.most_lost, made.over_bound))
        except BaseException:
            own.release()
            raise
        if not named:
            documents.lend(text)
        return ""
