"""Documents in packed pages: what prompts that hold them say, share, hold and give back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_batches import decoding
from document_decoding import DocumentDecoding, documents, fresh, insert_all, unpacked_runner
from families import random_tokens, tiny
from kvweave import PoolFull, Unsupported
from kvweave.policies import POLICIES, Foresight, Naive, policy_of
from kvweave.runner import Runner, Segment
from kvweave.runner.prefill.executor import ChunkedRun
from packed_decoding import (
    INT4,
    RECENT,
    SINK,
    apart,
    nothing_is_held,
    packed_runner,
    said_behind,
    steps_of,
)
from page_meaning import random_packing

SIZES = {"head_dim": 64, "max_position_embeddings": 4096, "num_hidden_layers": 2}
REUSING = [name for name in POLICIES if policy_of(name).reuse == "segments"]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", **SIZES)


def runner_with(model: Any, some: Sequence[Segment], **settings: Any) -> Runner:
    runner = packed_runner(model, **{"max_tokens": 16384, **settings})
    insert_all(runner, some)
    return runner


def logits_of(
    runner: Runner,
    prompt: Any,
    policy: Any,
    steps: int,
    said: list[int] | None = None,
) -> tuple[list[int], list[torch.Tensor]]:
    """What is said behind a prompt, or `said`, and the logits of each."""
    asked = {"reserve_tokens": steps, "remember": False, "watched": False}
    with runner.prefill(prompt, policy, **asked) as done:
        return said_behind(runner, done, steps, said)


def forget(runner: Runner) -> None:
    """Deletes all documents; nothing is left then."""
    for segment in runner.segments():
        runner.delete(segment.name)
    assert nothing_is_held(runner)


# ---- what is said ---------------------------------------------------------------------------


LAYOUTS: dict[str, list[int]] = {
    "behind some text": [70, 0, 1, 30],
    "at the very beginning": [0, 9],
    "inside the sink": [5, 1, 3, 0, 1],
    "the same twice": [64, 0, 0, 2, 200],
}
"""Parts of a prompt: up to 2 a document by its number, and else so many fresh tokens."""


def prompt_of(layout: Sequence[int], docs: Sequence[Segment]) -> list[Segment]:
    return [docs[n] if n < 3 else fresh(n, 50 + i) for i, n in enumerate(layout)]


@pytest.mark.parametrize(
    ("family", "layout", "chunk", "page_tokens"),
    [
        ("llama", "behind some text", 2048, 16),
        ("qwen3", "at the very beginning", 2048, 64),
        ("llama", "inside the sink", 150, 16),
        ("llama", "the same twice", 96, 32),
    ],
)
def test_it_is_the_definition(family: str, layout: str, chunk: int, page_tokens: int) -> None:
    """Prefill and decode steps, against transformers' own forward over what pages stand for."""
    model, steps = tiny(family, **SIZES), 230
    docs = documents([300, 40, 129])
    prompt = prompt_of(LAYOUTS[layout], docs)
    runner = runner_with(model, docs, chunk_tokens=chunk, page_tokens=page_tokens)
    said, logits = logits_of(runner, prompt, "naive", steps)
    plain, unpacked = (
        DocumentDecoding(model, chunk, page_tokens, meaning) for meaning in (INT4, None)
    )
    wanted, others = (
        [each.prefill(prompt), *(each.step(token) for token in said[:-1])]
        for each in (plain, unpacked)
    )
    effect, error = apart(others, wanted), apart(logits, wanted)
    assert effect > 1e-4
    assert error < 0.02 * effect
    forget(runner)


