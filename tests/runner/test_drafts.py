"""Drafts between two passes: what they measure, what they leave, and where there is no room."""

from __future__ import annotations

import pytest
import torch

from cached_prompts import answer_of, two_documents
from families import random_tokens, tiny
from head_maps import CLASSES, classes_of, near, runner_of
from kvweave.errors import InvalidArgument
from kvweave.plan import Draft
from kvweave.policies import Foresight
from plan_emulator import Emulator
from plan_policies import Overheard

MODES = ("materialise", "share")


@pytest.mark.parametrize(("length", "drafts"), [(144, 1), (145, 3), (159, 1), (159, 2), (150, 5)])
@pytest.mark.parametrize(
    ("mode", "classes", "fresh_end"),
    [
        ("materialise", None, True),
        ("share", None, True),
        ("share", None, False),
        ("share", CLASSES, True),
        ("materialise", CLASSES, False),
    ],
)
def test_the_draft_measures_what_plain_torch_does(length, drafts, mode, classes, fresh_end):
    model = tiny("llama")
    heads = classes_of(model, (None,) if classes is None else classes)
    runner = runner_of(model, None if classes is None else heads, mode=mode)
    tokens, parts, spans = two_documents(runner, length, fresh_end)
    # The draft crosses a block's border; `draft - 1` more tokens than a page.
    asked = Foresight(share=0.3, draft=18, drafts=drafts)
    ours, theirs = (Overheard(asked) for _ in range(2))
    wanted, rows = Emulator(runner.spec, heads).prefill(tokens, spans, theirs)
    logits, report = answer_of(runner, parts, ours, reserve_tokens=5)
    for got, expected in zip(ours.said, theirs.said, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    # 4 query heads in 3 layers of 4: what 18 tokens look at, themselves apart.
    drafted = ours.said[-1]
    assert drafted.shape == (length,)
    assert 0 < float(drafted.sum()) < 18 * 4 * 3
    near(logits, wanted[-1:])
    assert report.passes[1].tokens == 18 * drafts
    assert report.passes[1].rows_per_layer == [18 * drafts] * 4
    assert rows[-1] == length - 1


@pytest.mark.parametrize("classes", [None, CLASSES])
@pytest.mark.parametrize("mode", MODES)
def test_a_draft_leaves_nothing(mode, classes):
    model = tiny("llama")
    runner = runner_of(model, None if classes is None else classes_of(model, classes), mode=mode)
    _, parts, _ = two_documents(runner, 159)
    found = []
    for draft in (0, 18, 0):
        before = runner.cache.stats()["held"]
        policy = Foresight(share=0.5, draft=draft)
        if draft:
            # What it chooses is another matter: here the draft asks and is not listened to.
            policy = _Deaf(policy)
        with runner.prefill(parts, policy, remember=False, reserve_tokens=3) as done:
            assert [one.tokens for one in done.report.passes] == [0, *[draft] * (draft > 0), 0]
            request, stats = done.request, runner.cache.stats()
            entries = [request.entries(t)[:, 1:].tolist() for t in range(request.tables)]
            assert request.length == 159
            said = runner.decode(done, max_new_tokens=5).tokens
            state = entries, stats["held"] - before, done.report.kv_bytes, said
            found.append((done.logits.clone(), *state))
        runner.cache.check()
        assert runner.cache.stats()["held"] == before
    for logits, *state in found[1:]:
        assert torch.equal(logits, found[0][0])
        assert tuple(state) == found[0][1:]


class _Deaf(Overheard):
    """Tells its policy that there was no room for a draft."""

    def plan(self, prompt):
        steps, answer = self.policy.plan(prompt), None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration:
                return
            answer = yield step
            if isinstance(step, Draft):
                answer = None


def crowded(runner, parts, fewest, most):
    """A cache in which so many blocks more and more are free beside what a prompt takes."""
    wanted = runner.tokenize(parts)
    with runner.prefill(parts, "naive", remember=False) as done:
        regime = done.request.regime
    # Somebody reads the segments, so that their blocks do not give way.
    reader = runner.cache.admit(
        wanted.tokens, segments=wanted.segments, mode="share", regime=regime
    )
    free = runner.cache.stats()["free"]
    for left in range(fewest, most + 1):
        with runner.cache.admit(random_tokens(16 * (free - 10 - left), 9), reuse="none"):
            yield left
        runner.cache.check()
    reader.release()


def test_a_draft_without_room_is_told_and_done_without():
    runner = runner_of(tiny("llama"), max_tokens=768)
    _, parts, _ = two_documents(runner, 159)
    drafted = []
    for _ in crowded(runner, parts, 0, 4):
        alone, _ = answer_of(runner, parts, Foresight(draft=0))
        logits, report = answer_of(runner, parts, Foresight(draft=18))
        assert report.reused_segment == 43 + 85
        look, draft, last = report.passes
        assert (look.kind, draft.kind, last.kind) == ("layers", "draft", "layers")
        drafted.append((draft.tokens, draft.rows_per_layer[0]))
        # What was decoded before the room ran out was computed all the same.
        assert draft.flops["logits"] == (1 + drafted[-1][1]) * answer_flops(runner)
        assert draft.tokens or torch.equal(logits, alone)
    # The last block is copied, and 18 tokens begin two more.
    assert drafted == [(0, 0), (0, 1), (0, 17), (18, 18), (18, 18)]


def test_one_draft_is_made_where_there_is_no_room_for_all():
    runner = runner_of(tiny("llama"), max_tokens=768)
    _, parts, _ = two_documents(runner, 159)
    found = []
    for _ in crowded(runner, parts, 2, 6):
        alone, _ = answer_of(runner, parts, Foresight(draft=18))
        logits, report = answer_of(runner, parts, Foresight(draft=18, drafts=2))
        found.append((report.passes[1].tokens, report.passes[1].rows_per_layer[0]))
        assert found[-1][0] == 36 or torch.equal(logits, alone)
    # Three blocks each: what two of them had computed before the room ran out is counted too.
    assert found == [(0, 19), (18, 20), (18, 52), (18, 52), (36, 36)]


def answer_flops(runner):
    """FLOPs of one row's logits."""
    return 2 * runner.spec.head.weight.numel()


class _DraftFirst(Foresight):
    """Drafts before anything was computed."""

    def plan(self, prompt):
        yield Draft(2)
        yield from super().plan(prompt)


def test_a_draft_before_any_pass_is_refused():
    runner = runner_of(tiny("llama"))
    _, parts, _ = two_documents(runner, 159)
    held = runner.cache.stats()["held"]
    with pytest.raises(InvalidArgument, match="draft: expected a pass with the last token before"):
        answer_of(runner, parts, _DraftFirst())
    assert runner.cache.stats()["held"] == held
