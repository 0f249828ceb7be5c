"""Decoding over host memory says, bit for bit, what it says with all pages on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from cached_prompts import knowledge
from decode_batches import decoding
from families import random_tokens, tiny
from host_memory import PAGE, both, held_at_home, host_runner, nothing_is_held, spills
from kvweave import PoolFull, ops
from kvweave.runner import Runner, Sampling, Segment
from kvweave.runner.decode import Decoder
from kvweave.runner.kv import host_pool
from kvweave.runner.kv.aside import Arrival, Aside
from ranked_pages import FULL, WINDOW, logits_of_steps, stepping_as_on_a_gpu, top_k

STEPS = 40
MIXED = [top_k(4, 5), FULL, top_k(6, 3), WINDOW, top_k(4)]
KINDS = [[top_k(4, 5)], [top_k(3, 16), FULL], MIXED, [WINDOW, top_k(5, 2)]]


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


def same_bits(one: tuple[list[int], list[Any]], other: tuple[list[int], list[Any]]) -> bool:
    pairs = zip(one[1], other[1], strict=True)
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in pairs)


# ---- what is said ---------------------------------------------------------------------------


@pytest.mark.parametrize("copies", ["spill", "mirror"])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
@pytest.mark.parametrize("length", [3, 90])
def test_it_says_what_all_pages_on_the_device_say(
    name: str, kinds: Any, length: int, copies: str
) -> None:
    resident, host = both(tiny(name), kinds, host_copies=copies)
    tokens = random_tokens(length, 3)
    wanted = logits_of_steps(resident, tokens, STEPS)
    assert same_bits(logits_of_steps(host, tokens, STEPS), wanted)
    # A short prompt begins to choose, and is spilled, in the middle of its answer.
    assert spills(host) == len(host.host)
    assert nothing_is_held(host)


@pytest.mark.parametrize("kinds", [[top_k(4, 5)], MIXED])
def test_what_a_gpu_captures_is_what_is_decoded_elsewhere(llama: Any, kinds: Any) -> None:
    resident, host = both(llama, kinds)
    tokens = random_tokens(90, 3)
    wanted = logits_of_steps(resident, tokens, STEPS)
    assert same_bits(logits_of_steps(stepping_as_on_a_gpu(host), tokens, STEPS), wanted)
    assert spills(host) > 0
    assert nothing_is_held(host)


def test_as_many_pages_as_there_are_are_dense(llama: Any) -> None:
    """Nothing has to be spilled then, and nothing is."""
    tokens = random_tokens(70, 4)
    host = host_runner(llama, [top_k(500, 16), FULL])
    dense = host_runner(llama, [FULL], None)
    wanted = logits_of_steps(dense, tokens, STEPS)
    assert same_bits(logits_of_steps(host, tokens, STEPS), wanted)
    assert spills(host) == 0


def test_few_pages_are_another_answer_than_all(llama: Any) -> None:
    """What the tests above compare with is no dense decoding, and pages do come from the host."""
    tokens = random_tokens(90, 3)
    few = logits_of_steps(host_runner(llama, [top_k(3, 4)]), tokens, 2)
    dense = logits_of_steps(host_runner(llama, [FULL], None), tokens, 2)
    assert float((few[1][1] - dense[1][1]).abs().max()) > 0.01
    host = host_runner(llama, [top_k(3, 4)])
    fetched = list[int]()
    with pytest.MonkeyPatch.context() as patch:
        move = ops.move_pages

        def counted(moves: Any, count: Any, *sides: Any, way: Any, **named: Any) -> None:
            if way == "fetch":
                fetched.append(int(count[0]))
            move(moves, count, *sides, way=way, **named)

        patch.setattr(ops, "move_pages", counted)
        logits_of_steps(host, tokens, 13)
    layers, heads = len(host.spec.layers), host.spec.kv_heads
    assert len(fetched) == 4 * layers
    # First nothing lies there, then all of a choice but the newest page does, then what is new.
    assert fetched[:layers] == [0] * layers
    assert fetched[layers : 2 * layers] == [2 * heads] * layers
    assert sum(fetched[2 * layers :]) < 2 * sum(fetched[layers : 2 * layers])


def test_a_page_that_is_spoiled_at_home_is_missed(llama: Any) -> None:
    """The answer depends on what lies there, so what the tests above compare did come from it."""
    host = host_runner(llama, [top_k(4, 3)])
    tokens = random_tokens(90, 3)
    wanted = logits_of_steps(host, tokens, 12)
    (pool,) = host.host.values()
    with pytest.MonkeyPatch.context() as patch:
        spill = type(pool).carry_blocks

        def spoiled(self: Any, here: Any, home: Any, way: Any) -> None:
            spill(self, here, home, way)
            if way == "spill":
                self.pages[:, 1].fill_(7.0)

        patch.setattr(type(pool), "carry_blocks", spoiled)
        assert not same_bits(logits_of_steps(host, tokens, 12), wanted)
    assert same_bits(logits_of_steps(host, tokens, 12), wanted)


class LateCopies:
    """Copies beside decoding that come over a while after they were begun: in so many looks."""

    def __init__(self, looks: int) -> None:
        self.looks, self.begun = looks, 0

    def make(self, work: Any) -> Any:
        self.begun += 1
        left = self.looks

        class Late(Arrival):
            def is_there(self) -> bool:
                nonlocal left
                left -= 1
                if left == 0:
                    work()
                return left <= 0

            def wait(self) -> None:
                pass

        return Late()


@pytest.mark.parametrize("looks", [1, 2, 5, 1000])
def test_pages_stay_on_the_device_until_all_have_come_over(llama: Any, looks: int) -> None:
    """What is said does not depend on when; nor does what is given back by who leaves before."""
    resident, host = both(llama, [top_k(4, 5), FULL])
    tokens, late = random_tokens(90, 3), LateCopies(looks)
    wanted = logits_of_steps(resident, tokens, STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Aside, "do", lambda aside, work: late.make(work))
        patch.setattr(Decoder, "_behind", prepared_at_once)
        assert same_bits(logits_of_steps(host, tokens, STEPS), wanted)
    assert late.begun == 1
    assert nothing_is_held(host)


@contextmanager
def prepared_at_once(_decoder: Any, slots: Any) -> Iterator[None]:
    slots.prepare()
    yield


# ---- batches and engines --------------------------------------------------------------------


def ragged_steps(runner: Runner, seed: int) -> list[torch.Tensor]:
    """Logits of steps of batches that outgrow their room and change order; some sit steps out."""
    draws, seen = np.random.default_rng(seed), list[torch.Tensor]()
    prompts = [random_tokens(int(draws.integers(10, 150)), n) for n in range(11)]
    done = [runner.prefill(p, "full", remember=False, reserve_tokens=40) for p in prompts]
    sequences = [decoding(runner, one, 40) for one in done]

    def choose(batch: Any, found: torch.Tensor, _greedy: bool) -> Any:
        seen.append(found.clone())
        return np.array([s.choose(row) for s, row in zip(batch, found, strict=True)])

    with torch.inference_mode():
        for turn in range(45):
            batch = [s for s in sequences[: 1 + turn] if not s.done and draws.random() < 0.9]
            if batch:
                order = draws.permutation(len(batch))
                runner._decoder.step([batch[i] for i in order], choose=choose)
    runner._decoder.forget()
    for one in done:
        one.release()
    return seen


@pytest.mark.parametrize("copies", ["spill", "mirror"])
@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_requests_that_join_in_turns(llama: Any, as_on_a_gpu: bool, copies: str) -> None:
    """Who comes back into a batch has its bounds made of what lies at home."""
    found = []
    for runner in both(llama, [top_k(4, 16), top_k(3, 7)], host_copies=copies):
        if as_on_a_gpu:
            stepping_as_on_a_gpu(runner)
        found.append(ragged_steps(runner, 1))
        assert nothing_is_held(runner)
    assert spills(runner) > 15
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_engine_whose_requests_join_leave_and_are_cancelled(llama: Any) -> None:
    answers = []
    for runner in both(llama, [top_k(4, 3), WINDOW, top_k(5, 8)]):
        engine = runner.engine(token_budget=60, chunk_tokens=24, max_running=4)
        lengths = [20, 175, 5, 48, 130, 90]
        asked = [
            engine.submit(random_tokens(n, n), "full", max_new_tokens=9 + n // 4, stop=())
            for n in lengths
        ]
        for turn in range(4000):
            if turn == 12:
                engine.cancel(asked[1])
            if not engine.step() and not engine.live:
                break
        assert asked[1].outcome == "cancelled"
        answers.append([r.result().tokens for r in asked if r.outcome == "finished"])
        assert len(answers[-1]) == 5
        assert nothing_is_held(runner)
    assert answers[0] == answers[1]
    assert spills(runner) > 0


@pytest.mark.parametrize("policy", ["naive", "epic", "sparsex", "foresight"])
def test_prefixes_and_segments_that_were_reused(llama: Any, policy: str) -> None:
    ask = {"max_new_tokens": 30, "stop": (), "sampling": Sampling(temperature=0.8, seed=3)}
    answers = []
    for runner in both(llama, [top_k(5, 4), FULL, top_k(12, 7)], page_tokens=8):
        parts, prompt = knowledge(runner, 3), random_tokens(140, 5)
        said = [runner.generate(parts, policy, **ask).tokens for _ in range(2)]
        for tokens in (prompt, np.concatenate((prompt[:101], random_tokens(50, 6))), prompt):
            made = runner.generate(tokens, "prefix", **ask)
            said.append(made.tokens)
        assert made.report.reused_prefix > 100
        answers.append(said)
    assert answers[0] == answers[1]
    assert spills(runner) > 0


def test_requests_that_share_a_prefix_spill_each_their_own(llama: Any) -> None:
    """Blocks of the prefix are others' too: what one spills the others go on reading."""
    answers, prompt = [], random_tokens(160, 9)
    for runner in both(llama, [top_k(4, 6), FULL]):
        runner.prefill(prompt, "full").release()
        prompts = [np.concatenate((prompt, random_tokens(3 + n, n))) for n in range(4)]
        ask = {"max_new_tokens": 25, "stop": (), "remember": False}
        made = runner.generate_batch(prompts, "prefix", **ask)
        assert all(one.report.reused_prefix == 160 for one in made)
        answers.append([one.tokens for one in made])
        assert nothing_is_held(runner)
    assert answers[0] == answers[1]


