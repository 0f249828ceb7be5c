"""What leaves vLLM's host memory first by our order: its definition, vLLM's manager, an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.base import make_offload_key as key_of
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

import vllm_cpu_offload
from kvweave.adapters.vllm.serving import offloading_options
from kvweave.adapters.vllm.store_tier.cost_policy import CostAware
from kvweave.adapters.vllm.store_tier.settings import HOST_EVICTIONS, ChunkCost
from kvweave.errors import InvalidArgument
from test_store_tier_order import COSTED
from vllm_engines import STOCK, answers, engine, prompt, same
from vllm_tiers import CHUNK, ORIGIN, keys, tiers

POLICY = dict(HOST_EVICTIONS["cost-aware"])
TOKENS = 16
ROOM = 6
# Of four texts, of which the second and the third go on with the first chunks of the first one.
TEXTS = [[0, 1, 2, 3, 4], [0, 1, 5, 6], [0, 7], [8, 9, 10]]
COSTS = {1: 5, 2: 3, 3: 4, 4: 9, 5: 2}
"""FLOPs for each byte of a text's first chunk, its second, …"""


def named(number: int) -> OffloadKey:
    return key_of(hashlib.sha256(bytes([number])).digest(), 0)


class Costs(ChunkCost):
    """Costs of these tests, by where a chunk ends."""

    def density(self, end: int | None) -> int:
        return COSTS[(end or 0) // TOKENS]


def request(number: int, text: Sequence[int]) -> ReqContext:
    context = ReqContext(f"request {number}")
    # The state goes by its type's name.
    context._state[ChunkCost] = Costs(ORIGIN, 1)
    for place, chunk in enumerate(text):
        context.set_offload_key_position(named(chunk), TOKENS * (place + 1))
    return context


# ---- against a definition ------------------------------------------------------------------------


@dataclass
class Line:
    """What is known of a chunk that is there."""

    cost: int
    uses: int
    worth: int
    turn: int
    held: bool = True
    before: int | None = None

    @property
    def rank(self) -> tuple[int, int]:
        return (self.worth, self.turn)


@dataclass
class Definition:
    """The order, of all chunks anew each time. A second use doubles what a chunk is worth.

    That is so while little was seen: at most twenty chunks of these tests.
    """

    lines: dict[int, Line] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)
    sunk: int = 0
    turns: int = 0

    def place(self, line: Line) -> None:
        self.turns += 1
        line.worth = self.sunk + line.cost * (2 if line.uses > 1 else 1)
        line.turn = self.turns

    def insert(self, chunk: int, place: int, before: int | None) -> None:
        uses = 2 if chunk in self.gone else 1
        self.gone = [other for other in self.gone if other != chunk]
        self.lines[chunk] = Line(COSTS[place], uses, 0, 0, before=before)
        self.place(self.lines[chunk])

    def use(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            self.lines[chunk].uses += 1
            self.place(self.lines[chunk])

    def evict(self, n: int, protected: set[int]) -> list[int] | None:
        left = {c for c, line in self.lines.items() if not line.held and c not in protected}
        if len(left) < n:
            return None
        chosen: list[int] = []
        while len(chosen) < n:
            stay = [line.before for c, line in self.lines.items() if c not in chosen]
            ends = [c for c in left if c not in stay]
            if not ends:
                chosen += sorted(left, key=lambda c: self.lines[c].rank)[: n - len(chosen)]
                break
            chosen.append(min(ends, key=lambda c: self.lines[c].rank))
            left.remove(chosen[-1])
        for chunk in chosen:
            self.sunk = max(self.sunk, self.lines.pop(chunk).worth)
        self.gone = [*self.gone, *chosen][-ROOM:]
        return chosen


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["store", "use", "hold", "evict", "fail"]),
        st.integers(0, len(TEXTS) - 1),
        st.integers(1, 5),
        st.integers(0, 3),
    ),
    max_size=30,
)


@given(OPERATIONS)
@settings(max_examples=300, deadline=None)
def test_the_policy_is_its_definition(operations: list[tuple[str, int, int, int]]) -> None:
    policy, wanted, counted = CostAware(ROOM), Definition(), 0
    for number, (what, which, length, evicted) in enumerate(operations):
        text = TEXTS[which][:length]
        context = request(number, text)
        there = [chunk for chunk in text if chunk in wanted.lines]
        if what == "store":
            policy.on_request_access([named(chunk) for chunk in text], context)
            for place, chunk in enumerate(text):
                if chunk not in wanted.lines:
                    policy.insert(named(chunk), ChunkStatus(chunk), context)
                    wanted.insert(chunk, place + 1, text[place - 1] if place else None)
        elif what == "use" and counted + len(there) <= 20:
            ready = [chunk for chunk in there if not wanted.lines[chunk].held]
            reused = {named(chunk) for chunk in ready}
            policy.on_request_finished([[named(c) for c in text]], set(), reused, context)
            wanted.use(reversed(ready))
            counted += len(ready)
        elif what == "hold":
            for chunk in there:
                line, status = wanted.lines[chunk], policy.get(named(chunk))
                assert status is not None
                line.held = not line.held
                status.ref_cnt = 1 if line.held else 0
                turn = policy.mark_non_evictable if line.held else policy.mark_evictable
                turn(named(chunk))
        elif what == "evict" and counted + evicted <= 20:
            found = policy.evict(evicted, {named(chunk) for chunk in text})
            expected = wanted.evict(evicted, set(text))
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert [key for key, _ in found] == [named(chunk) for chunk in expected]
                counted += len(expected)
        elif what == "fail" and there and wanted.lines[there[-1]].held:
            policy.remove(named(there[-1]))
            del wanted.lines[there[-1]]
    for chunk in range(11):
        assert (policy.get(named(chunk)) is not None) == (chunk in wanted.lines)


