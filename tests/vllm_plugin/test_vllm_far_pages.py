"""Pages in the host's memory behind virtual pages: each is somewhere, whoever comes and goes.

Needs no vLLM: its scheduler is played by random events, its worker's layers by what they choose.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from far_world import CLASSES, P, Request, World
from kvweave.adapters.vllm.top_k.bounds import bound_share
from kvweave.adapters.vllm.virtual_pages.far_requests import FarRequests
from kvweave.adapters.vllm.virtual_pages.layout import PageLayout, layout_of
from kvweave.adapters.vllm.virtual_pages.residency import Residency
from ranked_pages import FULL, top_k
from versions import needs_cuda

DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("paced", [False, True], ids=["each step", "each page"])
@pytest.mark.parametrize("classes", CLASSES.values(), ids=CLASSES)
def test_whatever_is_chosen_is_what_was_written(classes, paced, seed: int, device: str) -> None:
    """Requests come, grow, give their pages up, end in any step, and two in one step."""
    world = World(classes, device, seed, paced)
    for _ in range(250):
        world.events()
    assert world.far.spilled > 10
    assert world.fetched > 100
    assert (world.kept > 100) is paced
    assert world.hits > 0
    world.nothing_is_held()


def test_what_stays_and_what_it_is_charged() -> None:
    share = bound_share(torch.bfloat16, torch.device("cpu"), P)
    assert share == Fraction(3 * 4, 2 * P * 2)
    whole = layout_of([[FULL, top_k(64), top_k(64), top_k(64)]] * 32, P)
    assert (whole.parts, whole.block_pages, whole.budgets) == ((1, 3), 32, (0, 64))
    stays = whole.with_bounds(Fraction(1, P), spills=False)
    leaves = whole.with_bounds(Fraction(1, P), spills=True)
    # 96 heads that choose have bounds of 6 pages for each page; all 128 heads stay, or 32.
    assert (stays.bound_rows, stays.bound_pages, stays.slots) == (96, 6, 0)
    assert (stays.head_slots, leaves.head_slots, leaves.slots) == (4, 1, 72)
    assert leaves.arena_pages(1000) == 1000 * 32 - 6000
    assert leaves.home_blocks(10 * 96 * 4096 + 5, 4096) == 10
    assert not layout_of([[FULL]], P).with_bounds(Fraction(1, P), spills=True).spills
    # Bounds take half at most, however few heads stay.
    bare = layout_of([[top_k(4)] * 8] * 4, P).with_bounds(Fraction(3, 16), spills=True)
    assert bare.bound_pages == 6
    assert bare.head_slots == 3


def test_a_host_without_room_gives_none() -> None:
    layout: PageLayout = layout_of([[top_k(4)] * 2] * 2, P).with_bounds(Fraction(0), spills=True)
    residency = Residency(layout, 40, 2)
    far = FarRequests(residency, 0, 2)
    request = Request("a", 300, 300, pages=list(range(1, 20)))
    residency.adopt("a", [])
    residency.extend("a", request.pages)
    far.know(request, request.pages)

    def pages_of(name: str) -> list[int]:
        return request.pages

    def nowhere(page: int) -> bool:
        return False

    assert far.make_room(lambda: 10, pages_of, nowhere) == []
    assert far.away == far.spilled == 0
    # Nobody is asked for more than all could give.
    able = FarRequests(residency, 100, 2)
    able.know(request, request.pages)
    assert able.make_room(lambda: 1000, pages_of, nowhere) == []
    assert able.away == 0
    before = residency.pages.stats()["free"]
    none = np.zeros((0, 2), np.int32)

    def lacking() -> int:
        return max(3 - (residency.pages.room_beside(none) - before), 0)

    able.make_room(lacking, pages_of, nowhere)
    assert (able.away, able.held, lacking()) == (1, 18, 0)


def test_who_has_no_seat_stays() -> None:
    """One that may be gone on with from outside, and more than there are seats for."""
    layout: PageLayout = layout_of([[top_k(4)] * 2] * 2, P).with_bounds(Fraction(0), spills=True)
    residency = Residency(layout, 200, 1)
    far = FarRequests(residency, 100, 1)
    for number, resumable in enumerate((True, False, False)):
        pages = list(range(1 + 20 * number, 21 + 20 * number))
        residency.adopt(str(number), [])
        residency.extend(str(number), pages)
        far.know(Request(str(number), 300, 300, pages=pages, resumable=resumable), pages)
    assert list(far._of) == ["1"]


def test_what_several_share_is_no_gain() -> None:
    layout: PageLayout = layout_of([[top_k(4)] * 2] * 2, P).with_bounds(Fraction(0), spills=True)
    residency = Residency(layout, 90, 2)
    far, shared = FarRequests(residency, 100, 2), list(range(1, 30))
    residency.adopt("a", [])
    residency.extend("a", shared)
    residency.adopt("b", shared)
    residency.extend("b", list(range(40, 50)))
    pages = {"a": shared, "b": shared + list(range(40, 50))}
    for name, own in pages.items():
        far.know(Request(name, 1, 16 * len(own), pages=own), own)
    # Of b's 39 pages ten are its own, of a's none; slots take five.
    assert residency.gain("a", pages["a"], seated=False) == -5
    assert residency.gain("b", pages["b"], seated=False) == 5
    assert far.make_room(lambda: 6, pages.__getitem__, lambda page: True) == []
    assert far.away == 0


def test_a_prefix_that_nobody_holds_is_not_given_to_slots() -> None:
    """Its blocks were used least lately, and are what a request is admitted for."""
    layout: PageLayout = layout_of([[top_k(4)] * 2] * 2, P).with_bounds(Fraction(0), spills=True)
    residency = Residency(layout, 40, 2)
    total = residency.pages.stats()["total"]
    far, hit = FarRequests(residency, 100, 2), list(range(1, 11))
    residency.adopt("former", [])
    residency.extend("former", hit)
    residency.drop("former", hit, lambda page: True)
    own = list(range(11, 11 + total - 10))
    residency.adopt("a", [])
    residency.extend("a", own)
    far.know(Request("a", 1, P * len(own), pages=own), own)
    assert residency.pages.stats()["free"] == 0

    def lacking() -> int:
        return residency.lacking(4, hit)

    assert lacking() == 4
    with residency.sparing(hit):
        far.make_room(lacking, lambda name: own, lambda page: True)
    assert far.away == 1
    assert residency.longest_hit(hit) == 10
    assert lacking() == 0
    residency.adopt("b", hit)
    residency.extend("b", list(range(1 + len(own) + 10, 5 + len(own) + 10)))
    residency.pages.check()
