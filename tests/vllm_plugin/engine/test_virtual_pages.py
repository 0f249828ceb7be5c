"""Virtual pages in a real engine: the same tokens, and how many blocks lie behind the pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

from kvweave import Unsupported
from kvweave.adapters.vllm.virtual_pages.connector import KvweavePages
from test_head_split import EIGHT, FAMILIES, SIZES, Masked, checkpoint_of
from test_pool_metrics import shown, states
from vllm_engines import OURS, answers, engine, metric, prompt, same, sampling

PROMPTS = [prompt(length, seed) for seed, length in enumerate([5, 40, 100, 200, 33, 64, 1, 250])]
FULL = {"kind": "full"}


def window(sink: int, recent: int) -> dict[str, Any]:
    return {"kind": "window", "sink": sink, "recent": recent}


def written(folder: Path, classes: list[list[dict[str, Any]]]) -> Path:
    """A map of these classes [L, G]."""
    heads = [
        {"layer": number, "head": head, "class": kept, "reach": "local", "stability": "stable"}
        for number, layer in enumerate(classes)
        for head, kept in enumerate(layer)
    ]
    made = {"schema_version": 1, "model_fingerprint": "tiny", "heads": heads}
    made |= {"layers": len(classes), "kv_heads": len(classes[0])}
    path = folder / "map.json"
    path.write_text(json.dumps(made))
    return path


def one_global(sink: int, recent: int, layers: int = 4) -> list[list[dict[str, Any]]]:
    """One head of four keeps everything, another one in each layer."""
    local = window(sink, recent)
    return [
        [FULL if head == number % 4 else local for head in range(4)] for number in range(layers)
    ]


def virtual(family: str = "llama", heads: Path | None = None) -> dict[str, Any]:
    options = {"virtual_pages": True, **({} if heads is None else {"heads": str(heads)})}
    return {
        "hf_overrides": {"architectures": [f"Kvweave{FAMILIES[family]}ForCausalLM"]},
        "additional_config": {"kvweave": options},
        "block_size": 16,
        "kv_transfer_config": {
            "kv_connector": KvweavePages.__name__,
            "kv_connector_module_path": KvweavePages.__module__,
            "kv_role": "kv_both",
        },
    }


def masked(family: str, path: Path) -> Masked:
    changes = {"head_dim": 32, "initializer_range": 0.15, "sliding_window": None, **SIZES}
    return Masked(family, changes, path)


def scheduler_of(llm) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def residency_of(llm) -> Any:
    return scheduler_of(llm).kv_cache_manager.coordinator.single_type_managers[0].residency


def memory_of(llm) -> Any:
    config = llm.llm_engine.vllm_config.compilation_config
    return next(iter(config.static_forward_context.values())).memory


def nothing_is_lost(llm) -> None:
    """After all requests nobody holds a block, and the books balance."""
    pages = residency_of(llm).pages
    pages.check()
    assert pages.stats()["held"] == 0


def peaks(llm, prompts: list[dict[str, list[int]]], count: int) -> list[dict[str, int]]:
    """By step: pages that requests hold, and blocks behind them, as scheduler and worker know."""
    inner, found = llm.llm_engine, []
    for number, given in enumerate(prompts):
        inner.add_request(str(number), given, sampling(count))
    while inner.has_unfinished_requests() and len(found) < 2000:
        inner.step()
        manager = scheduler_of(llm).kv_cache_manager
        pool, stats = manager.block_pool, residency_of(llm).pages.stats()
        used = pool.num_gpu_blocks - pool.get_num_free_blocks() - 1
        running = len(scheduler_of(llm).running)
        by_table = memory_of(llm).blocks_in_use()
        found.append({"pages": used, "running": running, "tables": by_table, **stats})
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_full_heads_are_stocks(checkpoint, family: str) -> None:
    model = checkpoint(family)
    with engine(model, OURS) as llm:
        wanted = answers(llm, PROMPTS, 12)
    with engine(model, virtual(family)) as llm:
        # A block in use elsewhere: pages are numbered by vLLM, and lie somewhere else.
        pages = residency_of(llm).pages
        elsewhere = np.array([[0, pages.stats()["total"]]], np.int32)
        pages.take(elsewhere)
        got = answers(llm, PROMPTS, 12)
        table = memory_of(llm).tables[0]
        used = table[:-1].nonzero()[:, 0]
        assert len(used) > 40
        assert (table[used] // residency_of(llm).layout.block_pages != used).all()
        pages.release(elsewhere, keep=False)
        nothing_is_lost(llm)
    same(got, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_local_heads_are_masked_ones(checkpoint, tmp_path, family: str) -> None:
    """Chunks, mixed batches and decode steps, the window far shorter than the prompts."""
    path = written(tmp_path, one_global(sink=20, recent=40))
    wanted = [masked(family, path).answer(given, 8) for given in PROMPTS]
    with engine(checkpoint_of(checkpoint, family), virtual(family, path)) as llm:
        got = answers(llm, PROMPTS, 8)
        nothing_is_lost(llm)
    same(got, wanted)


def test_heads_may_differ_as_they_like(checkpoint, tmp_path) -> None:
    """Layers without global heads, all of them global, and windows of three kinds."""
    narrow, wide, sinks = window(0, 24), window(16, 100), window(33, 17)
    classes = [
        [narrow, wide, sinks, narrow],
        [FULL, FULL, FULL, FULL],
        [narrow, FULL, sinks, sinks],
        [wide, wide, wide, wide],
    ]
    path = written(tmp_path, classes)
    wanted = [masked("llama", path).answer(given, 8) for given in PROMPTS]
    with engine(checkpoint_of(checkpoint, "llama"), virtual("llama", path)) as llm:
        got = answers(llm, PROMPTS, 8)
        nothing_is_lost(llm)
    same(got, wanted)


def test_no_head_needs_to_keep_everything(checkpoint, tmp_path) -> None:
    path = written(tmp_path, [[window(16, 40)] * 4] * 4)
    wanted = [masked("llama", path).answer(given, 8) for given in PROMPTS]
    with engine(checkpoint_of(checkpoint, "llama"), virtual("llama", path)) as llm:
        got = answers(llm, PROMPTS, 8)
    same(got, wanted)


def test_local_heads_lie_in_fewer_blocks_than_pages(checkpoint, tmp_path) -> None:
    """A request of 430 tokens is 27 pages; a window of 32 and a sink of 16 are few of them."""
    path = written(tmp_path, one_global(sink=16, recent=32))
    changes = {"enable_prefix_caching": False}
    with engine(checkpoint_of(checkpoint, "llama"), virtual("llama", path), **changes) as llm:
        layout = residency_of(llm).layout
        assert (layout.parts, layout.head_slots) == ((1, 3), 1) or layout.parts == (3, 1)
        steps = peaks(llm, [prompt(400, 1)], 30)
        nothing_is_lost(llm)
    whole = layout.spans.index((None, 0))
    last = steps[-2]
    assert last["pages"] == 27
    for table, number in enumerate(layout.tables):
        # Sink, window and the page that it starts in; every page of the global heads.
        expected = 27 if number == whole else 1 + 3
        assert last["tables"][table] <= expected
        assert number != whole or last["tables"][table] == expected
    # While chunks of 64 rows are computed, they lie there too.
    most = max(sum(step["tables"]) for step in steps)
    assert most <= 27 + 3 * (1 + 3 + 4)
    assert all(step["held"] <= sum(step["tables"]) for step in steps)


def test_the_arena_is_what_admits(checkpoint, tmp_path) -> None:
    """Numbers of pages abound; blocks do not, and requests wait or start anew: tokens stay."""
    path = written(tmp_path, one_global(sink=16, recent=32))
    prompts = [prompt(60, seed) for seed in range(8)]
    model = checkpoint_of(checkpoint, "llama")
    changes = {"enable_prefix_caching": False}
    with engine(model, virtual("llama", path), **changes) as llm:
        wanted = answers(llm, prompts, 200)
        assert metric(llm, "num_preemptions") == 0
        needed = residency_of(llm).layout.most_blocks(512, 64)
    for blocks in (needed + 2, needed + 40):
        changes["num_gpu_blocks_override"] = blocks
        with engine(model, virtual("llama", path), **changes) as llm:
            steps = peaks(llm, prompts, 200)
            assert max(step["held"] for step in steps) <= residency_of(llm).pages.stats()["total"]
            nothing_is_lost(llm)
            assert metric(llm, "num_preemptions") > 0
            got = answers(llm, prompts, 200)
            nothing_is_lost(llm)
        same(got, wanted)
        assert max(step["pages"] for step in steps) < blocks - 1 - 10, "blocks ran out, not numbers"


def test_an_eighth_of_global_heads_admits_five_times_as_many_requests(checkpoint, tmp_path) -> None:
    """By vLLM's own figure, for requests of 64K tokens."""
    length, sizes = 65536, {"num_hidden_layers": 2, "max_position_embeddings": 65536}
    model = checkpoint("llama", **EIGHT, **sizes)
    classes = [[FULL, *[window(16, 512)] * 7], [*[window(16, 512)] * 7, FULL]]
    path = written(tmp_path, classes)
    found = []
    for choice in ({**OURS, "block_size": 16}, virtual("llama", path)):
        with engine(model, choice, max_model_len=length, max_num_batched_tokens=1024) as llm:
            kept = scheduler_of(llm).kv_cache_config
            found.append(get_kv_cache_capacity(llm.llm_engine.vllm_config, kept)[1])
    assert found[1] >= 5 * found[0]


