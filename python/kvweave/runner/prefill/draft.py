"""Drafts: what the likeliest next tokens of a prompt look at, by the engine's own decode steps.

A draft decodes in a fork of the request, so that nothing of it stays: the fork shares all blocks,
the last one is copied before the first token is written, and its own are given back.
"""

from __future__ import annotations

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

        logits f32 [V] are those of the prompt's last token.

        # Errors
        `Unsupported` for more tokens than the exact pages beside packed documents keep.
        """
        request, packed = kv.drafted(step.tokens)
        try:
            fork = kv.forked(request)
            sequence = Decoding(
                request,
                kv.positions,
                Sampling(),
                limit=step.tokens + 1,
                device=logits.device,
                packed=packed,
            )
            sequence.choose(logits)
            mass = self._decode(kv, sequence, step)
            self._count(fork, step, len(sequence.tokens) - 1, done)
            done.tokens = 0 if mass is None else step.tokens
            return mass
        finally:
            request.release()

    def _decode(self, kv: RequestKv, sequence: Decoding, step: Draft) -> torch.Tensor | None:
        """What the queries of so many tokens look at, f32 [T]; None without room for them."""
        length = kv.request.length
        mass, kept = torch.zeros(length, device=sequence.device), []
        try:
            for _, queries in decode_steps(self.decoder, [sequence], lambda _: True):
                assert queries is not None
                kept.append(queries)
                # Window groups let go of what later tokens do not see: there each token asks alone.
                if sequence.done or not kv.keeps_drafts:
                    fork = kv.forked(sequence.request)
                    mass += probes.mass_of_layers(fork, torch.cat(kept, 1), step.since)[:length]
                    kept.clear()
        except PoolFull:
            return None
        return mass

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
