"""Drafts by few pages, verified by all: every answer is that of a runner that reads all pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvweave
from byte_tokenizer import Bytes
from cached_prompts import knowledge
from families import random_tokens, tiny
from kvweave.runner import Healing, Runner, Sampling
from kvweave.runner.decode import rounds
from kvweave.runner.decode.draws import Draws
from plan_policies import Restoring
from ranked_pages import (
    FULL,
    WINDOW,
    every_place_came_back,
    ranked_runner,
    stepping_as_on_a_gpu,
    top_k,
)

PAGE, STEPS = 8, 30
MIXED = [top_k(4), FULL, top_k(3, 3), WINDOW, top_k(4, 16)]
DRAWN = [None, Sampling(temperature=0.9, seed=1), Sampling(temperature=1.5, top_k=9, seed=5)]


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


def verified_runner(model: Any, kinds: Any, speculate: int = 4, **settings: Any) -> Runner:
    return ranked_runner(model, kinds, **{"page_tokens": PAGE, "speculate": speculate, **settings})


def dense_runner(model: Any, kinds: Any, **settings: Any) -> Runner:
    """The same heads, of which those that choose pages read all of them at every step."""
    full = [FULL if kind["kind"] == "top_k" else kind for kind in kinds]
    return ranked_runner(model, full, **{"page_tokens": PAGE, **settings})


def held(runner: Runner) -> int:
    runner.cache.check()
    return int(runner.cache.stats()["held"])


def asked(**more: Any) -> dict[str, Any]:
    return {"max_new_tokens": STEPS, "stop": (), "remember": False, **more}


# ---- the same tokens ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("llama", [top_k(4)]), ("llama", MIXED), ("qwen3", [WINDOW, top_k(4)]), ("gemma", MIXED)],
)
@pytest.mark.parametrize("sampling", DRAWN)
@pytest.mark.parametrize("speculate", [1, 4, 7])
def test_answers_are_dense(name, kinds, sampling, speculate) -> None:
    """A ragged batch, over many borders of pages; each accepts what its own drafts are worth."""
    model = tiny(name)
    prompts = [random_tokens(length, length) for length in (1, 7, 8, 63, 64, 90, 130, 45)]
    dense, runner = dense_runner(model, kinds), verified_runner(model, kinds, speculate)
    wanted = dense.generate_batch(prompts, "full", **asked(sampling=sampling))
    made = runner.generate_batch(prompts, "full", **asked(sampling=sampling))
    assert [one.tokens for one in made] == [one.tokens for one in wanted]
    told = [one.report.speculation for one in made]
    for one in told:
        assert 0 < one.rounds <= one.drafted <= speculate * one.rounds
        assert 0 < one.accepted <= one.drafted
    assert held(runner) == 0
    assert every_place_came_back(runner)


@pytest.mark.parametrize("sampling", DRAWN)
@pytest.mark.parametrize("wrong", [0.3, 1.0])
def test_whatever_is_drafted(llama, monkeypatch, sampling, wrong) -> None:
    """Some drafts are others, or all: each request accepts its own number, often none."""
    prompts = [random_tokens(length, length) for length in (1, 8, 63, 90, 45)]
    dense, runner = dense_runner(llama, MIXED), verified_runner(llama, MIXED)
    generator, drafted = torch.Generator().manual_seed(7), Draws.drafted

    def spoilt(self: Draws, logits: torch.Tensor) -> torch.Tensor:
        likely = drafted(self, logits)
        other = torch.randint(0, logits.shape[1], likely.shape, generator=generator)
        return torch.where(torch.rand(likely.shape, generator=generator) < wrong, other, likely)

    monkeypatch.setattr(Draws, "drafted", spoilt)
    for ask in (asked(sampling=sampling), asked(sampling=sampling, remember=True)):
        wanted = dense.generate_batch(prompts, "full", **ask)
        made = runner.generate_batch(prompts, "full", **ask)
        assert [one.tokens for one in made] == [one.tokens for one in wanted]
        told = [one.report.speculation for one in made]
        assert sum(one.accepted for one in told) < 0.8 * sum(one.drafted for one in told)
    assert held(runner) == 0
    assert every_place_came_back(runner)


@pytest.mark.parametrize("sampling", DRAWN)
def test_one_request_at_a_time(llama, sampling) -> None:
    dense, runner = dense_runner(llama, MIXED), verified_runner(llama, MIXED)
    for length in (3, 40, 100):
        prompt = random_tokens(length, length + 1)
        ask = asked(sampling=sampling, max_new_tokens=90)
        wanted = dense.generate(prompt, "full", **ask).tokens
        assert runner.generate(prompt, "full", **ask).tokens == wanted


@pytest.mark.long
def test_answers_of_a_real_model_are_dense(smollm2) -> None:
    model, tokenizer = smollm2
    kinds = [top_k(5), FULL, WINDOW, top_k(6, 16)]
    texts = ["The cat sat on the mat, and the dog looked at the moon. " * n for n in (3, 14)]
    prompts = [tokenizer(text + "It was a clear night, and")["input_ids"] for text in texts]
    settings = {"page_tokens": 16, "max_tokens": 1024}
    dense, runner = (
        dense_runner(model, kinds, **settings),
        verified_runner(model, kinds, **settings),
    )
    for sampling in (None, Sampling(temperature=0.7, top_p=0.9, seed=2)):
        ask = asked(max_new_tokens=16, sampling=sampling)
        wanted = dense.generate_batch(prompts, "full", **ask)
        made = runner.generate_batch(prompts, "full", **ask)
        assert [one.tokens for one in made] == [one.tokens for one in wanted]


def test_drafts_by_all_pages_are_all_accepted(llama) -> None:
    """Up to rounding: a draft's row and its verification's are computed by other kernels."""
    runner = verified_runner(llama, [top_k(500)])
    for sampling in DRAWN:
        made = runner.generate(random_tokens(60, 1), "full", **asked(sampling=sampling))
        told = made.report.speculation
        assert told.accepted == told.drafted
        # One token by the prompt; the others by rounds of five but for the last.
        assert told.rounds == -(-(STEPS - 1) // 5)


def test_few_pages_are_rejected_where_they_are_wrong(llama) -> None:
    """What is compared above was drafted by fewer pages than count."""
    runner = verified_runner(llama, [top_k(3)])
    told = runner.generate(random_tokens(200, 1), "full", **asked(max_new_tokens=60)).report
    assert told.speculation.accepted < told.speculation.drafted
    assert told.to_dict()["speculation"]["rounds"] == told.speculation.rounds


@pytest.mark.parametrize("kinds", [[top_k(4)], MIXED, [top_k(4, 16), top_k(3, 7)]])
def test_what_a_gpu_captures_drafts_the_same(llama, kinds) -> None:
    prompts = [random_tokens(length, length) for length in (5, 90, 33)]
    runners = [verified_runner(llama, kinds), stepping_as_on_a_gpu(verified_runner(llama, kinds))]
    runners[1]._decoder.rounds.graphs = runners[1]._decoder.graphs
    for sampling in DRAWN:
        one, other = (
            r.generate_batch(prompts, "full", **asked(sampling=sampling)) for r in runners
        )
        assert [made.tokens for made in one] == [made.tokens for made in other]
        told = [[made.report.speculation for made in some] for some in (one, other)]
        assert told[0] == told[1]
    assert every_place_came_back(runners[1])


@pytest.mark.parametrize("mode", ["materialise", "share"])
@pytest.mark.parametrize("policy", ["naive", "foresight"])
def test_behind_segments_that_are_reused(llama, mode, policy) -> None:
    answers = []
    for make in (dense_runner, verified_runner):
        runner = make(llama, [top_k(4), FULL], mode=mode, max_tokens=4096)
        made = runner.generate(knowledge(runner, 3), policy, **asked())
        assert made.report.reused_segment > 0
        answers.append(made.tokens)
    assert answers[0] == answers[1]


def test_turns_of_a_conversation(llama) -> None:
    answers = []
    for make in (dense_runner, verified_runner):
        runner = make(llama, [top_k(4), FULL], tokenizer=Bytes(), max_tokens=4096)
        with runner.conversation() as talk:
            said = [
                talk.ask([text], max_new_tokens=STEPS, stop=()).tokens
                for text in ("What is it that they all want?", "And who has it?", "Why?")
            ]
        answers.append(said)
        assert held(runner) == 0
    assert answers[0] == answers[1]


def test_a_server_streams_what_is_said_in_rounds(llama) -> None:
    dense = dense_runner(llama, MIXED, tokenizer=Bytes())
    runner = verified_runner(llama, MIXED, tokenizer=Bytes())
    prompts = [random_tokens(n, n).tolist() for n in (20, 61)]
    wanted = [dense.generate(p, "full", **asked()) for p in prompts]
    with runner.serve() as server:
        some = [server.submit(p, "full", streamed=True, **asked()) for p in prompts]
        told = [list(one) for one in some]
    for pieces, one in zip(told, wanted, strict=True):
        assert [piece.token for piece in pieces] == one.tokens
        assert "".join(piece.text for piece in pieces) == one.text


# ---- ends within a run ----------------------------------------------------------------------


@pytest.mark.parametrize("limit", range(1, 12))
def test_no_answer_is_longer_than_was_asked_for(llama, limit) -> None:
    dense, runner = dense_runner(llama, [top_k(500)]), verified_runner(llama, [top_k(500)])
    prompts = [random_tokens(length, 9) for length in (30, 58)]
    ask = asked(max_new_tokens=limit)
    wanted = [one.tokens for one in dense.generate_batch(prompts, "full", **ask)]
    assert [one.tokens for one in runner.generate_batch(prompts, "full", **ask)] == wanted


def test_a_token_that_ends_the_answer_within_a_run(llama) -> None:
    dense, runner = dense_runner(llama, [top_k(500)]), verified_runner(llama, [top_k(500)])
    prompt = random_tokens(30, 9)
    said = dense.generate(prompt, "full", **asked()).tokens
    for stop in dict.fromkeys(said):
        made = runner.generate(prompt, "full", **asked(stop=[stop]))
        assert made.tokens == said[: said.index(stop) + 1]
        assert made.stopped


@pytest.mark.parametrize("kinds", [[top_k(500)], [top_k(3), WINDOW]])
def test_a_string_that_ends_the_answer_within_a_run(llama, kinds) -> None:
    """What is streamed, and what is remembered of it, end before it as well."""
    runners = [make(llama, kinds, tokenizer=Bytes()) for make in (dense_runner, verified_runner)]
    dense, runner = runners
    prompt = random_tokens(30, 9).tolist()
    text = dense.generate(prompt, "full", **asked()).text
    for at in range(0, len(text) - 2, 3):
        stop = text[at : at + 2]
        told = [r.generate(prompt, "full", **asked(stop=stop, remember=True)) for r in runners]
        assert told[0].text == told[1].text
        assert told[0].tokens == told[1].tokens
        pieces = [list(r.stream(prompt, "full", **asked(stop=stop))) for r in runners]
        assert pieces[0] == pieces[1]
        known = np.asarray([*prompt, *told[1].tokens, 1, 2, 3], np.int32)
        found = [r.cache.match_prefix(known) for r in runners]
        assert found[0] == found[1] <= len(known) - 4
    assert held(runner) == 0


def test_rejected_tokens_are_never_found(llama) -> None:
    """What is remembered of an answer is dense KV of what was said, read again as a prefix."""
    dense, runner = dense_runner(llama, [top_k(3)]), verified_runner(llama, [top_k(3)])
    prompt = random_tokens(40, 2).tolist()
    for _ in range(3):
        ask = asked(remember=True, max_new_tokens=21)
        one, other = (r.generate(prompt, **ask) for r in (dense, runner))
        assert one.tokens == other.tokens
        assert one.report.reused_prefix == other.report.reused_prefix
        prompt = [*prompt, *one.tokens, 3, 1]
    assert other.report.reused_prefix > 80


def test_decoding_goes_on_where_it_ended(llama) -> None:
    answers = []
    for make in (dense_runner, verified_runner):
        runner = make(llama, MIXED)
        with runner.prefill(random_tokens(50, 4), "full", remember=False) as done:
            first = runner.decode(done, max_new_tokens=9, stop=()).tokens
            logits = runner.extend(done, [5, 6, 7])
            again = runner.decode(done, max_new_tokens=11, stop=()).tokens
            fork = done.fork()
            with fork:
                other = runner.decode(fork, max_new_tokens=6, stop=()).tokens
            more = runner.decode(done, max_new_tokens=6, stop=()).tokens
            answers.append((first, again, other, more, done.request.length))
        assert held(runner) == 0
        assert logits.shape[0] == 3
    assert answers[0] == answers[1]


# ---- others, room, failures -----------------------------------------------------------------


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_whoever_joins_and_leaves(llama, as_on_a_gpu) -> None:
    dense, runner = dense_runner(llama, MIXED), verified_runner(llama, MIXED)
    if as_on_a_gpu:
        runner._decoder.rounds.graphs = stepping_as_on_a_gpu(runner)._decoder.graphs
    lengths, limits = [20, 75, 5, 48, 90], [9, 17, 33, 4, 20]
    answers = []
    for r in (dense, runner):
        engine = r.engine(token_budget=40, chunk_tokens=16, max_running=3)
        some = [
            engine.submit(random_tokens(n, 7 + n), "full", **asked(max_new_tokens=limit))
            for n, limit in zip(lengths, limits, strict=True)
        ]
        engine.run()
        answers.append([request.result().tokens for request in some])
    assert answers[0] == answers[1]
    assert held(runner) == 0
    assert every_place_came_back(runner)


def test_requests_that_give_way_lose_nothing(llama) -> None:
    """Room for three of four: rounds find none and go on token by token; some are begun again."""
    dense = dense_runner(llama, [top_k(3), FULL])
    runner = verified_runner(llama, [top_k(3), FULL], max_tokens=14 * PAGE)
    prompts = [random_tokens(22, seed) for seed in range(4)]
    wanted = [dense.generate(p, "full", **asked()).tokens for p in prompts]
    engine = runner.engine(token_budget=64, chunk_tokens=32, max_running=4)
    some = [engine.submit(p, "full", **asked()) for p in prompts]
    engine.run()
    assert [request.result().tokens for request in some] == wanted
    assert engine.metrics()["preempted"] > 0
    assert held(runner) == 0
    assert every_place_came_back(runner)


def test_an_arena_without_room_for_drafts(llama) -> None:
    """The answer itself fits to the last token."""
    prompt = random_tokens(20, 3)
    wanted = dense_runner(llama, [top_k(3)]).generate(prompt, "full", **asked(max_new_tokens=29))
    runner = verified_runner(llama, [top_k(3)], max_tokens=48)
    made = runner.generate(prompt, "full", **asked(max_new_tokens=29))
    assert made.tokens == wanted.tokens


class _Broken(Exception):
    pass


@pytest.mark.parametrize("at", [1, 3, 5])
@pytest.mark.parametrize("kinds", [[top_k(4)], [top_k(4), WINDOW]])
def test_a_round_that_fails_takes_its_tokens_back(llama, monkeypatch, at, kinds) -> None:
    """Between drafts, and between these and the verification: a prompt of the caller's goes on."""
    dense, runner = dense_runner(llama, kinds), verified_runner(llama, kinds)
    wanted = dense.generate(random_tokens(50, 4), "full", **asked()).tokens
    forward, calls = rounds.forward, iter(range(100))

    def breaks(*given: Any) -> torch.Tensor:
        if next(calls) == at - 1:
            raise _Broken
        return forward(*given)

    with runner.prefill(random_tokens(50, 4), "full", remember=False) as done:
        with monkeypatch.context() as patch:
            patch.setattr(rounds, "forward", breaks)
            with pytest.raises(_Broken):
                runner.decode(done, max_new_tokens=STEPS, stop=())
        assert done.request.length == 50
        assert done.pending == wanted[:1]
        assert runner.extend(done, wanted[1:3]).argmax(-1).tolist() == wanted[2:4]
    assert held(runner) == 0
    assert every_place_came_back(runner)


