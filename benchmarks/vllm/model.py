"""What vLLM is started with in benchmarks: a model's configuration, and a head class map of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.device.models import MODELS

SINK, RECENT, GLOBAL_EVERY = 16, 256, 8
"""One KV head in eight keeps everything, the others a sink and a window."""


def written(folder: Path, model: str, layers: int) -> tuple[Path, Path]:
    """A folder with the model's configuration alone, and a head class map of it.

    `layers` 0: all of the model's. The global head is another one from layer to layer.
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

    path = write_heads(folder, layers, kv_heads, is_global, sink=SINK, recent=RECENT)
    return folder, path


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

    def entry(layer: int, head: int) -> dict[str, Any]:
        full = is_global(layer, head)
        kept = {"kind": "full"} if full else {"kind": "window", "sink": sink, "recent": recent}
        reach = "global" if full else "local"
        return {"layer": layer, "head": head, "class": kept, "reach": reach, "stability": "stable"}

    heads = [entry(layer, head) for layer in range(layers) for head in range(kv_heads)]
    known = {"schema_version": 1, "model_fingerprint": "random", "layers": layers}
    path = folder / "heads.json"
    path.write_text(json.dumps({**known, "kv_heads": kv_heads, "heads": heads}))
    return path