def test_nothing_is_left_of_what_was_cleared() -> None:
    policy, context = CostAware(ROOM), request(0, TEXTS[0])
    for chunk in TEXTS[0]:
        policy.insert(named(chunk), ChunkStatus(chunk), context)
        policy.mark_evictable(named(chunk))
    assert policy.evict(2, set()) is not None
    policy.clear()
    assert [policy.get(named(chunk)) for chunk in TEXTS[0]] == [None] * 5
    assert policy.evict(1, set()) is None
    assert policy.evict(0, set()) == []
    policy.insert(named(4), ChunkStatus(4), context)


# ---- in vLLM's manager ---------------------------------------------------------------------------


def stored(manager: CPUOffloadingManager, number: int, text: Sequence[int]) -> list[bool]:
    """Which chunks of a text are there when a request asks; after it all of them are."""
    context = request(number, text)
    manager.on_new_request(context)
    wanted = [named(chunk) for chunk in text]
    found = [manager.lookup(key, context) is LookupResult.HIT for key in wanted]
    hits = found.index(False) if False in found else len(found)
    if hits:
        manager.prepare_load(wanted[:hits], context)
        manager.complete_load(wanted[:hits], context)
    given = manager.prepare_store(wanted, context)
    if given is not None and given.keys_to_store:
        manager.complete_store(given.keys_to_store, context)
    manager.on_request_finished(context)
    return found


def manager_of(name: str, room: int) -> CPUOffloadingManager:
    told = HOST_EVICTIONS[name]
    module = told.get("cache_policy_module_path")
    return CPUOffloadingManager(room, told["eviction_policy"], module)


def test_of_one_text_the_tail_goes_first() -> None:
    manager = manager_of("cost-aware", room=6)
    stored(manager, 0, TEXTS[0])
    # Two are wanted; the end of the text costs most of all, and is of no use without the rest.
    stored(manager, 1, TEXTS[3])
    assert stored(manager, 2, TEXTS[0])[:3] == [True] * 3
    assert manager.on_request_finished(ReqContext("nobody's")) is None


@pytest.mark.parametrize(
    ("name", "wanted"), [("lru", [False] * 3), ("arc", [True] * 3), ("cost-aware", [True] * 3)]
)
def test_what_was_used_again_outlives_a_flood(name: str, wanted: list[bool]) -> None:
    manager = manager_of(name, room=6)
    stored(manager, 0, TEXTS[3])
    assert stored(manager, 1, TEXTS[3]) == [True] * 3
    for number in range(6):
        stored(manager, 2 + number, [20 + number])
    assert stored(manager, 9, TEXTS[3]) == wanted


def test_the_tier_says_what_chunks_cost(tmp_path: Path) -> None:
    """By the model's sizes, and for each byte of a chunk."""
    origin = replace(COSTED, weights=10**6)
    with tiers(tmp_path, origin=origin, policy=POLICY) as made:
        policy: Any = made.manager.primary_tier._policy
        assert type(policy) is CostAware
        text = keys(4)
        made.store(text)
        worth = [policy._rank(key)[0] for key in text]
        assert worth == [origin.cost(16 * place) // CHUNK for place in range(1, 5)]
        assert worth[0] >= 16 * 2 * 10**6 // CHUNK
        assert made.found(text) == [True] * 4


def test_without_a_tier_that_says_so_all_cost_the_same() -> None:
    policy, context = CostAware(4), ReqContext("request")
    for number, end in enumerate((16, 32, None)):
        if end is not None:
            context.set_offload_key_position(named(number), end)
        policy.insert(named(number), ChunkStatus(number), context)
    assert [policy._rank(named(number))[0] for number in range(3)] == [1, 1, 1]


# ---- in an engine --------------------------------------------------------------------------------


def test_an_engine_whose_host_memory_is_full_answers_the_same(checkpoint, tmp_path: Path) -> None:
    """There is room for few chunks, so most had to go, and come from the store on disk."""
    model = checkpoint("llama")
    prompts = [prompt(90 + 16 * seed, seed) for seed in range(6)]
    with engine(model, STOCK) as llm:
        wanted = answers(llm, prompts, 4)
    options = offloading_options(str(tmp_path), 1 << 18, host_eviction="cost-aware")
    extra = options["kv_transfer_config"]["kv_connector_extra_config"]
    extra |= {"spec_name": "CpuTieringSpec", "spec_module_path": vllm_cpu_offload.__name__}
    with engine(model, {**options, "enable_prefix_caching": True}) as llm:
        core = llm.llm_engine.engine_core.engine_core
        policy = core.scheduler.connector.scheduler.manager.primary_tier._policy
        assert type(policy) is CostAware
        for given, answer in zip(prompts, wanted, strict=True):
            same(answers(llm, [given], 4), [answer])
            for _ in range(20_000):
                if not core.scheduler.connector.has_pending_push_work():
                    break
                core.step()
        assert policy._gone
        assert 0 < len(policy._chunks) <= policy.cache_capacity
        for given, answer in zip(prompts, wanted, strict=True):
            same(answers(llm, [given], 4), [answer])


@pytest.mark.parametrize("word", ["fifo", "LRU", None, 3, ["lru"]])
def test_words_that_are_no_order_are_refused(word: Any) -> None:
    with pytest.raises(InvalidArgument, match="host_eviction: expected one of lru, arc"):
        offloading_options("/nowhere", 1 << 20, host_eviction=word)
