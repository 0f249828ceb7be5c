"""What freed blocks held is overwritten, where a runner is asked to: nowhere is it left."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from families import random_tokens, tiny
from head_maps import classes_of, head_map
from host_memory import host_runner, nothing_is_held, spills
from kvweave import (
    InvalidArgument,
    KvCache,
    KvShape,
    PoolFull,
    Runner,
    Segment,
    Tenant,
    Unsupported,
)
from kvweave.runner.tiers.zeroing import zero_pages
from ranked_pages import FULL, top_k
from tiered_runners import answer, evict, sources, tiered

SECRET = random_tokens(150, 5).tolist()
OTHER = random_tokens(90, 6).tolist()
HOW: dict[str, Any] = {"max_new_tokens": 4, "stop": ()}


def runner_of(zeroes: bool, **more: Any) -> Runner:
    options = {"max_tokens": 512, "check": False, "progress": False, **more}
    return Runner(tiny("llama"), zero_on_free=zeroes, **options)


def pages_of(runner: Runner) -> torch.Tensor:
    return torch.from_dlpack(runner.cache.arena)


def rows_of(pages: torch.Tensor) -> set[bytes]:
    """The keys and values of all slots that are not zero, as bytes."""
    slots = pages.reshape(-1, pages.shape[-1]).numpy()
    return {row.tobytes() for row in slots if row.any()}


def secret_rows(text: list[int] = OTHER) -> set[bytes]:
    """What a runner writes for the secret, and would not for another text: a token's first values
    are the same anywhere."""
    one, other = runner_of(False), runner_of(False)
    one.prefill(SECRET, "full", remember=False).release()
    other.generate(text, "full", remember=False, **HOW)
    return rows_of(pages_of(one)) - rows_of(pages_of(other))


def found(runner: Runner, text: list[int], namespace: str) -> int:
    """Tokens of a text that are cached as an exact prefix."""
    ids = np.asarray(text, np.int32)
    return runner.cache.match_prefix(ids, namespace, regime=runner.regime(len(text)))


@pytest.mark.parametrize("zeroes", [False, True])
def test_what_was_released_is_nowhere(zeroes: bool) -> None:
    runner, secret = runner_of(zeroes), secret_rows()
    made = runner.generate(SECRET, "full", remember=False, **HOW)
    assert secret
    assert bool(rows_of(pages_of(runner))) is not zeroes
    assert (rows_of(pages_of(runner)) & secret == secret) is not zeroes
    assert made.tokens == runner_of(False).generate(SECRET, "full", **HOW).tokens
    runner.cache.check()


@pytest.mark.parametrize("zeroes", [False, True])
def test_who_is_given_blocks_finds_nothing_in_them(zeroes: bool) -> None:
    runner, secret = runner_of(zeroes), secret_rows()
    runner.generate(SECRET, "full", namespace="a", **HOW)
    assert rows_of(pages_of(runner)) >= secret
    # All that is cached has to go for room that is set aside, and not written to.
    with runner.prefill(OTHER, "full", namespace="b", reserve_tokens=435):
        left = rows_of(pages_of(runner)) & secret
        assert bool(left) is not zeroes
    runner.cache.check()


@pytest.mark.parametrize("windows", [False, True])
def test_what_a_step_decodes_stays_in_the_blocks_that_it_was_given(windows: bool) -> None:
    """Blocks that a step of decoding takes from what is cached, or was freed in the same step."""
    model = tiny("llama", max_position_embeddings=1024)
    plain = Runner(model, max_tokens=64, check=False, progress=False)
    heads = head_map(plain.spec, classes_of(model)) if windows else None
    prompts = [random_tokens(60 + 7 * n, 40 + n).tolist() for n in range(8)]
    said = []
    for zeroes in (False, True):
        how: dict[str, Any] = {"max_tokens": 512, "check": False, "progress": False}
        runner = Runner(model, zero_on_free=zeroes, heads=heads, **how)
        engine = runner.engine(token_budget=160, chunk_tokens=96, max_running=8)
        asked = [engine.submit(p, "full", max_new_tokens=40, stop=()) for p in prompts]
        engine.run()
        said.append([request.result().tokens for request in asked])
        runner.cache.check()
    assert said[0] == said[1]


@pytest.mark.parametrize("zeroes", [False, True])
def test_a_namespace_that_is_forgotten_leaves_nothing(zeroes: bool) -> None:
    runner, secret = runner_of(zeroes), secret_rows()
    runner.insert(SECRET, "secret", "a")
    runner.generate(OTHER, "full", namespace="b", **HOW)
    assert runner.forget("a") == 0, "a document stays"
    assert found(runner, SECRET, "a") > 140
    runner.delete("secret", "a")
    assert runner.forget("a") == -(-len(SECRET) // 16)
    assert runner.forget("a") == runner.forget("nobody") == 0
    assert bool(rows_of(pages_of(runner)) & secret) is not zeroes
    # What is another's is found as ever.
    assert found(runner, OTHER, "b") > 80
    assert found(runner, SECRET, "a") == 0
    runner.cache.check()


def test_a_tenant_forgets_his_own_alone() -> None:
    runner, secret = runner_of(True), secret_rows()
    with runner.serve() as server:
        one, other = Tenant(runner, server, "a"), Tenant(runner, server, "b")
        for tenant, text in ((one, SECRET), (other, OTHER)):
            tenant.insert(text, "text")
            tenant.delete("text")
        other.forget()
        assert rows_of(pages_of(runner)) >= secret
        one.forget()
    assert not rows_of(pages_of(runner))


@pytest.mark.parametrize("zeroes", [False, True])
def test_copies_in_the_hosts_memory_go_too(zeroes: bool) -> None:
    runner = tiered(tiny("llama"), document_bytes=1 << 19, zero_on_free=zeroes)
    assert runner.tiers is not None
    assert runner.tiers.host is not None
    secret, memory = secret_rows(), runner.tiers.host.pages
    runner.insert(SECRET, "secret", "a")
    runner.insert(OTHER, "other", "b")
    assert rows_of(memory) >= secret
    runner.delete("secret", "a")
    runner.forget("a")
    assert bool(rows_of(memory) & secret) is not zeroes
    # The other's is read from there as ever.
    runner.cache.delete("other", "b")
    evict(runner)
    assert sources(answer(runner, OTHER, of="b")) == ["host"]
    # What has to go for others goes too, but for what is still cached.
    for number in range(6):
        runner.insert(random_tokens(150, 20 + number).tolist(), "other", "b")
    assert runner.tiers.host.stats()["evictions"] > 10
    runner.delete("other", "b")
    runner.forget("b")
    assert bool(rows_of(memory)) is not zeroes
    runner.tiers.host.cache.check()
    runner.close()


@pytest.mark.parametrize("mode", ["materialise", "share"])
@pytest.mark.parametrize("eviction", ["lru", "cost-aware"])
def test_answers_are_the_same_where_room_is_short(mode: str, eviction: str) -> None:
    runners = [runner_of(zeroes, mode=mode, eviction=eviction) for zeroes in (False, True)]
    rng = np.random.default_rng(3)
    texts = [random_tokens(int(rng.integers(20, 150)), seed).tolist() for seed in range(6)]
    for number in range(40):
        text, whose = texts[rng.integers(6)], "ab"[rng.integers(2)]
        prompt = [
            Segment(tokens=random_tokens(9, number).tolist()),
            Segment(tokens=text, namespace=whose),
            Segment(tokens=[1, 2, 3 + number]),
        ]
        said = [runner.generate(prompt, "naive", namespace=whose, **HOW) for runner in runners]
        assert said[0].tokens == said[1].tokens
        assert said[0].report.reused_segment == said[1].report.reused_segment
    for runner in runners:
        runner.cache.check()


def test_windows_and_promoted_heads_leave_nothing() -> None:
    heads = head_map(runner_of(False).spec, classes_of(tiny("llama")))
    runners = [runner_of(zeroes, heads=heads, chunk_tokens=32) for zeroes in (False, True)]
    said = [runner.generate(SECRET, "full", remember=False, **HOW).tokens for runner in runners]
    assert said[0] == said[1]
    assert rows_of(pages_of(runners[0]))
    assert not rows_of(pages_of(runners[1]))


@pytest.mark.parametrize(
    "how",
    [{}, {"host_copies": "mirror"}, {"host_dtype": "fp8"}, {"host_arrivals": "late"}],
)
def test_pages_that_were_spilled_leave_nothing(how: dict[str, str]) -> None:
    said = []
    for zeroes in (False, True):
        kinds = [top_k(4, 5), FULL]
        over: dict[str, Any] = {**how, "zero_on_free": zeroes}
        runner = host_runner(tiny("llama"), kinds, **over)
        options: dict[str, Any] = {"max_new_tokens": 40, "stop": (), "remember": False}
        said.append(runner.generate(SECRET, "full", **options).tokens)
        assert spills(runner) > 0
        assert nothing_is_held(runner)
        home = [pool.pages.view(torch.uint8) for pool in runner.host.values()]
        home += [pool.scales for pool in runner.host.values() if pool.scales is not None]
        for pages in (pages_of(runner), *home):
            assert bool(pages.any()) is not zeroes
    assert said[0] == said[1]


def test_an_engine_that_is_full_answers_the_same() -> None:
    said = []
    for zeroes in (False, True):
        runner = runner_of(zeroes)
        with runner.serve(chunk_tokens=32) as server:
            texts = [random_tokens(60 + 7 * i, i).tolist() for i in range(12)]
            asked = [server.submit(texts[i], "full", namespace=f"{i}", **HOW) for i in range(12)]
            said.append([request.result().tokens for request in asked])
        runner.cache.check()
        assert all(runner.forget(f"{i}") >= 0 for i in range(12))
        assert bool(rows_of(pages_of(runner))) is not zeroes
    assert said[0] == said[1]


def test_a_pin_of_another_thread_takes_nothing_that_is_being_written() -> None:
    runner = runner_of(True)
    expected = runner_of(False).generate(SECRET, "full", **HOW).tokens
    runner.generate(OTHER, "full", namespace="b", **HOW)
    ended = threading.Event()

    def pins() -> None:
        while not ended.is_set():
            try:
                runner.pin(OTHER, namespace="b").release()
            except PoolFull:
                continue

    thread = threading.Thread(target=pins)
    thread.start()
    try:
        for _ in range(20):
            assert runner.generate(SECRET, "full", remember=False, **HOW).tokens == expected
    finally:
        ended.set()
        thread.join()
    runner.cache.check()


def test_runs_of_pages_are_zeroed_and_no_others() -> None:
    pages = torch.ones(40, 2, 4, 8, dtype=torch.bfloat16)
    runs = np.asarray([[3, 1], [7, 12], [39, 1]], np.int32)
    zero_pages(pages, runs)
    zeroed = (pages == 0).flatten(1).all(1).nonzero().flatten().tolist()
    assert zeroed == [3, *range(7, 19), 39]
    assert (pages != 0).flatten(1).all(1).sum() == 40 - len(zeroed)


def test_a_cache_says_which_pages_were_freed() -> None:
    cache, heard = KvCache(KvShape(2, 3, 8, 16), blocks=4), []
    cache.zero_freed()
    request = cache.admit(np.arange(40, dtype=np.int32), reuse="none")
    blocks = sorted(request.entries()[:, 0].tolist())
    cache.zero_freed_by(lambda pages: heard.append(pages.tolist()))
    request.release()
    assert heard == []
    cache.zero_freed()
    cache.zero_freed()
    assert heard == [[[blocks[0], 18]]], "three blocks of six pages lie one behind the other"
    with pytest.raises(InvalidArgument, match="zero_freed_by"):
        cache.zero_freed_by(print)

    def fails(pages: Any) -> None:
        raise ValueError("no")

    other = KvCache(KvShape(2, 3, 8, 16), blocks=4)
    other.zero_freed_by(fails)
    other.admit(np.arange(40, dtype=np.int32), reuse="none").release()
    # Whoever would be given what could not be overwritten is not, and holds nothing.
    with pytest.raises(ValueError, match="no"):
        other.admit(np.arange(40, dtype=np.int32), reuse="none")
    assert other.stats()["held"] == 0


def test_what_is_packed_is_not_zeroed_yet() -> None:
    with pytest.raises(Unsupported, match="zero_on_free"):
        runner_of(True, kv_dtype="int4")
    with pytest.raises(InvalidArgument, match="zero_on_free"):
        runner_of(1)  # type: ignore[arg-type]
