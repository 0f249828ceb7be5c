"""`CheckedChoice`: the tokens of a decode step, where the choice of one request harms no other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvweave.errors import InvalidArgument
from kvweave.runner.decode.decoding import Decoding


def check_token(token: int, vocabulary: int) -> None:
    """Raises InvalidArgument for a token that is none: it would fail the next step of all."""
    if not 0 <= token < vocabulary:
        raise InvalidArgument(f"sampling: expected a token below {vocabulary}, got {token}")


class CheckedChoice:
    """Chooses the tokens of a step; whose choice raises is in `failed`, and says nothing."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self.failed: dict[Decoding, Exception] = {}

    def __call__(self, batch: Sequence[Decoding], logits: torch.Tensor, greedy: bool) -> list[int]:
        """The choice of each: see `choose_all`."""
        picked = logits.argmax(-1) if greedy else self._picked(batch, logits)
        chosen: list[int] = picked.tolist()
        for sequence, token in zip(batch, chosen, strict=True):
            if sequence in self.failed:
                continue
            try:
                check_token(token, self._vocabulary)
            except InvalidArgument as error:
                self.failed[sequence] = error
                continue
            sequence.tokens.append(token)
        return chosen

    def _picked(self, batch: Sequence[Decoding], logits: torch.Tensor) -> torch.Tensor:
        """The choice of each row, i64 [B]; −1 where it raised."""
        nothing = torch.full((), -1, dtype=torch.int64, device=logits.device)
        picked = []
        for sequence, row in zip(batch, logits, strict=True):
            try:
                token = sequence.sampling.pick(row, sequence.generator)
                picked.append(torch.as_tensor(token, device=logits.device).to(torch.int64).view(()))
            except Exception as error:
                self.failed[sequence] = error
                picked.append(nothing)
        return torch.stack(picked)
