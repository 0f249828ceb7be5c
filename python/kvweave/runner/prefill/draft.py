"""Drafts: what the likeliest next tokens of a prompt look at, by the engine's own decode steps.

A draft decodes in a fork of the request, so that nothing of it stays: the fork shares all blocks,
the last one is copied before the first token is written, and its own are given back. Drafts from
several first tokens share their steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from kvweave.errors import PoolFull
from kvweave.plan import Draft
from kvweave.runner.decode import Decoder
from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.decode.loop import decode_steps
from kvweave.runner.decode.sampling import Sampling
from kvweave.runner.kv.request_kv import RequestKv
from kvweave.runner.prefill import probes
from kvweave.runner.prefill.trace import PassTrace


class Drafter:
    """Makes drafts with the decode steps of one model over one arena."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def mass(
        self, kv: RequestKv, logits: torch.Tensor, step: Draft, done: PassTrace
    ) -> torch.Tensor | None:
        """Attention mass on each token of the prompt, f32 [T]; None when there is no room.

        logits f32 [V] are those of the prompt's last token. Where there is no room for all drafts,
        the likeliest one is made alone.

        # Errors
        `Unsupported` for more tokens than the exact pages beside packed documents keep.
        """
        firsts = logits.topk(min(step.drafts, len(logits))).indices.tolist()
        mass = self._drafted(kv, firsts, step, done)
        if mass is None and len(firsts) > 1:
            mass = self._drafted(kv, firsts[:1], step, done)
        return mass

    def _drafted(
        self, kv: RequestKv, firsts: Sequence[int], step: Draft, done: PassTrace
    ) -> torch.Tensor | None:
        """The mean over drafts that begin with these tokens; None without room for all of them."""
        drafts: list[Decoding] = []
        try:
            for first in firsts:
                drafts.append(self._begun(kv, first, step))
            mass = self._decode(kv, drafts, step)
            for draft in drafts:
                self._count(kv.forked(draft.request), step, len(draft.tokens) - 1, done)
            done.tokens = 0 if mass is None else step.tokens * len(drafts)
            return mass
        finally:
            for draft in drafts:
                draft.request.release()

    def _begun(self, kv: RequestKv, first: int, step: Draft) -> Decoding:
        request, packed = kv.drafted(step.tokens)
        return Decoding(
            request,
            kv.positions,
            Sampling(),
            limit=step.tokens + 1,
            device=kv.spec.device,
            tokens=[first],
            packed=packed,
        )

    def _decode(self, kv: RequestKv, drafts: list[Decoding], step: Draft) -> torch.Tensor | None:
        """What the queries of so many tokens of each draft look at; None without room for them."""
        length = kv.request.length
        mass = torch.zeros(length, device=kv.spec.device)
        kept: dict[Decoding, list[torch.Tensor]] = defaultdict(list)
        try:
            for group, queries in decode_steps(self.decoder, drafts, lambda _: True):
                assert queries is not None
                for number, draft in enumerate(group):
                    kept[draft].append(queries[:, number : number + 1])
                    # Window groups let go of what later tokens do not see: there each token asks
                    # alone.
                    if draft.done or not kv.keeps_drafts:
                        fork, asked = kv.forked(draft.request), torch.cat(kept.pop(draft), 1)
                        mass += probes.mass_of_layers(fork, asked, step.since)[:length]
        except PoolFull:
            return None
        return mass / len(drafts)

    def _count(self, fork: RequestKv, step: Draft, tokens: int, done: PassTrace) -> None:
        """FLOPs of the newest tokens' way through the model, and of the measuring."""
        rows = fork.newest(tokens)
        for layer in range(len(fork.spec.layers)):
            seen = fork.layer_heads(layer).seen
            done.flops.project(layer, tokens)
            done.flops.attend(layer, rows, seen)
            done.flops.feed_forward(layer, tokens)
            done.rows_per_layer[layer] += tokens
            if layer >= step.since:
                done.flops.score(rows, seen)
        done.flops.logits(tokens)
