"""Drafts: what the likeliest next tokens of a prompt look at, by the engine's own decode steps.

A draft decodes in a fork of the request, so that nothing of it stays: the fork shares all blocks,
the last one is copied before the first token is written, and its own are given back.
"""

from __future__ import annotations

import torch

from kvweave.errors import PoolFull
from kvweave.plan import Draft
from kvweave.runner import probes
from kvweave.runner.decode import Decoder
from kvweave.runner.decoding import Decoding
from kvweave.runner.request_kv import RequestKv
from kvweave.runner.sampling import Sampling
from kvweave.runner.trace import PassTrace


class Drafter:
    """Makes drafts with the decode steps of one model over one arena."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def mass(
        self, kv: RequestKv, logits: torch.Tensor, step: Draft, done: PassTrace
    ) -> torch.Tensor | None:
        """Attention mass on each token of the prompt, f32 [T]; None when there is no room.

        logits f32 [V] are those of the prompt's last token.
        """
        request = kv.request.fork()
        try:
            fork = kv.forked(request)
            sequence = Decoding(
                request,
                kv.positions,
                Sampling(),
                limit=step.tokens + 1,
                device=logits.device,
                forked=fork,
            )
            sequence.choose(logits)
            queries = self._decode(sequence, step.tokens)
            if queries is None:
                return None
            done.tokens = step.tokens
            self._count(fork, step, done)
            return probes.mass_of_layers(fork, queries, step.since)[: kv.request.length]
        finally:
            self.decoder.forget()
            request.release()

    def _decode(self, sequence: Decoding, tokens: int) -> torch.Tensor | None:
        """The queries [L, n, H, D] of so many tokens; None without room for them."""
        kept = []
        try:
            for _ in range(tokens):
                self.decoder.step([sequence], watched=True)
                assert self.decoder.queries is not None
                kept.append(self.decoder.queries.clone())
        except PoolFull:
            return None
        return torch.cat(kept, 1)

    def _count(self, fork: RequestKv, step: Draft, done: PassTrace) -> None:
        """FLOPs of the tokens' way through the model, and of the measuring."""
        rows = fork.newest(step.tokens)
        for layer in range(len(fork.spec.layers)):
            seen = fork.layer_heads(layer).seen
            done.flops.project(layer, len(rows))
            done.flops.attend(layer, rows, seen)
            done.flops.feed_forward(layer, len(rows))
            done.rows_per_layer[layer] += len(rows)
            if layer >= step.since:
                done.flops.score(rows, seen)
        done.flops.logits(len(rows))
