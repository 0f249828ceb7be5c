"""Decoding over pinned host memory on a GPU, in captured steps, and over memory that is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode_batches import said_in_turns
from families import random_tokens, tiny
from host_faults import ALWAYS, Faults, answered
from host_memory import AMPLE, both, host_runner, nothing_is_held, spills
from kvweave import TransferFailed
from kvweave.runner.kv import host_arena, host_pool, pinned
from kvweave.runner.kv.host_arena import HostArena
from kvweave.runner.kv.near_device import _address
from ranked_pages import FULL, WINDOW, logits_of_steps, top_k
from versions import needs_cuda

pytestmark = needs_cuda

STEPS = 50
KINDS = [[top_k(4, 5)], [top_k(3, 16), FULL], [top_k(4, 5), FULL, top_k(6, 3), WINDOW, top_k(4)]]


def on_gpu(dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """A model, and its runners' settings; of half precision by the kernels of tensor cores."""
    if dtype == torch.float32:
        return tiny("llama").cuda(), {}
    return tiny("llama", head_dim=64).to("cuda", dtype), {"page_tokens": 16}


def same_bits(one: Any, other: Any) -> bool:
    pairs = zip(one[1], other[1], strict=True)
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("copies", ["spill", "mirror"])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_says_what_all_pages_on_the_device_say(
    kinds: Any, dtype: torch.dtype, copies: str
) -> None:
    model, sizes = on_gpu(dtype)
    resident, host = both(model, kinds, host_copies=copies, **sizes)
    assert all(pool.pinned for pool in host.host.values())
    tokens = random_tokens(300, 3)
    wanted = logits_of_steps(resident, tokens, STEPS)
    assert same_bits(logits_of_steps(host, tokens, STEPS), wanted)
    assert spills(host) == len(host.host)
    graphs = host._decoder.graphs
    assert graphs is not None
    assert graphs.capturable
    assert any(size.graph is not None for size in graphs._sizes.values())
    assert nothing_is_held(host)


@pytest.mark.parametrize("copies", ["spill", "mirror"])
@pytest.mark.parametrize("kinds", KINDS)
def test_requests_that_join_in_turns(kinds: Any, copies: str) -> None:
    answers = []
    for runner in both(tiny("llama").cuda(), kinds, host_copies=copies, max_tokens=16384):
        answers.append(said_in_turns(runner))
        assert nothing_is_held(runner)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_copies_are_the_same_by_whoever_carries_them(dtype: torch.dtype) -> None:
    """The device in captured steps, or the host where memory is not pinned."""
    model, sizes = on_gpu(dtype)
    tokens, kinds = random_tokens(300, 3), KINDS[2]
    said = []
    for register in (pinned.register, lambda *_given: False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_arena, "register", register)
            host = host_runner(model, kinds, AMPLE, "spill", "fp8", **sizes)
        said.append(logits_of_steps(host, tokens, STEPS))
        assert spills(host) == len(host.host)
        for pool in host.host.values():
            assert pool.pinned is (register is pinned.register)
            assert (
                pool.block_bytes * model.dtype.itemsize
                == host_runner(model, kinds, **sizes).host[pool.budget.group].block_bytes
            )
        assert nothing_is_held(host)
    assert same_bits(*said)
    assert not same_bits(
        said[0], logits_of_steps(host_runner(model, kinds, **sizes), tokens, STEPS)
    )


def test_memory_that_is_refused_to_be_pinned_is_carried_by_the_host() -> None:
    model, tokens = tiny("llama").cuda(), random_tokens(200, 3)
    resident = host_runner(model, [top_k(4, 5), FULL], None)
    wanted = logits_of_steps(resident, tokens, STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_arena, "register", lambda *_given: False)
        host = host_runner(model, [top_k(4, 5), FULL])
    assert not any(pool.pinned for pool in host.host.values())
    assert host._decoder.graphs is None
    assert same_bits(logits_of_steps(host, tokens, STEPS), wanted)
    assert nothing_is_held(host)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_a_part_that_is_refused_to_be_pinned_while_requests_decode(chunks: int) -> None:
    """Steps that were captured are launched one by one from then on, and say the same."""
    model, tokens = tiny("llama").cuda(), random_tokens(200, 3)
    kinds = [top_k(4, 5), FULL]
    resident, register, left = host_runner(model, kinds, None), pinned.register, [chunks]

    def refusing(*given: Any) -> bool:
        left[0] -= 1
        return left[0] >= 0 and register(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_arena, "CHUNK_BYTES", 1 << 15)
        patch.setattr(host_arena, "register", refusing)
        host = host_runner(model, kinds)
        (pool,) = host.host.values()
        assert pool.pinned
        assert host._decoder.graphs is not None
        for length in (200, 600):
            tokens = random_tokens(length, 3)
            wanted = logits_of_steps(resident, tokens, STEPS)
            assert same_bits(logits_of_steps(host, tokens, STEPS), wanted)
    assert pool.waits
    assert nothing_is_held(host)


