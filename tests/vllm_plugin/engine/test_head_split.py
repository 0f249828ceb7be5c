"""Heads of two classes in a real engine: what they answer, and what memory they take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm.config import CacheConfig

from families import tiny
from kvweave.adapters.vllm.heads import sink_manager
from kvweave.adapters.vllm.heads.worker import SplitAttention
from kvweave.adapters.vllm.models import DIGEST
from kvweave.adapters.vllm.options import Options
from vllm_engines import OURS, STOCK, Answer, answers, engine, metric, prompt, same, sampling

PROMPTS = [prompt(length, seed) for seed, length in enumerate([5, 40, 100, 200, 33, 64, 1, 250])]
SIZES = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}


def kept_at_intervals() -> bool:
    """Whether vLLM says where windows of a cached prefix are kept."""
    return "prefix_cache_retention_interval" in CacheConfig.__dataclass_fields__


FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
FAMILIES |= {"qwen3-moe": "Qwen3Moe"}


def written(
    folder: Path,
    sink: int,
    recent: int,
    layers: int = 4,
    kv_heads: int = 4,
    whole: int | Sequence[int] = 1,
    narrower: Sequence[tuple[int, int]] = (),
) -> Path:
    """A map with `whole` global heads in each layer, others from layer to layer.

    `narrower`: (sink, recent) of some of the local heads, in turn with the widest.
    """
    counts = [whole] * layers if isinstance(whole, int) else whole
    windows = [(sink, recent), *narrower]

    def entry(layer: int, head: int) -> dict[str, Any]:
        full = (head - layer) % kv_heads < counts[layer]
        first, latest = windows[(layer + 2 * head) % len(windows)]
        kept = {"kind": "full"} if full else {"kind": "window", "sink": first, "recent": latest}
        reach = "global" if full else "local"
        named = {"class": kept, "reach": reach, "stability": "stable"}
        return {"layer": layer, "head": head, **named}

    made = {
        "schema_version": 1,
        "model_fingerprint": "tiny",
        "layers": layers,
        "kv_heads": kv_heads,
        "heads": [entry(layer, head) for layer in range(layers) for head in range(kv_heads)],
    }
    path = folder / f"map-{len(windows)}-{sink}-{recent}-{'-'.join(map(str, counts))}.json"
    path.write_text(json.dumps(made))
    return path


def ours(path: Path, family: str = "llama") -> dict[str, Any]:
    return {
        "hf_overrides": {"architectures": [f"Kvweave{FAMILIES[family]}ForCausalLM"]},
        "additional_config": {"kvweave": {"heads": str(path)}},
        "block_size": 16,
    }


def checkpoint_of(checkpoint, family: str) -> Path:
    # Mistral's own window would be a second one: the map's is the only one here.
    changes = {"sliding_window": None} if family == "mistral" else {}
    return checkpoint(family, **SIZES, **changes)


def is_split(llm) -> bool:
    worker = llm.llm_engine.model_executor.driver_worker.worker
    return any(isinstance(m, SplitAttention) for m in worker.model_runner.model.modules())


class Masked:
    """transformers' forward, in which each KV head has the window that the map gives it."""

    def __init__(self, family: str, changes: dict[str, Any], path: Path) -> None:
        self.model = tiny(family, **changes)
        heads = json.loads(path.read_text())["heads"]
        self.kinds = {(head["layer"], head["head"]): head["class"] for head in heads}
        transformers.AttentionInterface.register("kvweave_masked", self.attention)
        self.model.set_attn_implementation("kvweave_masked")

    def attention(self, module, q, k, v, mask, scaling=None, **others):
        """q [1, H, T, D], k and v [1, G, T, D] -> [1, T, H, D]"""
        tokens, group = q.shape[2], q.shape[1] // k.shape[1]
        row, key = torch.arange(tokens)[:, None], torch.arange(tokens)
        seen = torch.stack(
            [
                self.visible(self.kinds[module.layer_idx, head], row, key)
                for head in range(k.shape[1])
            ]
        )
        k, v, seen = (x.repeat_interleave(group, -3) for x in (k, v, seen))
        scores = (q @ k.transpose(2, 3)) * scaling
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return (weights @ v).transpose(1, 2), None

    @staticmethod
    def visible(kind: dict[str, Any], row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        if kind["kind"] == "full":
            return key <= row
        return (key <= row) & ((key > row - kind["recent"]) | (key < kind["sink"]))

    def answer(self, given: dict[str, list[int]], count: int) -> Answer:
        ids, logprobs = list(given["prompt_token_ids"]), []
        for _ in range(count):
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
            logprobs.append(float(logits.log_softmax(-1)[ids[-1]]))
        return Answer(ids[-count:], logprobs, 0)


# Layers without global heads, and with all: as `kvweave profile-heads` finds them.
UNEVEN = (0, 1, 4, 2)
SEVERAL = ((4, 10), (0, 25), (20, 3))
"""Windows beside a wider one: none of them keeps as many first tokens and as many latest."""
MASKED = [
    *((family, 1, ()) for family in FAMILIES),
    *(("llama", UNEVEN, windows) for windows in ((), SEVERAL)),
]


@pytest.mark.parametrize(("family", "whole", "narrower"), MASKED)
def test_local_heads_are_masked_ones(
    checkpoint, tmp_path, family: str, whole: Any, narrower: Any
) -> None:
    """Chunks, mixed batches and decode steps, windows far shorter than the prompts."""
    path = written(tmp_path, sink=20, recent=40, whole=whole, narrower=narrower)
    model = checkpoint_of(checkpoint, family)
    changes = {"head_dim": 32, "initializer_range": 0.15, **SIZES}
    masked = Masked(family, {**changes, "sliding_window": None}, path)
    wanted = [masked.answer(given, 8) for given in PROMPTS]
    with engine(model, ours(path, family)) as llm:
        assert is_split(llm)
        # vLLM finds compiled graphs by a hash of this.
        known = llm.llm_engine.vllm_config.additional_config
        assert known[DIGEST] == Options(path).digest()
        got = answers(llm, PROMPTS, 8)
    same(got, wanted)
    with engine(model, STOCK) as llm:
        dense = answers(llm, PROMPTS, 8)
    assert dense[3].tokens != wanted[3].tokens


@pytest.mark.parametrize("recent", [512, None], ids=["wide", "full"])
def test_heads_that_see_everything_are_stocks(checkpoint, tmp_path, recent: int | None) -> None:
    """A window as long as any request, with the split at work; and a map of full heads."""
    path = written(tmp_path, sink=0, recent=recent or 1, whole=1 if recent else 4)
    model = checkpoint_of(checkpoint, "llama")
    with engine(model, STOCK) as llm:
        wanted = answers(llm, PROMPTS, 12)
    # A map of full heads leaves stock attention, whose blocks have multiples of 32 tokens.
    with engine(model, {**ours(path), "block_size": 16 if recent else 32}) as llm:
        assert is_split(llm) is (recent is not None)
        got = answers(llm, PROMPTS, 12)
    same(got, wanted)


@pytest.mark.parametrize(
    ("sink", "whole", "narrower"),
    [(0, 1, ()), (20, 1, ()), (20, (0, 1, 2, 1), ()), (20, (0, 1, 2, 1), SEVERAL)],
)
def test_cached_prefixes_keep_their_sink(
    checkpoint, tmp_path, sink: int, whole: Any, narrower: Any
) -> None:
    path = written(tmp_path, sink=sink, recent=40, whole=whole, narrower=narrower)
    model = checkpoint_of(checkpoint, "llama")
    ids = prompt(300, 5)["prompt_token_ids"]
    prompts = [{"prompt_token_ids": ids[:end]} for end in (300, 299, 200)]
    with engine(model, ours(path), enable_prefix_caching=False) as llm:
        wanted = [answers(llm, [given], 8)[0] for given in prompts]
    with engine(model, ours(path), enable_prefix_caching=True) as llm:
        got = [answers(llm, [given], 8)[0] for given in prompts]
    # Blocks of 48 tokens of the global head; 288 is the last whole one before either end.
    assert [a.cached for a in got[:2]] == [0, 288]
    same(got, wanted)


@pytest.mark.skipif(
    not kept_at_intervals(), reason="this version keeps every window it has room for"
)
def test_a_prefix_is_found_the_first_time_that_it_is_shared(
    checkpoint, tmp_path, monkeypatch
) -> None:
    """As far as windows are kept at intervals, be they asked for or the plugin's own.

    The third prompt finds what vLLM keeps where the second parted from the first.
    """
    path = written(tmp_path, sink=20, recent=40)
    model = checkpoint_of(checkpoint, "llama")
    prefix = prompt(240, 7)["prompt_token_ids"]
    prompts = [
        {"prompt_token_ids": [*prefix, *prompt(100, seed)["prompt_token_ids"]]} for seed in range(3)
    ]
    with engine(model, ours(path), enable_prefix_caching=False) as llm:
        wanted = [answers(llm, [given], 8)[0] for given in prompts]
    for interval, apart, found in (
        (0, 1024, [0, 0, 240]),
        (0, 96, [0, 192, 240]),
        (48, 1024, [0, 240, 240]),
    ):
        # Four windows of 40 tokens and more: blocks of both classes begin together every 48.
        monkeypatch.setattr(sink_manager, "WINDOWS_APART", apart)
        asked = {"prefix_cache_retention_interval": interval}
        with engine(model, ours(path), enable_prefix_caching=True, **asked) as llm:
            got = [answers(llm, [given], 8)[0] for given in prompts]
        assert [answer.cached for answer in got] == found
        same(got, wanted)


def test_preempted_requests_go_on(checkpoint, tmp_path) -> None:
    path = written(tmp_path, sink=20, recent=40)
    model = checkpoint_of(checkpoint, "llama")
    prompts = [prompt(60, seed) for seed in range(8)]
    with engine(model, ours(path), enable_prefix_caching=False) as llm:
        wanted = answers(llm, prompts, 60)
        assert metric(llm, "num_preemptions") == 0
    with engine(model, ours(path), enable_prefix_caching=False, num_gpu_blocks_override=40) as llm:
        got = answers(llm, prompts, 60)
        assert metric(llm, "num_preemptions") > 0
    same(got, wanted)


def most_running(llm, prompts: list[dict[str, list[int]]], sampling) -> int:
    """Most requests that the scheduler ran at once."""
    inner, most = llm.llm_engine, 0
    for number, given in enumerate(prompts):
        inner.add_request(str(number), given, sampling)
    while inner.has_unfinished_requests():
        inner.step()
        most = max(most, len(inner.engine_core.engine_core.scheduler.running))
    return most


EIGHT = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}


def test_the_scheduler_runs_more_requests_at_once(checkpoint, tmp_path) -> None:
    """In the memory of two stock requests of 480 tokens, more of those with local heads run."""
    model = checkpoint("llama", **EIGHT)
    path = written(tmp_path, sink=16, recent=32, kv_heads=8)
    prompts = [prompt(420, seed) for seed in range(8)]
    found = []
    # Pages of 8 · 16 tokens of a head, and of 7 · 16: the same bytes.
    for choice, blocks in (({**OURS, "block_size": 16}, 63), (ours(path), 72)):
        changes = {"num_gpu_blocks_override": blocks, "enable_prefix_caching": False}
        with engine(model, choice, **changes) as llm:
            found.append(most_running(llm, prompts, sampling(60)))
            fits = llm.llm_engine.vllm_config.cache_config.kv_cache_max_concurrency
    assert found[0] == 2
    # vLLM says how many fit of the engine's length, which is a little more than theirs.
    assert found[1] >= int(fits) >= 5
