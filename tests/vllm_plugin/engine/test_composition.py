"""The table of what goes together, walked by vLLM's own configurations: no engine."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from vllm import EngineArgs
from vllm.config import KVTransferConfig, VllmConfig

from kvweave import Unsupported
from kvweave.adapters.vllm import plugin
from kvweave.adapters.vllm.composition import (
    FOLDER,
    HEADS,
    NOT_BESIDE,
    PACKED,
    PAGES,
    PARTS,
    SEGMENTS,
    SETTINGS,
    TOP_K,
    check_together,
)
from kvweave.adapters.vllm.models import KvweaveLlamaForCausalLM, _classes_of, _parts_of
from kvweave.adapters.vllm.options import options_of
from kvweave.adapters.vllm.segments.connector import KvweaveSegments
from kvweave.adapters.vllm.virtual_pages.model import CONNECTOR as PAGES_CONNECTOR

CLASSES = {
    HEADS: {"kind": "window", "sink": 4, "recent": 32},
    TOP_K: {"kind": "top_k", "pages": 4, "rerank_every": 1},
}
FULL = {"kind": "full"}
LAYERS, KV_HEADS = 4, 2


def map_of(folder: Path, parts: tuple[str, ...]) -> str | None:
    """A map with a head of each of these parts in every layer, beside full ones."""
    kinds = [CLASSES[part] for part in parts if part in CLASSES]
    if not kinds:
        return None
    heads = [
        {"layer": layer, "head": head, "class": kind, "reach": "global", "stability": "stable"}
        for layer in range(LAYERS)
        for head, kind in enumerate([*kinds, FULL][:KV_HEADS])
    ]
    made = {"schema_version": 1, "model_fingerprint": "m", "layers": LAYERS, "kv_heads": KV_HEADS}
    path = folder / "map.json"
    path.write_text(json.dumps({**made, "heads": heads}))
    return str(path)


def connector(name: str) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_role="kv_both")


ON: dict[str, Callable[[VllmConfig], Any]] = {
    "enable_prefix_caching": lambda c: setattr(c.cache_config, "enable_prefix_caching", True),
    "tensor_parallel_size": lambda c: setattr(c.parallel_config, "tensor_parallel_size", 2),
    "pipeline_parallel_size": lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2),
    "context parallelism": lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2),
    "quantization": lambda c: setattr(c, "quant_config", MagicMock()),
    "lora_config": lambda c: setattr(c, "lora_config", object()),
    "speculative_config": lambda c: setattr(c, "speculative_config", object()),
    "kv_transfer_config": lambda c: setattr(c, "kv_transfer_config", connector("NixlConnector")),
    "disable_hybrid_kv_cache_manager": lambda c: setattr(
        c.scheduler_config, "disable_hybrid_kv_cache_manager", True
    ),
    "kv_lora_rank": lambda c: setattr(c.model_config.hf_text_config, "kv_lora_rank", 64),
    "attention_chunk_size": lambda c: setattr(
        c.model_config.hf_text_config, "attention_chunk_size", 32
    ),
}
"""Has a configuration ask for a setting."""


@pytest.fixture(scope="module")
def config_of(checkpoint: Any, tmp_path_factory: Any) -> Callable[..., VllmConfig]:
    plugin.register()
    model, folder = checkpoint("llama"), tmp_path_factory.mktemp("maps")
    small = {"max_model_len": 512, "skip_tokenizer_init": True, "block_size": 16}
    architecture = {"architectures": ["KvweaveLlamaForCausalLM"]}
    stock = EngineArgs(str(model), hf_overrides=architecture, **small).create_engine_config()
    stock.cache_config.enable_prefix_caching = False

    def made(*parts: str) -> VllmConfig:
        ours: dict[str, Any] = {}
        path = map_of(folder, parts)
        if path is not None:
            ours["heads"] = path
        if PAGES in parts:
            ours["virtual_pages"] = True
        if {SEGMENTS, PACKED, FOLDER} & set(parts):
            ours["segment_bytes"] = 1 << 20
        if PACKED in parts:
            ours["segment_dtype"] = "int4"
        if FOLDER in parts:
            ours["store"] = str(folder / "documents")
        config = copy.deepcopy(stock)
        config.additional_config = {"kvweave": ours}
        if PAGES in parts or "segment_bytes" in ours:
            name = KvweaveSegments.__name__ if "segment_bytes" in ours else PAGES_CONNECTOR
            config.kv_transfer_config = connector(name)
        return config

    return made


def check(config: VllmConfig) -> None:
    options = options_of(config.additional_config)
    check_together(_parts_of(options, _classes_of(config, options)), config)


def test_the_table_is_whole() -> None:
    """Every part has its row, every name in it is known, and parts refuse one another alike."""
    assert NOT_BESIDE.keys() == set(PARTS)
    assert ON.keys() == SETTINGS.keys()
    for part, refused in NOT_BESIDE.items():
        assert refused.keys() <= {*PARTS, *SETTINGS} - {part}
        for other in refused.keys() & set(PARTS):
            assert NOT_BESIDE[other][part] == refused[other]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("part", PARTS)
def test_a_setting_beside_a_part(config_of: Any, part: str, setting: str) -> None:
    """A model is not made where the table says no, and passes the check where it does not."""
    config = config_of(part)
    check(config)
    ON[setting](config)
    if setting not in NOT_BESIDE[part]:
        check(config)
        return
    with pytest.raises(Unsupported, match=f"^{setting}: expected "):
        KvweaveLlamaForCausalLM(vllm_config=config)


@pytest.mark.parametrize("part", PARTS)
def test_connectors_that_one_of_vllm_holds(config_of: Any, part: str) -> None:
    """One that carries blocks beside ours is refused however vLLM is told of both."""
    config = config_of(part)
    own = config.kv_transfer_config
    names = [*([own.kv_connector] if own else []), "NixlConnector"]
    held = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": held},
    )
    first = SEGMENTS if part in (PACKED, FOLDER) else part
    expected = f"^kv_transfer_config: expected none beside {first}, since .* got MultiConnector$"
    with pytest.raises(Unsupported, match=expected):
        KvweaveLlamaForCausalLM(vllm_config=config)


PAIRS = [(a, b) for number, a in enumerate(PARTS) for b in PARTS[number + 1 :]]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_parts(config_of: Any, one: str, other: str) -> None:
    config = config_of(one, other)
    if other not in NOT_BESIDE[one]:
        check(config)
    else:
        with pytest.raises(Unsupported, match=f"expected none beside ({one}|{other}), since"):
            KvweaveLlamaForCausalLM(vllm_config=config)
