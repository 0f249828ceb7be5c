"""Virtual pages in a real engine: the same tokens, and how many blocks lie behind the pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vllm

from kvweave.adapters.vllm import versions
from vllm_engines import OURS, answers, engine, metric, prompt, same

if not versions.is_known(vllm.__version__, versions.WITH_VIRTUAL_PAGES):
    pytest.skip("this vLLM lets no backend price its pages", allow_module_level=True)

PROMPTS = [prompt(length, seed) for seed, length in enumerate([5, 40, 100, 200, 33, 64, 1, 250])]


def virtual(family: str = "Llama", heads: Path | None = None) -> dict[str, Any]:
    options = {"virtual_pages": True, **({} if heads is None else {"heads": str(heads)})}
    return {
        "hf_overrides": {"architectures": [f"Kvweave{family}ForCausalLM"]},
        "additional_config": {"kvweave": options},
        "block_size": 16,
        "kv_transfer_config": {
            "kv_connector": "KvweavePages",
            "kv_connector_module_path": "kvweave.adapters.vllm.virtual_pages.connector",
            "kv_role": "kv_both",
        },
    }


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_full_heads_are_stocks(checkpoint, family: str) -> None:
    model = checkpoint(family.lower())
    with engine(model, OURS) as llm:
        wanted = answers(llm, PROMPTS, 12)
    with engine(model, virtual(family)) as llm:
        got = answers(llm, PROMPTS, 12)
    same(got, wanted)
    assert metric(llm, "num_preemptions") == 0
