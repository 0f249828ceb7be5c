"""Memory of decoding over the host: what it takes, what is short, what fails, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_batches import decoding
from families import random_tokens, tiny
from host_memory import AMPLE, PAGE, both, host_runner, nothing_is_held, spills
from kvweave import InvalidArgument, PoolFull, Unsupported, ops
from kvweave.ops import RowPages
from kvweave.runner import Runner, Sampling
from kvweave.runner.kv.beside_host import NOT_BESIDE_HOST
from kvweave.runner.kv.carry_pages import carry_by_host
from kvweave.runner.kv.host_pages import HostPages
from ranked_pages import FULL, WINDOW, logits_of_steps, top_k


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


# ---- memory ---------------------------------------------------------------------------------


def test_the_device_holds_slots_and_the_newest_pages(llama: Any) -> None:
    """By the allocators: K + K/8 slots a head, its newest pages, and all the rest at home."""
    runner = host_runner(llama, [top_k(8, 4), FULL])
    (pool,), (chosen, full) = runner.host.values(), (runner.cache.groups[1], runner.cache.groups[0])
    assert (chosen.kind, full.kind, pool.slots) == ("top_k", "full", 9)
    page = runner.cache.shape.page_bytes
    with runner.prefill(random_tokens(400, 1), "full", remember=False) as done:
        sequence = decoding(runner, done, 60)
        assert done.request.kv_bytes() == (100 * (chosen.pages + full.pages) * page, 0)
        with torch.inference_mode():
            for step in range(1, 41):
                runner._decoder.step([sequence])
                pages = -(-(400 + step) // PAGE)
                # Copied behind the first ranking; behind the step before each other one all pages
                # but the newest go.
                copied = (400 + step // 4 * 4 - (step >= 4)) // PAGE
                held = pages if step < 4 else 9 + pages - copied
                own = held * chosen.pages + pages * full.pages
                assert done.request.kv_bytes() == (own * page, 0)
                assert pool.stats()["held"] == copied
                assert pool.stats()["held_bytes"] == copied * chosen.pages * page
                groups = runner.cache.stats()["groups"]
                assert [g["held"] for g in groups] == [pages, held]
        runner._decoder.forget()
    assert nothing_is_held(runner)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_more_requests_decode_at_once_than_the_device_could_hold(llama: Any, share: float) -> None:
    """What spilled requests gave back others are prefilled into; nobody gives way."""
    prompts = [random_tokens(200, seed) for seed in range(6)]
    ask = {"max_new_tokens": 40, "stop": (), "remember": False}
    resident = host_runner(llama, [top_k(4, 4)], None)
    wanted = [resident.generate(p, "full", **ask).tokens for p in prompts]
    runner = host_runner(llama, [top_k(4, 4)], max_tokens=440, host_free_share=share)
    engine = runner.engine()
    asked = [engine.submit(p, "full", **ask) for p in prompts]
    most = 0
    while engine.live:
        engine.must_step()
        most = max(most, engine.metrics()["decoding"])
    assert most == 6
    assert engine.metrics()["preempted"] == 0
    assert [request.result().tokens for request in asked] == wanted
    assert nothing_is_held(runner)


def block_bytes(runner: Runner) -> int:
    (pool,) = runner.host.values()
    return pool.block_bytes


@pytest.mark.parametrize("blocks", [2, 10, 40, 60])
def test_host_memory_that_is_full_stops_nobody(llama: Any, blocks: int) -> None:
    """Whose pages find no room keeps them on the device, where admission waits for room then."""
    size = block_bytes(host_runner(llama, [top_k(4, 4)]))
    prompts = [random_tokens(60 + 30 * seed, seed) for seed in range(5)]
    ask = {"max_new_tokens": 40, "stop": (), "remember": False}
    resident = host_runner(llama, [top_k(4, 4)], None)
    runner = host_runner(llama, [top_k(4, 4)], size * blocks, max_tokens=1024)
    wanted = [resident.generate(p, "full", **ask).tokens for p in prompts]
    engine = runner.engine()
    asked = [engine.submit(p, "full", **ask) for p in prompts]
    engine.run()
    assert [request.result().tokens for request in asked] == wanted
    assert (spills(runner) > 0) == (blocks >= 40)
    assert nothing_is_held(runner)


@pytest.mark.parametrize("more", [-1, 0, 1, 3])
def test_what_finds_no_room_stays_and_the_rest_goes(llama: Any, more: int) -> None:
    """Host memory for the pages of a prompt, and a few more or less."""
    tokens, first = random_tokens(90, 3), 90 // PAGE
    size = block_bytes(host_runner(llama, [top_k(4, 4)]))
    wanted = logits_of_steps(host_runner(llama, [top_k(4, 4)], None), tokens, 40)
    # One block of host memory is nobody's.
    runner = host_runner(llama, [top_k(4, 4)], size * (1 + first + more))
    (pool,), homes = runner.host.values(), set[int]()
    with pytest.MonkeyPatch.context() as patch:
        spill = HostPages.spill

        def seen(pages: HostPages, count: int) -> None:
            spill(pages, count)
            homes.add(pages.count)

        patch.setattr(HostPages, "spill", seen)
        got = logits_of_steps(runner, tokens, 40)
    assert got[0] == wanted[0]
    assert all(torch.equal(a, b) for a, b in zip(got[1], wanted[1], strict=True))
    assert max(homes) == (0 if more < 0 else first + more)
    assert pool.stats()["failed"] == 0
    assert nothing_is_held(runner)


def test_a_prompt_that_no_room_suffices_for_is_refused_while_others_decode(llama: Any) -> None:
    size = block_bytes(host_runner(llama, [top_k(4, 4)]))
    runner = host_runner(llama, [top_k(4, 4)], 2 * size, max_tokens=200)
    engine = runner.engine()
    first = engine.submit(random_tokens(120, 1), "full", max_new_tokens=30, stop=())
    for _ in range(4):
        engine.must_step()
    with pytest.raises(PoolFull):
        engine.submit(random_tokens(500, 2), "full", max_new_tokens=4)
    waits = engine.submit(random_tokens(150, 3), "full", max_new_tokens=4, stop=())
    engine.must_step()
    assert engine.state(waits) == "waiting"
    engine.run()
    assert len(first.result().tokens) == 30
    assert len(waits.result().tokens) == 4
    assert nothing_is_held(runner)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**20),
    max_tokens=st.sampled_from([180, 300, 800]),
    blocks=st.sampled_from([2, 30, 90, 1000]),
    copies=st.sampled_from(["spill", "mirror"]),
)
def test_whatever_happens_nothing_is_lost(
    seed: int, max_tokens: int, blocks: int, copies: str
) -> None:
    """Requests come, share prefixes, give way, are cancelled and fail, in little room."""
    model, draws = tiny("llama", num_hidden_layers=2), np.random.default_rng(seed)
    kinds = [top_k(4, int(draws.integers(2, 9))), FULL]
    resident = host_runner(model, kinds, None)
    size = block_bytes(host_runner(model, kinds))
    sizes = {"max_tokens": max_tokens, "host_copies": copies}
    runner = host_runner(model, kinds, size * blocks, **sizes)
    engine = runner.engine(token_budget=80, chunk_tokens=48, max_running=5)
    asked = []
    for _ in range(400):
        if len(asked) < 8 and draws.random() < 0.3:
            prompt = random_tokens(int(draws.integers(1, 160)), int(draws.integers(0, 3)))
            most = int(draws.integers(1, 60))
            sampling = Fragile() if draws.random() < 0.3 else None
            with suppress(PoolFull):
                ask = {"max_new_tokens": most, "stop": (), "sampling": sampling}
                asked.append((engine.submit(prompt, "prefix", **ask), prompt, most))
        if asked and draws.random() < 0.02:
            engine.cancel(asked[int(draws.integers(len(asked)))][0])
        engine.step()
        runner.cache.check()
    engine.run()
    outcomes = {request.outcome for request, *_ in asked}
    assert outcomes <= {"finished", "failed", "cancelled"}
    for request, prompt, most in asked:
        if request.outcome == "finished" and engine.metrics()["preempted"] == 0:
            wanted = resident.generate(prompt, "full", max_new_tokens=most, stop=())
            assert request.result().tokens == wanted.tokens
    assert nothing_is_held(runner)


class Fragile(Sampling):
    """The likeliest token; some of them fail the request."""

    def pick(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        token = logits.argmax()
        if int(token) % 9 == 0:
            raise ValueError("spoiled")
        return token


# ---- faults ---------------------------------------------------------------------------------


def test_keys_that_are_nan_and_scores_that_are_equal(llama: Any) -> None:
    broken = tiny("llama")
    broken.get_input_embeddings().weight.data[7] = torch.nan
    constant = np.full(120, 5, np.int32)
    spoiled = random_tokens(120, 4)
    spoiled[spoiled == 7] = 8
    spoiled[33] = 7
    for model, tokens in ((broken, spoiled), (llama, constant)):
        resident, host = both(model, [top_k(4, 5), FULL])
        wanted = logits_of_steps(resident, tokens, 20)
        got = logits_of_steps(host, tokens, 20)
        assert wanted[0] == got[0]
        for one, other in zip(wanted[1], got[1], strict=True):
            torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)
        assert nothing_is_held(host)


@pytest.mark.parametrize("way", ["spill", "fetch"])
def test_memory_that_is_not_pinned_is_carried_by_the_host(way: Any) -> None:
    draws = np.random.default_rng(0)
    blocks = draws.permutation(40)[:24].reshape(2, 12).astype(np.int32) * 2
    there = draws.permutation(60)[:36].reshape(2, 18).astype(np.int32) * 2
    moves = np.full((20, 3), -1, np.int32)
    for row in range(4):
        some = slice(4 * row, 4 * row + 4)
        moves[some, 0] = row
        moves[some, 1], moves[some, 2] = draws.permutation(18)[:4], draws.permutation(12)[:4]
    count, found = np.asarray([16], np.int32), []
    for carry in (ops.move_pages, carry_by_host):
        torch.manual_seed(1)
        device, home = torch.randn(90, 2, 4, 8), torch.randn(130, 2, 4, 8)
        carry(moves, count, RowPages(device, blocks, 2), RowPages(home, there, 2), way=way)
        found.append((device, home))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


# ---- what is refused ------------------------------------------------------------------------


def refusals(runner: Runner, model: Any) -> dict[str, Callable[[], Any]]:
    """A call for each thing that does not go together."""
    given_ = {"host_bytes": AMPLE, "heads": runner.heads, "max_tokens": 64, "check": False}
    return {
        "kv_dtype": lambda: Runner(model, kv_dtype="int4", **given_),
    }


def test_what_does_not_go_with_it_is_refused_by_name(llama: Any) -> None:
    runner = host_runner(llama, [top_k(4, 4)])
    asked = refusals(runner, llama)
    assert asked.keys() == NOT_BESIDE_HOST.keys()
    for what, call in asked.items():
        with pytest.raises(Unsupported, match=f"^{what}: .*host_bytes"):
            call()
        assert nothing_is_held(runner)


@pytest.mark.parametrize("kinds", [[FULL], [top_k(4, 1)], [WINDOW, FULL]])
def test_a_map_without_heads_that_are_seldom_ranked_is_refused(llama: Any, kinds: Any) -> None:
    """Pages of heads that are ranked at every step would travel in every step."""
    with pytest.raises(InvalidArgument, match="host_bytes: expected a head map with top_k heads"):
        host_runner(llama, kinds)
    with pytest.raises(InvalidArgument, match="host_bytes: expected a head map"):
        Runner(llama, host_bytes=AMPLE, check=False, progress=False)


@pytest.mark.parametrize("copies", ["all", "", None, 3])
def test_copies_of_no_kind_are_refused(llama: Any, copies: Any) -> None:
    with pytest.raises(InvalidArgument, match="host_copies: expected spill or mirror, got"):
        host_runner(llama, [top_k(4, 4)], host_copies=copies)
    with pytest.raises(InvalidArgument, match="host_copies: expected host_bytes beside mirror"):
        host_runner(llama, [top_k(4, 4)], None, host_copies="mirror")


@pytest.mark.parametrize("dtype", ["fp16", "", 8, "exact"])
def test_copies_in_no_format_are_refused(llama: Any, dtype: Any) -> None:
    with pytest.raises(InvalidArgument, match="host_dtype: expected fp8 or None, got"):
        host_runner(llama, [top_k(4, 4)], host_dtype=dtype)
    with pytest.raises(InvalidArgument, match="host_dtype: expected host_bytes beside fp8, got"):
        host_runner(llama, [top_k(4, 4)], None, host_dtype="fp8")


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "8 GB", 100])
def test_bytes_that_are_none_or_too_few_are_refused(llama: Any, size: Any) -> None:
    with pytest.raises(InvalidArgument, match="host_bytes: expected"):
        host_runner(llama, [top_k(4, 4)], size)
