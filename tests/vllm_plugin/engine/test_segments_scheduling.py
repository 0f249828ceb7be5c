"""Segments as vLLM schedules: chunks, preemption, aborted requests, its own prefix cache."""

from __future__ import annotations

from typing import Any

from families import tiny
from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from vllm_engines import answer, metric, same, sampling
from vllm_segments import (
    BEHIND,
    DOCUMENT,
    FIRST,
    SECOND,
    SIZES,
    Counterpart,
    Marked,
    ask,
    asked,
    close,
    plain,
    segments,
    settings,
    stock,
    text,
)


def test_chunks_inside_a_segment(checkpoint) -> None:
    """Chunks of 48 tokens; one has no row to compute at all."""
    beside = Counterpart(tiny("llama", **SIZES))
    with segments(checkpoint("llama"), settings(), max_num_batched_tokens=48) as (llm, counts):
        for given in (FIRST, SECOND):
            wanted = beside.ask(given, "naive")
            got = ask(llm, given, policy="naive")
            close(got, wanted)
    assert counts.total.reused_tokens == len(DOCUMENT)
    spared = len(DOCUMENT) * len(beside.rows)
    assert counts.total.rows_spared == counts.total.copied_keys == spared


def test_chunks_are_planned_one_by_one(checkpoint) -> None:
    """A chunk of reused text has its own tail and its own scores; answers stay the same twice."""
    changes = {"max_num_batched_tokens": 48, "enable_prefix_caching": False}
    with segments(checkpoint("llama"), settings(), **changes) as (llm, counts):
        ask(llm, FIRST)
        first = ask(llm, SECOND)
        rows = counts.total.recomputed_rows
        assert ask(llm, SECOND) == first
    assert 0 < rows < len(DOCUMENT)
    assert counts.total.recomputed_rows == 2 * rows


def test_preempted_requests_go_on(checkpoint) -> None:
    """With few blocks some are thrown out, and reuse what they and others had stored."""
    marked = [Marked([text(9, seed), DOCUMENT, text(11, 50 + seed)]) for seed in range(6)]
    changes = {"enable_prefix_caching": False}
    prompts, params = zip(*(asked(given, 40, policy="full") for given in marked), strict=True)
    with segments(checkpoint("llama"), settings(), **changes) as (llm, _):
        wanted = [answer(o) for o in llm.generate(list(prompts), list(params), use_tqdm=False)]
    naive = [asked(given, 40, policy="naive") for given in marked]
    with segments(checkpoint("llama"), settings(), num_gpu_blocks_override=20, **changes) as found:
        llm, counts = found
        outputs = llm.generate([p for p, _ in naive], [s for _, s in naive], use_tqdm=False)
        assert metric(llm, "num_preemptions") > 0
        assert all(len(output.outputs[0].token_ids) == 40 for output in outputs)
        # With policy full what a preempted request computes again is what it was.
        again = [answer(o) for o in llm.generate(list(prompts), list(params), use_tqdm=False)]
        assert counts.worker._admitted == {}
        counts.worker.store.cache.check()
    same(again, wanted)
    assert counts.total.reused_tokens > 0


def test_an_aborted_request_lets_go(checkpoint) -> None:
    """In the middle of its prefill: its segments are free again, and nobody else notices."""
    model = checkpoint("llama")
    other = {"prompt_token_ids": text(60, 5)}
    wanted = stock(model, text(60, 5), 12)
    with segments(model, settings(), max_num_batched_tokens=48) as (llm, counts):
        ask(llm, FIRST)
        inner, done = llm.llm_engine, {}
        inner.add_request("a", *asked(SECOND, 12))
        inner.add_request("b", other, sampling(12))
        for step in range(100):
            if not inner.has_unfinished_requests():
                break
            if step == 2:
                assert len(counts.worker._admitted) == 1
                inner.abort_request(["a"])
            done |= {out.request_id: out for out in inner.step() if out.finished}
        same([answer(done["b"])], [wanted])
        assert counts.worker._admitted == {}
        assert counts.worker.store.cache.stats()["held"] == 0


def test_approximate_blocks_are_never_a_prefix(checkpoint) -> None:
    """An exact prefix is read and a segment reused; then the same tokens, asked as stock."""
    given, head = BEHIND, BEHIND.tokens[:64]
    model = checkpoint("llama")
    wanted = stock(model, given.tokens)
    with segments(model, settings(), enable_prefix_caching=True) as (llm, counts):
        plain(llm, head + text(9, 7))
        ask(llm, FIRST, policy="naive")
        marked = ask(llm, given, policy="naive")
        assert marked.cached == 64
        assert counts.total.reused_tokens == len(DOCUMENT)
        assert marked.tokens != wanted.tokens
        for _ in range(2):
            later = plain(llm, given.tokens)
            same([later], [wanted])
        assert later.cached > 64


