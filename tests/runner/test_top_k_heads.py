"""Heads that keep every token and read few pages: against the definition in plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvweave
from cached_prompts import knowledge
from decode_batches import decoding
from families import random_tokens, tiny
from head_maps import near
from kvweave.cache import HeadClassMap
from kvweave.runner import Healing, Runner, Sampling
from kvweave.runner.decode.kept_bounds import KeptBounds
from plan_policies import Restoring
from ranked_pages import (
    FULL,
    WINDOW,
    PlainDecoding,
    checked_choices,
    every_place_came_back,
    logits_of_steps,
    ranked_runner,
    stepping_as_on_a_gpu,
    top_k,
)

PAGE, STEPS = 4, 22
MIXED = [top_k(4), FULL, top_k(6, 3), WINDOW, top_k(4)]


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


def held(runner: Runner) -> int:
    runner.cache.check()
    return runner.cache.stats()["held"]


# ---- what is read ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama", [top_k(4)]),
        ("llama", [top_k(3, 5)]),
        ("llama", MIXED),
        ("llama", [FULL, top_k(5, 16)]),
        ("qwen3", [WINDOW, top_k(4)]),
        ("gemma", [top_k(5), FULL]),
        ("smollm3", MIXED),
    ],
)
@pytest.mark.parametrize("length", [3, 90])
def test_decoding_is_the_definition(name, kinds, length) -> None:
    model, tokens = tiny(name), random_tokens(length, 3)
    runner = ranked_runner(model, kinds, page_tokens=PAGE)
    said, logits = logits_of_steps(runner, tokens, STEPS)
    plain = PlainDecoding(model, kinds, PAGE)
    near(logits[0], plain.feed(tokens.tolist()))
    for token, got in zip(said, logits[1:], strict=False):
        near(got, plain.feed([token]))
    assert len(said) == len(logits) == STEPS + 1
    assert held(runner) == 0
    assert every_place_came_back(runner)


@pytest.mark.parametrize("kinds", [[top_k(4, 5)], MIXED])
def test_what_a_gpu_captures_is_what_is_decoded_elsewhere(llama, kinds) -> None:
    """Steps with a ranking and steps without; with room for more requests than there are."""
    runners = [ranked_runner(llama, kinds), stepping_as_on_a_gpu(ranked_runner(llama, kinds))]
    (said, logits), (also, others) = (
        logits_of_steps(runner, random_tokens(90, 3), STEPS) for runner in runners
    )
    assert said == also
    for one, other in zip(logits, others, strict=True):
        assert torch.equal(one, other)
    assert every_place_came_back(runners[1])


def test_decoding_of_a_real_model_is_the_definition(smollm2) -> None:
    model, tokenizer = smollm2
    kinds = [top_k(5), FULL, WINDOW, top_k(4, 3)]
    runner = ranked_runner(model, kinds, page_tokens=16, max_tokens=512)
    text = "The cat sat on the mat, and the dog looked at the moon. " * 3
    tokens = tokenizer(text + "What did the dog look at? It was a clear night, and far away")
    said, logits = logits_of_steps(runner, tokens["input_ids"] * 2, 6)
    plain = PlainDecoding(model, kinds, 16)
    for fed, got in zip([tokens["input_ids"] * 2, *([t] for t in said)], logits, strict=False):
        torch.testing.assert_close(got, plain.feed(list(fed)), atol=2e-3, rtol=0)


def test_few_pages_are_another_answer_than_all(llama) -> None:
    """What the tests above compare with is no dense decoding."""
    tokens = random_tokens(90, 3)
    (_, few), (_, dense) = (
        logits_of_steps(ranked_runner(llama, [kind]), tokens, 1) for kind in (top_k(3), FULL)
    )
    assert torch.equal(few[0], dense[0])
    assert float((few[1] - dense[1]).abs().max()) > 0.01


@pytest.mark.parametrize("kinds", [[top_k(500)], [top_k(500), FULL], [top_k(500, 16), WINDOW]])
def test_as_many_pages_as_there_are_change_no_bit(llama, kinds) -> None:
    full = [FULL if kind["kind"] == "top_k" else kind for kind in kinds]
    tokens = random_tokens(70, 4)
    answers = [logits_of_steps(ranked_runner(llama, some), tokens, STEPS) for some in (kinds, full)]
    assert answers[0][0] == answers[1][0]
    for one, other in zip(answers[0][1], answers[1][1], strict=True):
        assert torch.equal(one, other)


def test_a_page_more_than_is_read_is_where_choosing_begins(llama) -> None:
    """Pages are 4 tokens: of 16 all are read, from the 17th on three of five."""
    tokens, kinds = random_tokens(13, 5), [top_k(4)]
    _, few = logits_of_steps(ranked_runner(llama, kinds), tokens, 5)
    _, dense = logits_of_steps(ranked_runner(llama, [FULL]), tokens, 5)
    for step in range(4):
        assert torch.equal(few[step], dense[step])
    assert not torch.equal(few[4], dense[4])


# ---- batches, engines, other requests' heads ------------------------------------------------


def test_a_batch_is_each_alone(llama) -> None:
    runner = ranked_runner(llama, MIXED)
    prompts = [random_tokens(n, n) for n in (1, 30, 61, 130)]
    ask = {"max_new_tokens": STEPS, "stop": (), "remember": False}
    alone = [runner.generate(p, "full", **ask).tokens for p in prompts]
    batch = runner.generate_batch(prompts, "full", **ask)
    assert [made.tokens for made in batch] == alone
    assert every_place_came_back(runner)


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_whoever_joins_and_leaves_each_says_what_it_says_alone(llama, as_on_a_gpu) -> None:
    runner = ranked_runner(llama, [top_k(4, 3), WINDOW, top_k(5)])
    if as_on_a_gpu:
        stepping_as_on_a_gpu(runner)
    lengths, limits = [20, 75, 5, 48], [9, 17, 22, 4]
    prompts = [random_tokens(length, 7 + length) for length in lengths]
    alone = [
        runner.generate(p, "full", max_new_tokens=limit, stop=(), remember=False).tokens
        for p, limit in zip(prompts, limits, strict=True)
    ]
    engine = runner.engine(token_budget=40, chunk_tokens=16, max_running=3)
    asked = [
        engine.submit(p, "full", max_new_tokens=limit, stop=(), remember=False)
        for p, limit in zip(prompts, limits, strict=True)
    ]
    engine.run()
    assert [request.result().tokens for request in asked] == alone
    assert held(runner) == 0
    assert every_place_came_back(runner)


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_what_was_chosen_stays_when_more_requests_join(llama, as_on_a_gpu) -> None:
    """Ranked once in a while, in batches that outgrow the room of the first and change order."""
    kinds = [top_k(4, 16), top_k(3, 7)]
    runner, draws = ranked_runner(llama, kinds, max_tokens=4096), np.random.default_rng(1)
    if as_on_a_gpu:
        stepping_as_on_a_gpu(runner)
    prompts = [random_tokens(int(draws.integers(10, 90)), seed) for seed in range(11)]
    alone = [logits_of_steps(runner, prompt, 20) for prompt in prompts]
    done = [runner.prefill(p, "full", remember=False, reserve_tokens=20) for p in prompts]
    sequences = [decoding(runner, one, 21) for one in done]
    with torch.inference_mode():
        for turn in range(30):
            batch = [s for s in sequences[: 1 + 2 * turn] if not s.done]
            if batch:
                runner._decoder.step([batch[i] for i in draws.permutation(len(batch))])
    assert [s.tokens for s in sequences] == [said for said, _ in alone]
    runner._decoder.forget()
    for one in done:
        one.release()
    assert every_place_came_back(runner)


def test_whoever_comes_next_into_the_same_blocks_has_bounds_of_its_own(llama) -> None:
    """Both list the very same entries: only what lies in them differs."""
    runner, tables = ranked_runner(llama, [top_k(4)]), []
    with torch.inference_mode(), checked_choices(runner) as counted:
        for seed in range(3):
            tokens = random_tokens(50, seed)
            with runner.prefill(tokens, "full", remember=False, reserve_tokens=4) as done:
                sequence = decoding(runner, done, 4)
                for _ in range(3):
                    runner._decoder.step([sequence])
                tables.append(done.request.entries(0).tolist())
    assert tables[0] == tables[1] == tables[2]
    assert min(counted) == 8


def test_nothing_holds_on_to_bounds_that_have_moved(llama) -> None:
    """Steps of all sizes so far know them where they were."""
    runner = stepping_as_on_a_gpu(ranked_runner(llama, [top_k(4, 3)], max_tokens=4096))
    prompts = [random_tokens(length, length) for length in (40, 50, 60, 300)]
    with torch.inference_mode():
        done = [runner.prefill(p, "full", remember=False, reserve_tokens=9) for p in prompts]
        sequences = [decoding(runner, one, 9) for one in done]
        rooms = []
        for count in range(1, 5):
            for _ in range(2):
                runner._decoder.step(sequences[:count])
            (slots,) = (s for s in runner._decoder._slots if s.members)
            rooms.append(slots.chosen.rooms)
            known = [size.chosen.rooms for size in runner._decoder.graphs._sizes.values()]
            assert known
            assert all(room is rooms[-1] for room in known)
    assert rooms[0] is not rooms[-1]
    runner._decoder.forget()
    for one in done:
        one.release()


@pytest.mark.parametrize("what", ["bounds", "entries"])
def test_memory_that_runs_out_takes_nothing(llama, what) -> None:
    """Room for bounds, or for what more requests choose: the next ones find what they need."""
    runner = ranked_runner(llama, [top_k(4, 3)], max_tokens=4096)
    prompts = [random_tokens(40 + 20 * seed, seed) for seed in range(10)]
    expected = [logits_of_steps(runner, prompt, 6)[0] for prompt in prompts]

    def no_room(*_given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        done = [runner.prefill(p, "full", remember=False, reserve_tokens=6) for p in prompts]
        sequences = [decoding(runner, one, 7) for one in done]
        runner._decoder.step(sequences[:1])
        if what == "bounds":
            patch.setattr(KeptBounds, "_zeros", no_room)
        else:
            patch.setattr(torch.Tensor, "new_zeros", no_room)
        with pytest.raises(kvweave.OutOfMemory):
            runner._decoder.step(sequences)
        patch.undo()
        runner._decoder.forget()
        for one in done:
            one.release()
    assert every_place_came_back(runner)
    with torch.inference_mode():
        done = [runner.prefill(p, "full", remember=False, reserve_tokens=6) for p in prompts]
        sequences = [decoding(runner, one, 7) for one in done]
        for _ in range(6):
            runner._decoder.step(sequences)
        assert [s.tokens for s in sequences] == expected
        runner._decoder.forget()
        for one in done:
            one.release()
    assert held(runner) == 0
    assert every_place_came_back(runner)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_table_whose_blocks_were_copied_is_ranked_anew(llama, steps) -> None:
    """In mid-period: what was chosen before lies in blocks that are somebody else's now."""
    runner = ranked_runner(llama, [top_k(4, 16)])
    with (
        runner.prefill(random_tokens(50, 6), "full", remember=False, reserve_tokens=9) as done,
        torch.inference_mode(),
    ):
        one = decoding(runner, done, 9)
        for _ in range(steps):
            runner._decoder.step([one])
        before = done.request.entries(0).tolist()
        fork = done.request.fork()
        done.kv.own(np.arange(40, dtype=np.int32), None)
        runner._decoder.step([one])
        table = done.request.entries(0).tolist()
        assert sum(row not in before for row in table) >= 10
        (slots,) = (s for s in runner._decoder._slots if one in s.members)
        chosen = slots.chosen.groups[0].room.chosen[slots.members[one]]
        assert all(row in table for head in chosen[:, :4].tolist() for row in head)
        runner._decoder.forget()
        fork.release()
    assert every_place_came_back(runner)


