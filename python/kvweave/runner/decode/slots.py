"""Who takes part in decode steps, and where the entries of their tables lie on the device.

A request that joins a batch sends its entries over, once; from then on a step changes one or two of
them. One that leaves sends nothing. Nobody else's tables are touched, whoever comes and goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

from kvweave import ops
from kvweave._native import DecodeRows, DecodeStep
from kvweave.cache import KvRequest
from kvweave.errors import TransferFailed
from kvweave.ops import RopeTable
from kvweave.runner.decode.chosen_pages import ChosenPages
from kvweave.runner.decode.chosen_step import NO_ENTRY, ChosenStep
from kvweave.runner.decode.chosen_tables import ChosenTables
from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.decode.listed_step import ListedStep
from kvweave.runner.decode.packed_reads import PackedReads
from kvweave.runner.decode.reads import StepReach, StepReads
from kvweave.runner.decode.sampling import Int64, is_greedy
from kvweave.runner.kv.heads import HeadReads, Promoted
from kvweave.runner.kv.tables import Int32, send
from kvweave.runner.kv.whole_layers import WholeLayers


@dataclass(frozen=True)
class StepRows:
    """A part of what `DecodeRows.step` said, by the same names, of R rows of B requests."""

    positions: Int32
    slots: Int32
    spans: Int32
    places: Int64
    moved: Int32


_REQUEST = attrgetter("request")


def _is_spilled(sequence: Decoding) -> bool:
    return any(pages.count for pages in sequence.host.values())


@dataclass(frozen=True)
class Step:
    """The tokens i32 [R] that a step feeds, and what it reads and writes: see `DecodeRows.step`.

    `counts` i64 [B]: how many of each request, one where it is None. `chosen`: what top-K heads
    read of it, where there are any that choose.
    """

    tokens: Int32
    made: DecodeStep | StepRows
    chosen: ChosenStep | None = None
    counts: Int64 | None = None


class DecodeSlots:
    """The tables of requests that decode together.

    `members`: the row of each. `batch`, in the order of the step, and its `rope`. `longest`: the
    most tokens that any of them, or whoever sat with them, has at its end. `lanes`: the most tables
    that any of them keeps up by itself. `entries` i32 [N, 5] on the device: those of requests, then
    what top-K heads have chosen, and a last one that is nobody's. `chosen` says what the latter
    read, where there are any, and `packed` what packed pages do. A sequence's timings are told of
    its steps when it leaves.
    """

    def __init__(self, heads: HeadReads, pages: torch.Tensor, reads: StepReads) -> None:
        self.heads = heads
        self.spec = heads.spec
        self.pages = pages
        self.reads = reads
        self.rows = DecodeRows(heads.cache)
        self.entries = self._room(self.rows.entries)
        self.members: dict[Decoding, int] = {}
        self.batch: list[Decoding] = []
        self.longest = 0
        self.promoted: Promoted = ()
        self.lanes = 1
        self.chosen = ChosenPages(heads, pages) if heads.budgets else None
        self.packed = None if heads.packed is None else PackedReads(heads.packed)
        self._drawing: set[Decoding] = set()
        # Seconds that steps have taken, and those before each member joined.
        self._spent = 0.0
        self._spent_before: dict[Decoding, float] = {}
        # What the batch said last, where that is what each of them goes on from.
        self._said: Int32 | None = None
        # What the last step said of the batch, for the next one's rankings.
        self._listed: ListedStep | None = None
        # What the last step reads as a whole, where it does.
        self._whole: WholeLayers | None = None
        self._requests: list[KvRequest] = []
        self._numbers = np.zeros(0, np.int32)
        # Of each row: its tokens when it is done, and what it said last while `_said` is known.
        self._end_of: Int64 = np.zeros(0, np.int64)
        self._newest: Int32 = np.zeros(0, np.int32)
        # Tokens of each of the batch when it is done.
        self._ends = np.zeros(0, np.int64)

    def _room(self, entries: int) -> torch.Tensor:
        empty = torch.tensor(NO_ENTRY, dtype=torch.int32, device=self.spec.device)
        return empty.repeat(entries + 1, 1)

    @property
    def rope(self) -> RopeTable:
        """Frequencies that the batch's keys were rotated by."""
        return self.batch[0].positions.rope

    @property
    def greedy(self) -> bool:
        """Whether all of the batch choose the likeliest token."""
        return not self._drawing

    @property
    def reach(self) -> StepReach:
        """What heads read and write in a step."""
        return self.reads.of(self.promoted)

    # ---- who takes part -------------------------------------------------------------------

    def is_seated(self, batch: Sequence[Decoding]) -> bool:
        """Whether the last step was of this very batch."""
        # Lists compare their members by identity first.
        return self.batch == (batch if isinstance(batch, list) else list(batch))

    def seat(self, batch: Sequence[Decoding], sitting_out: Sequence[Decoding] = ()) -> None:
        """Makes these the batch of the next step, in this order: others leave, new ones join.

        Those who are `sitting_out` keep their rows, and go on later where they are.
        """
        if self.is_seated(batch):
            return
        said, coming = self._said is not None, set(batch)
        for sequence in self.members.keys() - coming - set(sitting_out):
            self._leave(sequence)
        for sequence in (coming & self.members.keys()) - set(self.batch):
            self._newest[self.members[sequence]] = sequence.tokens[-1]
        joining = list(dict.fromkeys(s for s in batch if s not in self.members))
        self._take_heads(joining)
        # Those who stay need no more than when they came.
        self.longest = self.longest if self.members else 0
        for sequence in joining:
            self._join(sequence)
        # Most stay, so that what is known of a row is looked up by its number.
        self._requests = list(map(_REQUEST, batch))
        rows = map(self.members.__getitem__, batch)
        self._numbers = np.fromiter(rows, np.int32, len(batch))
        self._ends = self._end_of[self._numbers]
        self.batch, self._said = list(batch), self._newest[self._numbers] if said else None
        if self.packed is not None:
            self.packed.seat(self.batch)

    def _join(self, sequence: Decoding) -> None:
        """Gives a request a row of its own."""
        row = self.members[sequence] = self.rows.join()
        if row >= len(self._end_of):
            more = np.zeros(1 + row, np.int64)
            self._end_of = np.concatenate((self._end_of, more))
            self._newest = np.concatenate((self._newest, more.astype(np.int32)))
        end = self._end_of[row] = sequence.request.length + sequence.remaining
        self._newest[row] = sequence.tokens[-1]
        self.longest = max(self.longest, int(end))
        self._spent_before[sequence] = self._spent
        if not is_greedy([sequence]):
            self._drawing.add(sequence)

    def _take_heads(self, joining: Sequence[Decoding]) -> None:
        """Sees to tables for all heads that the coming requests have promoted.

        While anybody is left, tables that there are stay: their requests read them.
        """
        promoted = dict.fromkeys(self.promoted if self.members else ())
        for sequence in joining:
            promoted.update(dict.fromkeys(sequence.request.promoted))
        if tuple(promoted) != self.promoted:
            self.promoted = tuple(promoted)
            self.rows.set_heads(self.reach.sights)

    def sits_out(self, sequence: Decoding) -> bool:
        """Whether a request should take no step yet: see `LatePages.sits_out`."""
        row = self.members.get(sequence)
        if row is None or self.chosen is None:
            return False
        return self.chosen.sits_out(row, sequence.host)

    def let_go(self, some: Sequence[Decoding]) -> None:
        """Lets some go that take their steps elsewhere from now on."""
        for sequence in self.members.keys() & set(some):
            self._leave(sequence)

    def forget(self, request: KvRequest | None = None) -> None:
        """Lets one of the requests go, or all."""
        for sequence in [s for s in self.members if request is None or s.request is request]:
            self._leave(sequence)

    def _leave(self, sequence: Decoding) -> None:
        row = self.members.pop(sequence)
        self.rows.leave(row)
        if self.chosen is not None:
            self.chosen.forget(row)
        if self.packed is not None:
            self.packed.forget(sequence)
        self._drawing.discard(sequence)
        sequence.timings.decode_s += self._spent - self._spent_before.pop(sequence)
        self.batch, self._requests, self._said = [], [], None

    # ---- a step ---------------------------------------------------------------------------

    def step(self, counts: Int64 | None = None) -> Step:
        """Appends each sequence's last token to its request, all or none, and says what to read.

        `counts` [B]: of a round, so many tokens for each; those behind the last are not known yet,
        and stand as 0. Copies that writing asks for are made; the entries are not brought up to
        date yet.

        # Errors
        As `Decoder.step`.
        """
        tokens = self._said
        if tokens is None:
            tokens = np.asarray([s.tokens[-1] for s in self.batch], np.int32)
        if self.packed is not None:
            self.packed.pack()
        if counts is not None:
            first = np.cumsum(counts) - counts
            known, tokens = tokens, np.zeros(int(counts.sum()), np.int32)
            tokens[first] = known
        of_each = None if counts is None else counts.astype(np.int32)
        made = self.rows.step(self._requests, self._numbers, tokens, of_each)
        self.lanes = made.lanes
        if len(made.copies):
            self._copy(made.copies)
        if self.chosen is not None:
            return Step(tokens, made, self._chosen_step(self.chosen, made, counts), counts)
        if made.entries >= len(self.entries):
            old, self.entries = self.entries, self._room(made.entries)
            self.entries[: len(old) - 1] = old[:-1]
        return Step(tokens, made, None, counts)

    def _chosen_step(
        self, chosen: ChosenPages, made: DecodeStep, counts: Int64 | None
    ) -> ChosenStep | None:
        """What top-K heads read in a step, and room for it behind the entries of requests.

        None where they choose for guesses alone, and the step makes none.
        """
        rows = int(self._numbers.max()) + 1
        self.entries = chosen.fit(self.entries, made.entries, rows)
        if self.heads.verified and counts is None:
            chosen.note(made.places, made.moved)
            self._listed = None
            return None
        first, growing = made.positions, np.ones(len(self.batch), np.int64)
        if counts is not None:
            last = np.cumsum(counts) - 1
            first, pages = first[last - counts + 1], made.positions // int(self.pages.shape[2])
            growing += pages[last] - pages[last - counts + 1]
        of_batch = self._numbers, first, self._ends, made.spans
        hosts = [sequence.host for sequence in self.batch]
        listed = ListedStep(*of_batch, made.places, made.moved, growing, hosts)
        if counts is None or self.heads.host:
            self._listed = listed
        return chosen.step(listed)

    def settle(self) -> None:
        """Takes in what a round has left of its tokens: the next one goes on behind that."""
        if self._listed is not None:
            lengths = [request.length for request in self._requests]
            self._listed = self._listed.left(np.asarray(lengths, np.int32))

    def whole(self, step: Step) -> WholeLayers | None:
        """What a step reads that reads all pages; None where all of it lies on the device.

        Or where heads read what they have chosen.
        """
        self._whole = None
        all_pages = step.chosen is None or step.counts is not None
        if self.chosen is not None and all_pages and any(map(_is_spilled, self.batch)):
            hosts = [sequence.host for sequence in self.batch]
            made = self.chosen.entries_of(step.made.spans, hosts)
            self._whole = WholeLayers(self.heads, self.pages, *made)
        return self._whole

    @property
    def is_preparing(self) -> bool:
        """Whether there is anything to prepare."""
        return self.chosen is not None or (self.packed is not None and self.packed.is_due)

    def prepare(self) -> bool:
        """Does of the next step what need not wait for it: see `ChosenPages.prepare`."""
        if self.packed is not None:
            self.packed.prepare()
        listed, self._listed = self._listed, None
        if self.chosen is None or listed is None:
            return False
        return self.chosen.prepare(listed)

    def take_failures(self) -> dict[int, TransferFailed]:
        """Whose pages could not be had of host memory since the last time, by number in the batch.

        What a step says for them is nothing.
        """
        whole, self._whole = self._whole, None
        found = {} if whole is None else dict(whole.failed)
        failures = {} if self.chosen is None else self.chosen.take_failures()
        numbers = enumerate(self._numbers.tolist()) if failures else ()
        found.update((number, failures[row]) for number, row in numbers if row in failures)
        return found

    def chosen_tables(self, step: ChosenStep) -> ChosenTables:
        """What top-K heads read in steps that find on the device what this one does."""
        page_tokens = int(self.pages.shape[2])
        known = step.rooms, self.entries, self.reads.choices
        return ChosenTables(self.spec, self.rope, page_tokens, *known)

    def hear(self, chosen: Int64 | None, seconds: float) -> None:
        """Takes in what each of the batch said, i64 [B] or −1 for nothing, and what that took.

        None: the batch knows.
        """
        self._spent += seconds
        if chosen is None:
            self._said = None
            return
        self._said = chosen.astype(np.int32) if len(chosen) and chosen.min() >= 0 else None
        if self._said is not None:
            self._newest[self._numbers] = self._said

    def _copy(self, copies: Int32) -> None:
        """Copies what others share of the blocks that are to be written: i32 [C, 8]."""
        for group in np.unique(copies[:, 1]).tolist():
            ops.copy_rerotate(
                self.pages,
                np.ascontiguousarray(copies[copies[:, 1] == group, 2:]),
                self.rope,
                kv_heads=self.spec.kv_heads,
                layers=self.heads.page_layers(group),
            )
        for number in np.unique(copies[:, 0]).tolist():
            self._requests[number].finish_copies()

    def write(self, places: npt.NDArray[np.int64], moved: Int32) -> None:
        """Brings entries up to date: rows i32 [M, 5] at places [M]."""
        if not len(places):
            return
        if self.entries.is_cuda:
            at, rows = send(self.spec.device, places.astype(np.int32), moved)
            self.entries.index_copy_(0, torch.as_tensor(at).long(), torch.as_tensor(rows))
        else:
            self.entries.numpy()[places] = moved