@pytest.mark.parametrize(
    ("policy", "name", "limit"),
    [
        *((policy, "int4", 2e-4) for policy in REUSING),
        # One number at the edge of two codes, or one scale of INT8, is that much.
        *(("foresight", name, 2e-3) for name in ("int8", "half-int4", "planes-3")),
        ("redknot", "planes-3", 2e-3),
    ],
)
def test_every_policy_reads_documents_as_if_unpacked(policy: str, name: str, limit: float) -> None:
    """Against an exact runner in whose pages documents are what packed ones make of them."""
    model = tiny("llama", **SIZES)
    docs = documents([300, 40, 129])
    prompt = [fresh(70, 1), docs[0], fresh(5, 2), docs[1], docs[2], docs[0], fresh(50, 3)]
    # Some policies choose by pages.
    packing, meaning = random_packing(name, 4, 64)
    runner = runner_with(model, docs, page_tokens=64, kv_dtype=packing)
    exact = unpacked_runner(model, docs, meaning, runner.packed.first_tokens)
    said, logits = logits_of(runner, prompt, policy, 90)
    _, wanted = logits_of(exact, prompt, policy, 90, said)
    assert apart(logits, wanted) < limit
    forget(runner)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "name"),
    [
        *product((torch.bfloat16, torch.float16), (64, 128), ["int4"]),
        *product([torch.bfloat16], [64], ("int8", "planes-3")),
    ],
)
def test_in_half_precision_too(dtype: torch.dtype, head_dim: int, name: str) -> None:
    model = tiny("llama", **{**SIZES, "head_dim": head_dim}).to(dtype)
    docs = documents([300, 40, 129])
    prompt = [fresh(70, 1), *docs, fresh(50, 3)]
    packing, meaning = random_packing(name, 4, head_dim)
    runner = runner_with(model, docs, kv_dtype=packing)
    meant = None if name == "int4" else meaning
    exact = unpacked_runner(model, docs, meant, runner.packed.first_tokens)
    said, logits = logits_of(runner, prompt, Foresight(draft=0), 90)
    _, wanted = logits_of(exact, prompt, Foresight(draft=0), 90, said)
    largest = max(float(row.abs().max()) for row in wanted)
    assert apart(logits, wanted) < {torch.bfloat16: 0.06, torch.float16: 0.02}[dtype] * largest
    forget(runner)


def test_more_tokens_in_one_pass_say_what_steps_say(model: Any) -> None:
    docs = documents([300, 129])
    runner = runner_with(model, docs)
    prompt, more = [fresh(70, 1), *docs, fresh(90, 2)], random_tokens(40, 5).tolist()
    for policy in ("naive", Foresight(draft=0)):
        _, wanted = logits_of(runner, prompt, policy, 40, [*more, 0])
        with runner.prefill(prompt, policy, remember=False, watched=False) as done:
            logits = runner.extend(done, more)
            assert apart(list(logits), wanted[1:]) < 1e-4
            # Once more, where exact pages have let go of the prompt's newest tokens.
            runner.extend(done, random_tokens(200, 6).tolist())
            assert runner.extend(done, more).isfinite().all()
    forget(runner)


def test_keys_may_stay_as_if_they_had_not_moved(model: Any) -> None:
    docs = documents([300])
    runner, exact = runner_with(model, docs), unpacked_runner(model, docs, mode="materialise")
    prompt, policy = [fresh(70, 1), docs[0], fresh(50, 2)], Naive(delta_rope=False)
    said, logits = logits_of(runner, prompt, policy, 9)
    assert apart(logits, logits_of(exact, prompt, policy, 9, said)[1]) < 2e-4


def test_steps_read_what_lies_aside_in_few_entries(model: Any) -> None:
    """Each token once; those that windows have at first where they are, the others one by one."""
    some = documents([900, 129])
    runner = runner_with(model, some)
    prompt = [fresh(70, 1), *some, fresh(50, 2)]
    with runner.prefill(prompt, Foresight(share=0.3, draft=0), watched=False) as done:
        packed, near = done.kv.packed, len(done.request.tokens) - RECENT
        assert done.kv.gathered.nbytes == 0
        listed, asked = packed.exact_entries(SINK), packed.step_entries(SINK)
        slots = [
            [(block, slot) for block, begin, end, _, _ in rows for slot in range(begin, end)]
            for rows in (listed.tolist(), asked.tolist())
        ]
        assert sorted(slots[0]) == sorted(slots[1])
        assert len(set(slots[1])) == len(slots[1])
        starts, ends = asked[:, 3], asked[:, 3] + asked[:, 2] - asked[:, 1]
        assert (starts[1:] >= ends[:-1]).all()
        assert starts[0] == SINK
        newest = listed[listed[:, 3] > near]
        assert len(newest)
        assert np.array_equal(asked[asked[:, 3] > near], newest)
        assert 4 * len(asked) < len(listed)


