"""What a prompt has in vLLM's pages, gathered over layers and heads before it is packed."""

from __future__ import annotations

from operator import attrgetter

import numpy as np
import torch

from kvweave.adapters.vllm.segments.attention_layers import AttentionLayers
from kvweave.plan import Rows

MOST_PAGES = 16
"""Of a text, from its first on: 1024 tokens or more, for all of which an engine's step waits."""


def first_tokens(layers: AttentionLayers, blocks: list[torch.Tensor], tokens: int) -> torch.Tensor:
    """So many first tokens of a prompt [pages, 2, tokens, D], a page for each layer and KV head.

    `blocks` i32 [N] of each class of heads: the first head's page, of each page of the prompt.
    """
    found = []
    by_head = attrgetter("first_head")
    for part in (part for parts in layers.layers for part in sorted(parts, key=by_head)):
        at = torch.arange(tokens, device=part.pages.device)
        heads = torch.arange(part.kv_heads, device=part.pages.device)
        page = blocks[part.number].long()[at // part.page_tokens] + heads[:, None]
        found.append(part.pages[page, :, at % part.page_tokens].transpose(1, 2))
    return torch.cat(found)


def measured_pages(
    layers: AttentionLayers, packs: list[torch.Tensor], kv_heads: int, page_tokens: int
) -> tuple[torch.Tensor, Rows]:
    """Pages [pages, 2, P, D] of all layers and of `kv_heads` each, and packs i32 [N, 3] of them.

    They lie on the host, where the store's first basis is made of them.

    `packs` of each class of heads: rows as `ops.pack_pages` takes them for a part of that class,
    which the engine has in smaller pages.
    """
    packs = [rows[:MOST_PAGES] for rows in packs]
    count, tokens = len(packs[0]), packs[0][:, 1].cpu().numpy()
    pages: torch.Tensor | None = None
    for layer, parts in enumerate(layers.layers):
        for part in parts:
            heads = torch.arange(part.kv_heads, device=part.pages.device)
            read = packs[part.number][:, 2:, None].long() + heads
            # Blocks, the engine's pages of each, heads, K and V, tokens, D.
            found = part.pages[read].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
            if pages is None:
                size = 1 + count, len(layers.layers) * kv_heads, 2, page_tokens, found.shape[-1]
                pages = torch.zeros(size, dtype=found.dtype)
            first = layer * kv_heads + part.first_head
            pages[1:, first : first + part.kv_heads] = found.cpu()
    assert pages is not None
    own = np.arange(1, 1 + count) * pages.shape[1]
    return pages.flatten(0, 1), np.column_stack((own, tokens, own)).astype(np.int32)
