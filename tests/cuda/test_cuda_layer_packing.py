"""Layers of a prompt are packed on a stream of their own: bytes, order, and who waits for whom."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from families import random_tokens, tiny
from kvweave.runner import Packing, Runner, Strategy
from kvweave.runner.kv.aside import Aside
from kvweave.runner.kv.layer_packing import LayerPacking
from kvweave.runner.tiers import final_packing
from kvweave.runner.tiers.copy_memory import CopyMemory
from packed_decoding import nothing_is_held, packed_runner
from page_meaning import random_packing
from strategy_runners import text_of, uneven_model
from versions import needs_cuda

pytestmark = needs_cuda

LAYERS, HEADS, DIM = 3, 2, 128
SLOW = 50_000_000
"""Cycles that a GPU is kept busy: tens of milliseconds, in which the host goes far ahead."""


@pytest.fixture(scope="module")
def model() -> Any:
    sizes = {"head_dim": DIM, "num_key_value_heads": HEADS, "num_hidden_layers": LAYERS}
    return tiny("llama", max_position_embeddings=8192, **sizes).to("cuda", torch.bfloat16)


def runner_that(model: Any, name: str, beside: bool) -> Runner:
    packing, _ = random_packing(name, LAYERS * HEADS, DIM)
    given = Packing(name, packing.basis, beside=beside)
    return packed_runner(model, kv_dtype=given, max_tokens=16_384, chunk_tokens=512)


def prefilled(runner: Runner, tokens: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and the bytes of a prompt that nobody finds."""
    with runner.prefill(tokens, "full", remember=False) as done:
        size, blocks = runner.packed.block_pages, done.kv.packed.request.entries()[:, 0]
        rows = runner.packed.rows(blocks)
        pages = [runner.packed.pages.data[at : at + size] for at in rows.tolist()]
        return done.logits.clone(), torch.stack(pages)


@pytest.mark.parametrize("name", ["int4", "int8", "half-int4", "quarter-bf16", "planes-3"])
def test_bytes_are_those_of_packing_behind(model: Any, name: str) -> None:
    tokens = random_tokens(3000, 1)
    one, behind = (prefilled(runner_that(model, name, beside), tokens) for beside in (True, False))
    assert torch.equal(one[1], behind[1])
    assert torch.equal(one[0], behind[0])


def test_with_a_strategy_too_once_blocks_lie_elsewhere() -> None:
    model, made = uneven_model(64).to("cuda", torch.bfloat16), []
    for beside in (True, False):
        packing = Packing("int4", strategy=Strategy(0.3), beside=beside)
        runner = packed_runner(model, kv_dtype=packing, max_tokens=16_384, chunk_tokens=512)
        runner.encode(random_tokens(4200, 5), "manual")
        runner.flush()
        assert text_of(runner).nbytes > 0
        made.append(prefilled(runner, random_tokens(1500, 6)))
    one, behind = made
    assert torch.equal(one[1], behind[1])
    assert torch.equal(one[0], behind[0])


@pytest.mark.parametrize("name", ["int4", "half-int4"])
def test_whoever_reads_pages_waits_for_a_slow_stream(
    model: Any, monkeypatch: Any, name: str
) -> None:
    """A stream that is far behind changes no bit: later chunks and given back blocks wait."""
    tokens, pack = random_tokens(1500, 2), LayerPacking._pack
    wanted = prefilled(runner_that(model, name, False), tokens)

    def slowly(self: LayerPacking, layer: int) -> None:
        torch.cuda._sleep(SLOW)
        pack(self, layer)

    runner = runner_that(model, name, True)
    prefilled(runner, tokens)
    monkeypatch.setattr(LayerPacking, "_pack", slowly)
    for _ in range(2):
        got = prefilled(runner, tokens)
        assert torch.equal(got[1], wanted[1])
        assert torch.equal(got[0], wanted[0])
    assert nothing_is_held(runner)


def test_blocks_given_back_midway_are_not_written_any_more(model: Any, monkeypatch: Any) -> None:
    """What was begun for a prompt that is dropped is done before others have its blocks."""
    pack = LayerPacking._pack

    def fails(self: LayerPacking, layer: int) -> None:
        torch.cuda._sleep(SLOW)
        pack(self, layer)
        if layer == LAYERS - 1:
            raise KeyboardInterrupt

    tokens = random_tokens(1500, 3)
    wanted = prefilled(runner_that(model, "int4", False), tokens)
    runner = runner_that(model, "int4", True)
    with monkeypatch.context() as patched:
        patched.setattr(LayerPacking, "_pack", fails)
        with pytest.raises(KeyboardInterrupt):
            runner.prefill(random_tokens(1500, 4), "full", remember=False)
    assert nothing_is_held(runner)
    got = prefilled(runner, tokens)
    assert torch.equal(got[1], wanted[1])


def test_what_a_thread_copies_late_is_what_was_written(monkeypatch: Any) -> None:
    """Pages of a document on the host: the same bits however late they are copied."""
    sizes = {"head_dim": 64, "num_key_value_heads": HEADS, "num_hidden_layers": 2}
    small = tiny("llama", max_position_embeddings=8192, **sizes).to("cuda", torch.bfloat16)
    packing, _ = random_packing("half-int4", 2 * HEADS, 64)
    made, on_host = final_packing.Made, CopyMemory.on_host
    parts: list[list[torch.Tensor]] = []

    def heard(copy: Any, shared: torch.Tensor) -> Any:
        parts.append([part.cache.clone() for part in copy.parts])
        return made(copy, shared)

    def late(memory: CopyMemory, tensor: torch.Tensor, aside: Aside) -> torch.Tensor:
        time.sleep(0.05)
        return on_host(memory, tensor, aside)

    def pageable(_: CopyMemory, tensor: torch.Tensor, aside: Aside) -> torch.Tensor:
        return aside.on_host(tensor)

    monkeypatch.setattr(final_packing, "Made", heard)
    for way in (on_host, late, pageable):
        monkeypatch.setattr(CopyMemory, "on_host", way)
        runner = packed_runner(small, kv_dtype=packing, max_tokens=32_768, chunk_tokens=512)
        report = runner.encode(random_tokens(5500, 5).tolist(), "long").packing
        runner.flush()
        assert (report.why, report.basis) == ("", "own")
        memory = runner._prefiller.final_packing.copies
        # All of it is free again.
        assert {*memory._given} == {*memory._places}
        runner.close()
    assert [len(some) for some in parts] == [12] * 3
    for some in parts[1:]:
        assert all(torch.equal(a, b) for a, b in zip(parts[0], some, strict=True))
    assert all(part.device.type == "cpu" and bool(part.any()) for part in parts[0])
