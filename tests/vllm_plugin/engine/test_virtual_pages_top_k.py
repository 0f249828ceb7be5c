"""Heads that choose pages of virtual pages, on the device and in the host's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvweave import InvalidArgument
from kvweave.adapters.vllm.heads.class_map import read_classes
from kvweave.adapters.vllm.top_k.bounds import bound_share
from kvweave.adapters.vllm.virtual_pages.choosing_attention import VirtualChoosingAttention
from kvweave.adapters.vllm.virtual_pages.layout import layout_of
from ranked_pages import FULL, WINDOW, top_k
from test_head_split import checkpoint_of
from test_pool_metrics import shown, states
from test_top_k import HEADS, KINDS, LAYERS, PAGE, PROMPTS, defined, written
from test_virtual_pages import memory_of, nothing_is_lost, scheduler_of, virtual
from vllm_engines import answers, engine, metric, prompt, same, sampling

HOST = 64 << 20
LONG = [prompt(length, seed) for seed, length in enumerate([380, 340, 400, 360, 390, 350])]


def with_host(path: Path, host_bytes: int = HOST, family: str = "llama") -> dict[str, Any]:
    choice = virtual(family, path)
    choice["additional_config"]["kvweave"]["host_bytes"] = host_bytes
    return choice


def manager_of(llm: Any) -> Any:
    return scheduler_of(llm).kv_cache_manager.coordinator.single_type_managers[0]


def nothing_is_left(llm: Any) -> None:
    """Of what requests had on the device and on the host."""
    nothing_is_lost(llm)
    far = manager_of(llm).far
    assert (far.held, far.away) == (0, 0)


def sizes_of(
    path: Path, *, spills: bool, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[int, int]:
    """Pages of a head that vLLM takes for a page of its own, and for a request of 512 tokens."""
    share = bound_share(dtype, torch.device(device), PAGE)
    layout = layout_of(read_classes(path, LAYERS, HEADS), PAGE).with_bounds(share, spills=spills)
    return layout.head_slots, layout.charged(512, 2 * 64)


def expect_bounds(llm: Any) -> int:
    """Compares bounds with the keys of pages that are there; how many there are."""
    memory = memory_of(llm)
    layout, found = memory.layout, 0
    pool = scheduler_of(llm).kv_cache_manager.block_pool
    for block in pool.blocks:
        for table in layout.choosing:
            first = int(memory.tables[table, block.block_id])
            if block.block_hash is None or not first:
                continue
            keys = memory.arena[first : first + layout.block_pages, 0]
            row = block.block_id * layout.bound_rows + layout.bound_row(table)
            bounds = memory.bounds[row : row + layout.block_pages]
            used = layout.counts[layout.tables[table]]
            assert (bounds[:used, 0] == keys.amin(1)[:used]).all()
            assert (bounds[:used, 1] == keys.amax(1)[:used]).all()
            found += 1
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_few_pages_are_the_definition(checkpoint, tmp_path, family: str) -> None:
    """Eight prompts at once in chunks of 64 rows: prefills and decodes share steps."""
    path, model = written(tmp_path, KINDS), checkpoint_of(checkpoint, family)
    wanted = [defined(family, KINDS, given, 20) for given in PROMPTS]
    with engine(model, virtual(family, path), enable_prefix_caching=True) as llm:
        config = llm.llm_engine.vllm_config.compilation_config
        layers = list(config.static_forward_context.values())
        assert all(isinstance(layer.impl, VirtualChoosingAttention) for layer in layers)
        got = answers(llm, PROMPTS, 20)
        assert expect_bounds(llm) > 30
        nothing_is_lost(llm)
        again = answers(llm, PROMPTS, 20)
    same(got, wanted)
    # Prompts alone are found again, which are exact.
    assert max(answer.cached for answer in again) == 240
    same(again, wanted)


def test_windows_and_budgets_in_one_map(checkpoint, tmp_path) -> None:
    """Reach and stability: local heads beside heads that choose and heads that read all."""
    kinds = [top_k(4), WINDOW, FULL, top_k(3), WINDOW]
    path, model = written(tmp_path, kinds), checkpoint_of(checkpoint, "llama")
    wanted = [defined("llama", kinds, given, 20) for given in PROMPTS]
    for choice in (virtual("llama", path), with_host(path)):
        with engine(model, choice) as llm:
            got = answers(llm, PROMPTS, 20)
            nothing_is_lost(llm)
        same(got, wanted)


LEAVING = {
    "each step": ([top_k(4), FULL], False),
    "windows beside": ([top_k(4), WINDOW, top_k(3)], False),
    "each page": ([top_k(4, 16), FULL], True),
}


@pytest.mark.parametrize(("kinds", "paced"), LEAVING.values(), ids=LEAVING)
def test_pages_leave_for_the_host_and_answers_stay(checkpoint, tmp_path, kinds, paced) -> None:
    """In the same memory more requests run than where all pages stay; none is preempted."""
    path, model = written(tmp_path, kinds), checkpoint_of(checkpoint, "llama")
    wanted = [defined("llama", kinds, given, 40, paced=paced) for given in LONG]
    choices = {"host": with_host(path), "device": virtual("llama", path)}
    sizes = {name: sizes_of(path, spills=name == "host") for name in choices}
    memory, most = 1.3 * max(charged for _, charged in sizes.values()), {}
    for name, choice in choices.items():
        changes = {"num_gpu_blocks_override": int(memory / sizes[name][0])}
        with engine(model, choice, enable_prefix_caching=False, **changes) as llm:
            inner, running, away = llm.llm_engine, 0, 0
            for number, given in enumerate(LONG):
                inner.add_request(str(number), given, sampling(40))
            while inner.has_unfinished_requests():
                inner.step()
                running = max(running, len(scheduler_of(llm).running))
                if name == "host":
                    away = max(away, manager_of(llm).far.away)
            most[name] = running
            if name == "host":
                assert away > 1
                assert metric(llm, "num_preemptions") == 0
                assert manager_of(llm).far.spilled > 20
                nothing_is_left(llm)
                same(answers(llm, LONG, 40), wanted)
                nothing_is_left(llm)
    assert most["host"] > most["device"]


KINDS_OF_HOST = [top_k(4), FULL]


def tight(path: Path, requests: float = 1.3) -> dict[str, Any]:
    """An engine's changes with room for so many requests of 512 tokens that all stay."""
    slots, charged = sizes_of(path, spills=True)
    blocks = int(requests * charged / slots)
    return {"enable_prefix_caching": False, "num_gpu_blocks_override": blocks}


