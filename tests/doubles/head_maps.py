"""Head maps of tiny models, and transformers' own forward with a mask for every head."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from families import reference
from kvweave.cache import HeadClassMap
from kvweave.runner import Runner
from kvweave.runner.model.model_spec import ModelSpec, describe

FULL = None
CLASSES = (FULL, (16, 4), FULL, (40, 0), (16, 4))
"""(window, sink) of heads, dealt out by (layer, KV head): three groups of unlike sizes."""


def runner_of(model: Any, classes: Any = None, **settings: Any) -> Runner:
    """A runner of a tiny model, with a head map of these classes if any."""
    settings = {"max_tokens": 2048, "progress": False, "check": False, **settings}
    runner = Runner(model, **settings)
    if classes is None:
        return runner
    return Runner(model, heads=head_map(runner.spec, classes), **settings)


def classes_of(model: Any, classes: Any = CLASSES) -> np.ndarray:
    """Classes dealt out in turn, i32 [L, G, 2]: window (0: full) and sink."""
    config = model.config
    count = config.num_hidden_layers * config.num_key_value_heads
    made = [classes[i % len(classes)] or (0, 0) for i in range(count)]
    return np.asarray(made, np.int32).reshape(-1, config.num_key_value_heads, 2)


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for rounding in f32."""
    torch.testing.assert_close(got.cpu(), wanted.cpu(), atol=1e-4, rtol=0)


def head_map(spec: ModelSpec, classes: np.ndarray, **changes: Any) -> HeadClassMap:
    """The map of a model with these classes, i32 [L, G, 2]."""
    return class_map(classes, spec.fingerprint, **changes)


def class_map(classes: np.ndarray, fingerprint: str, **changes: Any) -> HeadClassMap:
    """The map with these classes, i32 [L, G, 2]."""

    def entry(layer: int, head: int) -> dict[str, Any]:
        window, sink = (int(n) for n in classes[layer, head])
        kept = {"kind": "window", "sink": sink, "recent": window} if window else {"kind": "full"}
        reach = "local" if window else "global"
        named = {"class": kept, "reach": reach, "stability": "stable"}
        return {"layer": layer, "head": head, **named}

    layers, kv_heads = classes.shape[:2]
    whole = {
        "schema_version": 1,
        "model_fingerprint": fingerprint,
        "layers": layers,
        "kv_heads": kv_heads,
        "heads": [entry(layer, head) for layer in range(layers) for head in range(kv_heads)],
    }
    return HeadClassMap.from_json(json.dumps(whole | changes))


def masks(spec: ModelSpec, classes: np.ndarray, tokens: int) -> list[torch.Tensor]:
    """What every head of each layer may not see, as numbers to add: f32 [1, H, T, T] a layer.

    Where the model itself has a sliding window the narrower counts, and there is no sink.
    """
    row, key = torch.arange(tokens)[:, None], torch.arange(tokens)
    made = []
    for layer, of_layer in zip(spec.layers, classes.tolist(), strict=True):
        seen = []
        for window, sink in of_layer:
            if layer.window is not None:
                window, sink = min(window or layer.window, layer.window), 0
            near = key > row - (window or tokens)
            seen.append((key <= row) & (near | (key < sink)))
        mask = torch.stack(seen).repeat_interleave(spec.query_heads // spec.kv_heads, 0)
        made.append(torch.zeros(mask.shape).masked_fill(~mask, torch.finfo().min)[None])
    return made


@contextmanager
def masked(model: Any, classes: np.ndarray, tokens: int) -> Iterator[None]:
    """While entered, every layer of the model attends under its heads' own masks."""
    spec = describe(model)
    handles = []
    layers = model.get_decoder().layers
    for layer, mask in zip(layers, masks(spec, classes, tokens), strict=True):
        mask = mask.to(spec.device, spec.dtype)

        def hook(_module: Any, given: Any, named: Any, mask: torch.Tensor = mask) -> Any:
            return given, {**named, "attention_mask": mask}

        handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def masked_reference(model: Any, classes: np.ndarray, ids: Any) -> torch.Tensor:
    """Logits f32 [T, V] of the model's own forward under the heads' masks."""
    with masked(model, classes, len(ids)):
        return reference(model, ids)


def masked_greedy(model: Any, classes: np.ndarray, ids: Any, count: int) -> list[int]:
    """The model's own greedy continuation under the masks, everything computed anew each step."""
    tokens = [int(i) for i in ids]
    for _ in range(count):
        tokens.append(int(masked_reference(model, classes, tokens)[-1].argmax()))
    return tokens[-count:]
