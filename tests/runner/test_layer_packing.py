"""A prompt's layers are packed while those behind are computed: bytes, faults, an end midway."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from families import random_tokens, tiny
from head_maps import runner_of
from kvweave import InvalidArgument, PoolFull, ops
from kvweave.policies import policy_of
from kvweave.runner import Packing, Runner
from kvweave.runner.kv import layer_packing
from kvweave.runner.prefill.lookup import Lookup
from kvweave.runner.prefill.prefill_job import PrefillJob
from kvweave.runner.report import PackedReport
from packed_decoding import nothing_is_held, packed_runner
from page_meaning import random_packing
from ranked_pages import FULL, kinds_map, logits_of_steps, top_k

LAYERS, HEADS, DIM = 3, 2, 16
FORMATS = ("int4", "half-int4", "planes-3")


@pytest.fixture(scope="module")
def model() -> Any:
    sizes = {"head_dim": DIM, "num_key_value_heads": HEADS, "num_hidden_layers": LAYERS}
    return tiny("llama", max_position_embeddings=4096, **sizes)


def runner_that(model: Any, name: str, beside: bool, **settings: Any) -> Runner:
    """One that packs beside what it computes, or behind it."""
    packing, _ = random_packing(name, LAYERS * HEADS, DIM)
    return packed_runner(model, kv_dtype=Packing(name, packing.basis, beside=beside), **settings)


def text_of(runner: Runner, done: Any) -> list[torch.Tensor]:
    """What lies packed of a prompt: bytes, and bounds where there are any."""
    pool, pages = runner.packed, []
    assert pool is not None
    blocks = done.kv.packed.request.entries()[:, 0]
    for side in (pool.pages.data, pool.bounds):
        if side is not None:
            pages += [side[at : at + pool.block_pages].clone() for at in blocks.tolist()]
    return pages


def prefilled(runner: Runner, tokens: Any) -> tuple[torch.Tensor, list[torch.Tensor], Any]:
    """Logits, packed text and report of a prompt that others may find."""
    with runner.prefill(tokens, "prefix") as done:
        return done.logits.clone(), text_of(runner, done), done.report


def expect_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """That logits and packed texts are the same bits."""
    assert torch.equal(one[0], other[0])
    assert len(one[1]) == len(other[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("chunk", [64, 100, 2048])
def test_bytes_are_those_of_packing_behind(model: Any, name: str, chunk: int) -> None:
    """In chunks and at once, and of a prompt that goes on behind a shared prefix."""
    tokens = random_tokens(500, 1)
    other = np.concatenate((tokens[:330], random_tokens(170, 2)))
    runners = [runner_that(model, name, beside, chunk_tokens=chunk) for beside in (True, False)]
    for prompt, found in ((tokens, 0), (other, 320)):
        one, behind = (prefilled(runner, prompt) for runner in runners)
        expect_same(one, behind)
        assert one[2].reused_prefix == behind[2].reused_prefix == found
        full = (len(prompt) - found) // 64
        assert one[2].packed == PackedReport(beside=full)
        assert behind[2].packed == PackedReport(behind=full)
    steps = [logits_of_steps(runner, other, 9) for runner in runners]
    assert steps[0][0] == steps[1][0]
    assert all(torch.equal(a, b) for a, b in zip(steps[0][1], steps[1][1], strict=True))
    assert all(nothing_is_held(runner) for runner in runners)


def test_bounds_are_those_of_packing_behind(model: Any) -> None:
    heads = kinds_map(runner_of(model).spec, [top_k(4), FULL])
    one, behind = (
        prefilled(runner_that(model, "int4", beside, heads=heads), random_tokens(500, 1))
        for beside in (True, False)
    )
    assert one[2].packed.beside == 7
    expect_same(one, behind)


def test_a_layer_is_packed_before_the_next_is_written(model: Any, monkeypatch: Any) -> None:
    seen: list[str] = []
    pack, write = ops.pack_pages, ops.write_pages

    def packs(*given: Any, **named: Any) -> None:
        seen.append("pack")
        pack(*given, **named)

    def writes(*given: Any, **named: Any) -> None:
        seen.append("write")
        write(*given, **named)

    monkeypatch.setattr(ops, "pack_pages", packs)
    monkeypatch.setattr(ops, "write_pages", writes)
    for beside, wanted in ((True, ["write", "pack"] * LAYERS), (False, ["write"] * LAYERS)):
        runner = runner_that(model, "int4", beside)
        seen.clear()
        runner.prefill(random_tokens(500, 1), "prefix").release()
        assert seen == (wanted if beside else [*wanted, "pack"])


def test_what_has_no_basis_yet_is_packed_behind(model: Any) -> None:
    """The shared basis is made of the first prompt's pages, all of them; the next one has it."""
    both = []
    for beside in (True, False):
        runner = packed_runner(model, kv_dtype=Packing("half-int4", beside=beside))
        both.append([prefilled(runner, random_tokens(600, seed)) for seed in (1, 2)])
    for one, behind in zip(*both, strict=True):
        expect_same(one, behind)
    assert [one[2].packed for one in both[0]] == [PackedReport(behind=9), PackedReport(beside=9)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("at", [0, 1, LAYERS - 1, LAYERS + 1])
def test_a_fault_leaves_exact_pages_and_is_reported(
    model: Any, monkeypatch: Any, name: str, at: int
) -> None:
    """The chunk's pages are packed behind it then, to the same bytes."""
    tokens = random_tokens(500, 1)
    wanted = prefilled(runner_that(model, name, False, chunk_tokens=200), tokens)
    runner, pack, calls = runner_that(model, name, True, chunk_tokens=200), ops.pack_pages, []

    def fails(*given: Any, **named: Any) -> None:
        calls.append(named["pages"])
        if len(calls) == at + 1:
            raise RuntimeError("no room for a workspace")
        pack(*given, **named)

    monkeypatch.setattr(ops, "pack_pages", fails)
    got = prefilled(runner, tokens)
    expect_same(got, wanted)
    report = got[2].packed
    assert report.why == f"layer {at % LAYERS}: RuntimeError: no room for a workspace"
    # 500 tokens are chunks of 200, 200 and 100: three pages, three and one come to be full.
    assert (report.beside, report.behind) == (4, 3)
    assert LAYERS * HEADS in calls
    assert nothing_is_held(runner)


def test_what_cannot_be_packed_at_all_is_raised_and_holds_nothing(
    model: Any, monkeypatch: Any
) -> None:
    tokens = random_tokens(500, 1)
    wanted = prefilled(runner_that(model, "int4", False, chunk_tokens=200), tokens)
    runner = runner_that(model, "int4", True, chunk_tokens=200)
    free = runner.packed.cache.stats()["free"]
    with monkeypatch.context() as patched:
        patched.setattr(ops, "pack_pages", _raising(RuntimeError("gone")))
        with pytest.raises(RuntimeError, match="gone"):
            runner.prefill(tokens, "prefix")
    assert nothing_is_held(runner)
    assert runner.packed.cache.stats()["free"] == free
    expect_same(prefilled(runner, tokens), wanted)


def _raising(error: BaseException) -> Any:
    def raises(*_given: Any, **_named: Any) -> None:
        raise error

    return raises


def test_cancelling_midway_loses_nothing(model: Any, monkeypatch: Any) -> None:
    """Between two chunks, and within a layer: all blocks come back, and others say the same."""
    tokens = random_tokens(500, 1)
    wanted = prefilled(runner_that(model, "half-int4", False, chunk_tokens=200), tokens)
    runner = runner_that(model, "half-int4", True, chunk_tokens=200)
    for end in (200, 400):
        prompt, lookup = runner.tokenize(tokens), Lookup(remember=False)
        job = PrefillJob(runner._prefiller, prompt, policy_of("prefix"), lookup, 200)
        job.advance(end)
        assert runner.packed.cache.stats()["held"] > 0
        job.release()
        assert nothing_is_held(runner)
    with monkeypatch.context() as patched:
        patched.setattr(layer_packing.LayerPacking, "_pack", _raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            runner.prefill(tokens, "prefix")
    assert nothing_is_held(runner)
    expect_same(prefilled(runner, tokens), wanted)


def test_a_full_pool_says_so_as_ever(model: Any) -> None:
    """Room that is not there while rows are computed is asked for again behind them."""
    packed = packed_runner(model, max_tokens=512)
    with pytest.raises(PoolFull):
        packed.prefill(random_tokens(700, 1), "prefix")
    assert nothing_is_held(packed)


def test_documents_are_packed_beside_their_rows(model: Any) -> None:
    both = []
    for beside in (True, False):
        runner = runner_that(model, "int4", beside, chunk_tokens=200)
        report = runner.encode(random_tokens(500, 1).tolist(), "manual")
        both.append((report.packed, runner.packed.pages.data.clone()))
    assert torch.equal(both[0][1], both[1][1])
    assert (both[0][0].beside, both[1][0].behind) == (7, 7)


def test_what_is_no_flag_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="beside: expected"):
        Packing("int4", beside=1)  # type: ignore[arg-type]
