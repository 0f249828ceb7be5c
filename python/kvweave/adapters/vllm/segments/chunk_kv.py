"""A layer of a chunk in vLLM's pages as a question's rows read it: see `kvweave.question`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce

from kvweave import ops
from kvweave.adapters.vllm.backend.attention import PagedAttention
from kvweave.plan import Rows


def over_ranks(found: torch.Tensor) -> torch.Tensor:
    """What each rank measured over its own heads, summed."""
    if get_tensor_model_parallel_world_size() == 1:
        return found
    summed: torch.Tensor = tensor_model_parallel_all_reduce(found)
    return summed


@dataclass(frozen=True)
class ChunkKv:
    """The KV of one request in one layer up to `tokens`: entries [N, 5] of pages [pages, 2, P, D].

    Entries are one a page, from the first token on.
    """

    attends: PagedAttention
    pages: torch.Tensor
    entries: torch.Tensor
    tokens: int

    @property
    def kv_heads(self) -> int:
        """KV heads of this rank."""
        return self.attends.num_kv_heads

    @property
    def query_heads(self) -> int:
        """Query heads of all ranks."""
        return self.attends.num_heads * int(get_tensor_model_parallel_world_size())

    def table(self, positions: Rows) -> torch.Tensor:
        """Positions where the pages are."""
        return torch.from_numpy(positions).to(self.pages.device)

    def mass(self, q: torch.Tensor, positions: ops.Table, head: int | None = None) -> torch.Tensor:
        """Mass of every token, f32 [T]; see `LayerKv`."""
        paged = self.attends.paged(self.pages)
        if head is not None:
            # Blocks hold the pages of all KV heads; seen from its first page, a head is the first.
            paged = replace(paged, cache=self.pages[head:], kv_heads=1)
        return ops.score_tokens(q, positions, self.entries, paged, tokens=self.tokens)

    def value_norms(self, head: int) -> torch.Tensor:
        """The norm of each token's value in one KV head, f32 [T]."""
        page, slot = self._places()
        norms: torch.Tensor = self.pages[page + head, 1, slot].float().norm(dim=-1)
        return norms

    def moved(self, k: torch.Tensor, v: torch.Tensor, positions: Rows) -> torch.Tensor:
        """Squared distance of fresh K, V [R, G, D] of rows from those in the pages, f32 [R]."""
        page, slot = (x.index_select(0, self.table(positions).long()) for x in self._places())
        page = page[:, None] + torch.arange(self.kv_heads, device=page.device)
        apart = torch.zeros(len(k), device=k.device)
        for which, fresh in enumerate((k, v)):
            kept = self.pages[page, which, slot[:, None]]
            apart += (fresh.float() - kept.float()).square().sum((1, 2))
        return over_ranks(apart)

    def over_ranks(self, found: torch.Tensor) -> torch.Tensor:
        """What was measured over the heads here, summed over all ranks."""
        return over_ranks(found)

    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The page of the first head and the slot of every token, i64 [T] each."""
        size = self.pages.shape[2]
        at = torch.arange(self.tokens, device=self.pages.device)
        return self.entries[:, 0].long().index_select(0, at // size), at % size
