"""`CheckedChoice`: the tokens of a decode step, where the choice of one request harms no other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvweave.errors import InvalidArgument
from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.decode.sampling import Int64, check_token


class CheckedChoice:
    """Chooses the tokens of a step; whose choice raises says nothing; its row is in `failed`."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self.failed: dict[int, Exception] = {}

    def __call__(self, batch: Sequence[Decoding], logits: torch.Tensor, greedy: bool) -> Int64:
        """The choice of each, −1 of whose choice failed: see `choose_all`."""
        picked = logits.argmax(-1) if greedy else self._picked(batch, logits)
        chosen: Int64 = picked.cpu().numpy()
        for row in np.flatnonzero((chosen < 0) | (chosen >= self._vocabulary)).tolist():
            try:
                check_token(int(chosen[row]), self._vocabulary)
            except InvalidArgument as error:
                self.failed.setdefault(row, error)
            chosen[row] = -1
        for sequence, token in zip(batch, chosen.tolist(), strict=True):
            if token >= 0:
                sequence.tokens.append(token)
        return chosen

    def _picked(self, batch: Sequence[Decoding], logits: torch.Tensor) -> torch.Tensor:
        """The choice of each row, i64 [B]; −1 where it raised."""
        nothing = torch.full((), -1, dtype=torch.int64, device=logits.device)
        picked = []
        for number, (sequence, row) in enumerate(zip(batch, logits, strict=True)):
            try:
                token = sequence.sampling.pick(row, sequence.generator)
                picked.append(torch.as_tensor(token, device=logits.device).to(torch.int64).view(()))
            except Exception as error:
                self.failed[number] = error
                picked.append(nothing)
        return torch.stack(picked)
