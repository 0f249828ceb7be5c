"""Rounds of self-speculation: tokens are drafted by few pages, and verified by all in one pass.

A round of a request drafts some tokens one after the other, each by a decode step whose top-K
heads read the pages they choose (Sun et al., TriForce, arXiv 2404.11912; Sadhukhan et al.,
MagicDec, arXiv 2408.11049: a model's own sparse KV drafts for it). Then the request's last token
and all drafts go through the model in one pass over all KV, which writes theirs anew: row i says
what follows token i. A draft is right where that row, choosing with the very random number that one
token a step would have chosen with, says the same. What is said are the right drafts up to the
first wrong one, and what that row says in its place: each token is what the pass over all KV gives.
No distribution is corrected, so this holds for any way of choosing.

Nothing waits for the device before the end of a round: what was drafted goes to the next step and
to the verification there. So the host makes the tables of a whole round at once, with room for all
drafts: a row reads of them what is at positions up to its own. Behind the round the host takes
back what was wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvweave.errors import InvalidArgument
from kvweave.ops import Workspace
from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.decode.draws import Draws, may_draft
from kvweave.runner.decode.graph import StepGraphs
from kvweave.runner.decode.round_grid import RoundGrid
from kvweave.runner.decode.sampling import Int64, check_token
from kvweave.runner.decode.slots import DecodeSlots, Step
from kvweave.runner.decode.step import DecodeTables, forward, turns_of
from kvweave.runner.kv.heads import HeadReads
from kvweave.runner.kv.tables import send
from kvweave.runner.kv.whole_layers import WholeLayers
from kvweave.runner.model.rope import Rotary


@dataclass(frozen=True)
class Run:
    """What a request says in a round: at least one token, unless choosing it raised `failure`."""

    tokens: list[int]
    failure: Exception | None = None


class Rounds:
    """Rounds of one model over one arena, of at most `most` drafts a request.

    `graphs`: of a device where steps are captured.
    """

    def __init__(
        self,
        heads: HeadReads,
        rotary: Rotary,
        pages: torch.Tensor,
        most: int,
        workspace: Workspace | None,
        graphs: StepGraphs | None,
    ) -> None:
        self.spec = heads.spec
        self.rotary = rotary
        self.pages = pages
        self.most = most
        self.workspace = workspace
        self.graphs = graphs

    def drafts(self, batch: Sequence[Decoding]) -> Int64:
        """How many tokens each may draft, i64 [B]: one that it may say is never drafted."""
        return np.asarray(
            [max(0, min(self.most, s.remaining - 1)) * may_draft(s) for s in batch], np.int64
        )

    def runs(self, slots: DecodeSlots, step: Step) -> list[Run]:
        """Carries out the round of a step, and takes back what was wrong: one wait for the device.

        Tokens are not added to the sequences.
        """
        assert step.counts is not None
        draws, grid = Draws(slots.batch, step.counts - 1), RoundGrid.of(step)
        whole = slots.whole(step)
        if self.graphs is None or slots.heads.waits:
            drafted, logits = self._computed(slots, step, grid, draws, whole)
        elif whole is None:
            drafted, logits = self.graphs.round(slots, step, grid, draws.drafted)
        else:
            ids = self.graphs.drafts(slots, step, grid, draws.drafted)
            reads = _RoundReads(self.rotary, slots, step, whole)
            drafted, logits = ids[:, 1:], self._verified(reads, ids, grid)
        picked = draws.verified(logits, grid.width)
        both = torch.cat((drafted, picked), 1).cpu().numpy()
        parts = both[:, : grid.width - 1], both[:, grid.width - 1 :]
        runs = [self._run(draws, number, *parts) for number in range(len(slots.batch))]
        for number, run in enumerate(runs):
            draws.keep(number, len(run.tokens))
            _settle(slots.batch[number], int(grid.positions[number, 0]), run)
        return runs

    def _verified(self, reads: _RoundReads, ids: torch.Tensor, grid: RoundGrid) -> torch.Tensor:
        """Logits f32 [B · W, V] of all rows, ids i64 [B, W], launch by launch."""
        tables = reads.verification(ids, grid)
        return forward(self.spec, self.pages, tables, reads.slots.rope, self.workspace)

    def _computed(
        self,
        slots: DecodeSlots,
        step: Step,
        grid: RoundGrid,
        draws: Draws,
        whole: WholeLayers | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts i64 [B, W − 1] and the logits f32 [B · W, V] of all rows, launch by launch."""
        reads = _RoundReads(self.rotary, slots, step, whole)
        ids = torch.from_numpy(grid.tokens).to(self.spec.device, torch.int64)
        asked = slots.rope, self.workspace
        for row in range(grid.width - 1):
            tables = reads.draft(ids[:, row].contiguous(), grid, row)
            logits = forward(self.spec, self.pages, tables, *asked)
            ids[:, row + 1] = draws.drafted(logits)
        return ids[:, 1:], self._verified(reads, ids, grid)

    def _run(self, draws: Draws, number: int, drafted: Int64, picked: Int64) -> Run:
        """What a request says: picked [B, W] as far as drafted [B, W − 1] was right."""
        sequence, drafts = draws.batch[number], draws.drafts[number]
        said: list[int] = []
        for row, token in enumerate(picked[number, : drafts + 1].tolist()):
            try:
                check_token(token, self.spec.vocabulary)
            except InvalidArgument as error:
                return Run(said, draws.failed.get((number, row), error))
            said.append(token)
            if token in sequence.stop or row == drafts or token != drafted[number, row]:
                break
        right = sum(map(int.__eq__, said, drafted[number, :drafts].tolist()))
        sequence.speculation.note(drafts, right)
        return Run(said)


