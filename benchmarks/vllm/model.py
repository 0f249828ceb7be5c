"""What vLLM is started with in benchmarks: a model's configuration, and a head class map of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.device.models import MODELS
from kvweave.adapters.vllm.serving import engine_options

OFF, STOCK = "off", "stock"
"""vLLM with the plugin loaded and nothing asked of it, and vLLM that loads no plugin."""
MAPPED, PACKED, FAR = "mapped", "packed", "far"
"""Engines with segments beside a head map, and in INT4 pages; one with pages in host memory."""
WINDOWS, SEGMENTS, PAGES = "windows", "segments", "pages"
"""vLLM's own model with windows in every other layer; segments alone; virtual pages under a map."""
UNSTABLE_EVERY, RANKED_EVERY = 4, 16
"""Of heads whose pages may lie there one in four reads all; others choose anew so many steps on."""
SINK, RECENT, GLOBAL_EVERY = 16, 256, 8
"""One KV head in eight keeps everything, the others a sink and a window."""


def written(
    folder: Path, model: str, layers: int, pages: int = 0, *, some_whole: bool = False
) -> tuple[Path, Path]:
    """A folder with the model's configuration alone, and a head class map of it.

    `layers` 0: all of the model's. The global head is another one from layer to layer. With `pages`
    all heads keep everything and read so many pages in a decode step, or with `some_whole` all but
    one in four, another one from layer to layer.
    """
    family, shape = MODELS[model]
    layers = layers or shape["num_hidden_layers"]
    named = {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower()}
    settings = {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu"}
    config = {**shape, **named, **settings, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    kv_heads = shape["num_key_value_heads"]

    def is_global(layer: int, head: int) -> bool:
        return head % GLOBAL_EVERY == layer % min(GLOBAL_EVERY, kv_heads)

    if pages and some_whole:

        def pages_of(layer: int, head: int) -> int:
            return 0 if head % UNSTABLE_EVERY == layer % UNSTABLE_EVERY else pages

        return folder, write_ranked(folder, layers, kv_heads, pages_of, RANKED_EVERY)
    if pages:
        return folder, write_ranked(folder, layers, kv_heads, lambda *_: pages)
    path = write_heads(folder, layers, kv_heads, is_global, sink=SINK, recent=RECENT)
    return folder, path


def with_windows(folder: Path) -> None:
    """Has every other layer see a window alone, as models that vLLM knows itself have it.

    vLLM keeps as many tables of blocks of such a model as under a head map: one of whole contexts,
    one of windows.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text())
    kinds = "full_attention", "sliding_attention"
    config["layer_types"] = [kinds[layer % 2] for layer in range(config["num_hidden_layers"])]
    config["sliding_window"] = RECENT
    path.write_text(json.dumps(config))


def options_named(
    engine: str, architecture: str, heads: Path | None, store: int, host: int = 0
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for an engine by its name in benchmarks.

    `heads` is the map of those that have one, `store` the bytes of segments of those that do, and
    `host` those of the host's memory.
    """
    if engine in (STOCK, OFF, WINDOWS):
        return {}
    of_map, kept = {"heads": str(heads)}, {"segment_bytes": store}
    options: dict[str, dict[str, Any]] = {
        "ours": {},
        "heads": of_map,
        "top_k": of_map,
        SEGMENTS: kept,
        PAGES: {**of_map, "virtual_pages": True},
        MAPPED: {**kept, **of_map},
        PACKED: {**kept, "segment_dtype": "int4"},
        FAR: {**of_map, "virtual_pages": True, "host_bytes": host},
    }
    return engine_options(architecture, **options[engine])


def write_ranked(
    folder: Path,
    layers: int,
    kv_heads: int,
    pages_of: Callable[[int, int], int],
    every: int = 1,
) -> Path:
    """Writes `ranked.json`: heads (layer, head) read so many pages in a decode step, 0 for all."""

    def class_of(layer: int, head: int) -> dict[str, Any]:
        pages = pages_of(layer, head)
        ranked = {"kind": "top_k", "pages": pages, "rerank_every": every}
        kind = ranked if pages else {"kind": "full"}
        return {"class": kind, "reach": "global", "stability": "stable"}

    return _write_map(folder / "ranked.json", layers, kv_heads, class_of)


def write_heads(
    folder: Path,
    layers: int,
    kv_heads: int,
    is_global: Callable[[int, int], bool],
    *,
    sink: int,
    recent: int,
) -> Path:
    """Writes `heads.json`: heads (layer, head) that are not global keep a sink and a window."""

    def class_of(layer: int, head: int) -> dict[str, Any]:
        full = is_global(layer, head)
        kept = {"kind": "full"} if full else {"kind": "window", "sink": sink, "recent": recent}
        return {"class": kept, "reach": "global" if full else "local", "stability": "stable"}

    return _write_map(folder / "heads.json", layers, kv_heads, class_of)


def _write_map(
    path: Path, layers: int, kv_heads: int, class_of: Callable[[int, int], dict[str, Any]]
) -> Path:
    pairs = [(layer, head) for layer in range(layers) for head in range(kv_heads)]
    heads = [{"layer": layer, "head": head, **class_of(layer, head)} for layer, head in pairs]
    known = {"schema_version": 1, "model_fingerprint": "random", "layers": layers}
    path.write_text(json.dumps({**known, "kv_heads": kv_heads, "heads": heads}))
    return path
