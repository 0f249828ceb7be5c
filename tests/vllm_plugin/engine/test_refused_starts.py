"""Engines that are refused while they start, by vLLM's own options as an operator gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvweave import Unsupported
from kvweave.adapters.vllm.serving import engine_options
from vllm_engines import engine, ours

WINDOW, FULL = {"kind": "window", "sink": 16, "recent": 64}, {"kind": "full"}


def with_heads(model: Path, folder: Path) -> dict[str, Any]:
    """What serves a map of one head with a window in every layer."""
    config = json.loads((model / "config.json").read_text())
    layers, kv_heads = config["num_hidden_layers"], config["num_key_value_heads"]
    heads = [
        {"layer": layer, "head": head, "class": kind, "reach": "global", "stability": "stable"}
        for layer in range(layers)
        for head, kind in enumerate([WINDOW, *[FULL] * (kv_heads - 1)])
    ]
    made = {"schema_version": 1, "model_fingerprint": "m", "layers": layers, "kv_heads": kv_heads}
    path = folder / "map.json"
    path.write_text(json.dumps({**made, "heads": heads}))
    return engine_options("LlamaForCausalLM", heads=str(path))


@pytest.mark.parametrize("part", ["segments", "heads"])
def test_adapters_are_refused(checkpoint, tmp_path, part: str) -> None:
    model = checkpoint("llama")
    choice = with_heads(model, tmp_path)
    if part == "segments":
        choice = engine_options("LlamaForCausalLM", segment_bytes=1 << 22)
    started = engine(model, choice, enable_lora=True)
    with pytest.raises(Exception, match="lora_config") as raised, started:
        pass
    error = ours(raised.value)
    assert isinstance(error, Unsupported), raised.value