def test_a_prompt_that_fills_the_arena_comes_again(checkpoint, tmp_path) -> None:
    """Its own prefix is what the arena holds then, and must not stand in its way."""
    path = written(tmp_path, one_global(sink=16, recent=32))
    model = checkpoint_of(checkpoint, "llama")
    with engine(model, virtual("llama", path)) as llm:
        layout, spec = (
            residency_of(llm).layout,
            scheduler_of(llm).kv_cache_config.kv_cache_groups[0],
        )
        least = -(-layout.charged(512, spec.kv_cache_spec.in_flight) // layout.head_slots) + 1
        wanted = answers(llm, [prompt(490, 3)], 20)
    changes = {"enable_prefix_caching": True, "num_gpu_blocks_override": least}
    with engine(model, virtual("llama", path), **changes) as llm:
        for _ in range(3):
            assert len(peaks(llm, [prompt(490, 3)], 20)) < 100
        got = answers(llm, [prompt(490, 3)], 20)
        assert got[0].cached > 0
        nothing_is_lost(llm)
    same(got, wanted)


def test_an_arena_that_holds_no_request_is_refused(checkpoint, tmp_path) -> None:
    path = written(tmp_path, one_global(sink=16, recent=32))
    changes = {"num_gpu_blocks_override": 40, "max_model_len": 512}
    with (
        pytest.raises(ValueError, match="KV cache is needed, which is larger"),
        engine(checkpoint_of(checkpoint, "llama"), virtual("llama", path), **changes),
    ):
        pass


@pytest.mark.parametrize("sink", [0, 20])
def test_cached_prefixes_are_read(checkpoint, tmp_path, sink: int) -> None:
    path = written(tmp_path, one_global(sink=sink, recent=40))
    ids = prompt(300, 5)["prompt_token_ids"]
    prompts = [{"prompt_token_ids": ids[:end]} for end in (300, 299, 200)]
    model = checkpoint_of(checkpoint, "llama")
    with engine(model, virtual("llama", path), enable_prefix_caching=False) as llm:
        wanted = [answers(llm, [given], 8)[0] for given in prompts]
    with engine(model, virtual("llama", path), enable_prefix_caching=True) as llm:
        got = [answers(llm, [given], 8)[0] for given in prompts]
        nothing_is_lost(llm)
    # What windows left behind stays until its blocks are needed.
    assert [a.cached for a in got] == [0, 288, 192]
    same(got, wanted)


def test_prefixes_that_lost_their_blocks_are_not_found(checkpoint, tmp_path) -> None:
    """Prompts that share half of their text, again and again, in an arena that holds few."""
    path = written(tmp_path, one_global(sink=20, recent=40))
    head = prompt(160, 5)["prompt_token_ids"]
    tails = [prompt(40 + 30 * seed, 10 + seed)["prompt_token_ids"] for seed in range(8)]
    prompts = [{"prompt_token_ids": head + tail} for tail in tails * 2]
    model = checkpoint_of(checkpoint, "llama")
    with engine(model, virtual("llama", path), enable_prefix_caching=False) as llm:
        wanted = answers(llm, prompts, 20)
        needed = residency_of(llm).layout.most_blocks(512, 64)
    changes = {"enable_prefix_caching": True, "num_gpu_blocks_override": needed + 40}
    with engine(model, virtual("llama", path), **changes) as llm:
        got = answers(llm, prompts, 20)
        again = answers(llm, prompts[:2], 20)
        nothing_is_lost(llm)
    assert max(a.cached for a in got) > 0
    same(got, wanted)
    same(again, wanted[:2])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "block size": ({"block_size": 48}, "block_size: expected one of 16, 32, 64"),
    "no connector": ({"kv_transfer_config": None}, "kv_connector: expected KvweavePages"),
}