# ---- what needs all pages -------------------------------------------------------------------


@pytest.mark.parametrize("copies", ["spill", "mirror"])
def test_who_is_extended_forked_or_decoded_on_is_brought_back(llama: Any, copies: str) -> None:
    """All pages are read then: they are what they were, bit for bit."""
    found = []
    for runner in both(llama, [top_k(4, 5), FULL, top_k(5, 3)], host_copies=copies):
        said: list[Any] = []
        with runner.prefill(random_tokens(150, 2), "full", remember=False) as done:
            ask = {"max_new_tokens": 23, "stop": ()}
            said.append(runner.decode(done, **ask).tokens)
            if runner.host:
                assert done.kv.is_spilled
            said.append(runner.extend(done, random_tokens(7, 3).tolist()))
            assert not done.kv.is_spilled
            assert held_at_home(runner) == 0
            said.append(runner.decode(done, **ask).tokens)
            with done.fork() as fork:
                assert not fork.kv.is_spilled
                said += [runner.decode(one, **ask).tokens for one in (fork, done, fork)]
                said.append(runner.extend(fork, random_tokens(5, 4).tolist()))
        assert nothing_is_held(runner)
        found.append(said)
    for one, other in zip(*found, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize("policy", ["prefix", "foresight"])
def test_turns_of_a_conversation(llama: Any, policy: str) -> None:
    """With fresh text alone and with segments; the whole is found when it has been closed."""
    found = []
    for runner in both(llama, [top_k(4, 5), FULL]):
        for number in range(2):
            runner.insert(random_tokens(60, number).tolist(), f"segment {number}", "kb")
        said = list[Any]()
        with runner.conversation(policy) as talk:
            for turn in range(4):
                parts: list[Any] = [Segment(tokens=random_tokens(50 + turn, 9 + turn).tolist())]
                if turn in (0, 2):
                    parts.append(Segment(tokens=random_tokens(60, turn // 2), namespace="kb"))
                    parts.append(Segment(tokens=random_tokens(9, 20 + turn).tolist()))
                made = talk.ask(parts, max_new_tokens=21, stop=())
                said.append((made.tokens, made.report.reused_segment, made.report.recomputed))
            length = talk.tokens
        known = random_tokens(50, 9).tolist()
        with runner.prefill([*known, 1], "prefix", remember=False) as done:
            said.append(done.report.reused_prefix)
        assert length > 300
        assert nothing_is_held(runner)
        found.append(said)
    assert spills(runner) > 0
    assert found[0] == found[1]


def test_without_room_to_be_brought_back_nothing_has_changed(llama: Any) -> None:
    runner = host_runner(llama, [top_k(4, 5), FULL], max_tokens=400)
    with runner.prefill(random_tokens(200, 2), "full", remember=False) as done:
        runner.decode(done, max_new_tokens=10, stop=())
        with runner.prefill(random_tokens(240, 3), "full", remember=False):
            length, home = done.request.length, held_at_home(runner)
            for call in (done.fork, lambda: runner.extend(done, [1, 2])):
                with pytest.raises(PoolFull):
                    call()
                assert done.kv.is_spilled
                assert (done.request.length, held_at_home(runner)) == (length, home)
        runner.extend(done, [1, 2])
    assert nothing_is_held(runner)


def test_what_lies_at_home_is_nobodys_to_find_but_the_prompt_is(llama: Any) -> None:
    runner, prompt = host_runner(llama, [top_k(3, 4), FULL]), random_tokens(120, 14)
    said = runner.generate(prompt, "prefix", max_new_tokens=30, stop=()).tokens
    known = np.concatenate((prompt, np.asarray(said, np.int32)))
    with runner.prefill(known, "prefix", remember=False) as done:
        assert len(prompt) - PAGE < done.report.reused_prefix <= len(prompt)
    assert nothing_is_held(runner)


# ---- fp8 copies -----------------------------------------------------------------------------


def rounded(pages: torch.Tensor) -> torch.Tensor:
    """Pages [N, 2, P, D] whose keys and values went through e4m3 times a power of two, by torch."""
    greatest = pages.abs().amax((2, 3), keepdim=True)
    power = torch.frexp(greatest).exponent - 9
    power += greatest > 464 * torch.exp2(power.float())
    quotients = torch.ldexp(pages, -power)
    return torch.ldexp(quotients.to(torch.float8_e4m3fn).float(), power)


@pytest.mark.parametrize("copies", ["spill", "mirror"])
@pytest.mark.parametrize("kinds", [[top_k(4, 5)], MIXED])
def test_fp8_copies_are_pages_rounded_once(llama: Any, kinds: Any, copies: str) -> None:
    """An answer is that over exact copies of which each was rounded when it came to the host."""
    tokens, small = random_tokens(90, 3), 1 << 18
    exact = host_runner(llama, kinds, small, copies)
    with pytest.MonkeyPatch.context() as patch:
        carry = host_pool.carry_pages
        # Blocks may be carried as pages that are as many together.
        sizes = next(iter(exact.host.values())).pages.shape[1:]

        def rounding(moves: Any, count: Any, slots: Any, home: Any, way: Any, **named: Any) -> None:
            carry(moves, count, slots, home, way, **named)
            if way == "spill":
                # Whatever lies there has been rounded, so once more changes nothing.
                pages = home.data.view(-1, *sizes)
                pages.copy_(rounded(pages))

        patch.setattr(host_pool, "carry_pages", rounding)
        wanted = logits_of_steps(exact, tokens, STEPS)
    host = host_runner(llama, kinds, small // 4, copies, "fp8")
    found = logits_of_steps(host, tokens, STEPS)
    assert same_bits(found, wanted)
    assert not same_bits(found, logits_of_steps(exact, tokens, STEPS))
    for group, pool in host.host.items():
        there, here = pool.stats(), exact.host[group].stats()
        assert 4 * there["block_bytes"] == here["block_bytes"]
        assert 4 * there["copied_bytes"] * 2 == here["copied_bytes"]
    assert nothing_is_held(host)


def test_fp8_pages_that_come_back_are_spilled_as_the_same_bytes(llama: Any) -> None:
    """A conversation's next turn has all pages brought back, and spills them again."""
    host = host_runner(llama, [top_k(4, 3)], 1 << 18, "spill", "fp8")
    (pool,) = host.host.values()
    seen = []
    with host.prefill(random_tokens(60, 5), "full", remember=False) as done:
        for _ in range(2):
            sequence = decoding(host, done, 9)
            with torch.inference_mode():
                for _ in range(9):
                    host._decoder.step([sequence])
            (pages,) = done.kv.host.values()
            assert pages.count >= 15
            at = torch.from_numpy(pages.blocks()[:15, None] + np.arange(pool.budget.heads)).long()
            kept = pool.pages.view(torch.uint8)[at], pool.scales[at]
            seen.append([part.clone() for part in kept])
            host._decoder.forget()
            done.bring_back()
            # A later prompt takes rounded pages for no exact prefix.
            assert (done.exact, done.exact_tokens) == (False, 0)
    assert all(map(torch.equal, *seen))
    assert len(seen[0][0].unique()) > 100
    assert nothing_is_held(host)
