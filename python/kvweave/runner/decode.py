"""Decode: one token a step for a batch of requests, which leave the batch as they end."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from kvweave.device_memory import needs_memory
from kvweave.ops import Workspace
from kvweave.runner.decode_graph import StepGraphs
from kvweave.runner.decode_step import StepTables, forward, query_room
from kvweave.runner.decoding import Decoding, choose_all
from kvweave.runner.heads import HeadReads
from kvweave.runner.rope import Rotary


class Decoder:
    """Decode steps of one model over one arena.

    On a GPU a step is captured once for each size of batch and replayed from then on, where the
    frequencies of RoPE are fixed and the model itself waits for nothing.
    """

    def __init__(self, heads: HeadReads, rotary: Rotary, pages: torch.Tensor) -> None:
        self.spec = heads.spec
        self.heads = heads
        self.rotary = rotary
        self.pages = pages
        on_gpu = self.spec.device.type == "cuda"
        self.workspace = Workspace(self.spec.device) if on_gpu else None
        captured = self.workspace is not None and rotary.is_fixed
        self.graphs = StepGraphs(heads, rotary, pages, self.workspace) if captured else None
        self.queries: torch.Tensor | None = None

    @needs_memory("decode step")
    def step(self, batch: Sequence[Decoding], *, watched: bool = False) -> list[int]:
        """Feeds each sequence's last token through the model and chooses its next: B ids.

        The batch is of one kind: see `by_regime`. `watched`: `queries` then has those of the step,
        [L, B, H, D], until the next one.

        # Errors
        `PoolFull` when a sequence needs a block and there is none; its request is unchanged.
        `OutOfMemory` when the step finds no room: the requests are to be released.
        """
        start = time.perf_counter()
        for sequence in batch:
            sequence.request.append(np.asarray(sequence.tokens[-1:], np.int32))
            if sequence.forked is not None:
                sequence.forked.copy()
        with self.spec.current():
            chosen = choose_all(batch, self._logits(batch, watched))
        spent = time.perf_counter() - start
        for sequence in batch:
            sequence.timings.decode_s += spent
        return chosen

    def _logits(self, batch: Sequence[Decoding], watched: bool) -> torch.Tensor:
        if self.graphs is not None:
            logits, self.queries = self.graphs.logits(batch, watched)
            return logits
        tables = StepTables.of(self.heads, self.rotary, batch)
        self.queries = query_room(self.spec, len(batch)) if watched else None
        rope = batch[0].positions.rope
        return forward(self.spec, self.pages, tables, rope, self.workspace, self.queries)

    def forget(self) -> None:
        """Lets go of the requests of the last step."""
        if self.graphs is not None:
            self.graphs.forget()