def test_cancelled_between_draft_and_verification(llama, monkeypatch) -> None:
    """By another thread: no token comes any more, and all is given back behind the step."""
    runner = verified_runner(llama, [top_k(4)])
    engine = runner.engine()
    ask = asked(max_new_tokens=40)
    one, other = (engine.submit(random_tokens(30, seed), "full", **ask) for seed in (1, 2))
    engine.step()
    forward, calls = rounds.forward, []

    def cancels(*given: Any) -> torch.Tensor:
        calls.append(one.tokens)
        if len(calls) == 4:
            assert engine.cancel(one)
        return forward(*given)

    monkeypatch.setattr(rounds, "forward", cancels)
    engine.run()
    assert one.outcome == "cancelled"
    assert one.tokens == calls[3]
    wanted = dense_runner(llama, [top_k(4)]).generate(random_tokens(30, 2), "full", **ask)
    assert other.result().tokens == wanted.tokens
    assert held(runner) == 0


def test_logits_that_are_nan_end_their_request_alone(llama, monkeypatch) -> None:
    """A verification's row of one request: what it said before stands, and the others go on."""
    runner = verified_runner(llama, [top_k(500)])
    drawn = Sampling(temperature=0.8, seed=3)
    ask = asked(max_new_tokens=20, sampling=drawn)
    wanted = [
        dense_runner(llama, [FULL]).generate(random_tokens(n, n), "full", **ask).tokens
        for n in (30, 41)
    ]
    engine = runner.engine()
    broken, other = (engine.submit(random_tokens(n, n), "full", **ask) for n in (30, 41))
    forward = rounds.forward

    def nan(*given: Any) -> torch.Tensor:
        logits = forward(*given)
        if given[2].row_offsets is not None and len(logits) == 10:
            logits[2] = torch.nan
        return logits

    monkeypatch.setattr(rounds, "forward", nan)
    engine.run()
    assert broken.outcome == "failed"
    # One by the prompt, two by the rows before.
    assert broken.tokens == wanted[0][:3]
    assert other.result().tokens == wanted[1]
    assert held(runner) == 0