def test_a_batch_says_what_each_says_alone(model: Any) -> None:
    """Prompts with documents beside others without, also where only some have room at once."""
    docs = documents([300, 40])
    prompts: list[Any] = [
        [fresh(70, 1), *docs, fresh(50, 2)],
        random_tokens(150, 3),
        [docs[0], fresh(9, 4)],
        [fresh(90, 5), docs[1], docs[0], fresh(5, 6)],
    ]
    for max_tokens in (2048, 16384):
        runner = runner_with(model, docs, max_tokens=max_tokens, chunk_tokens=200)
        how = {"max_new_tokens": 150, "remember": False, "stop": []}
        alone = [runner.generate(prompt, "naive", **how).tokens for prompt in prompts]
        batch = runner.generate_batch(prompts, "naive", **how)
        assert [answer.tokens for answer in batch] == alone
        streamed = runner.stream(prompts[0], "naive", **how)
        assert [token.token for token in streamed] == alone[0]
        forget(runner)


@pytest.mark.parametrize("policy", ["naive", "epic"])
def test_a_chunk_is_of_rows_and_not_of_positions(model: Any, monkeypatch: Any, policy: str) -> None:
    """Each chunk unpacks all documents before it, however few rows it has."""
    passes: list[int] = []
    compute = ChunkedRun.compute

    def counted(run: ChunkedRun, start: int, end: int) -> None:
        before = sum(done.rows_per_layer[0] for done in run.trace.passes)
        compute(run, start, end)
        passes.append(run.trace.passes[-1].rows_per_layer[0] - before)

    docs = documents([700, 640, 300])
    prompt = [docs[0], fresh(20, 1), docs[1], fresh(90, 2), docs[2], fresh(150, 3)]
    runner = runner_with(model, docs, chunk_tokens=100)
    runner._prefiller.chunk_tokens = 4096
    _, whole = logits_of(runner, prompt, policy, 1)
    runner._prefiller.chunk_tokens = 100
    monkeypatch.setattr(ChunkedRun, "compute", counted)
    _, said = logits_of(runner, prompt, policy, 1)
    assert apart(said, whole) < 1e-4
    # What no document covers, the sink, and for `epic` more of each document.
    rows = sum(passes)
    assert rows >= 20 + 90 + 150 + SINK
    assert passes == [100] * (rows // 100) + [rows % 100]
    # Between steps of others it is as many rows as positions were asked for.
    passes.clear()
    with closing(runner.engine(token_budget=80, chunk_tokens=48, max_running=4)) as engine:
        request = engine.submit(prompt, policy, max_new_tokens=1, stop=())
        engine.run()
        assert len(request.result().tokens) == 1
    assert passes == [48] * (rows // 48) + [rows % 48]
    forget(runner)


# ---- what is shared and held ----------------------------------------------------------------


def test_documents_are_read_where_they_lie(model: Any) -> None:
    """No packed byte changes, and what a request has of its own is what it computed."""
    docs = documents([300, 129])
    runner = runner_with(model, docs)
    assert runner.packed is not None
    assert [segment.blocks for segment in runner.segments()] == [5, 3]
    before, held = runner.packed.pages.data.clone(), runner.packed.stats()["held"]
    prompt = [fresh(70, 1), *docs, fresh(50, 2)]
    token = runner.cache.block_bytes // runner.cache.shape.page_tokens
    with runner.prefill(prompt, "naive", watched=False) as done:
        report = done.report
        assert (report.reused_segment, report.recomputed, report.mode) == (429, 120, "share")
        spans = [span for span in report.plan.spans if span.kind == "segment"]
        assert [(s.start, s.end, s.delta) for s in spans] == [(70, 370, 70), (370, 499, 370)]
        # Packed pages for what begins or ends beside a document, and for what is decoded.
        assert runner.packed.stats()["held"] <= held + 5
        assert torch.equal(runner.packed.pages.data, before)
        # Its own text, and windows of the sink and the newest tokens.
        exact = runner.cache.stats()["groups"][0]["held"] * runner.cache.shape.page_tokens
        assert 120 <= exact - (64 + 128) <= 120 + 3 * 16
        own = report.kv_bytes - 5 * runner.packed.block_bytes
        assert own <= exact * token <= report.kv_bytes
    with runner.prefill(prompt, Foresight(share=0.1), watched=False) as done:
        rows = 120 + 43
        exact = runner.cache.stats()["groups"][0]["held"] * runner.cache.shape.page_tokens
        assert rows <= exact - (64 + 128) <= rows + 4 * 16
        assert torch.equal(runner.packed.pages.data, before)
    forget(runner)


def test_a_document_goes_when_its_last_reader_does(model: Any) -> None:
    docs = documents([300])
    runner = runner_with(model, docs)
    prompt = [fresh(70, 1), docs[0], fresh(50, 2)]
    said, wanted = logits_of(runner, prompt, "naive", 20)
    with runner.prefill(prompt, "naive", remember=False, watched=False) as done:
        runner.delete("0")
        for seed in range(9):
            with suppress(PoolFull):
                runner.prefill(random_tokens(2000, seed), "full").release()
        sequence = decoding(runner, done, 21)
        logits = [done.logits[-1], *steps_of(runner, sequence, 20, said[1:])]
        assert apart(logits, wanted) == 0.0
    assert nothing_is_held(runner)


def test_what_is_no_document_is_computed(model: Any) -> None:
    """Of another namespace, deleted, or within the sink: then it is a prompt like any other."""
    docs = documents([300, 40])
    runner = runner_with(model, docs)
    theirs = [Segment(tokens=d.tokens, namespace="theirs") for d in docs]
    short = [docs[1], fresh(7, 2)]
    for prompt in ([fresh(9, 1), *theirs, fresh(300, 2)], short):
        for policy in ("naive", "foresight"):
            said, logits = logits_of(runner, prompt, policy, 20)
            _, wanted = logits_of(runner, prompt, "full", 20, said)
            assert apart(logits, wanted) == 0.0
    forget(runner)


def test_unmarked_text_is_found_by_its_content(model: Any) -> None:
    docs = documents([300])
    runner = runner_with(model, docs)
    text = np.concatenate((random_tokens(70, 1), docs[0].tokens or [], random_tokens(50, 2)))
    marked = [fresh(70, 1), docs[0], fresh(50, 2)]
    for prompt, discover, found in ((text, True, 300), (text, False, 0), (marked, False, 300)):
        how = {"discover": discover, "remember": False, "watched": False}
        with runner.prefill(prompt, "naive", **how) as done:
            assert done.report.reused_segment == found


def test_a_document_that_is_inserted_again_is_not_packed_again(model: Any) -> None:
    docs = documents([300, 300])
    runner = runner_with(model, docs[:1])
    assert runner.packed is not None
    before = runner.packed.stats()["held"]
    runner.insert(docs[0].tokens, "again")
    assert runner.packed.stats()["held"] == before
    runner.insert([*(docs[0].tokens or ()), 1, 2, 3], "0")
    assert [segment.tokens for segment in runner.segments()] == [303, 300]
    forget(runner)


# ---- many requests, little room --------------------------------------------------------------


@settings(max_examples=8)
@given(seed=st.integers(0, 2**20), max_tokens=st.sampled_from([1000, 1500, 4000]))
def test_an_engine_answers_in_little_room(seed: int, max_tokens: int) -> None:
    """Whoever finds no room waits, gives way or fails by type; some go before they are done."""
    model = tiny("llama", num_hidden_layers=1, max_position_embeddings=4096)
    draws = np.random.default_rng(seed)
    docs = documents([int(n) for n in draws.integers(1, 200, 3)])
    sizes = {"max_tokens": max_tokens, "chunk_tokens": 64, "frozen_share": 0.8}
    runner = runner_with(model, docs, **sizes)
    engine = runner.engine(token_budget=80, chunk_tokens=48, max_running=4)
    asked = []
    for number in range(6):
        some = [docs[i] for i in draws.integers(0, 3, draws.integers(0, 3))]
        prompt = [fresh(int(draws.integers(1, 100)), number), *some, fresh(3, number)]
        wanted = int(draws.integers(1, 140))
        policy = str(draws.choice(["naive", "foresight", "epic", "prefix"]))
        known = {"max_new_tokens": wanted, "stop": []}
        asked.append((engine.submit(prompt, policy, **known), wanted))
    for number in range(5000):
        if not engine.live:
            break
        if number == 5:
            engine.cancel(asked[0][0])
        engine.must_step()
    for request, wanted in asked:
        if request.outcome == "failed":
            with pytest.raises(PoolFull):
                request.result()
        elif request.outcome == "finished":
            assert len(request.result().tokens) == wanted
    assert any(request.outcome == "finished" for request, _ in asked)
    forget(runner)


def test_a_prompt_without_room_takes_nothing(model: Any) -> None:
    docs = documents([300])
    runner = runner_with(model, docs, max_tokens=1024, chunk_tokens=128)
    assert runner.packed is not None
    held = runner.packed.stats()["held"]
    for prompt in ([fresh(900, 1), docs[0], fresh(5, 2)], [fresh(9, 1), docs[0], fresh(700, 2)]):
        with pytest.raises(PoolFull):
            runner.prefill(prompt, "naive", watched=False)
        assert runner.packed.stats()["held"] == held
        assert runner.cache.stats()["held"] == 0
    with pytest.raises(PoolFull):
        runner.insert(random_tokens(900, 7).tolist(), "large")
    forget(runner)


# ---- bad input ------------------------------------------------------------------------------


def test_nan_reaches_its_own_readers_alone(model: Any) -> None:
    broken = tiny("llama", **SIZES)
    broken.get_input_embeddings().weight.data[7] = torch.nan
    good, bad = (np.full(200, 3), np.full(200, 4))
    bad[100] = 7
    docs = [Segment(tokens=tokens.tolist()) for tokens in (good, bad)]
    runner = runner_with(broken, docs)
    ends = [Segment(tokens=[9] * 70, namespace="fresh"), Segment(tokens=[8] * 9, namespace="fresh")]
    for document, finite in ((0, True), (1, False), (0, True)):
        _, logits = logits_of(runner, [ends[0], docs[document], ends[1]], "naive", 3)
        assert all(bool(row.isfinite().all()) is finite for row in logits)
    forget(runner)


def test_a_draft_that_outgrows_the_windows_is_refused_by_name(model: Any) -> None:
    docs = documents([300])
    runner = runner_with(model, docs)
    with pytest.raises(Unsupported, match="draft: expected fewer than 128 tokens beside packed"):
        runner.prefill([fresh(70, 1), *docs, fresh(5, 2)], Foresight(draft=128), watched=False)
    forget(runner)


# ---- a real model ---------------------------------------------------------------------------


@pytest.mark.long
def test_a_real_model_stays_close(smollm2: Any) -> None:
    """KL a token to the same policy over exact documents."""
    model, tokenizer = smollm2
    sizes = {"max_tokens": 4096, "check": False, "progress": False}
    text = " ".join(f"The {n}th of the {n * 7} sailors was called Ann-{n % 13}." for n in range(60))
    prompt = ["You read.\n", Segment(text), Segment(text[:700]), "\nWho was the 23rd sailor?"]
    said = []
    for runner in (Runner(model, tokenizer, **sizes), packed_runner(model, **sizes)):
        runner.prompts = type(runner.prompts)(tokenizer, runner.spec.vocabulary)
        runner.insert(text, "long")
        runner.insert(text[:700], "short")
        with runner.prefill(prompt, "foresight", remember=False, watched=False) as done:
            assert done.report.reused_segment > 900
            answer = np.arange(1000, 1020)
            said.append(runner.extend(done, answer.tolist()).log_softmax(-1))
    kl = (said[0].exp() * (said[0] - said[1])).sum(-1)
    assert 1e-6 < float(kl.mean()) < 0.05