def test_an_arena_that_grows_is_read_across_its_parts() -> None:
    """Each part is pinned by itself, and pages may lie in two of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_arena, "CHUNK_BYTES", 1 << 15)
        found = []
        for runner in both(tiny("llama").cuda(), [top_k(4, 5), FULL], host_ahead_bytes=0):
            said = [logits_of_steps(runner, random_tokens(n, n), STEPS) for n in (90, 700, 300)]
            assert nothing_is_held(runner)
            found.append(said)
        (pool,) = runner.host.values()
        assert pool.pinned
        assert pool.stats()["reserved_bytes"] > 4 << 15
        assert pool.stats()["reserved_bytes"] < pool.pages.nbytes
        graphs = runner._decoder.graphs
        assert graphs is not None
        assert any(size.graph is not None for size in graphs._sizes.values())
    assert all(same_bits(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("times", [1, 2, ALWAYS])
@pytest.mark.parametrize("place", ["aside", "before a ranking"])
def test_spills_that_fail_change_no_token(place: str, times: int) -> None:
    resident, host = both(tiny("llama").cuda(), [top_k(4, 5), FULL])
    tokens, faults = random_tokens(300, 3), Faults(place, times)
    wanted = logits_of_steps(resident, tokens, STEPS)
    with faults.at_work():
        assert same_bits(logits_of_steps(host, tokens, STEPS), wanted)
    (pool,) = host.host.values()
    assert faults.hit == min(times, faults.hit) > 0
    assert (pool.stats()["failed"] > 0) == (times == ALWAYS)
    assert nothing_is_held(host)


@pytest.mark.parametrize("times", [1, 2, ALWAYS])
def test_who_cannot_be_brought_its_pages_by_the_host_fails_alone(times: int) -> None:
    model = tiny("llama").cuda()
    resident = host_runner(model, [top_k(4, 5), FULL], None)
    wanted = [one.result().tokens for one in answered(resident, Faults("back", 0), None)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_arena, "register", lambda *_given: False)
        host = host_runner(model, [top_k(4, 5), FULL])
    asked = answered(host, Faults("at a ranking", times), 1)
    for number, request in enumerate(asked):
        if number == 1 and times == ALWAYS:
            with pytest.raises(TransferFailed):
                request.result()
        else:
            assert request.result().tokens == wanted[number]
    assert nothing_is_held(host)


def test_a_launch_that_is_refused_while_a_step_is_captured() -> None:
    """Steps are launched one kernel at a time from then on, and say the same."""
    resident, host = both(tiny("llama").cuda(), [top_k(4, 5), FULL])
    tokens, carry = random_tokens(300, 3), host_pool.carry_pages

    def refused(*given: Any, **named: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("too many resources requested for launch")
        carry(*given, **named)

    wanted = logits_of_steps(resident, tokens, STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_pool, "carry_pages", refused)
        assert same_bits(logits_of_steps(host, tokens, STEPS), wanted)
    assert host._decoder.graphs is not None
    assert not host._decoder.graphs.capturable
    assert nothing_is_held(host)


def test_what_the_driver_refuses_is_forgotten_by_the_next_launch() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    pages = HostArena((4, 1 << 20), torch.uint8, device).pages
    # It is pinned already.
    assert not pinned.register(pages.data_ptr(), pages.nbytes, device)
    assert float(torch.ones(100, device=device).sum()) == 100
    assert _address(device).count(":") == 2


def test_who_gives_way_is_brought_back_or_cancelled_loses_nothing() -> None:
    model = tiny("llama").cuda()
    found = []
    for runner in both(model, [top_k(4, 5), FULL]):
        with runner.prefill(random_tokens(150, 2), "full", remember=False) as done:
            said = [runner.decode(done, max_new_tokens=23, stop=()).tokens]
            said.append(runner.extend(done, random_tokens(7, 3).tolist()).argmax(-1).tolist())
            with done.fork() as fork:
                more = [runner.decode(one, max_new_tokens=23, stop=()) for one in (fork, done)]
            found.append(said + [made.tokens for made in more])
    assert found[0] == found[1]
    runner = host_runner(model, [top_k(4, 4), FULL], AMPLE, max_tokens=300)
    engine = runner.engine(token_budget=64, chunk_tokens=32, max_running=4)
    ask = {"max_new_tokens": 40, "stop": (), "remember": False}
    asked = [engine.submit(random_tokens(70, seed), "full", **ask) for seed in range(6)]
    for _ in range(6):
        engine.must_step()
    engine.cancel(asked[0])
    engine.run()
    assert [len(request.result().tokens) for request in asked[1:]] == [40] * 5
    assert nothing_is_held(runner)
