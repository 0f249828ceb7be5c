"""The shapes that vLLM's own tests are given: what transformers reads from the folder of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoProcessor

from benchmarks.vllm.own_models import IMAGE, LLAVA, SHAPES, write_models


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    write_models(folder)
    return folder


@pytest.mark.parametrize("name", SHAPES)
def test_each_shape_is_found_without_a_network(hub: Path, name: str) -> None:
    found = AutoConfig.from_pretrained(name, cache_dir=hub, local_files_only=True)
    shape = SHAPES[name]
    assert found.model_type == shape["model_type"]
    assert found.architectures == shape["architectures"]
    sizes = {key: value for key, value in shape.items() if key.endswith(("_size", "_heads"))}
    assert {key: getattr(found, key) for key in sizes} == sizes


def test_a_prompt_with_an_image_has_a_token_for_it(hub: Path) -> None:
    processor = AutoProcessor.from_pretrained(LLAVA, cache_dir=hub, local_files_only=True)
    tokens = processor.tokenizer(f"w1 {IMAGE} w2")["input_ids"]
    assert tokens == [1, SHAPES[LLAVA]["image_token_index"], 2]
