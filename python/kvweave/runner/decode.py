"""Decode: one token a step for a batch of requests, which leave the batch as they end."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from kvweave.runner.decode_graph import StepGraphs
from kvweave.runner.decode_step import StepTables, forward
from kvweave.runner.decoding import Decoding, choose_all
from kvweave.runner.model_spec import ModelSpec
from kvweave.runner.rope import Rotary


class Decoder:
    """Decode steps of one model over one arena.

    On a GPU a step is captured once for each size of batch and replayed from then on, where the
    frequencies of RoPE are fixed and the model itself waits for nothing.
    """

    def __init__(self, spec: ModelSpec, rotary: Rotary, pages: torch.Tensor) -> None:
        self.spec = spec
        self.rotary = rotary
        self.pages = pages
        captured = spec.device.type == "cuda" and rotary.is_fixed
        self.graphs = StepGraphs(spec, rotary, pages) if captured else None

    def step(self, batch: Sequence[Decoding]) -> list[int]:
        """Feeds each sequence's last token through the model and chooses its next: B ids.

        All keys of the batch were rotated by the same frequencies: see `by_regime`.

        # Errors
        `PoolFull` when a sequence needs a block and there is none; its request is unchanged.
        """
        start = time.perf_counter()
        for sequence in batch:
            sequence.request.append(np.asarray(sequence.tokens[-1:], np.int32))
        with self.spec.current():
            chosen = choose_all(batch, self._logits(batch))
        spent = time.perf_counter() - start
        for sequence in batch:
            sequence.report.timings.decode_s += spent
        return chosen

    def _logits(self, batch: Sequence[Decoding]) -> torch.Tensor:
        if self.graphs is not None:
            return self.graphs.logits(batch)
        tables = StepTables.of(self.spec, self.rotary, batch)
        return forward(self.spec, self.pages, tables, batch[0].positions.rope)

    def forget(self) -> None:
        """Lets go of the requests of the last step."""
        if self.graphs is not None:
            self.graphs.forget()
