"""What goes first where a store is full: by use alone, or by what it costs as well."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvweave import InvalidArgument, Provenance, Store

OF = Provenance("m", dtype="f32", layout="bytes", layers=1, kv_heads=1, head_dim=1)
FILE = 3 * 4096


def put(store: Store, text: int, now: int, cost: int | None = None, size: int = 1) -> bool:
    parts = {"kv": bytes(4096 * size)}
    return store.put(OF, np.asarray([text, 1], np.uint32), parts, cost=cost, now=now)[1]


def read(store: Store, text: int, now: int) -> None:
    assert store.get(OF, np.asarray([text, 1], np.uint32), now=now) is not None


def texts(store: Store) -> list[int]:
    return sorted(int(store.shard(one.name).tokens()[0]) for one in store.list())


def filled(folder: Path, eviction: str, costs: list[int | None]) -> Store:
    """A store that is full of texts 0, 1, …, written in this order."""
    size = max(1, len(costs)) * FILE
    store = Store(folder, capacity_bytes=size, eviction=eviction)
    for text, cost in enumerate(costs):
        put(store, text, now=1000 + text, cost=cost)
    assert store.held()[0] == size
    return store


def test_what_is_cheap_goes_before_what_is_dear(tmp_path: Path) -> None:
    costs: list[int | None] = [90 * FILE, 10 * FILE, 50 * FILE, None]
    for eviction, left in (("lru", [2, 3, 10, 11]), ("cost-aware", [0, 2, 10, 11])):
        store = filled(tmp_path / eviction, eviction, costs)
        assert [one.cost for one in store.list()].count(None) == 1
        assert sorted(one.cost or 0 for one in store.list()) == sorted(c or 0 for c in costs)
        for text in (10, 11):
            put(store, text, now=2000 + text, cost=60 * FILE)
        assert texts(store) == left


def test_what_was_read_again_outlives_what_comes_once(tmp_path: Path) -> None:
    """As a flood of new texts does with LRU, and with what nobody has read."""
    for eviction, stay in (("lru", False), ("cost-aware", True)):
        store = filled(tmp_path / eviction, eviction, [100 * FILE] * 6)
        put(store, 6, now=1999, cost=100 * FILE)  # The order has seen the others.
        for text in (1, 2):
            read(store, text, now=2000 + text)
        for flood in range(5):
            put(store, 10 + flood, now=3000 + flood, cost=100 * FILE)
        assert ({1, 2} <= set(texts(store))) is stay


def test_bytes_count_against_cost(tmp_path: Path) -> None:
    store = Store(tmp_path, capacity_bytes=9 * FILE, eviction="cost-aware")
    put(store, 0, now=1000, cost=100 * FILE, size=9)
    put(store, 1, now=1001, cost=40 * FILE)
    assert texts(store) == [0, 1]
    for text in range(10, 15):
        put(store, text, now=1010 + text, cost=40 * FILE)
    # It costs more than any other, and less for each of its bytes.
    assert texts(store) == [1, *range(10, 15)]


def test_nothing_is_worth_so_much_that_it_stays_for_ever(tmp_path: Path) -> None:
    store = filled(tmp_path, "cost-aware", [5 * FILE, FILE, FILE])
    for flood in range(40):
        put(store, 10 + flood, now=2000 + flood, cost=FILE)
    assert 0 not in texts(store)


def test_costs_survive_and_other_orders_do_not_mind_them(tmp_path: Path) -> None:
    filled(tmp_path, "cost-aware", [90 * FILE, 10 * FILE, 50 * FILE])
    again = Store(tmp_path, capacity_bytes=3 * FILE, eviction="cost-aware")
    put(again, 7, now=3000, cost=60 * FILE)
    assert texts(again) == [0, 2, 7]
    for one in again.list():
        again.verify(one.name)
    # A cost is no part of what a shard is of: the same text is there.
    assert not put(again, 7, now=3001, cost=1)
    last = Store(tmp_path, capacity_bytes=3 * FILE)
    put(last, 8, now=4000)
    assert texts(last) == [2, 7, 8]


def test_two_processes_see_each_others_reads(tmp_path: Path) -> None:
    one = filled(tmp_path, "cost-aware", [100 * FILE] * 4)
    put(one, 4, now=1500, cost=100 * FILE)
    other = Store(tmp_path)
    read(other, 1, now=2000)
    for flood in range(3):
        put(one, 10 + flood, now=3000 + flood, cost=100 * FILE)
    assert 1 in texts(one)


@pytest.mark.parametrize("eviction", ["", "LRU", "s3-fifo", "cost_aware"])
def test_orders_that_are_not_known_are_refused(tmp_path: Path, eviction: str) -> None:
    with pytest.raises(InvalidArgument, match=r"eviction: expected lru or cost-aware"):
        Store(tmp_path / "store", eviction=eviction)
    assert not (tmp_path / "store").exists()


def test_costs_that_cannot_be_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(InvalidArgument, match="cost"):
        put(store, 1, now=1, cost=-1)
    assert store.list() == []


def test_room_is_told_of_before_anything_is_written(tmp_path: Path) -> None:
    """It is there just where `put` evicts nothing, whatever is full: the store or the quota."""
    tokens = np.asarray([7, 1], np.uint32)
    for size in (3, 4):
        wide = {"kv": 4096 * size}
        whole, quota = (
            Store(tmp_path / f"{size}", capacity_bytes=2 * FILE + 4096 * 2),
            Store(tmp_path / f"{size} q", quota_bytes=2 * FILE + 4096 * 2),
        )
        for store in (whole, quota):
            put(store, 0, now=1000)
            put(store, 1, now=1001) if size == 4 else None
            there = store.has_room(OF, 2, wide, cost=5)
            before = len(store.list())
            assert there is (size == 3)
            store.put(OF, tokens, {"kv": bytes(wide["kv"])}, cost=5, now=1002)
            assert (len(store.list()) == before + 1) is there
    assert Store(tmp_path / "4", capacity_bytes=1).has_room(OF, 2, {"kv": 2**62}) is False
    assert Store(tmp_path / "4").has_room(OF, 2, {"kv": 2**62})
    with pytest.raises(InvalidArgument, match="part"):
        whole.has_room(OF, 2, {"kv": -1})
