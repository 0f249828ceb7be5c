"""Choices of one step after the other, over tables and pages made by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families import random_tokens, tiny
from kvweave.runner.decode.chosen_pages import ChosenPages, ListedStep
from kvweave.runner.decode.chosen_tables import ChosenTables
from ranked_pages import FULL, best_pages, page_score, ranked_runner, top_k

PAGE, LAYER = 4, 2


class World:
    """One request's table over pages of random keys; its heads choose 4 of its pages."""

    def __init__(self, every: int, entries: int) -> None:
        kinds = [top_k(4, every), FULL]
        self.runner = ranked_runner(tiny("llama"), kinds, page_tokens=PAGE)
        decoder = self.runner._decoder
        (self.budget,) = decoder.heads.budgets
        self.pages = decoder.pages
        generator = torch.Generator().manual_seed(entries)
        self.pages.copy_(torch.randn(self.pages.shape, generator=generator))
        self.chosen = ChosenPages(decoder.heads, self.pages)
        self.heads, self.reads = decoder.heads, decoder.reads
        self.rope = decoder.rotary.table(1).rope
        self.array = torch.zeros(1, 5, dtype=torch.int32)
        self.room = 64, 1
        self.listed = np.zeros((0, 5), np.int32)
        self.table = np.array(
            [(8 * (i + 1), 0, PAGE, PAGE * i, 0) for i in range(entries)], np.int32
        )
        self.table[-1, 2] = 1
        self.generator = generator

    def moved(self) -> np.ndarray:
        """What has changed in the table: of one that is listed anew all, as the cache says it."""
        before, self.listed = self.listed, self.table.copy()
        both = min(len(before), len(self.table))
        anew = len(self.table) < len(before) or not np.array_equal(
            before[:both, 3], self.table[:both, 3]
        )
        other = np.ones(len(self.table), bool)
        other[:both] = anew | (before[:both] != self.table[:both]).any(1)
        return np.flatnonzero(other)

    def free(self) -> bool:
        """Whether no bounds are kept, once the request has been forgotten."""
        self.chosen.forget(0)
        self.listed = self.listed[:0]
        (group,) = self.chosen.groups
        return sorted(group.bounds.free.tolist()) == list(range(len(group.bounds.values)))

    def step(self) -> tuple[list[list[int]], list[list[int]]]:
        """What the layer's head reads of the table: as was chosen, and by the definition."""
        q = torch.randn(
            1, self.runner.spec.query_heads, self.pages.shape[-1], generator=self.generator
        )
        chosen, count = self.chosen, len(self.table)
        self.array = chosen.fit(self.array, max(self.room[0], count), self.room[1])
        moved = self.moved()
        self.array[torch.from_numpy(moved)] = torch.from_numpy(self.table[moved])
        spans = np.array([[(0, count), (0, count)]], np.int32)
        newest = np.array([self.table[-1, 3] + self.table[-1, 2] - self.table[-1, 1] - 1], np.int32)
        at_end = newest.astype(np.int64) + 1
        row = np.zeros(1, np.int32)
        listed = row, newest, at_end, spans, moved, self.table[moved], np.ones(1, np.int64)
        step = chosen.step(ListedStep(*listed))
        known = step.rooms, self.array, self.reads.choices
        tables = ChosenTables(self.runner.spec, self.rope, PAGE, *known)
        plans = [torch.from_numpy(plan) for plan in step.plans]
        tables.begin(torch.from_numpy(spans.reshape(1, -1)), plans, *step.form)
        entries, ends = (torch.as_tensor(table) for table in tables.read(LAYER, q, None))
        reach = self.reads.of(()).chosen[LAYER]
        assert reach is not None
        ((_, (head,), (rank,)),) = self.heads.ranked(LAYER)
        at = reach.heads[head, 0]
        assert reach.heads[head].tolist() == [at, rank, 0, 0]
        read = entries[ends[at] : ends[at + 1]].tolist()
        keys = [self.pages[b + rank, 0, begin:end] for b, begin, end, *_ in self.table.tolist()]
        asking = q[0].view(self.runner.spec.kv_heads, -1, q.shape[-1])[head]
        best = best_pages([page_score(asking, some) for some in keys], 4)
        return read, self.table[best].tolist()


def test_an_entry_of_another_block_has_other_bounds() -> None:
    world = World(every=1, entries=9)
    for block in (80, 88, 96, 8):
        read, wanted = world.step()
        assert read == wanted
        world.table[3:6, 0] = block, 16, 40
        world.table[-1, 2] = min(PAGE, world.table[-1, 2] + 1)


