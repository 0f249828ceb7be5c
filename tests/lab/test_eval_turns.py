"""Chats measured turn by turn: what a turn computes, and that it is asked what it always was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from families import tiny
from head_maps import classes_of, head_map
from kvweave import models
from kvweave.lab.eval import (
    Measurement,
    Sample,
    SampleMeasurer,
    Turn,
    draw,
    evaluate,
    inserted,
    read_policies,
    task_of,
)
from kvweave.lab.eval.measure import of_turns
from kvweave.lab.eval.sample import Said
from kvweave.runner import Runner
from kvweave.runner.model.model_spec import describe


@pytest.fixture(scope="module")
def runner() -> Runner:
    """A random model with words of the real tokenizer."""
    tokenizer = models.load_tokenizer("smollm2")
    model = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=4096)
    return Runner(model, tokenizer, max_tokens=8192, progress=False, check=False)


@pytest.fixture(scope="module")
def samples(runner: Runner) -> list[Sample]:
    return draw(task_of("needle", 256), runner.prompts.tokenizer, 2, seed=0)


class Chat:
    """A task of one sample with turns."""

    name, length, score_name, corpus = "chat", 256, "recall", None

    def __init__(self, chat: Sample) -> None:
        self.chat = chat

    def sample(self, tokenizer, rng) -> Sample:
        return self.chat


def turn_by_turn(runner: Runner, chat: Sample, policies: str) -> list[list[Measurement]]:
    """Each turn as a prompt of its own, computed anew: full, then the policies."""
    found, said = [], []
    for turn in range(len(chat.turns) + 1):
        with inserted(runner, chat.at_turn(turn, said), f"alone/{turn}") as ready:
            measurer = SampleMeasurer(runner, ready, 0, f"alone/{turn}", 6)
            found.append([measurer.full(), *map(measurer.policy, read_policies(policies))])
            said.append(found[-1][0].answer)
    return found


@pytest.mark.parametrize("brings", [False, True])
def test_turns_go_on_where_the_one_before_ended(
    runner: Runner, samples: list[Sample], brings: bool
) -> None:
    """Each turn is asked behind full's own answers, by every policy, which computes what is new."""
    more = samples[1].segments[:1] if brings else ()
    turns = (
        Turn((Said(0, reused=brings), *more, "\nAnd the other one?"), ("17",)),
        Turn((Said(1), "\nAnd the first?"), ("17",)),
    )
    chat, policies = replace(samples[0], turns=turns), "naive,foresight:share=1.0,foresight:draft=2"
    found = evaluate(runner, Chat(chat), read_policies(policies), 1, max_new_tokens=6, controlled=1)
    alone = turn_by_turn(runner, chat, policies)
    names = ["full", "naive", "foresight(share=1.0)", "foresight(draft=2)"]
    for place, name in enumerate(names):
        (whole,), parts = found.of(name).values(), [turn[place] for turn in alone]
        assert whole.turns == 3
        assert whole.tokens == sum(part.tokens for part in parts)
        assert len(whole.kl) == sum(len(part.kl) for part in parts)
        cached = whole.reused_prefix + whole.reused_segment + whole.recomputed
        assert cached + whole.settled_before == whole.tokens
        assert whole.settled_before > sum(part.settled_before for part in parts) == 0
        assert whole.encoding_flops == parts[-1].encoding_flops
        # Of the first turn it has all; of later ones what is new.
        assert parts[0].flops < whole.flops < 0.8 * sum(part.flops for part in parts)
        if name != names[-1]:
            assert whole.answer == "\n---\n".join(part.answer for part in parts)
            wanted = [nats for part in parts for nats in part.kl]
            assert whole.kl == pytest.approx(wanted, abs=2e-4)
    assert max(found.of("naive")[0].kl) > 1e-3
    assert found.of("chunked (floor)")[0].settled_before == 0
    assert runner.cache.stats()["held"] == 0
    assert runner.segments() == []


def test_agents_begin_conversations_of_their_own(runner: Runner, samples: list[Sample]) -> None:
    turns = tuple(
        Turn((f"Agent {n}: ", *samples[0].segments, Said(0, reused=True), " Sum."), ("17",), False)
        for n in range(2)
    )
    chat = replace(samples[0], turns=(*turns, Turn((Said(2), " Sure?"), ("17",))))
    found = evaluate(runner, Chat(chat), ["naive"], 1, max_new_tokens=6, controlled=0)
    alone = turn_by_turn(runner, chat, "naive")
    (naive,), by_turn = found.of("naive").values(), [turn[1] for turn in alone]
    assert naive.tokens == sum(one.tokens for one in by_turn)
    assert naive.answer == "\n---\n".join(one.answer for one in by_turn)
    # What the last agent's first prompt left, whose KV was settled for its second.
    last = by_turn[2].tokens - by_turn[2].reused_segment
    assert naive.settled_before == pytest.approx(last, abs=1)
    assert sum(one.flops for one in by_turn[:3]) < naive.flops < sum(m.flops for m in by_turn)
    assert of_turns([naive]) is naive


def test_a_conversation_that_cannot_go_on_is_computed_anew(samples: list[Sample]) -> None:
    """Heads that the policy made full for one prompt."""
    tokenizer = models.load_tokenizer("smollm2")
    model = tiny("llama", vocab_size=len(tokenizer), num_hidden_layers=2)
    heads = head_map(describe(model), classes_of(model, (None, (24, 4))))
    runner = Runner(model, tokenizer, max_tokens=4096, heads=heads, progress=False, check=False)
    chat = replace(samples[0], turns=(Turn((Said(0), " And?"), ("17",)),) * 2)
    policies = "redknot:restore_edge=0.0,epic"
    found = evaluate(runner, Chat(chat), read_policies(policies), 1, max_new_tokens=6, controlled=0)
    alone = turn_by_turn(runner, chat, policies)
    (restoring,), (epic,) = (
        found.of("redknot(restore_edge=0.0)").values(),
        found.of("epic").values(),
    )
    assert restoring.restored == sum(turn[1].restored for turn in alone) > 0
    assert restoring.kl == tuple(nats for turn in alone for nats in turn[1].kl)
    assert restoring.flops == sum(turn[1].flops for turn in alone)
    assert restoring.settled_before == 0 < epic.settled_before
