"""Conversations: turns over one live request, what each computes, and who sees it."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvweave
from families import random_tokens, tiny
from head_maps import classes_of, near
from healed_answers import frozen_kv, kv_of, reader
from kvweave.cache import KvCache, KvShape
from kvweave.lab.eval.encoded import inserted
from kvweave.lab.eval.sample import Said, Sample, Turn
from kvweave.policies import Epic, Foresight, Naive
from kvweave.runner import Healing, Runner, Segment, chat_parts, chat_turn_parts
from kvweave.runner.conversation.turns import copies_of

LOOKING = Foresight(share=0.1, draft=2)


@pytest.fixture(scope="module")
def model():
    return tiny("llama", max_position_embeddings=1024)


@pytest.fixture(scope="module", params=["materialise", "share"])
def reading(request, model):
    return reader(model, request.param)


def fresh(count, seed):
    return [Segment(tokens=random_tokens(count, seed).tolist(), namespace="fresh")]


def text(count, seed):
    """Fresh tokens that no segment stands for, so that nothing is looked up."""
    return random_tokens(count, seed).tolist()


def another(runner, index=9):
    """A turn with a segment that the prompt does not have, between fresh text."""
    tokens = random_tokens(70, 100 + index).tolist()
    runner.insert(tokens, f"another {index}", "more")
    return [*fresh(8, 50 + index), Segment(tokens=tokens, namespace="more"), *fresh(6, 60 + index)]


class Seen(Foresight):
    """Foresight that remembers what it was told of each prompt."""

    views: list

    def plan(self, prompt):
        self.views.append(prompt)
        return super().plan(prompt)


def seeing(**settings):
    policy = Seen(**settings)
    object.__setattr__(policy, "views", [])
    return policy


@contextmanager
def nothing_held_besides(runner):
    runner.cache.check()
    before = runner.cache.stats()["held"]
    yield
    runner.cache.check()
    assert runner.cache.stats()["held"] == before


@pytest.mark.parametrize("policy", ["naive", LOOKING, "full"])
def test_the_first_turn_is_generate(reading, policy):
    runner, parts = reading
    wanted = runner.generate(parts, policy, max_new_tokens=9, remember=False)
    with runner.conversation(policy, remember=False) as talk:
        said = talk.ask(parts, max_new_tokens=9)
        assert said.tokens == wanted.tokens
        assert talk.tokens == wanted.report.tokens + 9
        assert said.report is talk.reports[0]
        assert (said.report.settled_before, said.report.recomputed) == (0, wanted.report.recomputed)


def test_turns_of_full_are_full(model):
    runner, parts = reader(model)
    tokens = runner.tokenize(parts).tokens.tolist()
    with runner.conversation("full", remember=False) as talk:
        whole = list[int]()
        for turn in (tokens, text(20, 31), text(1, 32)):
            said = talk.ask(turn, max_new_tokens=5, stop=[])
            whole = [*whole, *turn]
            wanted = runner.generate(whole, "full", max_new_tokens=5, remember=False, stop=[])
            assert said.tokens == wanted.tokens
            whole = [*whole, *said.tokens]


@pytest.mark.parametrize("brings", [False, True])
def test_what_earlier_turns_computed_stays(reading, brings):
    """Without recomputation a turn is nothing but more rows over the same KV."""
    runner, parts = reading
    with (
        nothing_held_besides(runner),
        runner.conversation("naive", remember=False) as talk,
        runner.prefill(parts, "naive", remember=False) as done,
    ):
        said = talk.ask(parts, max_new_tokens=4, stop=[]).tokens
        new = fresh(30, 41) if brings else text(30, 41)
        tokens = runner.tokenize(new).tokens
        wanted = runner.extend(done, [*said, *tokens.tolist()])
        live = talk.prefill(new, logits_from=done.request.length - 30)
        near(live.logits, wanted[-30:])
        report = live.report
        assert (report.settled_now, report.recomputed) == (0, 31)
        assert report.settled_before == talk.reports[0].recomputed + 3
        assert report.reused_segment == talk.reports[0].reused_segment
        assert report.rows_per_layer == [31] * len(runner.spec.layers)
        if runner._prefiller.mode == "materialise":
            near(kv_of(runner, live), kv_of(runner, done))


def test_a_turn_is_told_what_is_settled_and_computes_only_further_tokens(reading):
    runner, parts = reading
    policy = seeing(share=0.1, draft=2)
    with runner.conversation(policy, remember=False) as talk:
        talk.ask(parts, max_new_tokens=4, stop=[])
        for turn in (text(12, 42), another(runner)):
            left, length = talk._live.reused.left, talk._live.request.length
            report = talk.ask(turn, max_new_tokens=4, stop=[]).report
            view = policy.views[-1]
            new = runner.tokenize(turn)
            marked = [(a, b) for a, b, name in new.segments if name == "more"]
            size = sum(b - a for a, b in marked)
            assert view.tokens == length + 1 + len(new.tokens)
            assert len(view.fresh) == 1 + len(new.tokens) - size
            assert view.fresh[0] == length
            assert np.array_equal(view.reused[: len(left)], left)
            assert len(view.reused) == len(left) + size == report.reused_segment
            assert len(view.settled) == length - len(left) == report.settled_before
            assert len(view.reused) - len(talk._live.reused.left) == report.settled_now
            assert report.settled_now <= round(0.1 * len(view.reused))
        assert [one.settled_now > 0 for one in talk.reports] == [True] * 3


@pytest.mark.parametrize("mode", ["materialise", "share"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_recomputing_everything_in_every_turn_is_full(family, mode):
    runner, parts = reader(tiny(family), mode)
    with runner.conversation(Foresight(share=1.0), remember=False) as talk:
        said = talk.ask(parts, max_new_tokens=5, stop=[]).tokens
        whole = [*runner.tokenize(parts).tokens.tolist(), *said]
        for index, turn in enumerate((fresh(9, 43), another(runner), fresh(11, 44))):
            whole += runner.tokenize(turn).tokens.tolist()
            if index:
                # What was said to the last turn was decoded from a fork.
                turn = [Segment(tokens=said, namespace="fresh"), *turn]
            done = talk.prefill(turn, logits_from=len(whole) - 6)
            with runner.prefill(whole, "full", logits_from=len(whole) - 6, remember=False) as full:
                near(done.logits, full.logits)
                if mode == "materialise":
                    near(kv_of(runner, done), kv_of(runner, full))
            with done.fork() as fork:
                said = runner.decode(fork, max_new_tokens=5, stop=[]).tokens
            whole += said


def test_what_is_taken_over_is_the_same_bit_for_bit(model):
    runner, parts = reader(model)
    with runner.conversation(LOOKING, remember=False) as talk:
        talk.ask(parts, max_new_tokens=7)
        talk._policy = Naive()
        before, length = kv_of(runner, talk._live), talk._live.request.length
        after = kv_of(runner, talk.prefill(another(runner)))
        assert torch.equal(after[:, :, :length], before)


def test_conversations_do_not_see_each_other(reading):
    runner, parts = reading
    turns = [parts, text(12, 45), another(runner), text(7, 46)]
    other = [parts, text(12, 47), text(9, 48), another(runner, 3)]

    def alone(asked):
        with runner.conversation(LOOKING, remember=False) as talk:
            said = [talk.ask(turn, max_new_tokens=5, stop=[]).tokens for turn in asked]
            return said, talk._live.logits.clone()

    stored = frozen_kv(runner, 3)
    with nothing_held_besides(runner):
        wanted = [alone(turns), alone(other)]
        talks = [runner.conversation(LOOKING, remember=False) for _ in range(2)]
        said = [[], []]
        for pair in zip(turns, other, strict=True):
            for one, talk, turn in zip(said, talks, pair, strict=True):
                one.append(talk.ask(turn, max_new_tokens=5, stop=[]).tokens)
        for talk, one, (tokens, logits) in zip(talks, said, wanted, strict=True):
            assert one == tokens
            assert torch.equal(talk._live.logits, logits)
            talk.close()
    assert torch.equal(frozen_kv(runner, 3), stored)


def donors(runner, parts):
    """A request that reads all segments of a prompt in place, so that they are not given up."""
    prompt = runner.tokenize(parts)
    regime = runner._prefiller.rotary.table(9).regime
    return runner.cache.admit(prompt.tokens, segments=prompt.segments, mode="share", regime=regime)


@pytest.mark.parametrize(
    ("brings", "answer", "free"), [(False, 1, 2), (False, 400, 28), (True, 1, 4), (True, 400, 36)]
)
def test_a_turn_without_room_leaves_the_conversation(model, brings, answer, free):
    """The turn itself, or what it answers, finds too few free blocks."""
    runner, parts = reader(model)
    turn = another(runner) if brings else text(40, 49)
    ask = {"max_new_tokens": 5, "stop": []}
    segments = [*parts, *another(runner)]
    with (
        nothing_held_besides(runner),
        donors(runner, segments),
        runner.conversation(LOOKING, remember=False) as talk,
    ):
        talk.ask(parts, **ask)
        before, tokens, left = talk._live, talk.tokens, talk._live.reused.left
        kv, stats = kv_of(runner, before), runner.cache.stats()
        others = random_tokens(16 * (stats["total"] - stats["held"] - free), 1)
        with runner.cache.admit(others, reuse="none"):
            held = runner.cache.stats()["held"]
            with pytest.raises(kvweave.PoolFull):
                talk.ask(turn, max_new_tokens=answer, stop=[])
            assert talk._live is before
            assert not before.request.released
            assert (talk.tokens, len(talk.reports)) == (tokens, 1)
            assert np.array_equal(before.reused.left, left)
            assert torch.equal(kv_of(runner, before), kv)
            assert runner.cache.stats()["held"] == held
        said = talk.ask(turn, **ask)
        with runner.conversation(LOOKING, remember=False) as other:
            other.ask(parts, **ask)
            assert said.tokens == other.ask(turn, **ask).tokens


@pytest.mark.parametrize("recent", [24, 4096])
@pytest.mark.parametrize("brings", [False, True])
def test_turns_under_a_head_map(model, recent, brings):
    """What windows have let go of is not recomputed; all else is as for full heads."""
    runner, parts = reader(model, classes=classes_of(model, (None, (recent, 4))))
    turn = another(runner) if brings else text(15, 51)
    policy = seeing(share=0.5, draft=2)
    with nothing_held_besides(runner), runner.conversation(policy, remember=False) as talk:
        talk.ask(parts, max_new_tokens=4, stop=[])
        length, left = talk._live.request.length, talk._live.reused.left
        talk.ask(turn, max_new_tokens=4, stop=[])
        view = policy.views[-1]
        early = view.reused[view.reused < length]
        # Rows in the sink's block see nothing else.
        near_sink = left[left < 16]
        assert 0 < len(near_sink) < len(left)
        assert np.array_equal(early, near_sink if recent == 24 else left)
        assert talk.reports[-1].settled_now > 0
    if recent > 24:
        return
    # Of rows behind the window the KV is what a prompt without turns has.
    with runner.conversation(Epic(first=8), remember=False) as talk:
        said = talk.ask(parts, max_new_tokens=4, stop=[]).tokens
        whole = runner.tokenize(parts).tokens
        turn = runner.tokenize(text(15, 51)).tokens
        live = talk.prefill(turn.tolist(), logits_from=len(whole) + 4)
        with runner.prefill(parts, Epic(first=8), remember=False) as done:
            near(live.logits, runner.extend(done, [*said, *turn.tolist()])[-15:])


def test_a_stop_token_is_none_of_the_conversation(model):
    runner, parts = reader(model)
    with runner.conversation("naive", remember=False) as talk:
        said = talk.ask(parts, max_new_tokens=6, stop=[]).tokens
    length = len(runner.tokenize(parts).tokens)
    ends = said.index(said[3])
    with runner.conversation("naive", remember=False) as talk:
        assert talk.ask(parts, max_new_tokens=6, stop=[said[3]]).tokens == said[: ends + 1]
        assert talk.tokens == length + ends
        live = talk.prefill(text(3, 52))
        assert live.request.tokens[length:].tolist() == [*said[:ends], *text(3, 52)]


def test_an_answer_is_healed_and_the_next_turn_knows(reading):
    runner, parts = reading
    healing = Healing(every=4, bound=0.0, share=0.1, most=0.1)
    with runner.conversation("naive", remember=False, healing=healing) as talk:
        report = talk.ask(parts, max_new_tokens=8, stop=[]).report
        assert report.healing.recomputed == round(0.1 * report.reused_segment)
        after = talk.ask(text(5, 53), max_new_tokens=8, stop=[]).report
        assert after.reused_segment == report.reused_segment - report.healing.recomputed
        assert after.healing.healed == 1


def test_closing_commits_what_may_be_found_and_gives_all_back(model):
    runner, _ = reader(model)
    with nothing_held_besides(runner):
        for remember in (False, True):
            with runner.conversation("full", remember=remember) as talk:
                said = talk.ask(text(30, 54), max_new_tokens=20, stop=[]).tokens
                said += [*text(9, 55), *talk.ask(text(9, 55), max_new_tokens=20, stop=[]).tokens]
                whole = [*text(30, 54), *said]
                with runner.prefill(whole, "prefix", remember=False) as done:
                    assert done.report.reused_prefix == 0
            with runner.prefill(whole, "prefix", remember=False) as done:
                assert done.report.reused_prefix == (len(whole) - 1 if remember else 0)
        talk.close()
        for call in (talk.ask, talk.prefill):
            with pytest.raises(kvweave.InvalidArgument, match="expected an open one"):
                call([1, 2, 3])


def test_bad_turns_leave_the_conversation(model):
    runner, parts = reader(model)
    with nothing_held_besides(runner), runner.conversation("naive", remember=False) as talk:
        with pytest.raises(kvweave.InvalidArgument, match="at least one token"):
            talk.ask([])
        talk.ask(parts, max_new_tokens=3)
        tokens = talk.tokens
        for turn, match in (
            ([], "at least one token"),
            ([300], "id < 300"),
            ([3.5], "prompt part"),
        ):
            with pytest.raises(kvweave.InvalidArgument, match=match):
                talk.ask(turn)
        with pytest.raises(kvweave.InvalidArgument, match="max_new_tokens: expected >= 1"):
            talk.ask([1], max_new_tokens=0)
        assert talk.tokens == tokens
    runner, _ = reader(tiny("llama-dynamic"))
    with runner.conversation("naive", remember=False) as talk:
        talk.ask(text(60, 56), max_new_tokens=2)
        with pytest.raises(kvweave.InvalidArgument, match="conversation: expected RoPE freq"):
            talk.ask(text(60, 57))


@settings(max_examples=60)
@given(
    before=st.integers(1, 40),
    donor=st.integers(1, 60),
    moved=st.integers(0, 40),
    data=st.data(),
)
def test_copies_name_every_position_once(before, donor, moved, data):
    """Runs of copies say of each position where it lies, where it goes and how far it turns."""
    cache = KvCache(KvShape(1, 1, 8, 8), blocks=64)
    tokens = np.arange(100, 100 + donor, dtype=np.int32)
    with cache.admit(tokens, namespace="kb", reuse="none") as request:
        request.commit(donor, donor)
    head = np.arange(before, dtype=np.int32)
    whole = np.concatenate((head, tokens, head[:1]))
    marks = [(before, before + donor, "kb")]
    source = cache.admit(whole, segments=marks, mode="share")
    target = cache.admit(whole, reuse="none")
    rows = data.draw(st.sets(st.integers(0, len(whole) - 1), min_size=1))
    chosen = np.asarray(sorted(rows), np.int32)
    there = {}
    for block, begin, end, position, delta in source.entries().tolist():
        for slot in range(begin, end):
            there[position + slot - begin] = (block, slot, delta)
    goes = dict(zip(chosen.tolist(), map(tuple, target.slots(chosen).tolist()), strict=True))
    found = {}
    for block, slot, to, at, count, delta in copies_of(source, target, chosen, 0).tolist():
        assert 1 <= count <= 8
        found |= {(to, at + i): (block, slot + i, delta) for i in range(count)}
    assert found == {goes[row]: there[row] for row in chosen.tolist()}


class Letters:
    """A tokenizer of one id a character, with a first id of its own."""

    eos_token_id = None

    def __call__(self, text, add_special_tokens=True):
        ids = [ord(letter) % 300 for letter in text]
        return SimpleNamespace(input_ids=[7, *ids] if add_special_tokens else ids)

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(map(chr, ids))


def test_the_turns_of_a_sample_are_those_of_a_conversation(model):
    """Answers given: what every turn's prompt is as a whole, its conversation has by then."""
    book, page = Segment(text="What stands in a book. " * 3), Segment(text="And on a page. " * 4)
    turns = (
        Turn((Said(0), " Why? ", page, " Where? "), ("x",)),
        Turn((Said(1, reused=True), " And then?"), ("x",)),
        Turn((Said(2), " Done?"), ("x",)),
    )
    sample = Sample(("Read: ", book, " Who? "), ("x",), turns=turns)
    said = ["I think it is a very small island.", "It was said before: in the north.", ""]
    runner = Runner(model, Letters(), max_tokens=2048, progress=False, check=False)
    with inserted(runner, sample.at_turn(3, said), "kb") as ready:
        named = {s.text: s for s in ready.sample.segments}
        with runner.conversation(LOOKING, remember=False) as talk:
            for turn in range(4):
                parts = sample.parts if turn == 0 else turns[turn - 1].spoken_parts(said)
                parts = [named[p.text] if isinstance(p, Segment) else p for p in parts]
                live = talk.prefill(parts)
                whole = runner.tokenize(sample.at_turn(turn, said).parts).tokens
                assert np.array_equal(live.request.tokens, whole)
                brought = sum(len(p.text) for p in parts if isinstance(p, Segment))
                if turn in (1, 2):
                    assert brought > 0
                before = len(whole) - live.report.recomputed - live.report.settled_before
                assert live.report.reused_segment == before


