"""Layers whose tokens are brought together before they are read: the same attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cached_prompts import knowledge, logits_of
from families import tiny
from head_maps import CLASSES, classes_of, near, runner_of
from kvweave import OutOfMemory, ops
from kvweave.policies import Foresight
from kvweave.runner.kv import gathered_reads
from kvweave.runner.kv.gathered_tokens import GatheredTokens
from kvweave.runner.kv.token_places import no_places
from rotary import rotated_by_torch

HEADS, LAYERS, DIM, PAGE = 2, 3, 8, 4


def arena(blocks: int, seed: int = 0) -> torch.Tensor:
    sizes = (blocks * LAYERS * HEADS, 2, PAGE, DIM)
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def frequencies() -> np.ndarray:
    return np.stack([(10.0 + layer) ** -np.linspace(0, 1, DIM // 2) for layer in range(LAYERS)])


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_tokens_come_in_order_and_turned(layer: int, count: int) -> None:
    """Token by token, from any slots, each turned by a delta of its own."""
    rng, pages = np.random.default_rng(count), arena(60)
    inv_freq = frequencies().astype(np.float32)
    rope = ops.RopeTable(inv_freq)
    slots = rng.permutation(60 * PAGE)[:count]
    places = np.stack((slots // PAGE * LAYERS * HEADS, slots % PAGE, rng.integers(-50, 50, count)))
    known = GatheredTokens.of(pages, HEADS, 5, places.T.astype(np.int32))
    got = known.gathered(layer, rope)
    assert [entry[3] for entry in known.entries.tolist()] == list(range(5, 5 + count, 64))
    for block, begin, end, position, delta in known.entries.tolist():
        assert (begin, delta) == (0, 0)
        for slot in range(end):
            from_block, from_slot, moved = places[:, position - 5 + slot].tolist()
            for head in range(HEADS):
                k, v = pages[from_block + layer * HEADS + head, :, from_slot]
                here = got[block + layer * HEADS + head, :, slot]
                angles = torch.from_numpy(moved * np.tile(inv_freq[layer], 2))[None]
                wanted = rotated_by_torch(k[None, None], angles.cos(), angles.sin())[0, 0]
                torch.testing.assert_close(here[0], wanted)
                assert torch.equal(here[1], v)
    assert sum(entry[2] for entry in known.entries.tolist()) == count


def test_nothing_is_gathered_of_no_tokens() -> None:
    known = GatheredTokens.of(arena(2), HEADS, 0, no_places(0))
    assert known.entries.shape == (0, 5)
    assert len(known.gathered(1, ops.RopeTable(frequencies().astype(np.float32)))) == 2 * HEADS


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has all rows of prompts that read moved keys gather their layers; how often they did."""
    gathered, done = gathered_reads.GatheredReads.attend, list[int]()

    def attend(reads: Any, layer: int, *given: Any) -> Any:
        done.append(layer)
        return gathered(reads, layer, *given)

    monkeypatch.setattr(gathered_reads.GatheredReads, "attend", attend)
    monkeypatch.setattr(
        "kvweave.runner.kv.request_kv.is_worth_gathering",
        lambda table, rows, device: table.turns > 0,
    )
    return done


@pytest.mark.parametrize("scratch", [32_768, 64])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("policy", ["naive", Foresight(share=0.2, draft=3), "epic"], ids=str)
def test_a_prompt_says_what_it_says_where_pages_lie(
    policy: Any, name: str, scratch: int, at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered_reads, "SCRATCH_TOKENS", scratch)
    runner = runner_of(tiny(name), mode="share")
    got, report = logits_of(runner, knowledge(runner, 3), policy)
    assert set(at_once) == set(range(len(runner.spec.layers)))
    monkeypatch.undo()
    other = runner_of(tiny(name), mode="share")
    wanted, planned = logits_of(other, knowledge(other, 3), policy)
    near(got, wanted)
    assert report.rows_per_layer == planned.rows_per_layer


@pytest.mark.parametrize("chunk", [None, 64])
def test_nothing_is_kept_behind_a_prompt(chunk: int | None, at_once: list[int]) -> None:
    """Those who decode hold pages of the arena alone."""
    runner = runner_of(tiny("llama"), mode="share", chunk_tokens=chunk)
    with runner.prefill(knowledge(runner, 3), "naive", remember=False) as done:
        assert at_once
        assert done.kv.gathered.nbytes == 0
        of_layer = len(done.request.tokens) * runner.cache.shape.page_bytes // 16
        assert done.kv.gathered.most_bytes > of_layer * runner.spec.kv_heads


@pytest.mark.parametrize("at", [0, 2])
def test_without_memory_pages_are_read_where_they_lie(
    at: int, at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, other = (runner_of(tiny("llama"), mode="share") for _ in range(2))
    wanted, _ = logits_of(other, knowledge(other, 3), "naive")
    made, tried = GatheredTokens.gathered, list[int]()

    def short(tokens: GatheredTokens, layer: int, rope: ops.RopeTable) -> torch.Tensor:
        tried.append(layer)
        if layer >= at:
            raise OutOfMemory("tokens brought together: none")
        return made(tokens, layer, rope)

    monkeypatch.setattr(GatheredTokens, "gathered", short)
    got, _ = logits_of(runner, knowledge(runner, 3), "naive")
    assert set(tried) == set(at_once) == set(range(len(runner.spec.layers)))
    near(got, wanted)


def test_heads_of_several_groups_read_where_pages_lie(at_once: list[int]) -> None:
    model = tiny("llama")
    runner = runner_of(model, classes_of(model, CLASSES), mode="share")
    logits_of(runner, knowledge(runner, 3), Foresight(share=0.2, draft=0))
    assert not at_once