def test_a_table_that_grows_and_shrinks() -> None:
    world = World(every=1, entries=5)
    for count in (6, 40, 7, 3, 12):
        world.table = World(every=1, entries=count).table
        read, wanted = world.step()
        assert read == (wanted if count > 4 else world.table.tolist())
    assert world.free()


def test_parts_of_pages_are_bounded_by_what_is_listed_of_them() -> None:
    world = World(every=1, entries=10)
    world.table[1:7, 1], world.table[1:5, 2] = 1, 3
    for row in world.table[1:7].tolist():
        world.pages[row[0] : row[0] + 8, 0, : row[1]] = torch.nan
        world.pages[row[0] : row[0] + 8, 0, row[2] :] = torch.nan
    read, wanted = world.step()
    assert read == wanted


def test_pages_with_nan_keys_are_read() -> None:
    world = World(every=1, entries=10)
    world.pages[world.table[6, 0] : world.table[6, 0] + 8, 0, 1, 3] = torch.nan
    assert world.table[6].tolist() in world.step()[0]


def test_of_pages_alike_the_first_are_read() -> None:
    world = World(every=1, entries=10)
    world.pages[:] = 1.0
    assert [row[3] // PAGE for row in world.step()[0]] == [0, 1, 8, 9]


@pytest.fixture(scope="module")
def ranked_at_every_step() -> World:
    return World(every=1, entries=9)


PARTS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, PAGE - 1), st.integers(1, PAGE)),
    min_size=1,
    max_size=14,
)


@settings(max_examples=40)
@given(st.lists(PARTS, min_size=1, max_size=4))
def test_whatever_a_table_lists_is_chosen_by_the_definition(ranked_at_every_step, tables) -> None:
    """Blocks listed twice, parts of pages, tables that become others: each is ranked as it is."""
    world = ranked_at_every_step
    assert world.free()
    for step, parts in enumerate(tables):
        rows, position = [], 100 * step
        for block, begin, count in parts:
            end = min(PAGE, begin + count)
            rows.append((8 * block, begin, end, position, 0))
            position += end - begin
        world.table = np.array(rows, np.int32)
        read, wanted = world.step()
        assert read == (wanted if len(rows) > 4 else world.table.tolist())


@pytest.mark.parametrize("every", [2, 5])
def test_a_choice_stays_until_it_is_ranked_again(every) -> None:
    world = World(every=every, entries=9)
    last, chosen = world.table[-1], None
    for step in range(12):
        read, wanted = world.step()
        if step % every == 0:
            assert read == wanted
            chosen = [row[3] for row in read]
        else:
            begun = [row[3] for row in world.table.tolist() if row[3] > chosen[-1]]
            assert [row[3] for row in read] == chosen + begun
        assert read[-1] == world.table[-1].tolist()
        last = world.table[-1]
        if last[2] < PAGE:
            last[2] += 1
        else:
            row = np.array([[last[0] + 8, 0, 1, last[3] + PAGE, 0]], np.int32)
            world.table = np.concatenate((world.table, row))


@pytest.mark.parametrize("room", [(64, 30), (500, 1), (500, 30)])
def test_what_was_chosen_stays_where_the_array_grows(room) -> None:
    world = World(every=100, entries=9)
    read, wanted = world.step()
    assert read == wanted
    world.room = room
    world.table[-1, 2] += 1
    assert world.step()[0] == [*read[:-1], world.table[-1].tolist()]


def test_a_request_with_a_page_less_reads_all_and_is_ranked_when_it_comes_back() -> None:
    world = World(every=100, entries=5)
    read, wanted = world.step()
    assert read == wanted
    world.table = world.table[:4]
    assert world.step()[0] == world.table.tolist()
    world.table = World(every=100, entries=5).table
    world.table[-1, 2] = 3
    read, wanted = world.step()
    assert read == wanted


def test_tables_of_another_make_are_ranked_at_once() -> None:
    """Whoever cut a table anew has other entries at the numbers that were chosen."""
    world = World(every=100, entries=9)
    world.step()
    world.table = np.concatenate((world.table[:2], world.table[1:]))
    world.table[1, 2], world.table[2, 1:4:2] = 2, (2, PAGE + 2)
    read, wanted = world.step()
    assert read == wanted


def test_prompts_of_no_more_pages_than_are_read_cost_no_bounds() -> None:
    runner = ranked_runner(tiny("llama"), [top_k(8)], page_tokens=PAGE)
    runner.generate(random_tokens(20, 1), max_new_tokens=8, stop=(), remember=False)
    for slots in runner._decoder._slots:
        (group,) = slots.chosen.groups
        assert len(group.bounds.values) == 1
