"""`Draws`: what a round chooses its tokens by, once to draft and once for good."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.decode.sampling import Int64, Sampling, is_greedy


def may_draft(sequence: Decoding) -> bool:
    """Whether a sequence's choice may be asked for tokens that are then not said.

    Whatever is more than `Sampling` may remember what it was asked.
    """
    return type(sequence.sampling) is Sampling


class Draws:
    """The random numbers of a round of B sequences, each of which drafts so many tokens, i64 [B].

    A draft is chosen with the very number that its verification is: where both see the same
    logits they say the same, at any temperature. Numbers for tokens that are not said are taken
    back, so that a sequence's next round goes on where one token a step would have.

    `failed`: what choosing raised, by sequence and row.
    """

    def __init__(self, batch: Sequence[Decoding], drafts: Int64) -> None:
        self.batch = batch
        self.drafts = drafts.tolist()
        self.greedy = is_greedy(batch)
        self.failed: dict[tuple[int, int], Exception] = {}
        drawing = [] if self.greedy else list(enumerate(batch))
        # Copies to draft by, and the states of their own generators behind each choice.
        self._copies = {
            number: sequence.generator.clone_state()
            for number, sequence in drawing
            if self.drafts[number] and sequence.sampling.temperature > 0.0
        }
        self._states: dict[int, list[torch.Tensor]] = {
            number: [sequence.generator.get_state()] for number, sequence in drawing
        }

    def drafted(self, logits: torch.Tensor) -> torch.Tensor:
        """What each is likely to say next, i64 [B], by logits f32 [B, V]; nothing waits."""
        picked = logits.argmax(-1)
        for number, copy in self._copies.items():
            # A draft may be anything, and no number may stop it.
            row = logits[number].nan_to_num()
            picked[number] = self.batch[number].sampling.pick(row, copy)
        return picked

    def verified(self, logits: torch.Tensor, width: int) -> torch.Tensor:
        """What each says behind each of its tokens, i64 [B, W], by logits f32 [B · W, V].

        −1 behind the last row of its own, and where choosing raised.
        """
        if self.greedy:
            return logits.argmax(-1).view(-1, width)
        nothing = torch.full((), -1, dtype=torch.int64, device=logits.device)
        picked = [nothing] * len(logits)
        for number, sequence in enumerate(self.batch):
            for row in range(self.drafts[number] + 1):
                at = number * width + row
                try:
                    token = sequence.sampling.pick(logits[at], sequence.generator)
                    picked[at] = torch.as_tensor(token, device=logits.device).long().view(())
                except Exception as error:
                    self.failed[number, row] = error
                    break
                self._states[number].append(sequence.generator.get_state())
        return torch.stack(picked).view(-1, width)

    def keep(self, number: int, said: int) -> None:
        """Has a sequence's generator go on behind the tokens that it has said."""
        states = self._states.get(number, [])
        if said + 1 < len(states):
            self.batch[number].generator.set_state(states[said])
