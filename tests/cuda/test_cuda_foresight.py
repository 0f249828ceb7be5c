"""Passes, drafts, healing and turns on a CUDA device, against the same on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvweave
from cached_prompts import knowledge, logits_of
from families import random_tokens, tiny
from head_maps import near, runner_of
from kvweave.policies import Foresight
from kvweave.runner import Healing, Runner, Segment

STATUS = kvweave.cuda_status()
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(not STATUS.startswith("available"), reason=f"kvweave: {STATUS}"),
]

EVERYTHING = Healing(every=6, bound=0.0, share=1.0, most=1.0)


def on_device(name: str, **settings: Any) -> Runner:
    return runner_of(tiny(name).to("cuda"), **settings)


@pytest.mark.parametrize("mode", ["materialise", "share"])
@pytest.mark.parametrize(
    "policy",
    ["prophet", "infoflow", Foresight(share=0.2, draft=0), Foresight(share=0.2, draft=3), "weave"],
    ids=lambda policy: getattr(policy, "draft", policy),
)
def test_the_gpu_chooses_and_computes_what_the_cpu_does(policy, mode) -> None:
    host, device = runner_of(tiny("qwen3"), mode=mode), on_device("qwen3", mode=mode)
    (wanted, planned), (got, report) = (
        logits_of(runner, knowledge(runner, 3), policy) for runner in (host, device)
    )
    assert [one.kind for one in report.passes] == [one.kind for one in planned.passes]
    assert report.rows_per_layer == planned.rows_per_layer
    assert torch.allclose(got.cpu(), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("policy", ["naive", Foresight(share=0.2, draft=3)], ids=str)
def test_layers_that_are_gathered_say_what_pages_in_place_say(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place = on_device("qwen3", mode="share")
    wanted, planned = logits_of(in_place, knowledge(in_place, 3), policy)
    monkeypatch.setattr("kvweave.runner.kv.gathered_reads.WORTH_GATHERING", 1)
    gathered = on_device("qwen3", mode="share")
    got, report = logits_of(gathered, knowledge(gathered, 3), policy)
    assert report.rows_per_layer == planned.rows_per_layer
    near(got, wanted)


def test_a_draft_is_captured_once_and_leaves_the_next_answer_alone() -> None:
    runner = on_device("llama")
    parts = knowledge(runner, 3)
    wanted = runner.generate(parts, "naive", max_new_tokens=12, stop=(), remember=False).tokens
    held = runner.cache.stats()["held"]
    for _ in range(4):
        runner.prefill(parts, Foresight(share=0.2, draft=4), remember=False).release()
        assert runner.cache.stats()["held"] == held
    made = runner.generate(parts, "naive", max_new_tokens=12, stop=(), remember=False)
    assert made.tokens == wanted
    runner.cache.check()


@pytest.mark.parametrize("mode", ["materialise", "share"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_healing_everything_is_full(name, mode) -> None:
    runner = on_device(name, mode=mode)
    parts = knowledge(runner, 3)
    further = random_tokens(3, 5)
    with runner.prefill(parts, "naive", remember=False, reserve_tokens=16) as done:
        said = runner.decode(done, max_new_tokens=8, stop=(), healing=EVERYTHING)
        assert said.report.healing.healed == 1
        tokens = done.request.tokens.tolist()
        more = runner.extend(done, further)
    whole = [*tokens, said.tokens[-1], *further.tolist()]
    with runner.prefill(whole, "full", logits_from=len(tokens) - 1, remember=False) as full:
        assert torch.allclose(more, full.logits[-3:], atol=1e-4, rtol=0)
    runner.cache.check()


def test_a_watched_request_does_not_disturb_its_batch() -> None:
    runner = on_device("llama")
    prompts = [knowledge(runner, 3), random_tokens(70, 8).tolist()]
    alone = runner.generate(prompts[1], "full", max_new_tokens=20, stop=(), remember=False)
    both = runner.generate_batch(
        prompts, "naive", max_new_tokens=20, stop=(), remember=False, healing=EVERYTHING
    )
    assert both[0].report.healing.healed >= 1
    assert both[1].tokens == alone.tokens


def test_turns_are_those_of_the_cpu() -> None:
    said = []
    for runner in (runner_of(tiny("llama")), on_device("llama")):
        first = knowledge(runner, 3)
        runner.insert(random_tokens(60, 77).tolist(), "later", "kb")
        later = Segment(tokens=random_tokens(60, 77).tolist(), namespace="kb")
        asked = Segment(tokens=random_tokens(9, 78).tolist())
        with runner.conversation(Foresight(share=0.3, draft=2)) as talk:
            answers = [
                talk.ask(parts, max_new_tokens=6, stop=()).tokens
                for parts in (first, [asked], [later, asked])
            ]
        said.append((answers, [report.rows_per_layer for report in talk.reports]))
    assert said[0] == said[1]