def test_requests_that_give_way_end_and_leave_nothing(llama) -> None:
    """Who comes back has its answer so far computed densely: its tokens may be others then."""
    runner = ranked_runner(llama, [top_k(3), FULL], max_tokens=26 * PAGE)
    engine = runner.engine(token_budget=64, chunk_tokens=32, max_running=4)
    asked = [
        engine.submit(random_tokens(30, seed), "full", max_new_tokens=24, stop=(), remember=False)
        for seed in range(4)
    ]
    with checked_choices(runner):
        engine.run()
    assert [len(request.result().tokens) for request in asked] == [24] * 4
    assert engine.metrics()["preempted"] > 0
    assert held(runner) == 0
    assert every_place_came_back(runner)


def test_heads_that_are_restored_beside_heads_that_choose(llama) -> None:
    """A window head that was made full for one request reads all of it; the others choose."""
    kinds = [top_k(4), WINDOW]
    runner = ranked_runner(llama, kinds)
    restoring = Restoring(lambda layer, _: (1,) if layer in (1, 2) else ())
    tokens, other = random_tokens(60, 8), random_tokens(33, 9)
    ask = {"max_new_tokens": STEPS, "stop": (), "remember": False}
    alone = [
        runner.generate(tokens, restoring, **ask).tokens,
        runner.generate(other, "full", **ask).tokens,
    ]
    with (
        runner.prefill(tokens, restoring, remember=False, reserve_tokens=STEPS) as one,
        runner.prefill(other, "full", remember=False, reserve_tokens=STEPS) as two,
        torch.inference_mode(),
        checked_choices(runner) as counted,
    ):
        both = [decoding(runner, one, STEPS), decoding(runner, two, STEPS)]
        for _ in range(STEPS - 1):
            runner._decoder.step(both)
        runner._decoder.forget()
        assert [sequence.tokens for sequence in both] == alone
    assert min(counted) == 4
    assert every_place_came_back(runner)