class Template:
    """A tokenizer's chat template, and nothing else of it."""

    chat_template = "there is one"

    def __init__(self, ends="<end>\n", drops=""):
        self.ends, self.drops = ends, drops

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        kept = (one for one in messages if one["role"] != self.drops)
        said = [f"<{one['role']}>{one['content']}{self.ends}" for one in kept]
        return "<begin>" + "".join(said) + "<assistant>"


def test_chat_turns_join_to_what_the_template_says():
    first = chat_parts(Template(), ["Who?", Segment(text="a book")], "Be brief.")
    turn = chat_turn_parts(Template(), [Segment(text="a page"), "And where?"])
    assert first[1:-1] == ["Who?", Segment(text="a book")]
    assert turn[1:-1] == [Segment(text="a page"), "And where?"]
    spoken = [part.text if isinstance(part, Segment) else part for part in [*first, "Ann.", *turn]]
    messages = [("system", "Be brief."), ("user", "Who?a book"), ("assistant", "Ann.")]
    messages.append(("user", "a pageAnd where?"))
    named = [{"role": role, "content": content} for role, content in messages]
    assert "".join(spoken) == Template().apply_chat_template(named, False, True)


def test_chat_templates_that_leave_out_what_is_said():
    with pytest.raises(kvweave.InvalidArgument, match="expected the answer once"):
        chat_turn_parts(Template(drops="assistant"), ["And?"])
    with pytest.raises(kvweave.InvalidArgument, match="expected the message once"):
        chat_turn_parts(Template(drops="user"), ["And?"])
    with pytest.raises(kvweave.InvalidArgument, match="tokenizer with a chat template"):
        chat_turn_parts(object(), ["And?"])


def test_what_all_turns_missed_is_said_of_the_conversation() -> None:
    runner = Runner(tiny("llama"), max_tokens=512, check=False, progress=False)
    with runner.conversation("full") as talk:
        assert talk.missed == {}
        for number in range(2):
            talk.ask(random_tokens(20, number), max_new_tokens=2)
        told = [report.missed for report in talk.reports]
        assert talk.missed["last-token"] == 2
        assert sum(talk.missed.values()) == sum(sum(one.values()) for one in told) > 20
