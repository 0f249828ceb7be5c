"""What our store keeps behind vLLM's own manager where it is full: by cost, and on second sight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvweave.adapters.vllm.serving import offloading_options
from kvweave.adapters.vllm.store_tier.sights import Sights
from kvweave.errors import InvalidArgument
from kvweave.store import Store
from vllm_tiers import ORIGIN, keys, tiers

FILE = 4096 * 5
COSTED = replace(ORIGIN, chunk_tokens=16, weights=500, width=3)
CHAT, FLOOD = keys(6), keys(24, seed=1)


def waiting(told: dict[str, float]) -> float:
    return sum(value for name, value in told.items() if "kvweave_first_sights" in name)


def test_a_chunk_costs_more_the_more_stands_before_it(tmp_path: Path) -> None:
    with tiers(tmp_path, origin=COSTED) as made:
        made.store(CHAT)
    costs = sorted(one.cost or 0 for one in Store(tmp_path).list())
    pairs = [sum(range(16 * i + 1, 16 * i + 17)) for i in range(6)]
    assert costs == [16 * 1000 + 12 * seen for seen in pairs]
    assert COSTED.cost(None) == costs[0]
    assert ORIGIN.cost(4096) == 0


@pytest.mark.parametrize(
    ("eviction", "wanted"), [("lru", [False] * 2 + [True] * 3), ("cost-aware", [True] * 5)]
)
def test_what_was_asked_for_again_outlives_what_comes_once(
    tmp_path: Path, eviction: str, wanted: list[bool]
) -> None:
    """The host's memory has room for two chunks, so what comes again comes from the store."""
    settings = {"capacity_bytes": 8 * FILE, "eviction": eviction}
    with tiers(tmp_path, chunks=2, origin=COSTED, **settings) as made:
        for name in [*CHAT, *FLOOD[:3]]:
            made.store([name])
        # One of the chat's had to go, and the others come.
        assert made.found(CHAT[1:]) == [True] * 5
        for name in FLOOD[3:8]:
            made.store([name])
        assert made.found(CHAT[1:]) == wanted


def test_what_comes_once_drives_out_nothing(tmp_path: Path) -> None:
    settings = {"capacity_bytes": 6 * FILE, "admission": "second-sight"}
    with tiers(tmp_path, chunks=2, **settings) as made:
        for name in CHAT:
            made.store([name])  # There is room: what comes once is written too.
        for name in FLOOD:
            made.store([name])
        assert waiting(made.manager.get_stats().reduce()) == len(FLOOD)
        assert made.found(CHAT) == [True] * 6
        # It comes again, as it was not kept: now it is.
        made.store([FLOOD[0]])
        made.store([FLOOD[5]])
        told = made.manager.get_stats()
        assert waiting(told.reduce() if told else {}) == 0
    with tiers(tmp_path) as made:
        assert made.found([FLOOD[0], FLOOD[5]]) == [True] * 2
        assert sum(made.found(CHAT)) == 4


def test_second_sight_is_of_one_tenant(tmp_path: Path) -> None:
    """What another has offered before, and his quota, say nothing of mine."""
    settings = {"quota_bytes": 2 * FILE, "admission": "second-sight"}
    with tiers(tmp_path, chunks=2, **settings) as made:
        for name in CHAT[:4]:
            made.store([name], "salt-a")
        for name in CHAT[:4]:
            made.store([name], "salt-b")
    with tiers(tmp_path) as made:
        for salt in ("salt-a", "salt-b"):
            assert made.found(CHAT[:4], salt) == [True, True, False, False]


def test_sights_are_forgotten_in_the_order_of_their_use() -> None:
    sights = Sights(most=3)
    assert [sights.again(name) for name in "aabbcad"] == [0, 1, 0, 1, 0, 1, 0]
    assert [sights.again(name) for name in "adcb"] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("eviction", "s3-fifo"), ("eviction", None), ("admission", "never"), ("admission", True)],
)
def test_words_that_are_not_known_are_refused(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=rf"secondary_tiers\.{name}: expected"):
        offloading_options(str(tmp_path), 1 << 20, **{name: value})