def test_a_head_that_chooses_is_not_restored(llama) -> None:
    runner = ranked_runner(llama, [top_k(4)])
    with pytest.raises(kvweave.InvalidArgument, match="full already|one that is full"):
        runner.prefill(random_tokens(40, 1), Restoring(lambda *_: (0,)), remember=False)


# ---- whose pages they are -------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["materialise", "share"])
@pytest.mark.parametrize("policy", ["naive", "epic", "sparsex"])
def test_bounds_are_of_what_lies_in_reused_pages(llama, mode, policy) -> None:
    """Segments that begin inside a page, are turned, or are rewritten in part."""
    runner = ranked_runner(llama, [top_k(5), FULL, top_k(12)], page_tokens=8, mode=mode)
    parts = knowledge(runner, 3)
    with checked_choices(runner) as counted:
        for _ in range(2):
            runner.generate(parts, policy, max_new_tokens=6, stop=())
    assert min(counted) >= 5
    assert every_place_came_back(runner)


def test_a_prefix_that_others_hold_is_ranked_for_each_alone(llama) -> None:
    """The second prompt lists the first five tokens of a page that the first one filled."""
    runner = ranked_runner(llama, [top_k(3)], page_tokens=8)
    prompt = random_tokens(80, 2)
    other = prompt[:45].tolist() + random_tokens(20, 3).tolist()
    fresh = ranked_runner(llama, [top_k(3)], page_tokens=8)
    alone = fresh.generate(other, "full", max_new_tokens=STEPS, stop=(), remember=False).tokens
    with checked_choices(runner):
        runner.generate(prompt, "prefix", max_new_tokens=3, stop=())
        made = runner.generate_batch(
            [prompt, other], "prefix", max_new_tokens=STEPS, stop=(), remember=False
        )
    assert made[1].report.reused_prefix >= 40
    assert made[1].tokens == alone