class _RoundReads:
    """What the rows of a round read, where no graph knows it: made once for all of them."""

    def __init__(
        self, rotary: Rotary, slots: DecodeSlots, step: Step, whole: WholeLayers | None = None
    ) -> None:
        assert step.chosen is not None
        self.whole = whole
        self.rotary = rotary
        self.slots = slots
        self.device = slots.spec.device
        slots.write(step.made.places, step.made.moved)
        self.step = step.chosen
        self.again = step.chosen.once_more(len(slots.entries))
        # The room behind the last table ends nowhere: nobody reads it.
        offsets = np.append(step.made.spans, np.int32(0))
        spans = step.made.spans.reshape(len(slots.batch), -1)
        table, self.offsets = send(self.device, spans, offsets)
        self.spans = torch.as_tensor(table)
        self.entries = slots.entries if slots.entries.is_cuda else slots.entries.numpy()
        self.chosen = slots.chosen_tables(step.chosen)

    def draft(self, ids: torch.Tensor, grid: RoundGrid, row: int) -> DecodeTables:
        """The tables of a draft, by one row of each request; the first one ranks."""
        said = self.step if row == 0 else self.again
        if row == 0 or (row == 1 and said is not self.step):
            plans = map(torch.as_tensor, send(self.device, *said.plans))
            self.chosen.begin(self.spans, list(plans), *said.form)
        at, to = grid.column(row)
        positions, places = send(self.device, at, to)
        known = positions, places, self.entries, self.offsets, turns_of(self.rotary, at)
        return DecodeTables(ids, *known, self.slots.reach, self.chosen)

    def verification(self, ids: torch.Tensor, grid: RoundGrid) -> DecodeTables:
        """The tables of all rows at once, ids i64 [B, W], each of which reads all pages."""
        rows = np.arange(len(ids) + 1, dtype=np.int32) * grid.width
        at = grid.positions.reshape(-1)
        to = grid.slots.reshape(len(grid.slots), -1, 2)
        positions, places, splits = send(self.device, at, np.ascontiguousarray(to), rows)
        known = positions, places, self.entries, self.offsets, turns_of(self.rotary, at)
        tables = DecodeTables(ids.reshape(-1), *known, self.slots.reach, row_offsets=splits)
        return replace(tables, whole=self.whole)


def _settle(sequence: Decoding, known: int, run: Run) -> None:
    """Leaves a request of so many tokens with those that have KV behind what it says."""
    said = run.tokens[:-1]
    sequence.request.truncate(known + 1 + len(said))
    if said:
        sequence.request.set_tokens(known + 1, np.asarray(said, np.int32))
