"""Requests join a batch and leave it; whoever is there, each says what it says alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cached_prompts import knowledge
from decode_batches import decoding, prefilled
from families import random_tokens, tiny
from head_maps import classes_of, runner_of
from kvweave import InvalidArgument, PoolFull, ops
from kvweave._native import DecodeRows
from kvweave.cache import KvCache, KvShape
from kvweave.runner import Runner
from kvweave.runner.decode.decoding import Decoding, by_regime
from kvweave.runner.decode.graph import StepGraphs
from kvweave.runner.decode.slots import DecodeSlots

FAMILIES = {name: tiny(name) for name in ("llama", "qwen2-sliding", "llama-dynamic")}


def runner_for(name: str, mapped: bool, **settings: Any) -> Runner:
    model = FAMILIES[name]
    return runner_of(model, classes_of(model) if mapped else None, **settings)


@dataclass
class Logits:
    """What each request's steps gave, by the token that was fed."""

    rows: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def note(self, batch: list[Decoding], logits: torch.Tensor) -> None:
        for sequence, row in zip(batch, logits, strict=True):
            self.rows.setdefault(id(sequence), []).append(row.clone())


def overhear(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Logits:
    """Keeps the logits of all steps of a runner."""
    decoder, heard = runner._decoder, Logits()
    logits_of = decoder._logits

    def listen(slots: DecodeSlots, step: Any, watched: bool) -> torch.Tensor:
        logits = logits_of(slots, step, watched)
        heard.note(slots.batch, logits)
        return logits

    monkeypatch.setattr(decoder, "_logits", listen)
    return heard


def close(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    torch.testing.assert_close(torch.stack(one), torch.stack(other), atol=1e-4, rtol=0)


# Two that sat apart, then together, then apart again.
@example(name="llama", mapped=False, graphs=False, seeds=[0, 1, 2], turns=[4, 1, 5, 1, 4])
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(sorted(FAMILIES)),
    mapped=st.booleans(),
    graphs=st.booleans(),
    seeds=st.lists(st.integers(0, 1000), min_size=2, max_size=6, unique=True),
    turns=st.lists(st.integers(0, 2**6 - 1), min_size=4, max_size=30),
)
def test_whoever_joins_and_leaves_each_says_what_it_says_alone(
    name, mapped, graphs, seeds, turns
) -> None:
    """Prompts of unlike lengths and promotions, in batches drawn at random, in any order."""
    runner = runner_for(name, mapped)
    decoder = runner._decoder
    if graphs and decoder.rotary.is_fixed:
        # What is captured on a GPU, launch by launch.
        decoder.graphs = StepGraphs(decoder.heads, decoder.rotary, decoder.pages, None)
        decoder.graphs.capturable = False
    alone: list[tuple[list[int], list[torch.Tensor]]] = []
    with torch.inference_mode():
        for seed in seeds:
            with prefilled(runner, seed, mapped) as done, pytest.MonkeyPatch.context() as patch:
                sequence, heard = decoding(runner, done, 40), overhear(runner, patch)
                while not sequence.done:
                    decoder.step([sequence])
                decoder.forget()
                alone.append((sequence.tokens, heard.rows[id(sequence)]))
        prefills = [prefilled(runner, seed, mapped) for seed in seeds]
        together = [decoding(runner, done, 40) for done in prefills]
        with pytest.MonkeyPatch.context() as patch:
            heard = overhear(runner, patch)
            for turn in turns:
                batch = [s for i, s in enumerate(together) if turn >> i & 1 and not s.done]
                for kind in by_regime(batch[:: 1 if turn % 3 else -1]):
                    decoder.step(kind)
        for sequence, (tokens, rows) in zip(together, alone, strict=True):
            said = len(sequence.tokens)
            close(heard.rows.get(id(sequence), []), rows[: said - 1]) if said > 1 else None
            assert sequence.tokens == tokens[:said]
        decoder.forget()
        for done in prefills:
            done.release()
    runner.cache.check()
    assert runner.cache.stats()["held"] == 0


def test_frequencies_are_those_of_a_length_whoever_was_asked_about_before() -> None:
    rotary = Runner(tiny("llama-dynamic"), max_tokens=512)._decoder.rotary
    lengths = [1, 64, 65, 200, 90, 300, 20]
    regimes = {n: rotary.table(n).regime for n in lengths}
    assert len(set(regimes.values())) > 2
    for length in [*reversed(lengths), *sorted(lengths)]:
        table = rotary.table(length)
        assert table.regime == regimes[length]
        # A decode step's row is asked about alone, behind longer and shorter ones.
        newest = np.array([350, length - 1, 5], np.int32)
        for key, (cos, sin) in rotary.lone_turns(newest).items():
            torch.testing.assert_close(cos[1], table.cos[key][length - 1], rtol=0, atol=0)
            torch.testing.assert_close(sin[1], table.sin[key][length - 1], rtol=0, atol=0)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_batch_that_stays_is_bit_for_bit_the_cache_s_own_tables(mapped, monkeypatch) -> None:
    """Against attention over the tables that the cache itself gives, made anew in every step."""
    runner = runner_for("llama", mapped)
    decoder, spec = runner._decoder, runner.spec
    done = [prefilled(runner, seed, False) for seed in range(5)]
    batch = [decoding(runner, one, 60) for one in done]
    attend, calls = ops.attend_decode, []

    def compare(q: Any, positions: Any, entries: Any, kv: ops.PagedKv, **named: Any) -> Any:
        out, lse = attend(q, positions, entries, kv, **named)
        tables = range(batch[0].request.tables)
        own = [s.request.entries(table) for s in batch for table in tables]
        offsets = np.cumsum([0, *map(len, own)], dtype=np.int32)
        reach = decoder.heads.reaches(batch[0].request)
        window = spec.layers[kv.layer].window if reach is None else None
        as_made = replace(kv, window=window, reach=None if reach is None else reach[kv.layer])
        named |= {"entry_offsets": offsets}
        wanted = attend(q, positions, np.concatenate(own), as_made, **named)
        assert torch.equal(out, wanted[0])
        assert torch.equal(lse, wanted[1])
        calls.append(kv.layer)
        return out, lse

    monkeypatch.setattr(ops, "attend_decode", compare)
    with torch.inference_mode():
        for _ in range(40):
            decoder.step(batch)
    assert len(calls) == 40 * len(spec.layers)


def test_thirty_two_unlike_promotions_share_every_step(monkeypatch) -> None:
    model = FAMILIES["llama"]
    runner = runner_of(model, classes_of(model, [(16, 4), (40, 0)]), max_tokens=16384)
    decoder, sizes = runner._decoder, []
    with torch.inference_mode():
        alone = []
        for seed in range(32):
            with prefilled(runner, seed, True) as done:
                sequence = decoding(runner, done, 6)
                while not sequence.done:
                    decoder.step([sequence])
                alone.append(sequence.tokens)
                decoder.forget()
        done = [prefilled(runner, seed, True) for seed in range(32)]
        assert len({tuple(one.request.promoted) for one in done}) > 24
        batch = [decoding(runner, one, 6) for one in done]
        step = ops.write_pages
        monkeypatch.setattr(
            ops, "write_pages", lambda *a, **k: (sizes.append(len(a[2])), step(*a, **k))[1]
        )
        while not batch[0].done:
            assert by_regime(batch) == [batch]
            decoder.step(batch)
    assert [s.tokens for s in batch] == alone
    assert set(sizes) == {32}


def test_a_step_without_room_changes_nothing_and_can_be_tried_again() -> None:
    runner = runner_for("llama", False, max_tokens=16 * 7)
    prompts = [random_tokens(16 * 2 - 1, seed) for seed in range(3)]
    with torch.inference_mode():
        done = [runner.prefill(tokens, "full", remember=False) for tokens in prompts]
        batch = [decoding(runner, one, 40) for one in done]
        runner._decoder.step(batch)
        lengths = [s.request.length for s in batch]
        entries = [s.request.entries() for s in batch]
        for _ in range(2):
            with pytest.raises(PoolFull, match="request 2 of 3") as refused:
                runner._decoder.step(batch)
            assert refused.value.request == 2
            assert [s.request.length for s in batch] == lengths
            assert [len(s.tokens) for s in batch] == [2, 2, 2]
            for sequence, own in zip(batch, entries, strict=True):
                assert np.array_equal(sequence.request.entries(), own)
        done[2].release()
        runner._decoder.forget(done[2].request)
        runner._decoder.step(batch[:1])
        runner._decoder.step(batch[:2])
        assert [s.request.length - n for s, n in zip(batch[:2], lengths[:2], strict=True)] == [2, 1]
    runner.cache.check()


def test_what_changes_between_two_steps_is_seen() -> None:
    """A fork that is decoded meanwhile, blocks copied before they are written, a longer prompt."""
    runner = runner_for("llama", False)
    tokens = random_tokens(37, 3)
    with torch.inference_mode():
        with runner.prefill(tokens, "full", remember=False) as done:
            wanted = runner.decode(done, max_new_tokens=12, stop=()).tokens
        with runner.prefill(tokens, "full", remember=False) as done, done.fork() as fork:
            one, other = decoding(runner, done, 12), decoding(runner, fork, 12)
            for turn in range(11):
                runner._decoder.step([one, other] if turn % 2 else [other])
                if turn % 2 == 0:
                    runner._decoder.step([one])
                fork.request.make_writable(np.asarray([fork.request.length - 1], np.int32))
            assert one.tokens == other.tokens == wanted
            runner._decoder.forget()
    runner.cache.check()


@pytest.mark.long
def test_segments_read_in_place_and_answers_of_the_real_model(smollm2) -> None:
    """SmolLM2: prompts over shared segments come and go while others decode."""
    model, tokenizer = smollm2
    runner = Runner(model, tokenizer, max_tokens=4096, mode="share", progress=False, check=False)
    prompts = ["The capital of France is", "Once upon a time", "Water boils at", "2, 4, 6, 8,"]
    alone = [runner.generate(p, "full", max_new_tokens=10, stop=()).tokens for p in prompts]
    with torch.inference_mode():
        done = [runner.prefill(p, "full", remember=False) for p in prompts]
        waiting = [decoding(runner, one, 10) for one in done]
        batch: list[Decoding] = []
        left = []
        for turn in range(40):
            if turn % 3 == 0 and waiting:
                batch.append(waiting.pop(0))
            left += [s for s in batch if s.done]
            batch = [s for s in batch if not s.done]
            if batch:
                runner._decoder.step(batch)
        runner._decoder.forget()
    assert {tuple(s.tokens) for s in left} == {tuple(tokens) for tokens in alone}
    for one in done:
        one.release()
    runner.cache.check()


@pytest.mark.parametrize("mapped", [False, True])
def test_shared_segments_are_read_in_place_by_a_batch(mapped) -> None:
    said = []
    for mode in ("share", "materialise"):
        runner = runner_for("llama", mapped, mode=mode)
        parts = knowledge(runner, 3)
        made = runner.generate_batch(
            [parts, random_tokens(9, 1), parts], "naive", max_new_tokens=24, stop=(), remember=False
        )
        assert made[0].tokens == made[2].tokens
        said.append([one.tokens for one in made])
    assert said[0] == said[1]


# ---- the border -----------------------------------------------------------------------------


def cache_and_requests(count: int, blocks: int = 40) -> tuple[KvCache, list[Any]]:
    cache = KvCache(KvShape(2, 2, 8, 8), blocks=blocks)
    return cache, [cache.admit(np.arange(7, dtype=np.int32), reuse="none") for _ in range(count)]


def test_a_step_of_the_cache_is_all_or_nothing() -> None:
    cache, requests = cache_and_requests(3, blocks=5)
    ones = np.ones(3, np.int32)
    cache.append_step(requests, ones)
    with pytest.raises(PoolFull) as refused:
        cache.append_step(requests, ones)
    assert refused.value.request == 2
    assert [request.length for request in requests] == [8, 8, 8]
    requests[2].release()
    cache.append_step(requests[1::-1], ones[:2])
    assert [request.length for request in requests[:2]] == [9, 9]
    cache.check()


def test_bad_steps_are_refused_by_name() -> None:
    cache, requests = cache_and_requests(2)
    other = cache_and_requests(1)[1][0]
    ones = np.ones(2, np.int32)
    rows = DecodeRows(cache)
    seats = np.asarray([rows.join(), rows.join()], np.int32)
    for batch, numbers, tokens, what in [
        ([requests[0], requests[0]], seats, ones, "request 1 of 2: expected each request once"),
        ([requests[0], other], seats, ones, "request 1 of 2"),
        (requests, seats[:1], ones, "rows"),
        (requests, seats[[0, 0]], ones, "each row once"),
        (requests, np.asarray([0, 7], np.int32), ones, "row of request 1 of 2"),
        (requests, np.asarray([0, -1], np.int32), ones, "row"),
        (requests, seats, ones[:1], "tokens"),
        (requests, seats, -ones, "tokens"),
        (requests, seats.astype(np.float32), ones, "rows"),
    ]:
        with pytest.raises(InvalidArgument, match=what):
            rows.step(batch, numbers, tokens)
    for heads in ([[0, 0, 3, 0]], [[9, 0, 3, 0]], [[0, 0, -1, 0]], [[0, 0, 3]]):
        with pytest.raises(InvalidArgument):
            rows.set_heads(np.asarray(heads, np.int32))
    with pytest.raises(InvalidArgument):
        rows.leave(5)
    assert [request.length for request in requests] == [7, 7]
    made = rows.step(requests, seats, ones)
    assert made.positions.tolist() == [7, 7]
    requests[0].release()
    with pytest.raises(InvalidArgument, match="request 0 of 2: expected a live request"):
        rows.step(requests, seats, ones)
    cache.check()
