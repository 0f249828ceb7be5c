"""Slots of seats that outlast a step, and choices that are kept beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvweave import InvalidArgument, ops
from versions import needs_cuda

DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
NOTHING = [-1, 0, 0, 2**31 - 1, 0]
SHAPES = [
    # requests, seats, heads of lists, ranks of a seat, heads of rows, first rank, pages, slots, all
    (5, 7, 8, 9, (6, 1, 3), 4, 8, 9, 40),
    (1, 1, 1, 1, (0,), 0, 1, 1, 2),
    (24, 25, 8, 180, (0, 1, 2, 4, 5, 6), 174, 64, 72, 1970),
    (3, 4, 2, 2, (1, 0), 0, 129, 150, 700),
    (2, 3, 3, 3, (2,), 1, 1100, 1300, 4000),
    (2, 3, 2, 2, (), 0, 4, 5, 9),
    (0, 3, 2, 2, (0, 1), 0, 4, 5, 9),
]


class Seated:
    """Requests that sit on seats, what these hold, and what each request has chosen."""

    def __init__(self, shape: tuple, seed: int) -> None:
        self.requests, self.seats, self.of_lists, ranks, heads, self.first = shape[:6]
        self.most, self.width, self.limit = shape[6:]
        self.heads, self.random = np.array(heads, np.int32), np.random.default_rng(seed)
        # The last one is nobody's: of it nothing lies elsewhere.
        self.of = self.random.permutation(self.seats)[: self.requests].astype(np.int32)
        self.of[self.random.random(self.requests) < 0.2] = self.seats - 1
        self.away = self.random.integers(0, self.limit + 1, self.seats).astype(np.int32)
        self.away[-1] = 0
        self.blocks = self.random.permutation(self.seats * self.width).astype(np.int32)
        self.blocks = self.blocks.reshape(self.seats, self.width)
        self.held = np.full((self.seats, ranks, self.width), -1, np.int32)
        for row in self.held[:-1].reshape(-1, self.width):
            some = self.random.permutation(self.limit)[: self.random.integers(0, self.width + 1)]
            row[self.random.permutation(self.width)[: len(some)]] = some[: self.width]
        self.choose()

    def choose(self) -> None:
        self.pages = np.full((self.requests, self.of_lists, self.most), -1, np.int32)
        for row in self.pages.reshape(-1, self.most):
            count = self.random.integers(0, self.most + 1)
            row[:count] = np.sort(self.random.permutation(self.limit)[: self.most][:count])
        shape = (*self.pages.shape, 5)
        self.entries = self.random.integers(0, 99, shape).astype(np.int32)

    def by_hand(self) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int, int]]]:
        """Slots, entries and moves as plain words have them."""
        held, entries, moves = self.held.copy(), self.entries.copy(), []
        for request, seat in enumerate(self.of):
            for number, head in enumerate(self.heads):
                slots = held[seat, self.first + number]
                chosen = [p for p in self.pages[request, head] if 0 <= p < self.away[seat]]
                left = iter([s for s in range(self.width) if slots[s] not in chosen])
                for at, page in enumerate(chosen):
                    if page not in slots:
                        slot = next(left)
                        slots[slot] = page
                        moves.append((seat * len(self.heads) + number, page, slot))
                    slot = int(np.flatnonzero(slots == page)[0])
                    entries[request, head, at, 0] = self.blocks[seat, slot]
        return held, entries, moves

    def on(self, device: str) -> tuple[torch.Tensor, torch.Tensor, ops.Seats, ops.SeatedHeads]:
        names = ("pages", "entries", "held", "blocks", "away", "of", "heads")
        there = [torch.from_numpy(getattr(self, name).copy()).to(device) for name in names]
        return there[0], there[1], ops.Seats(*there[2:5]), ops.SeatedHeads(*there[5:], self.first)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("by_seat", [False, True])
def test_what_lies_elsewhere_comes_into_slots_of_seats(shape, by_seat, device) -> None:
    workspace = ops.Workspace(device) if device == "cuda" else None
    for seed in range(4):
        case = Seated(shape, seed)
        for _ in range(3):
            held, entries, moves = case.by_hand()
            pages, named, seats, rows = case.on(device)
            if by_seat:
                kept = pages.new_full((case.seats, *pages.shape[1:]), -1)
                kept[rows.of.long()] = pages
                pages = kept
            known = {"limit": case.limit, "by_seat": by_seat, "workspace": workspace}
            found = ops.recycle_seats(pages, named, seats, rows, **known)
            assert [tuple(m) for m in found.moves[: int(found.count)].tolist()] == moves
            assert np.array_equal(seats.held.cpu(), held)
            assert np.array_equal(named.cpu(), entries)
            assert not found.refused.any()
            case.held = held
            case.choose()


@needs_cuda
def test_seats_and_heads_that_are_none_are_left_as_they_are() -> None:
    case = Seated((6, 7, 4, 4, (0, 1, 2), 0, 8, 9, 40), 3)
    case.of[:] = range(6)
    case.of[1], case.of[4] = -1, 7
    case.away[:6] = case.limit
    case.heads[2] = 4
    pages, entries, seats, rows = case.on("cuda")
    found = ops.recycle_seats(pages, entries, seats, rows, limit=case.limit)
    refused = [[row in (1, 4) or head == 2 for head in range(3)] for row in range(6)]
    assert found.refused.view(6, 3).bool().tolist() == refused
    assert (found.places.view(6, 3, -1)[[1, 4]] == -1).all()
    case.of, case.heads = case.of[[0, 2, 3, 5]], case.heads[:2]
    case.pages = case.pages[[0, 2, 3, 5]]
    sound = case.entries
    case.entries = sound[[0, 2, 3, 5]]
    held, wanted, moves = case.by_hand()
    sound[[0, 2, 3, 5]] = wanted
    assert np.array_equal(seats.held.cpu(), held)
    assert np.array_equal(entries.cpu(), sound)
    # Rows of three heads a seat.
    moved = [(row // 2 * 3 + row % 2, page, slot) for row, page, slot in moves]
    assert [tuple(m) for m in found.moves[: int(found.count)].tolist()] == moved


@pytest.mark.parametrize("device", DEVICES)
def test_tables_that_do_not_belong_together_are_named(device) -> None:
    case = Seated((5, 7, 8, 9, (6, 1, 3), 4, 8, 9, 40), 0)
    pages, entries, seats, rows = case.on(device)
    with pytest.raises(InvalidArgument, match="pages: expected 3 axes, got 2"):
        ops.recycle_seats(pages[0], entries, seats, rows, limit=40)
    flat = ops.Seats(seats.held[0], seats.blocks, seats.away)
    with pytest.raises(InvalidArgument, match="held: expected 3 axes, got 2"):
        ops.recycle_seats(pages, entries, flat, rows, limit=40)
    if device == "cuda":
        beyond = ops.SeatedHeads(rows.of, rows.heads, 7)
        with pytest.raises(InvalidArgument, match="ranks: expected at most 9 ranks, got 10"):
            ops.recycle_seats(pages, entries, seats, beyond, limit=40)
        with pytest.raises(InvalidArgument, match="entries"):
            ops.recycle_seats(pages, entries[1:], seats, rows, limit=40)
        off = ops.Seats(seats.held, seats.blocks, seats.away.cpu())
        with pytest.raises(InvalidArgument, match="away: expected a tensor on cuda:0, got cpu"):
            ops.recycle_seats(pages, entries, off, rows, limit=40)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("most", [1, 5, 128, 300])
def test_requests_go_on_with_what_they_selected(most, device, generator) -> None:
    """Entries of what is kept are those of the same pages selected anew."""
    random, requests, heads, seats = np.random.default_rng(most), 6, 3, 8
    table = random.integers(0, 99, (requests * 400, 5)).astype(np.int32)
    ends = (400 * np.arange(requests + 1)).astype(np.int32)
    tables = [torch.from_numpy(x).to(device) for x in (table, ends)]

    def drawn(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        pages = np.full((rows, heads, most), -7, np.int32)
        count = random.integers(0, most + 1, (rows, heads)).astype(np.int32)
        for at in np.ndindex(*count.shape):
            pages[at][: count[at]] = np.sort(random.permutation(400)[: count[at]])
        return torch.from_numpy(pages).to(device), torch.from_numpy(count).to(device)

    def cut(pages: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        there = torch.arange(most, device=device) < count[..., None]
        return torch.where(there, pages, -1)

    kept = cut(*drawn(seats))
    rows = torch.from_numpy(random.permutation(seats)[:requests].astype(np.int32)).to(device)
    again = torch.tensor([True, False, True, False, False, True], device=device)
    pages, count = drawn(requests)
    wanted_kept = kept.clone()
    own = torch.where(again[:, None, None], kept[rows.long()], cut(pages, count))
    wanted_kept[rows.long()] = own
    known = {"entry_offsets": tables[1]}
    wanted = ops.gather_entries(own, (own >= 0).sum(-1).int(), tables[0], **known)
    got = ops.gather_entries(
        pages, count, tables[0], kept=ops.KeptPages(kept, rows, again), **known
    )
    assert torch.equal(kept, wanted_kept)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
