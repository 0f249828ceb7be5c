"""Healing: answers watched while they are decoded, and what is recomputed for them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvweave
from families import random_tokens, tiny
from head_maps import classes_of, near, runner_of
from healed_answers import TOKENS, frozen_kv, kv_of, reader
from kvweave.plan import one_pass
from kvweave.policies import Foresight
from kvweave.runner import Healing, Sampling, Segment
from kvweave.runner.healing import Watch
from kvweave.runner.kv.request_kv import RequestKv
from kvweave.runner.kv.reused_tokens import ReusedTokens, positions_of

ALWAYS = Healing(every=4, bound=0.0, share=0.1, most=1.0)
EVERYTHING = Healing(every=1, bound=0.0, share=1.0, most=1.0)
NEVER = Healing(every=4, bound=1.0, rise=1.0, share=0.1, most=1.0)


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module", params=["materialise", "share"])
def reading(request, model):
    return reader(model, request.param)


def held(runner):
    """Blocks that are held: frozen ones, once all requests have been released."""
    runner.cache.check()
    return runner.cache.stats()["held"]


@pytest.mark.parametrize("policy", ["naive", Foresight(share=0.1, draft=2), "epic"])
def test_a_bound_that_is_never_passed_changes_nothing(reading, policy):
    runner, parts = reading
    plain = runner.generate(parts, policy, max_new_tokens=TOKENS, remember=False)
    watched = runner.generate(parts, policy, max_new_tokens=TOKENS, remember=False, healing=NEVER)
    assert watched.tokens == plain.tokens
    healing = watched.report.healing
    assert healing.watched == (TOKENS - 2) // 4
    assert len(healing.held) == healing.watched
    assert all(0 < held < 1 for held in healing.held)
    assert len(healing.risen) == healing.watched
    assert healing.risen[0] == 0
    assert all(risen < held for risen, held in zip(healing.risen, healing.held, strict=True))
    assert healing.healed == healing.recomputed == healing.heal_flops == 0 < healing.watch_flops
    assert plain.report.healing is None
    assert watched.report.to_dict()["healing"]["watched"] == healing.watched


@pytest.mark.parametrize("named", ["bound", "rise"])
def test_it_is_healed_when_a_bound_is_passed_and_not_before(reading, named):
    runner, parts = reading
    ask = {"max_new_tokens": 2 * TOKENS, "remember": False}
    never = runner.generate(parts, "naive", healing=NEVER, **ask).report.healing
    found = never.held if named == "bound" else never.risen
    least = max(found) - 1e-6
    first = next(i for i, one in enumerate(found) if one > least)
    settings = replace(NEVER, most=0.1, **{named: least})
    healing = runner.generate(parts, "naive", healing=settings, **ask).report.healing
    assert (healing.healed, healing.watched) == (1, first + 1)
    assert healing.held == never.held[: first + 1]
    assert healing.risen == never.risen[: first + 1]


def test_what_is_held_is_compared_with_the_mean_of_what_was_before(reading):
    runner, parts = reading
    shares = torch.rand(5, 9, generator=torch.Generator().manual_seed(2))
    with runner.prefill(parts, "naive", remember=False) as done:
        watch = Watch(done, None, NEVER)
        for index, some in enumerate(shares):
            before = shares[:index].mean(0) if index else some
            torch.testing.assert_close(watch.compare(some), some - before)
            watch.report.watched += 1


def test_what_is_healed_is_counted_within_its_share(reading):
    runner, parts = reading
    frozen, before = held(runner), frozen_kv(runner, 3)
    settings = Healing(every=4, bound=0.0, share=0.05, most=0.12)
    once, again = (
        runner.generate(parts, "naive", max_new_tokens=TOKENS, remember=False, healing=settings)
        for _ in range(2)
    )
    reused, healing = once.report.reused_segment, once.report.healing
    sizes = [round(0.05 * reused)] * 2
    sizes.append(round(0.12 * reused) - sum(sizes))
    assert (healing.healed, healing.recomputed) == (3, sum(sizes))
    assert healing.watched == 3
    assert min(healing.heal_flops, healing.heal_s, healing.watch_s) > 0
    assert again.tokens == once.tokens
    assert again.report.healing.held == healing.held
    assert torch.equal(frozen_kv(runner, 3), before)
    assert held(runner) == frozen


@pytest.mark.parametrize("policy", ["naive", Foresight(share=0.2, draft=2)])
@pytest.mark.parametrize("mode", ["materialise", "share"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_healing_everything_is_full(family, mode, policy):
    model = tiny(family)
    runner, parts = reader(model, mode)
    with runner.prefill(parts, policy, remember=False, reserve_tokens=8) as done:
        said = runner.decode(done, max_new_tokens=8, healing=EVERYTHING)
        assert said.report.healing.healed == 1
        assert not len(done.reused.left)
        tokens = done.request.tokens
        more = runner.extend(done, random_tokens(3, 5))
        whole = np.concatenate((tokens, said.tokens[-1:], random_tokens(3, 5)))
        with runner.prefill(whole.tolist(), "full", logits_from=len(tokens) - 1) as full:
            near(more, full.logits[-3:])
            if mode == "materialise":
                near(kv_of(runner, done), kv_of(runner, full))


def test_a_healing_computes_the_chosen_and_what_stands_behind_the_last_segment(model):
    """One healing, against the same rows named to the executor over the same tokens."""
    runner, parts = reader(model)
    settings = Healing(every=6, bound=0.0, share=0.1, most=0.1)
    ask = {"remember": False, "reserve_tokens": 9}
    with runner.prefill(parts, "naive", **ask) as done, runner.prefill(parts, "naive", **ask) as by:
        left, prompt = done.reused.left, done.request.length
        said = runner.decode(done, max_new_tokens=8, healing=settings).tokens
        chosen = np.setdiff1d(left, done.reused.left)
        assert len(chosen) == round(0.1 * len(left))
        runner.extend(by, said[:6])
        behind = np.arange(runner.tokenize(parts).segments[-2][1], prompt + 6)
        rows = np.union1d(chosen, behind).astype(np.int32)
        pre, request = runner._prefiller, by.request
        kv = RequestKv(pre.heads, pre.pages, request, pre.rotary.table(prompt + 6))
        ids = torch.from_numpy(request.tokens).long()
        pre.executor.prefill(kv, ids, one_pass(len(runner.spec.layers), rows), prompt + 5)
        runner.extend(by, said[6:7])
        near(kv_of(runner, done), kv_of(runner, by))


def test_others_in_the_batch_do_not_notice(reading):
    runner, parts = reading
    fresh = random_tokens(40, 77).tolist()
    other = [*parts[:2], Segment(tokens=fresh, namespace="fresh")]
    ask = {"max_new_tokens": TOKENS, "remember": False}
    alone = runner.generate_batch([other, fresh], "naive", **ask)
    watched = runner.generate(parts, "naive", healing=ALWAYS, **ask)
    # Nothing of the others is reused, so that nothing of theirs is healed.
    apart = runner.generate_batch([parts, fresh], "naive", healing=ALWAYS, **ask)
    assert apart[0].tokens == watched.tokens
    assert apart[1].tokens == alone[1].tokens
    assert apart[0].report.healing.healed > 0 == apart[1].report.healing.watched
    both = runner.generate_batch([other, parts], "naive", healing=ALWAYS, **ask)
    assert both[1].tokens == watched.tokens
    assert both[0].tokens == runner.generate(other, "naive", healing=ALWAYS, **ask).tokens


def test_a_stream_is_healed_as_an_answer_is(reading):
    runner, parts = reading
    ask = {"max_new_tokens": TOKENS, "healing": ALWAYS, "sampling": Sampling(0.8, seed=3)}
    wanted = runner.generate(parts, "naive", remember=False, **ask).tokens
    said = [token.token for token in runner.stream(parts, "naive", remember=False, **ask)]
    assert said == wanted


def test_what_is_remembered_is_so_at_the_end(model):
    runner, parts = reader(model)
    assert len(runner.tokenize(parts).tokens) % 16 == 0

    def found(answer):
        ask = [Segment(tokens=answer[:20])]
        with runner.prefill(ask, "naive", remember=False) as done:
            return done.report.reused_segment

    said = []
    for token in runner.stream(parts, "naive", max_new_tokens=30, healing=ALWAYS):
        said.append(token.token)
        assert len(said) < 20 or found(said) == 0
    assert found(said) == 19
    whole = np.append(runner.tokenize(parts).tokens, said)
    fresh = runner.tokenize(parts).segments[0][1]
    with runner.prefill(whole.tolist(), "prefix", remember=False) as done:
        assert done.report.reused_prefix == fresh


def test_no_room_leaves_the_answer_as_it_was(model):
    # In mode share a recomputed token needs a block of its own.
    runner, parts = reader(model, "share")
    plain = runner.generate(parts, "naive", max_new_tokens=13, remember=False).tokens
    frozen, taken = held(runner), list[kvweave.KvRequest]()
    with runner.prefill(parts, "naive", remember=False, reserve_tokens=12) as done:
        with suppress(kvweave.PoolFull):
            while True:
                taken.append(runner.cache.admit(random_tokens(16, len(taken)), reuse="none"))
        said = runner.decode(
            done, max_new_tokens=13, healing=Healing(every=4, bound=0.0, share=0.1, most=1.0)
        )
        assert said.tokens == plain
        assert (said.report.healing.refused, said.report.healing.healed) == ({"no room": 2}, 0)
        taken.pop().release()
        for request in taken:
            request.release()
        again = runner.decode(done, max_new_tokens=10, healing=ALWAYS)
        assert again.report.healing.healed == 2
    assert held(runner) == frozen


@pytest.mark.parametrize("recent", [64, 4096])
def test_window_heads_are_healed_while_they_keep_what_is_seen(model, recent):
    runner, parts = reader(model, classes=classes_of(model, (None, (recent, 4))))
    with runner.prefill(parts, "naive", remember=False, reserve_tokens=8) as done:
        said = runner.decode(done, max_new_tokens=8, healing=EVERYTHING)
        tokens = done.request.tokens
        if recent == 64:
            assert said.report.healing.refused == {"windows": 1}
            assert said.report.healing.watched == 0
            plain = runner.generate(parts, "naive", max_new_tokens=8, remember=False)
            assert said.tokens == plain.tokens
            return
        assert said.report.healing.healed == 1
        more = runner.extend(done, random_tokens(3, 5))
        whole = np.concatenate((tokens, said.tokens[-1:], random_tokens(3, 5)))
        with runner.prefill(whole.tolist(), "full", logits_from=len(tokens) - 1) as full:
            near(more, full.logits[-3:])


def test_frequencies_that_change_with_the_length_are_left_alone():
    # Up to 64 tokens they are those of the segment.
    runner = runner_of(tiny("llama-dynamic"))
    segment = random_tokens(40, 1).tolist()
    runner.insert(segment, "segment", "kb")
    parts = [Segment(tokens=random_tokens(n, n).tolist(), namespace="fresh") for n in (9, 7)]
    parts.insert(1, Segment(tokens=segment, namespace="kb"))
    ask = {"max_new_tokens": 24, "remember": False}
    said = runner.generate(parts, "naive", healing=Healing(every=6, bound=0, most=0.3), **ask)
    assert (said.report.healing.healed, said.report.healing.refused) == (1, {"frequencies": 1})
    never = Healing(every=6, bound=1.0, rise=1.0)
    said = runner.generate(parts, "naive", healing=never, **ask)
    assert said.report.healing.watched == said.report.healing.refused["frequencies"] == 1
    assert said.tokens == runner.generate(parts, "naive", **ask).tokens


def test_nothing_reused_is_nothing_watched(model):
    runner, _ = reader(model)
    said = runner.generate([1, 2, 3], "naive", max_new_tokens=6, healing=EVERYTHING)
    healing = said.report.healing
    assert (healing.watched, healing.watch_flops, healing.refused) == (0, 0, {})


def test_a_prompt_that_others_may_find_is_not_written(model):
    runner, parts = reader(model)
    with runner.prefill(parts, "naive") as done:
        with pytest.raises(kvweave.InvalidArgument, match="expected a prompt that others cannot"):
            runner.decode(done, max_new_tokens=4, healing=ALWAYS)
        assert len(runner.decode(done, max_new_tokens=4).tokens) == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: Healing(every=0),
        lambda: Healing(bound=-0.1),
        lambda: Healing(rise=1.1),
        lambda: Healing(bound=float("nan")),
        lambda: Healing(share=1.1),
        lambda: Healing(most=2.0),
        lambda: Healing(depth=-1.0),
        lambda: Healing(near=2),
    ],
)
def test_bad_settings(make):
    with pytest.raises(kvweave.InvalidArgument, match="healing: expected .* got"):
        make()


def test_a_class_is_no_setting(model):
    runner, parts = reader(model)
    with pytest.raises(kvweave.InvalidArgument, match="healing: expected a Healing or None"):
        runner.generate(parts, "naive", healing=Healing)


@st.composite
def reused_tokens(draw):
    edges = sorted(draw(st.sets(st.integers(0, 60), min_size=2, max_size=8)))
    spans = tuple(zip(edges[::2], edges[1::2], strict=False))
    computed = draw(st.lists(st.integers(0, 60), max_size=30))
    return spans, np.unique(np.asarray(computed, np.int32))


@settings(max_examples=60)
@given(drawn=reused_tokens(), first=st.integers(0, 60), more=st.integers(0, 10))
def test_reused_tokens_are_settled_or_left(drawn, first, more):
    spans, computed = drawn
    reused, covered = ReusedTokens.of(spans, computed), set()
    for start, end in spans:
        covered |= set(range(start, end))
    assert positions_of(spans).tolist() == sorted(covered)
    assert reused.left.tolist() == sorted(covered - set(computed.tolist()))
    assert reused.count == len(covered)
    end = first + more
    assert reused.others(first, end).tolist() == [p for p in range(first, end) if p not in covered]
    fork = reused.copy()
    assert fork.settle(np.arange(61, dtype=np.int32)) == len(reused.left)
    assert len(fork.left) == 0
    assert reused.settle(computed) == 0
