"""Heads that choose pages beside documents of several formats: by bounds, however these lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from chosen_documents import ReadingChosen, left_out
from decode_batches import decoding
from document_decoding import documents, fresh
from final_tiers import leave_the_device, same
from kvweave import Store
from kvweave.payload import KvPayload
from kvweave.runner import Runner, Strategy
from kvweave.runner.decode.packed_reads import prepare_final
from kvweave.runner.hand_off import take_over
from kvweave.runner.tiers.choice import Speeds
from packed_choosing import expect_packed_choice
from packed_decoding import apart, steps_of
from page_meaning import Layer, Meaning, random_packing
from ranked_pages import FULL, kinds_map, top_k
from strategy_runners import (
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    LONG,
    all_is_back,
    held_back,
    meaning_of,
    runner_of,
    uneven_model,
)
from tiered_runners import FAST, SLOW, Stated

NARROW = {"kind": "window", "sink": 4, "recent": 100}
STEPS = 140
ASKED: dict[str, Any] = {"reserve_tokens": STEPS, "remember": False, "watched": False}
KINDS: dict[str, list[dict[str, Any]]] = {
    "every step": [top_k(4)],
    "by means": [top_k(5, score="mean"), FULL],
    "some": [top_k(6), NARROW, FULL],
}


@pytest.fixture(scope="module")
def model() -> Any:
    return uneven_model()


def choosing(
    model: Any, kinds: list[dict[str, Any]], bound: float = 0.13, **settings: Any
) -> tuple[Runner, Meaning]:
    plain = Runner(model, max_tokens=64, check=False, progress=False)
    packing, shared = random_packing("quarter-bf16", LAYERS * HEADS, DIM)
    packing = replace(packing, strategy=Strategy(bound))
    given = {"kv_dtype": packing, "heads": kinds_map(plain.spec, kinds), **settings}
    runner = runner_of(model, bound, **given)
    if runner.tiers is not None:
        runner.tiers.measured = Stated(Speeds(host=FAST, disk=FAST, compute=SLOW))
    return runner, shared


def put(runner: Runner, docs: list[Any]) -> None:
    for number, doc in enumerate(docs):
        runner.insert(doc.tokens, str(number))
    runner.flush()


def parts_of(docs: list[Any]) -> list[Any]:
    return [fresh(70, 1), docs[0], fresh(30, 2), docs[1], fresh(90, 4)]


def test_preparing_looks_up_nobodys_pages_and_changes_nothing(model: Any) -> None:
    """Whatever is chosen of them, nothing is of a text."""
    runner, _ = choosing(model, KINDS["some"])
    pool = runner.packed
    before = pool.text_memory.data.clone(), pool.pages.data.clone()
    prepare_final(pool)
    assert torch.equal(pool.text_memory.data, before[0])
    assert torch.equal(pool.pages.data, before[1])
    assert all_is_back(runner)


@pytest.mark.parametrize("of", KINDS)
def test_it_is_the_definition(model: Any, of: str) -> None:
    """What is chosen is an explicit sort; attention is over what that means, and nothing else."""
    docs, kinds = documents([LONG, 40]), KINDS[of]
    runner, shared = choosing(model, kinds)
    put(runner, docs)
    texts = runner.packed.final.texts
    assert len(texts[0].parts) > 1
    meanings = dict(zip((LONG, 40), map(meaning_of, texts), strict=True))

    def own(layer: int, of: Layer) -> Layer:
        return meanings[of[0].shape[1]](layer, of)

    sights = runner.packed.heads.sights
    double, dense = (ReadingChosen(model, 400, 16, shared, own, sights) for _ in range(2))
    logits, wanted, others = [], [], []
    with runner.prefill(parts_of(docs), "naive", **ASKED) as done:
        logits.append(done.logits[-1])
        wanted.append(double.prefill(parts_of(docs)))
        others.append(dense.prefill(parts_of(docs)))
        sequence, checked = decoding(runner, done, STEPS + 1), 0

        def choose(_batch: Any, said: torch.Tensor, _greedy: bool) -> Any:
            logits.append(said[0].float().clone())
            return np.array([sequence.choose(said[0])])

        with torch.inference_mode():
            for _ in range(12):
                token = sequence.tokens[-1]
                runner._decoder.step([sequence], choose=choose, watched=True)
                queries = runner._decoder.queries
                checked += expect_packed_choice(runner, sequence, queries[:, 0])
                double.left = left_out(runner, sequence)
                wanted.append(double.step(token))
                others.append(dense.step(token))
        runner._decoder.forget(sequence.request)
    choosers = sum(kind["kind"] == "top_k" for kind in (kinds * 4)[: LAYERS * HEADS])
    assert checked == 12 * choosers
    least = apart(others, wanted)
    assert least > 1e-4
    assert apart(logits, wanted) < 0.05 * least
    for number in range(2):
        runner.delete(str(number))
    assert all_is_back(runner)


def test_all_of_them_change_no_bit(model: Any) -> None:
    docs, logits = documents([LONG, 300]), []
    for kinds in ([top_k(128, 16), FULL], [FULL], [top_k(128, score="mean"), top_k(128, 7)]):
        runner, _ = choosing(model, kinds)
        put(runner, docs)
        with runner.prefill(parts_of(docs), "naive", **ASKED) as done:
            logits.append(steps_of(runner, decoding(runner, done, STEPS + 1), STEPS))
    for others in logits[1:]:
        assert same(torch.stack(logits[0]), torch.stack(others))


def test_what_is_not_chosen_is_not_read(model: Any) -> None:
    """Whatever lies in blocks that nobody chooses changes no bit."""
    docs = documents([LONG, 40])
    runner, _ = choosing(model, [top_k(4, 64), NARROW])
    put(runner, docs)
    text = runner.packed.final.texts[0]
    said = []
    for spoils in (False, True):
        with runner.prefill(parts_of(docs), "naive", **ASKED) as done:
            sequence = decoding(runner, done, STEPS)
            logits = steps_of_many(runner, sequence, 1)
            if spoils:
                left = left_out(runner, sequence)
                spoil(text, sequence, left)
            said.append([*logits, *steps_of_many(runner, sequence, 20)])
            runner._decoder.forget(sequence.request)
    assert same(*map(torch.stack, said))


def steps_of_many(runner: Runner, sequence: Any, steps: int) -> list[torch.Tensor]:
    """As `steps_of`, of a request that stays in its place."""
    seen: list[torch.Tensor] = []

    def choose(_batch: Any, logits: torch.Tensor, _greedy: bool) -> Any:
        seen.append(logits[0].float().clone())
        return np.array([sequence.choose(logits[0])])

    with torch.inference_mode():
        for _ in range(steps):
            runner._decoder.step([sequence], choose=choose)
    return seen


def spoil(text: Any, sequence: Any, left: np.ndarray) -> None:
    """Fills pages of a text that heads left out, all of their tokens."""
    count = 0
    numbers = {block: number for number, block in enumerate(text.blocks.tolist())}
    for block, begin, end, position, _ in sequence.packed.entries().tolist():
        if block not in numbers:
            continue
        span = slice(position, position + end - begin)
        for part in text.parts:
            for at, rank in enumerate(part.ranks.tolist()):
                if left[rank // HEADS, rank % HEADS, span].all():
                    part.pages.data[len(part.ranks) * (1 + numbers[block]) + at] = 255
                    count += 1
    assert count > BLOCKS


def test_a_choice_stays_when_a_text_is_packed_finally(model: Any, monkeypatch: Any) -> None:
    """Who decodes meanwhile has chosen by the same keys; what it reads of them is new."""
    docs = documents([LONG, 40])
    runner, _ = choosing(model, [top_k(4, 1000)], 0.8)
    seen = []
    with held_back(monkeypatch) as go:
        for number, doc in enumerate(docs):
            runner.insert(doc.tokens, str(number))
        with runner.prefill(parts_of(docs), "naive", **ASKED) as done:
            sequence = decoding(runner, done, STEPS)
            logits = steps_of_many(runner, sequence, 5)
            seen.append(left_out(runner, sequence))
            go.set()
            runner.flush()
            assert runner.packed.final.texts
            logits += steps_of_many(runner, sequence, 5)
            seen.append(left_out(runner, sequence))
            runner._decoder.forget(sequence.request)
    assert torch.stack(logits).isfinite().all()
    assert np.array_equal(seen[0], seen[1][:, :, : seen[0].shape[2]])


def test_batches_and_forks_say_what_each_says_alone(model: Any) -> None:
    docs = documents([LONG, 300])
    runner, _ = choosing(model, KINDS["some"], chunk_tokens=4096, max_tokens=1 << 15)
    put(runner, docs)
    prompts = [parts_of(docs), [fresh(9, 2), docs[1], fresh(30, 3)], [fresh(5, 4)]]
    how = {"max_new_tokens": 70, "remember": False, "stop": []}
    alone = [runner.generate(prompt, "naive", **how).tokens for prompt in prompts]
    answers = runner.generate_batch(prompts, "naive", **how)
    assert [answer.tokens for answer in answers] == alone
    with runner.prefill(prompts[0], "naive", **ASKED) as done, done.fork() as fork:
        logits = [steps_of(runner, decoding(runner, one, 40), 30) for one in (fork, done)]
        assert same(*map(torch.stack, logits))
    for number in range(2):
        runner.delete(str(number))
    assert all_is_back(runner)


# ---- where documents go -------------------------------------------------------------------


def said_by(runner: Runner, prompt: Any) -> tuple[torch.Tensor, list[str]]:
    with runner.prefill(prompt, "naive", **ASKED) as done:
        found = [one.source for one in done.report.documents or () if one.namespace == ""]
        sequence = decoding(runner, done, STEPS)
        return torch.stack([done.logits[-1], *steps_of(runner, sequence, 100)]), found


def test_bounds_come_from_the_hosts_memory(model: Any) -> None:
    docs = documents([LONG, 40])
    runner, _ = choosing(model, KINDS["some"], document_bytes=1 << 23)
    put(runner, docs)
    wanted = said_by(runner, parts_of(docs))[0]
    for _ in range(2):
        leave_the_device(runner)
        runner.packed.bounds.fill_(7.0)
        got, found = said_by(runner, parts_of(docs))
        assert found == ["host", "host"]
        assert same(got, wanted)


def test_bounds_from_a_store_are_of_what_pages_stand_for(model: Any, tmp_path: Any) -> None:
    docs = documents([LONG, 40])
    here, _ = choosing(model, KINDS["some"], 0.001, store=Store(tmp_path, direct=False))
    put(here, docs)
    there, _ = choosing(model, KINDS["some"], 0.001, store=Store(tmp_path, direct=False))
    bounds = []
    for runner in (here, there):
        got, found = said_by(runner, parts_of(docs))
        assert got.isfinite().all()
        pages = runner.packed.final.texts[0].blocks[:, None] + np.arange(LAYERS * HEADS)
        bounds.append(runner.packed.bounds[pages.reshape(-1)])
    assert found == ["disk", "disk"]
    assert bounds[0].abs().max() > 0.1
    torch.testing.assert_close(*bounds, atol=0.2, rtol=0)


def test_payloads_have_bounds_of_texts(model: Any) -> None:
    docs = documents([LONG, 40])
    here, _ = choosing(model, KINDS["some"])
    there, _ = choosing(model, KINDS["some"])
    put(here, docs)
    with here.prefill(parts_of(docs), "naive", **ASKED) as done:
        payload = KvPayload.from_bytes(here.export(done).to_bytes())
        wanted = steps_of(here, decoding(here, done, STEPS), 100)
    assert payload.parts["packed.bounds"].shape[0] == payload.header.packed.all_blocks > BLOCKS
    with take_over(there._prefiller, payload, None, STEPS) as done:
        got = steps_of(there, decoding(there, done, STEPS), 100)
    assert same(torch.stack(got), torch.stack(wanted))
    with there._prefiller.computing:
        pass
    assert all_is_back(there)


def test_bounds_are_within_the_bytes_of_the_arena(model: Any) -> None:
    given = {"arena_bytes": 8 << 20, "max_tokens": None}
    for kinds in ([FULL], [top_k(4)]):
        runner, _ = choosing(model, kinds, **given)
        pool = runner.packed
        exact = runner.cache.stats()["arena_pages"] * runner.cache.shape.page_bytes
        assert 0.9 * given["arena_bytes"] < exact + pool.nbytes <= given["arena_bytes"]
    assert len(pool.bounds) == pool.cache.stats()["arena_pages"]