@pytest.mark.parametrize("pages", [6, 40])
def test_a_host_that_is_full_takes_what_it_has_room_for(checkpoint, tmp_path, pages: int) -> None:
    """Others wait; all say what they say with all room."""
    path, model = written(tmp_path, KINDS_OF_HOST), checkpoint_of(checkpoint, "llama")
    wanted = [defined("llama", KINDS_OF_HOST, given, 40) for given in LONG]
    changes = tight(path)
    with engine(model, with_host(path), **changes) as llm:
        spec = scheduler_of(llm).kv_cache_config.kv_cache_groups[0].kv_cache_spec
        size = spec.host_bytes // spec.home_blocks
    with engine(model, with_host(path, pages * size), **changes) as llm:
        far = manager_of(llm).far
        assert far.blocks == pages
        got = answers(llm, LONG, 40)
        # Six pages free one page of who has five slots then.
        assert (far.spilled > 0) is (pages > 6)
        assert far.spilled <= pages * len(LONG)
        # Requests wait where nothing leaves: who is preempted has its answer computed anew.
        assert metric(llm, "num_preemptions") == 0
        nothing_is_left(llm)
    same(got, wanted)


def test_requests_that_are_aborted_leave_nothing(checkpoint, tmp_path) -> None:
    """In any step, with copies on their way; those that stay say what they say alone."""
    path, model = written(tmp_path, KINDS_OF_HOST), checkpoint_of(checkpoint, "llama")
    changes, random = tight(path), np.random.default_rng(3)
    wanted = defined("llama", KINDS_OF_HOST, LONG[0], 40)
    with engine(model, with_host(path), **changes) as llm:
        inner, away = llm.llm_engine, 0
        for round_ in range(6):
            names = [f"{round_}-{number}" for number in range(len(LONG))]
            for name, given in zip(names, LONG, strict=True):
                inner.add_request(name, given, sampling(60))
            while inner.has_unfinished_requests():
                inner.step()
                away = max(away, manager_of(llm).far.away)
                if random.random() < 0.08 and names:
                    inner.abort_request([names.pop(int(random.integers(len(names))))])
            nothing_is_left(llm)
        assert away > 1
        assert manager_of(llm).far.spilled > 50
        same(answers(llm, LONG[:1], 40), [wanted])


def test_prefixes_are_found_beside_pages_of_the_host(checkpoint, tmp_path) -> None:
    """What left for the host is found as long as its blocks are nobody else's."""
    path, model = written(tmp_path, KINDS_OF_HOST), checkpoint_of(checkpoint, "llama")
    head = prompt(200, 5)["prompt_token_ids"]
    tails = [prompt(120 + 10 * seed, 20 + seed)["prompt_token_ids"] for seed in range(4)]
    prompts = [{"prompt_token_ids": head + tail} for tail in tails]
    wanted = [defined("llama", KINDS_OF_HOST, given, 30) for given in prompts]
    changes = {**tight(path, 1.1), "enable_prefix_caching": True}
    with engine(model, with_host(path), **changes) as llm:
        for _ in range(3):
            got = answers(llm, prompts, 30)
            assert metric(llm, "num_preemptions") == 0
            nothing_is_left(llm)
            same(got, wanted)
        assert manager_of(llm).far.spilled > 10
        assert max(answer.cached for answer in got) > 0


def test_bytes_of_the_host_are_on_the_metrics(checkpoint, tmp_path, monkeypatch) -> None:
    path, model = written(tmp_path, KINDS_OF_HOST), checkpoint_of(checkpoint, "llama")
    with engine(model, with_host(path), **tight(path)) as llm:
        found = states(llm, LONG[:3], monkeypatch, 40)
        far, home = manager_of(llm).far, scheduler_of(llm).connector.home_bytes
    held = [step["top-k", "held"] for step in found if ("top-k", "held") in step]
    assert max(held) > 0
    assert held[-1] == 0
    assert shown("spilled_bytes_total") == far.spilled * home
    names = {group for step in found for group, _ in step}
    assert names == {"full", "top-k-4", "any", "top-k"}


REFUSED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "no heads": ([WINDOW, FULL], {"host_bytes": HOST}, "host_bytes: expected a map with top_k"),
    "no room": (KINDS_OF_HOST, {"host_bytes": 100}, "host_bytes: expected at least"),
    "budget": ([top_k(2), FULL], {}, "top_k.pages: expected at least 3"),
    "no pages": (KINDS_OF_HOST, {"host_bytes": HOST, "virtual_pages": False}, "host_bytes"),
}


@pytest.mark.parametrize(("kinds", "options", "says"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(checkpoint, tmp_path, kinds, options, says: str) -> None:
    choice = virtual("llama", written(tmp_path, kinds))
    choice["additional_config"]["kvweave"] |= options
    with (
        pytest.raises(InvalidArgument, match=says),
        engine(checkpoint_of(checkpoint, "llama"), choice),
    ):
        pass
