"""What a head map asks of vLLM's configuration, by that configuration alone: no engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import EngineArgs
from vllm.config import VllmConfig

from kvweave import Unsupported
from kvweave.adapters.vllm import plugin
from kvweave.adapters.vllm.models import KvweaveLlamaForCausalLM, record_digest
from kvweave.adapters.vllm.options import options_of
from test_head_split import checkpoint_of, ours, written
from vllm_segments import settings


def config_of(model: Path, path: Path) -> VllmConfig:
    return config_with(model, ours(path))


def config_with(model: Path, choice: dict[str, Any]) -> VllmConfig:
    plugin.register()
    small = {"max_model_len": 512, "skip_tokenizer_init": True, "enable_chunked_prefill": True}
    return EngineArgs(str(model), **small, **choice).create_engine_config()


@pytest.mark.parametrize("part", ["lora_config", "speculative_config"])
@pytest.mark.parametrize("choice", ["heads", "segments"])
def test_adapters_and_drafts_of_vllm_are_refused_by_name(
    checkpoint, tmp_path, choice: str, part: str
) -> None:
    model, path = checkpoint_of(checkpoint, "llama"), written(tmp_path, sink=20, recent=40)
    config = config_of(model, path) if choice == "heads" else config_with(model, settings())
    setattr(config, part, SimpleNamespace())
    with pytest.raises(Unsupported, match=part):
        KvweaveLlamaForCausalLM(vllm_config=config)


def test_graphs_of_another_map_in_the_same_file_are_not_found(checkpoint, tmp_path) -> None:
    """vLLM finds compiled graphs by a hash of its configuration."""
    model, path = checkpoint_of(checkpoint, "llama"), written(tmp_path, sink=20, recent=40)
    first = path.read_text()
    hashes = []
    for text in (first, first, first.replace('"recent": 40', '"recent": 41')):
        path.write_text(text)
        config = config_of(model, path)
        record_digest(config, options_of(config.additional_config))
        hashes.append(config.compute_hash())
    assert hashes[0] == hashes[1] != hashes[2]