def test_a_prefix_of_vllm_and_segments_are_the_runners(checkpoint) -> None:
    """The tokens before the first segment come from vLLM's cache, and are stored from there."""
    given, later = (Marked([text(64, 12), DOCUMENT, text(40, seed)]) for seed in (2, 3))
    beside = Counterpart(tiny("llama", **SIZES))
    with segments(checkpoint("llama"), settings(), enable_prefix_caching=True) as (llm, counts):
        ask(llm, FIRST, policy="naive")
        beside.ask(FIRST, "naive")
        plain(llm, given.tokens[:64] + text(9, 7))
        wanted = beside.ask(given, "naive", remember=False)
        close(ask(llm, given, policy="naive"), wanted)
        assert llm.reset_prefix_cache()
        wanted = beside.ask(later, "naive")
        got = ask(llm, later, policy="naive")
        close(got, wanted)
    assert got.cached == 0
    assert counts.total.hits["prefix"] == 64


def test_policy_full_fills_the_prefix_cache(checkpoint) -> None:
    """Its KV is exact, so that nothing is withheld."""
    with segments(checkpoint("llama"), settings(), enable_prefix_caching=True) as (llm, _):
        ask(llm, FIRST, policy="full")
        assert plain(llm, FIRST.tokens).cached == 128


def test_discovered_segments_withhold_the_whole_prompt(checkpoint) -> None:
    given = Marked([text(37, 3) + list(DOCUMENT) + text(21, 4)])
    with segments(checkpoint("llama"), settings(), enable_prefix_caching=True) as (llm, counts):
        ask(llm, FIRST, policy="naive")
        ask(llm, given, policy="naive", discover=True)
        assert counts.total.reused_tokens > len(DOCUMENT) // 2
        assert plain(llm, given.tokens).cached == 0


def fill(base: KnowledgeBase, seed: int) -> None:
    """Freezes documents of 12 blocks: about half of a store of 25."""
    for number in range(4):
        base.insert(f"document {number}", text(48, seed + number))


def finished(inner: Any) -> Any:
    """The answer to the one request that an engine has, step by step."""
    done: list[Any] = []
    for _ in range(100):
        done += [answer(out) for out in inner.step() if out.finished]
        if done:
            break
    return done[0]


def test_eviction_between_arrival_and_use(checkpoint) -> None:
    """What a prompt reads stays while it is in chunks; before it starts, it may go."""
    model, beside = checkpoint("llama"), Counterpart(tiny("llama", **SIZES))
    later = stock(model, SECOND.tokens)
    wanted = [beside.ask(given, "naive") for given in (FIRST, SECOND)]
    choice = settings(arena=26 * 32 * 1024)
    changes = {"max_num_batched_tokens": 48, "enable_prefix_caching": False}
    with segments(model, choice, **changes) as (llm, counts):
        base, inner = KnowledgeBase(llm.collective_rpc), llm.llm_engine
        ask(llm, FIRST, policy="naive")
        inner.add_request("held", *asked(SECOND, 6, policy="naive"))
        inner.step()
        fill(base, 100)
        assert base.store()["evictions"] > 0
        close(finished(inner), wanted[1])
        assert counts.total.reused_tokens == len(DOCUMENT)
        inner.add_request("late", *asked(SECOND, 6, policy="naive"))
        for round in range(3):
            for entry in base.entries():
                base.delete(entry["name"])
            fill(base, 200 + 10 * round)
        same([finished(inner)], [later])
        assert counts.total.reused_tokens == len(DOCUMENT)
        assert counts.total.misses["not-cached"] >= 2 * len(DOCUMENT)
        counts.worker.store.cache.check()
        assert base.store()["held"] == base.store()["frozen"]


def test_what_was_evicted_is_computed(checkpoint) -> None:
    """A store of 12 blocks holds one prompt at a time; and there is one that it cannot hold."""
    model = checkpoint("llama")
    small = settings(arena=13 * 32 * 1024)
    wanted = stock(model, SECOND.tokens)
    with segments(model, small) as (llm, counts):
        ask(llm, FIRST, policy="naive")
        ask(llm, Marked([tuple(text(190, 30))]), policy="naive")
        same([ask(llm, SECOND, policy="naive")], [wanted])
        assert counts.total.misses["not-cached"] >= 2 * len(DOCUMENT)
        assert counts.total.reused_tokens == 0
        ask(llm, Marked([tuple(text(400, 31))]), policy="naive")
    assert counts.total.misses["refused"] == 400
