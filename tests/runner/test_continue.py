"""A prefilled prompt goes on: `extend`, `decode` and `fork` of it, in any order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvweave
from families import greedy, random_tokens, reference, tiny
from head_maps import CLASSES, classes_of, masked_reference, near, runner_of
from kvweave.errors import InvalidArgument
from kvweave.policies import Foresight, RedKnot, Weave
from kvweave.runner import Sampling, Segment

MODES = ("materialise", "share")
MAPS = (None, CLASSES)


def made(model, classes, mode="materialise", **settings):
    """A runner of a tiny model, under a head map of these classes if any."""
    classes = None if classes is None else classes_of(model, classes)
    return runner_of(model, classes, mode=mode, **settings)


def prompt_of(runner, length):
    """A prompt of so many tokens with a cached segment that was encoded elsewhere."""
    tokens = random_tokens(length, length)
    runner.insert(tokens[5 : length - 9].tolist(), "middle", "kb")
    return [
        Segment(tokens=tokens[:5].tolist()),
        Segment(tokens=tokens[5 : length - 9].tolist(), namespace="kb"),
        Segment(tokens=tokens[length - 9 :].tolist()),
    ]


def kept(done):
    """All K, V that a request reads, by table: what forks must not touch in one another."""
    pages, groups = done.kv.pages, done.kv.heads.cache.groups
    found = []
    for table, group in enumerate(groups):
        for block, begin, end, _, _ in done.request.entries(table).tolist():
            found.append(pages[block : block + group.pages, :, begin:end].clone())
    return found


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("classes", MAPS)
@pytest.mark.parametrize("length", [63, 64, 65])
def test_extend_is_full_prefill_of_the_whole(length, classes):
    model, tokens = tiny("llama"), random_tokens(length + 40, 1)
    runner = made(model, classes)
    exact = reference(model, tokens)
    if classes is not None:
        exact = masked_reference(model, classes_of(model, classes), tokens)
    with runner.prefill(tokens[:length], "full", remember=False) as done:
        near(done.logits, exact[length - 1 : length])
        for start, end in ((length, length + 1), (length + 1, length + 33)):
            near(runner.extend(done, tokens[start:end].tolist()), exact[start:end])
            near(done.logits, exact[end - 1 : end])
            assert done.request.length == end
        near(runner.extend(done, tokens[-7:]), exact[-7:])
        assert done.request.tokens.tolist() == tokens.tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("classes", MAPS)
@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "gemma3"])
def test_extend_is_as_many_decode_steps(family, classes, mode):
    """Over approximate KV too: both read what the policy left."""
    runner = made(tiny(family), classes, mode)
    parts = prompt_of(runner, 150)
    with (
        runner.prefill(parts, Foresight(share=0.3), remember=False) as done,
        done.fork() as other,
    ):
        said = runner.decode(done, max_new_tokens=20).tokens
        logits = runner.extend(other, said[:-1])
        near(logits.argmax(-1), torch.tensor(said[1:]))
        # The last token that was decoded has no KV yet; both sides compute it now.
        near(runner.extend(done, [7, 8])[0], runner.extend(other, [said[-1], 7, 8])[1])
        near(done.logits, other.logits)
        assert done.request.tokens.tolist() == other.request.tokens.tolist()
    runner.cache.check()


def test_decode_goes_on_where_it_stopped():
    model, tokens = tiny("llama"), random_tokens(50, 3).tolist()
    runner = runner_of(model)
    wanted = greedy(model, tokens, 24)
    with runner.prefill(tokens, "full", remember=False) as done:
        first = runner.decode(done, max_new_tokens=10)
        assert done.pending == wanted[9:10]
        second = runner.decode(done, max_new_tokens=1)
        third = runner.decode(done, max_new_tokens=13)
        assert first.tokens + second.tokens + third.tokens == wanted
        assert done.request.tokens.tolist() == tokens + wanted[:-1]
        # A stop token ends it, and it may go on behind that.
        stopped = runner.decode(done, max_new_tokens=9, stop=[runner.decode(done).tokens[0]])
        assert len(stopped.tokens) <= 9


def test_what_decoded_before_an_extension_is_what_the_model_says():
    model, tokens = tiny("qwen3"), random_tokens(40, 4).tolist()
    runner = runner_of(model)
    with runner.prefill(tokens, "full", remember=False) as done:
        said = runner.decode(done, max_new_tokens=5).tokens
        more = random_tokens(21, 5).tolist()
        whole = tokens + said + more
        near(runner.extend(done, more), reference(model, whole)[-21:])
        assert runner.decode(done, max_new_tokens=6).tokens == greedy(model, whole, 6)


@pytest.mark.parametrize("classes", MAPS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [143, 144, 145])
def test_forks_do_not_touch_one_another(length, mode, classes):
    runner = made(tiny("llama"), classes, mode)
    parts = prompt_of(runner, length)
    policy = Foresight(share=0.3)
    sampling = Sampling(temperature=1.0, seed=3)

    def alone(go_on):
        with runner.prefill(parts, policy, remember=False) as done:
            return go_on(done)

    def extended(done):
        return runner.extend(done, random_tokens(20, 8).tolist())

    def decoded(done):
        return runner.decode(done, max_new_tokens=20, sampling=sampling).tokens

    wanted = alone(extended), alone(decoded), alone(lambda done: kept(done))
    for first, second in (("source", "fork"), ("fork", "source")):
        with runner.prefill(parts, policy, remember=False) as done, done.fork() as fork:
            sides = {"source": done, "fork": fork}
            assert same(kept(done), kept(fork))
            before = kept(sides[second])
            assert torch.equal(extended(sides[first]), wanted[0])
            # What one side wrote the other does not see.
            assert same(kept(sides[second]), before)
            assert same(before, wanted[2])
            after = kept(sides[first])
            assert decoded(sides[second]) == wanted[1]
            assert same(kept(sides[first]), after)
            assert sides[first].pending == []
            assert sides[second].pending == wanted[1][-1:]
    runner.cache.check()


def test_a_fork_of_a_fork_and_of_what_has_decoded():
    runner = runner_of(tiny("llama"))
    parts = prompt_of(runner, 150)
    with runner.prefill(parts, "foresight", remember=False) as done:
        runner.decode(done, max_new_tokens=3)
        with done.fork() as one, one.fork() as two:
            assert one.pending == two.pending == done.pending
            wanted = runner.decode(two, max_new_tokens=9).tokens
            two.release()
            two.release()
            assert runner.decode(one, max_new_tokens=9).tokens == wanted
        assert runner.decode(done, max_new_tokens=9).tokens == wanted
        assert one.report is not done.report
        assert one.report.timings.decode_s != done.report.timings.decode_s


def test_the_last_to_let_go_gives_the_blocks_back():
    runner = runner_of(tiny("llama"))
    parts = prompt_of(runner, 150)
    before = runner.cache.stats()["held"]
    done = runner.prefill(parts, "foresight", remember=False)
    fork = done.fork()
    held = runner.cache.stats()["held"]
    runner.extend(fork, [1, 2, 3])
    # One block more: the last is copied.
    assert runner.cache.stats()["held"] == held + 1
    done.release()
    assert runner.cache.stats()["held"] == held
    runner.decode(fork, max_new_tokens=4)
    fork.release()
    assert runner.cache.stats()["held"] == before
    runner.cache.check()


def test_what_was_remembered_is_not_changed_by_going_on():
    runner = runner_of(tiny("llama"))
    tokens = random_tokens(150, 9)
    with runner.prefill(tokens[:100], "full") as done:
        runner.decode(done, max_new_tokens=12)
        runner.extend(done, tokens[100:])
    with runner.prefill(tokens, "full", logits_from=0, remember=False) as whole:
        wanted = whole.logits.clone()
    with runner.prefill(tokens, "prefix", logits_from=120, remember=False) as found:
        assert found.report.reused_prefix == 100
        assert torch.equal(found.logits, wanted[120:])


def refused(*tokens):
    return pytest.param(list(tokens), id=repr(tokens))


@pytest.mark.parametrize("tokens", [refused(), refused(-1), refused(300), refused(1, 2, 1 << 40)])
def test_bad_tokens_are_refused_and_nothing_has_changed(tokens):
    runner = runner_of(tiny("llama"))
    with runner.prefill(random_tokens(40, 1), "full", remember=False) as done:
        with pytest.raises(InvalidArgument, match="expected"):
            runner.extend(done, tokens)
        with pytest.raises(InvalidArgument, match="expected a 1-D integer array"):
            runner.extend(done, np.asarray([0.5]))
        assert done.request.length == 40
        near(runner.extend(done, [3]), reference(tiny("llama"), [*random_tokens(40, 1), 3])[-1:])


def test_a_released_prompt_goes_nowhere():
    runner = runner_of(tiny("llama"))
    done = runner.prefill(random_tokens(40, 1), "full")
    done.release()
    for go_on in (
        lambda: runner.extend(done, [1]),
        lambda: runner.decode(done, max_new_tokens=2),
        lambda: done.fork(),
    ):
        with pytest.raises(InvalidArgument, match="released"):
            go_on()
    runner.cache.check()


def test_no_room_changes_nothing():
    runner = runner_of(tiny("llama"), max_tokens=64)
    tokens = random_tokens(60, 1)
    with runner.prefill(tokens, "full", remember=False) as done:
        said = runner.decode(done, max_new_tokens=3).tokens
        stats = runner.cache.stats()
        with pytest.raises(kvweave.PoolFull):
            runner.extend(done, random_tokens(40, 2))
        assert (done.pending, runner.cache.stats()) == (said[-1:], stats)
        with pytest.raises(kvweave.PoolFull):
            runner.decode(done, max_new_tokens=40)
        # What had room was decoded, and its last token waits for its KV.
        end = done.request.length
        assert end % 16 == 0
        wanted = greedy(tiny("llama"), tokens, end - 59)
        assert done.request.tokens[60:].tolist() == wanted[:-1]
        assert done.pending == wanted[-1:]
    runner.cache.check()


def test_frequencies_that_change_with_the_length_are_refused():
    model = tiny("llama-dynamic")
    runner = runner_of(model)
    tokens = random_tokens(80, 1)
    # Up to 64 tokens the frequencies are the model's own.
    with runner.prefill(tokens[:50], "full", remember=False) as done:
        near(runner.extend(done, tokens[50:60]), reference(model, tokens[:60])[50:])
        with pytest.raises(InvalidArgument, match="frequencies that hold for 70 tokens"):
            runner.extend(done, tokens[60:70])
        assert done.request.length == 60
        near(runner.extend(done, tokens[60:63]), reference(model, tokens[:63])[60:])
    with (
        runner.prefill(tokens[:70], "full", remember=False) as done,
        pytest.raises(InvalidArgument, match="frequencies that hold for 71 tokens"),
    ):
        runner.extend(done, tokens[70:71])


def test_heads_made_full_cannot_be_forked_but_go_on():
    model = tiny("llama")
    runner = made(model, CLASSES, "materialise")
    parts = prompt_of(runner, 150)
    eager = RedKnot(dense_until=0.25, recent_n=5, restore_edge=0.1)
    with runner.prefill(parts, Weave(Foresight(share=0.3), eager), remember=False) as done:
        assert done.report.restored
        assert [one.kind for one in done.report.passes] == ["layers", "draft", "layers"]
        with pytest.raises(InvalidArgument, match="without promoted heads"):
            done.fork()
        said = runner.decode(done, max_new_tokens=6).tokens
        assert runner.extend(done, [1, 2]).shape == (2, 300)
        assert len(said) == 6
    runner.cache.check()