def test_forks_choose_apart(llama) -> None:
    """A fork writes into a copy of the last page; what it chose before is its own."""
    runner = ranked_runner(llama, [top_k(3)])
    tokens = random_tokens(50, 6)
    with (
        runner.prefill(tokens, "full", remember=False, reserve_tokens=9) as done,
        torch.inference_mode(),
        checked_choices(runner) as counted,
    ):
        one = decoding(runner, done, 9)
        runner._decoder.step([one])
        fork = decoding(runner, done, 9)
        fork.request, fork.tokens = done.request.fork(), [7]
        for _ in range(6):
            runner._decoder.step([one, fork])
        runner._decoder.forget()
        fork.request.release()
    assert min(counted) == 8
    assert every_place_came_back(runner)


@pytest.mark.parametrize("mode", ["materialise", "share"])
@pytest.mark.parametrize("estimate", [False, True])
def test_what_healing_rewrites_has_bounds_and_means_anew(llama, mode, estimate) -> None:
    kinds = [top_k(5, estimate=estimate), FULL]
    runner = ranked_runner(llama, kinds, page_tokens=8, mode=mode)
    parts = knowledge(runner, 3)
    healing = Healing(every=3, bound=0.0, share=0.2, most=1.0)
    with checked_choices(runner) as counted:
        made = runner.generate(
            parts, "naive", max_new_tokens=14, stop=(), remember=False, healing=healing
        )
    assert made.report.healing.healed >= 3
    assert min(counted) == 4