@pytest.mark.parametrize(("changes", "says"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_compose_is_refused(checkpoint, changes: dict[str, Any], says: str) -> None:
    with (
        pytest.raises(Unsupported, match=says),
        engine(checkpoint("llama"), {**virtual(), **changes}),
    ):
        pass


def test_what_classes_keep_is_on_the_metrics(checkpoint, tmp_path, monkeypatch) -> None:
    path = written(tmp_path, one_global(20, 40))
    model = checkpoint_of(checkpoint, "llama")
    changes = {"enable_prefix_caching": False, "num_gpu_blocks_override": 80}
    with engine(model, virtual(heads=path), **changes) as llm:
        found = [step for step in states(llm, [prompt(60, 1)], monkeypatch, 200) if step]
        layout = residency_of(llm).layout
    local, block = "window-40-sink-20", layout.block_pages * 2 * 16 * 32 * 4
    assert len({sum(step.values()) for step in found}) == 1
    last = [step for step in found if step["full", "resident"]][-1]
    # Of 17 pages the local heads keep the sink's two and the three or four of a window.
    assert last["full", "resident"] == 17 * layout.parts[0] * block
    assert last[local, "resident"] in [pages * layout.parts[1] * block for pages in (5, 6)]
    assert found[-1]["full", "resident"] == found[-1][local, "resident"] == 0
    given_back = shown("given_back_bytes_total", group=local)
    assert given_back + last[local, "resident"] == 17 * layout.parts[1] * block
    assert shown("stalls_total") == 0
