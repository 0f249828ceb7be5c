"""Drafts in vLLM: the model's likeliest next tokens, decoded from a prompt's KV as it is now."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context

from kvweave.adapters.vllm.backend.metadata import PagedMetadata
from kvweave.adapters.vllm.backend.step_tables import Entries
from kvweave.adapters.vllm.segments.attention_layers import AttentionLayers
from kvweave.adapters.vllm.segments.batch import Batch
from kvweave.adapters.vllm.segments.chunk_kv import ChunkKv, over_ranks
from kvweave.plan import Draft


class Drafter:
    """Decodes a few tokens of one request of a batch, and measures what their queries look at.

    vLLM has given the request no block for them. They go into its null block, number 0, which vLLM
    keeps out of circulation: tables name it where there is no block, and nobody reads what it
    holds. It is zero again when the draft is done. So a draft longer than a block has no room, nor
    has one beyond the `longest` sequence that the model is run for.
    """

    def __init__(self, model: Any, layers: AttentionLayers, batch: Batch, longest: int) -> None:
        self.model = model
        self.layers = layers
        self.batch = batch
        self.longest = longest

    def mass(
        self, request: int, length: int, draft: Draft, last: torch.Tensor
    ) -> torch.Tensor | None:
        """Attention mass on each of the prompt's `length` tokens, f32 [T]; None without room.

        last [1, E]: the last token's states behind the last layer and its norm.
        """
        count = draft.tokens
        if count > self.batch.page_tokens or length + count > self.longest:
            return None
        at = torch.arange(length, length + count, device=last.device, dtype=torch.int32)
        queries: list[list[torch.Tensor]] = []
        for step in range(count):
            token = self.model.compute_logits(last).argmax(-1)
            last, asked = self._decode(token, at[step : step + 1], request, length, step)
            queries.append(asked)
        entries = self._entries(request, length, count)
        mass = torch.zeros(length + count, device=last.device)
        for number in range(draft.since, len(self.layers.names)):
            q = torch.cat([asked[number] for asked in queries])
            attends, pages = self.layers.attends[number], self.layers.pages[number]
            mass += ChunkKv(attends, pages, entries, length + count).mass(q, at)
        for pages in self.layers.pages:
            pages[: self.batch.kv_heads].zero_()
        return over_ranks(mass)[:length]

    def _decode(
        self, token: torch.Tensor, at: torch.Tensor, request: int, length: int, step: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """One token through all layers: its last states [1, E], and its queries in each layer."""
        asked: list[torch.Tensor] = []

        def write(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            null = self.layers.pages[len(asked)][: self.batch.kv_heads]
            null[:, 0, step], null[:, 1, step] = k[0], v[0]
            asked.append(q)

        device, known = at.device, self.batch.metadata
        entries = self._entries(request, length, step + 1)
        ends = torch.tensor([[0, 1], [0, len(entries)]], dtype=torch.int32, device=device)
        metadata = PagedMetadata(
            rows=1,
            decode=True,
            positions=at,
            row_offsets=ends[0],
            slots=known.slots[:0],
            entries=Entries(entries, ends[1]),
            workspace=known.workspace,
            observer=write,
            writes=False,
        )
        context: Any = get_forward_context()
        context.attn_metadata = dict.fromkeys(self.layers.names, metadata)
        hidden, residual = self.model.model.embed_input_ids(token), None
        for layer in self.model.model.layers:
            hidden, residual = layer(at.long(), hidden, residual)
        last, _ = self.model.model.norm(hidden, residual)
        return last, asked

    def _entries(self, request: int, length: int, count: int) -> torch.Tensor:
        """Entries of the prompt, and of so many tokens of the draft behind it."""
        own = np.array([[0, 0, count, length, 0]], np.int32)
        prompt = self.batch.entries(request)
        return torch.cat((prompt, torch.from_numpy(own).to(prompt.device)))