def test_what_is_decoded_from_elsewhere_says_the_same(llama) -> None:
    kinds = [top_k(4, 2), FULL]
    one, other = ranked_runner(llama, kinds), ranked_runner(llama, kinds)
    tokens = random_tokens(70, 12)
    expected = one.generate(tokens, "full", max_new_tokens=12, stop=(), remember=False).tokens
    with one.prefill(tokens, "full", remember=False) as done:
        payload = one.export(done)
    assert other.resume(payload, max_new_tokens=12, stop=()).tokens == expected


def test_what_is_remembered_is_read_as_what_was_computed(llama) -> None:
    runner = ranked_runner(llama, MIXED)
    ask = {"max_new_tokens": 12, "stop": (), "sampling": Sampling(temperature=0.8, seed=3)}
    first, second = (runner.generate(random_tokens(60, 1), "prefix", **ask) for _ in range(2))
    assert second.tokens == first.tokens
    assert second.report.reused_prefix > 0


@pytest.mark.parametrize("way", ["generate", "decode", "engine", "conversation"])
@pytest.mark.parametrize(("pages", "chooses"), [(3, True), (500, False)])
def test_what_was_decoded_by_choice_is_nobodys_exact_prefix(llama, way, pages, chooses) -> None:
    runner, prompt = ranked_runner(llama, [top_k(pages), FULL]), random_tokens(48, 14).tolist()
    ask = {"max_new_tokens": 18, "stop": ()}
    if way == "generate":
        said = runner.generate(prompt, "prefix", **ask).tokens
    elif way == "decode":
        with runner.prefill(prompt, "prefix") as done:
            said = runner.decode(done, **ask).tokens
            said += runner.decode(done, **ask).tokens
    elif way == "engine":
        engine = runner.engine()
        request = engine.submit(prompt, "prefix", **ask)
        engine.run()
        said = request.result().tokens
    else:
        with runner.conversation("prefix") as talk:
            said = talk.ask(prompt, **ask).tokens
            more = random_tokens(9, 15).tolist()
            said += more + talk.ask(more, **ask).tokens
    known = prompt + said + random_tokens(5, 16).tolist()
    with runner.prefill(known, "prefix", remember=False) as done:
        found, logits = done.report.reused_prefix, done.logits.clone()
    fresh = ranked_runner(llama, [top_k(pages), FULL])
    with fresh.prefill(known, "full", remember=False) as done:
        near(logits, done.logits)
    assert len(prompt) - PAGE < found <= len(prompt) if chooses else found > len(prompt) + 12


# ---- what is refused ------------------------------------------------------------------------


def test_fewer_pages_than_are_always_read_are_refused(llama) -> None:
    with pytest.raises(kvweave.CorruptHeadMap, match="top_k.pages of at least 3, .* got 2"):
        ranked_runner(llama, [FULL, top_k(2)])


def test_layers_with_a_window_of_their_own_choose_nothing() -> None:
    with pytest.raises(kvweave.Unsupported, match="no top_k heads in layer 2"):
        ranked_runner(tiny("qwen2-sliding"), [top_k(4)])


def test_a_map_says_what_its_groups_read(llama) -> None:
    runner = ranked_runner(llama, MIXED)
    groups = {(g.kind, g.read, g.rerank_every) for g in runner.cache.groups}
    assert groups == {("full", 0, 0), ("window", 0, 0), ("top_k", 4, 1), ("top_k", 6, 3)}
    assert isinstance(runner.heads, HeadClassMap)
