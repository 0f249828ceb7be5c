"""Host memory beside what else a runner does: answers are those with all pages on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from byte_tokenizer import Bytes
from cached_prompts import knowledge
from families import random_tokens, tiny
from host_faults import ALWAYS, Faults, answered
from host_memory import both, host_runner, nothing_is_held, spills
from kvweave import InvalidArgument, PoolFull, TransferFailed, Unsupported
from kvweave.runner import Healing, Runner, Sampling, Segment
from kvweave.runner.kv.host_pages import HostPages
from kvweave.runner.kv.whole_layers import WholeLayers
from ranked_pages import FULL, WINDOW, stepping_as_on_a_gpu, top_k

MIXED = [top_k(4, 5), FULL, top_k(6, 3), WINDOW, top_k(4, 16)]
WARM = Sampling(temperature=0.8, seed=3)
ASK: dict[str, Any] = {"max_new_tokens": 30, "stop": ()}


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


# ---- segments that are read where they lie --------------------------------------------------


@pytest.mark.parametrize("copies", ["spill", "mirror"])
@pytest.mark.parametrize("policy", ["naive", "epic", "sparsex", "foresight"])
def test_segments_in_place_and_prefixes(llama: Any, policy: str, copies: str) -> None:
    """Pages of documents are read at another position, begin within pages, or are written anew."""
    settings = {"page_tokens": 8, "mode": "share", "host_copies": copies}
    answers = []
    for runner in both(llama, [top_k(5, 4), FULL, top_k(12, 7), WINDOW], **settings):
        parts, prompt = knowledge(runner, 3), random_tokens(140, 5)
        said = [runner.generate(parts, policy, sampling=WARM, **ASK).tokens for _ in range(2)]
        for tokens in (prompt, np.concatenate((prompt[:101], random_tokens(50, 6))), prompt):
            made = runner.generate(tokens, "prefix", sampling=WARM, **ASK)
            said.append(made.tokens)
        assert made.report.reused_prefix > 100
        # What others read lies where it was.
        said.append(runner.generate(parts, "naive", sampling=WARM, **ASK).tokens)
        answers.append(said)
        assert nothing_is_held(runner)
    assert answers[0] == answers[1]
    assert spills(runner) > 8


def test_who_reads_a_document_in_place_is_brought_back(llama: Any) -> None:
    found = []
    for runner in both(llama, [top_k(4, 5), FULL], page_tokens=8, mode="share"):
        parts, said = knowledge(runner, 2), list[Any]()
        with runner.prefill(parts, "naive", remember=False) as done:
            said.append(runner.decode(done, **ASK).tokens)
            assert done.kv.is_spilled == bool(runner.host)
            said.append(runner.extend(done, random_tokens(7, 3).tolist()).flatten().tolist())
            assert not done.kv.is_spilled
            with done.fork() as fork:
                said += [runner.decode(one, **ASK).tokens for one in (fork, done, fork)]
        assert nothing_is_held(runner)
        found.append(said)
    assert found[0] == found[1]


@pytest.mark.parametrize("arrivals", ["exact", "whole", "late"])
def test_who_shares_a_document_spills_pages_of_his_own(llama: Any, arrivals: str) -> None:
    """Whoever else reads it: a batch says what each says alone."""
    settings = {"page_tokens": 8, "mode": "share", "host_arrivals": arrivals}
    runner = host_runner(llama, [top_k(4, 5), FULL], **settings)
    parts = knowledge(runner, 2)
    prompts = [[*parts, Segment(tokens=random_tokens(5 + n, n).tolist())] for n in range(4)]
    ask = {**ASK, "remember": False}
    alone = [runner.generate(prompt, "naive", **ask).tokens for prompt in prompts]
    made = runner.generate_batch(prompts, "naive", **ask)
    assert [one.tokens for one in made] == alone
    assert all(one.report.reused_segment > 150 for one in made)
    assert spills(runner) == 8
    assert nothing_is_held(runner)


# ---- drafts that all pages verify -----------------------------------------------------------


def drafting(model: Any, kinds: Any, **settings: Any) -> tuple[Runner, Runner]:
    """The same heads, reading all pages at each step, and drafting over host memory."""
    settings = {"page_tokens": 8, **settings}
    full = [FULL if kind["kind"] == "top_k" else kind for kind in kinds]
    alike = {name: given for name, given in settings.items() if not name.startswith("host_")}
    dense = host_runner(model, full, None, **alike)
    return dense, host_runner(model, kinds, speculate=4, **settings)


@pytest.mark.parametrize("mode", ["materialise", "share"])
@pytest.mark.parametrize("sampling", [None, WARM])
@pytest.mark.parametrize(("name", "kinds"), [("llama", MIXED), ("gemma", [top_k(4, 5), WINDOW])])
def test_drafted_answers_are_dense(name: str, kinds: Any, sampling: Any, mode: str) -> None:
    dense, host = drafting(tiny(name), kinds, mode=mode)
    prompts = [random_tokens(length, length) for length in (1, 63, 64, 90, 130)]
    ask = {**ASK, "max_new_tokens": 45, "sampling": sampling, "remember": False}
    parts = [knowledge(runner, 2) for runner in (dense, host)]
    wanted = dense.generate_batch([*prompts, parts[0]], "naive", **ask)
    made = host.generate_batch([*prompts, parts[1]], "naive", **ask)
    assert [one.tokens for one in made] == [one.tokens for one in wanted]
    assert sum(one.report.speculation.accepted for one in made) > 60
    assert spills(host) >= 5 * len(host.host)
    assert nothing_is_held(host)


@pytest.mark.parametrize("copies", ["spill", "mirror"])
def test_drafts_as_a_gpu_captures_them(llama: Any, copies: str) -> None:
    dense, host = drafting(llama, MIXED, host_copies=copies)
    stepping_as_on_a_gpu(host)
    for length in (3, 90, 150):
        prompt, ask = random_tokens(length, length), {**ASK, "max_new_tokens": 60}
        wanted = dense.generate(prompt, "full", **ask).tokens
        assert host.generate(prompt, "full", **ask).tokens == wanted
    assert spills(host) > 5
    assert nothing_is_held(host)


def test_drafts_are_those_of_all_pages_on_the_device(llama: Any) -> None:
    """As many are right: heads choose the same pages, wherever these lie."""
    told = []
    for runner in both(llama, [top_k(4, 6), FULL], page_tokens=8, speculate=4):
        made = [runner.generate(random_tokens(150, n), "full", **ASK) for n in range(4)]
        told.append([(one.tokens, one.report.speculation) for one in made])
    assert told[0] == told[1]
    assert spills(runner) > 3


def test_a_pass_over_all_pages_brings_those_at_home(llama: Any) -> None:
    """What the tests above compare was read from there."""
    dense, host = drafting(llama, [top_k(4, 5)])
    prompt, brought = random_tokens(150, 1), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        layer = WholeLayers.layer

        def spoiled(self: WholeLayers, rows: Any) -> Any:
            whole = layer(self, rows)
            brought.append(len(whole.pages))
            whole.pages.index_fill_(0, torch.arange(2, 20), 3.0)
            return whole

        patch.setattr(WholeLayers, "layer", spoiled)
        said = host.generate(prompt, "full", **ASK).tokens
    assert said != dense.generate(prompt, "full", **ASK).tokens
    # Of one layer at a time all pages of its heads.
    assert min(brought) >= 150 // 8 * host.spec.kv_heads
    assert nothing_is_held(host)


def test_an_answer_that_ends_within_a_round(llama: Any) -> None:
    """Tokens behind the string that ends it are taken back, whatever has gone to the host."""
    dense, host = drafting(llama, [top_k(3, 2), FULL], tokenizer=Bytes())
    prompt = random_tokens(150, 8)
    text = dense.generate(prompt, "full", **ASK).text
    for at in range(0, len(text) - 2, 2):
        ask = {**ASK, "stop": [text[at : at + 2]]}
        wanted = dense.generate(prompt, "full", **ask)
        made = host.generate(prompt, "full", **ask)
        assert (made.tokens, made.text) == (wanted.tokens, wanted.text)
        assert nothing_is_held(host)


@pytest.mark.parametrize("where", ["a draft", "a verification"])
def test_whose_pages_cannot_be_had_fails_alone(
    llama: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, host = drafting(llama, [top_k(4, 5), FULL])
    prompts = [random_tokens(100 + n, n) for n in range(3)]
    ask = {"max_new_tokens": 20, "stop": (), "remember": False}
    wanted = [dense.generate(prompt, "full", **ask).tokens for prompt in prompts]
    within, others = (ALWAYS, 0) if where == "a verification" else (0, ALWAYS)
    faults, bring = Faults("at a ranking", others), WholeLayers._bring

    def as_a_whole(*given: Any) -> None:
        faults.left = within
        bring(*given)
        faults.left = others

    monkeypatch.setattr(WholeLayers, "_bring", as_a_whole)
    asked = answered(host, faults, 1)
    assert [asked[n].result().tokens for n in (0, 2)] == [wanted[0], wanted[2]]
    with pytest.raises(TransferFailed, match="host memory: expected pages"):
        asked[1].result()
    assert faults.hit > 2
    assert nothing_is_held(host)


def test_late_arrivals_are_nothing_for_drafts(llama: Any) -> None:
    with pytest.raises(Unsupported, match="^host_arrivals: .*without speculate, got late beside"):
        host_runner(llama, [top_k(4, 4)], host_arrivals="late", speculate=2)


# ---- healing --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["materialise", "share"])
@pytest.mark.parametrize("bound", [0.0, 1.0])
def test_answers_that_are_healed(llama: Any, mode: str, bound: float) -> None:
    """Looking changes nothing of where pages lie; what is recomputed comes back for that."""
    healing = Healing(every=3, bound=bound, rise=1.0, share=0.2, most=0.6)
    found, settings = [], {"page_tokens": 8, "mode": mode}
    for runner in both(llama, [top_k(5, 4), FULL, top_k(6, 7)], **settings):
        parts = knowledge(runner, 3)
        made = runner.generate(parts, "naive", healing=healing, sampling=WARM, **ASK)
        told = made.report.healing
        found.append([made.tokens, told.watched, told.healed, told.recomputed, told.held])
        # The prompt is remembered from its end on.
        known = [*runner.tokenize(parts).tokens.tolist(), *made.tokens]
        with runner.prefill(known, "naive", remember=False, discover=True) as done:
            found[-1] += [done.report.reused_prefix, done.report.reused_segment]
        assert nothing_is_held(runner)
    assert found[0] == found[1]
    assert found[0][1] > 2
    assert (found[0][2] > 0) == (bound == 0.0)
    assert spills(runner) > 1


def test_a_look_leaves_pages_where_they_lie(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what finds no room to be recomputed is left as it was, and said."""
    runner = host_runner(llama, [top_k(4, 4), FULL], page_tokens=8)
    parts, looked = knowledge(runner, 2), list[bool]()

    def full(pages: HostPages) -> None:
        looked.append(pages.count > 0)
        raise PoolFull("bring back: expected blocks to be available, got none")

    # Pages lie in the host's memory when it is looked first.
    settings = {"every": 9, "rise": 1.0, "share": 0.2, "most": 0.6}
    ask = {**ASK, "remember": False}
    plain = runner.generate(parts, "naive", healing=Healing(bound=1.0, **settings), **ask)
    monkeypatch.setattr(HostPages, "bring_back", full)
    made = runner.generate(parts, "naive", healing=Healing(bound=0.0, **settings), **ask)
    assert (made.tokens, made.report.healing.held) == (plain.tokens, plain.report.healing.held)
    assert made.report.healing.refused == {"no room": len(looked)}
    assert len(looked) == 3
    assert all(looked)
    assert nothing_is_held(runner)


def test_what_is_healed_is_copied_anew(llama: Any) -> None:
    """Copies that are on their way when their pages are rewritten are nobody's."""
    healing = Healing(every=2, bound=0.0, share=0.2, most=1.0)
    found = []
    for runner in both(llama, [top_k(4, 3), FULL], page_tokens=8, host_copies="mirror"):
        parts = knowledge(runner, 2)
        found.append(runner.generate(parts, "naive", healing=healing, **ASK).tokens)
        assert nothing_is_held(runner)
    assert found[0] == found[1]
    assert spills(runner) > 2


def test_a_prompt_that_others_find_is_not_healed_there_either(llama: Any) -> None:
    runner = host_runner(llama, [top_k(4, 4)])
    with (
        runner.prefill(random_tokens(60, 1), "full") as done,
        pytest.raises(InvalidArgument, match="cannot find yet"),
    ):
        runner.decode(done, healing=Healing(), **ASK)
    assert nothing_is_held(runner)
