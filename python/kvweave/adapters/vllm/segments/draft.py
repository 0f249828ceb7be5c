"""Drafts in vLLM: what the model's likeliest next tokens look at, over a prompt's KV as it is."""

from __future__ import annotations

from typing import Any

import torch

from kvweave.adapters.vllm.backend.step_tables import Entries
from kvweave.adapters.vllm.segments.attention_layers import AttentionLayers
from kvweave.adapters.vllm.segments.batch import Batch
from kvweave.adapters.vllm.segments.chunk_kv import ChunkKv
from kvweave.adapters.vllm.segments.draft_steps import DraftedPrompt, DraftSteps
from kvweave.adapters.vllm.segments.ranks import over_ranks
from kvweave.plan import Draft


class Drafter:
    """Drafts a few tokens of requests of a batch, and measures what their queries look at.

    A draft has the slots that `AttentionLayers.draft_tokens` says: one of more tokens has no room,
    nor has one beyond the longest sequence that the model is run for.
    """

    def __init__(
        self, model: Any, layers: AttentionLayers, batch: Batch, steps: DraftSteps
    ) -> None:
        self.model = model
        self.layers = layers
        self.batch = batch
        self.steps = steps

    def mass(
        self, request: int, length: int, draft: Draft, last: torch.Tensor
    ) -> torch.Tensor | None:
        """Attention mass on each of the prompt's `length` tokens, f32 [T]; None without room.

        last [1, E]: the last token's states behind the last layer and its norm.
        """
        count = draft.tokens
        if count > self.layers.draft_tokens or length + count > self.steps.longest:
            return None
        firsts = self.model.compute_logits(last)[0].topk(draft.drafts).indices
        entries = self.batch.entries(request, length, length)
        prompt = DraftedPrompt(entries, length, count, last, firsts)
        mass = torch.zeros(length, device=last.device)
        try:
            for asked in self.steps.asked(self.model, self.layers, prompt):
                mass += self._mass(*asked, prompt, draft.since)[:length]
        finally:
            for part in self.layers.parts:
                part.pages[: part.kv_heads].zero_()
        return over_ranks(mass) / len(firsts)

    def _mass(
        self,
        asked: list[torch.Tensor],
        entries: list[Entries],
        prompt: DraftedPrompt,
        since: int,
    ) -> torch.Tensor:
        """What the queries of one draft look at on this rank: the prompt's tokens and its own."""
        device, end = prompt.last.device, prompt.length + prompt.count
        at = torch.arange(prompt.length, end, device=device, dtype=torch.int32)
        mass = torch.zeros(end, device=device)
        for number in range(since, len(asked)):
            mass += ChunkKv(self.layers.layers[number], entries, end).mass(asked[number], at)
        return mass
