"""Forks and conversations over packed pages: what they say, share and give back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from decode_batches import decoding
from document_decoding import documents, fresh, insert_all
from families import random_tokens, tiny
from kvweave import PoolFull
from kvweave.runner import Prefill, Runner
from packed_decoding import apart, nothing_is_held, packed_runner, steps_of
from page_meaning import random_packing

SIZES = {"head_dim": 64, "max_position_embeddings": 4096, "num_hidden_layers": 2}
KINDS = ["int4", "int8", "half-int4", "planes-3"]
STEPS = 150


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", **SIZES)


def runner_of(model: Any, kind: str, **settings: Any) -> Runner:
    packing, _ = random_packing(kind, 4, 64)
    runner = packed_runner(model, kv_dtype=packing, **{"max_tokens": 8192, **settings})
    insert_all(runner, documents([300]))
    return runner


def prompt_of(kind: str) -> Any:
    if kind == "a prefix":
        return random_tokens(333, 5)
    return [fresh(70, 1), *documents([300]), fresh(150, 2)]


def said_by(runner: Runner, done: Prefill, said: list[int]) -> list[torch.Tensor]:
    """The logits behind a prompt that says some tokens, one by one."""
    sequence = decoding(runner, done, len(said) + 1)
    sequence.tokens[-1] = said[0]
    return steps_of(runner, sequence, len(said), [*said[1:], 0])


def forget(runner: Runner) -> None:
    for segment in runner.segments():
        runner.delete(segment.name)
    assert nothing_is_held(runner)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ["a prefix", "documents"])
def test_forks_say_what_each_says_alone(model: Any, kind: str, prompt: str) -> None:
    """Whichever goes on first, also from one that has decoded into its next pages."""
    runner = runner_of(model, kind)
    text, (one, other, third) = prompt_of(prompt), random_tokens(3 * STEPS, 7).reshape(3, -1)
    asked = {"remember": False, "watched": False}

    def alone(said: Any) -> list[torch.Tensor]:
        with runner.prefill(text, "naive", **asked) as done:
            return said_by(runner, done, said.tolist())

    wanted = [alone(said) for said in (one, other, np.concatenate((one, third)))]
    held = runner.packed.stats()["held"]
    with runner.prefill(text, "naive", **asked) as done:
        before = runner.packed.stats()["held"]
        with done.fork() as fork, fork.fork() as second:
            assert runner.packed.stats()["held"] == before
            assert apart(said_by(runner, done, one.tolist()), wanted[0]) == 0.0
            assert apart(said_by(runner, fork, other.tolist()), wanted[1]) == 0.0
            with done.fork() as late:
                late.kv.packed.pack(late.request, late.request.length)
                got = said_by(runner, late, third.tolist())
                assert apart(got, wanted[2][STEPS:]) == 0.0
            assert apart(said_by(runner, second, one.tolist()), wanted[0]) == 0.0
    assert runner.packed.stats()["held"] == held
    forget(runner)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ["a prefix", "documents"])
def test_a_turn_says_what_more_tokens_say(model: Any, kind: str, prompt: str) -> None:
    """The same as one prompt that is extended, turn by turn; reports tell of packed bytes."""
    runner = runner_of(model, kind)
    text, turns = prompt_of(prompt), [random_tokens(n, n).tolist() for n in (40, 90, 128)]
    with runner.prefill(text, "naive", remember=False, watched=False) as done:
        wanted = [done.logits[-1], *(runner.extend(done, turn)[-1] for turn in turns)]
    with runner.conversation("naive", remember=False) as conversation:
        got = [conversation.prefill(part).logits[-1] for part in (text, *turns)]
        assert apart(got, wanted) < 2e-5
        assert all(report.kv_bytes > 0 for report in conversation.reports)
        rows = [report.rows_per_layer[0] for report in conversation.reports]
        assert rows[1:] == [40, 90, 128]
        answer = conversation.ask(random_tokens(9, 3), max_new_tokens=20, stop=[])
        again = conversation.ask(random_tokens(9, 4), max_new_tokens=20, stop=[])
        assert len(answer.tokens) == len(again.tokens) == 20
    forget(runner)


def test_a_conversation_is_found_by_later_prompts(model: Any) -> None:
    runner = runner_of(model, "half-int4")
    first = random_tokens(300, 1)
    with runner.conversation("prefix") as conversation:
        said = conversation.ask(first, max_new_tokens=70, stop=[]).tokens
        conversation.ask(random_tokens(200, 2), max_new_tokens=5, stop=[])
    whole = np.concatenate((first, said, random_tokens(200, 2))).astype(np.int32)
    with runner.prefill(whole, "prefix") as done:
        assert done.report.reused_prefix == 570 // 64 * 64
    forget(runner)


def test_a_turn_without_room_leaves_the_conversation(model: Any) -> None:
    runner = runner_of(model, "half-int4", max_tokens=1200, chunk_tokens=300)
    with runner.conversation("prefix", remember=False) as conversation:
        conversation.ask(random_tokens(300, 1), max_new_tokens=3, stop=[])
        tokens, held = conversation.tokens, runner.packed.stats()["held"]
        with pytest.raises(PoolFull):
            conversation.ask(random_tokens(3000, 2), max_new_tokens=3)
        assert (conversation.tokens, runner.packed.stats()["held"]) == (tokens, held)
        answer = conversation.ask(random_tokens(100, 3), max_new_tokens=3, stop=[])
        assert len(answer.tokens) == 3
    forget(runner)