def test_drafts_that_are_nan_are_only_wrong(llama, monkeypatch) -> None:
    prompt, drawn = random_tokens(50, 4), Sampling(temperature=0.8, seed=3)
    wanted = dense_runner(llama, [FULL]).generate(prompt, "full", **asked(sampling=drawn)).tokens
    runner, forward = verified_runner(llama, [top_k(500)]), rounds.forward

    def nan(*given: Any) -> torch.Tensor:
        logits = forward(*given)
        return logits if given[2].row_offsets is not None else logits * torch.nan

    monkeypatch.setattr(rounds, "forward", nan)
    assert runner.generate(prompt, "full", **asked(sampling=drawn)).tokens == wanted


class _Own(Sampling):
    """A way of choosing that counts what it was asked."""

    def pick(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        self.__dict__["asked"] = self.__dict__.get("asked", 0) + 1
        return super().pick(logits, generator)


def test_a_way_of_choosing_of_ones_own_is_asked_once_a_token(llama) -> None:
    """Alone it drafts nothing; beside others they do."""
    runner, own = verified_runner(llama, [top_k(4)]), _Own(temperature=0.9, seed=4)
    prompt = random_tokens(50, 4)
    wanted = dense_runner(llama, [FULL]).generate(prompt, "full", **asked(sampling=own)).tokens
    own.__dict__.clear()
    own.__dict__.update(_Own(temperature=0.9, seed=4).__dict__)
    engine = runner.engine()
    one = engine.submit(prompt, "full", **asked(sampling=own))
    other = engine.submit(random_tokens(33, 1), "full", **asked())
    engine.run()
    assert one.result().tokens == wanted
    assert own.__dict__["asked"] == STEPS
    assert one.result().report.speculation.rounds == 0
    assert other.result().report.speculation.rounds > 0


def test_heads_that_were_restored_go_on_token_by_token(llama) -> None:
    answers = []
    for make in (dense_runner, verified_runner):
        runner = make(llama, [top_k(4), WINDOW])
        restoring = Restoring(lambda layer, _: (1,) if layer in (1, 2) else ())
        made = runner.generate(random_tokens(60, 8), restoring, **asked())
        answers.append(made.tokens)
    assert answers[0] == answers[1]
    assert made.report.speculation.rounds == 0


# ---- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize("speculate", [0, -1, PAGE, 2**40, "4", 1.5, True])
def test_a_number_of_drafts_that_is_none(llama, speculate) -> None:
    with pytest.raises(kvweave.InvalidArgument, match="speculate"):
        verified_runner(llama, [top_k(4)], speculate)


def test_what_does_not_go_with_drafts(llama) -> None:
    with pytest.raises(kvweave.InvalidArgument, match="speculate: expected a head map"):
        Runner(llama, max_tokens=256, progress=False, check=False, speculate=4)
    with pytest.raises(kvweave.InvalidArgument, match="with top_k heads, got one without"):
        verified_runner(llama, [FULL, WINDOW])
    runner = verified_runner(llama, [top_k(4, 16)])
    small = {"max_tokens": 256, "progress": False, "check": False, "speculate": 4}
    over = {"host_bytes": 2**20, "host_arrivals": "late"}
    with pytest.raises(kvweave.Unsupported, match="host_arrivals: expected a runner without sp"):
        Runner(llama, heads=runner.heads, **over, **small)
    with pytest.raises(kvweave.Unsupported, match="int4"):
        Runner(llama, heads=runner.heads, kv_dtype="int4", **small)
    with pytest.raises(kvweave.Unsupported, match="kv_dtype: expected a runner without speculate"):
        Runner(llama, kv_dtype="int4", **small)
    with pytest.raises(kvweave.Unsupported, match="healing: expected a runner without speculate"):
        runner.generate([1, 2, 3], healing=Healing())
    assert held(runner) == 0
