"""The attention backend beside adapters and drafts of vLLM's own: it answers as stock does."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm import LLM
from vllm.lora.request import LoRARequest

from vllm_engines import (
    OURS,
    STOCK,
    Answer,
    answer,
    answers,
    engine,
    metric,
    prompt,
    same,
    sampling,
)

RANK = 4
DRAFTS: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


def adapter(folder: Path, model: Path, seed: int) -> Path:
    """A random adapter of q and v of each layer, as peft writes one."""
    config = json.loads((model / "config.json").read_text())
    wide, head = config["hidden_size"], config["head_dim"]
    out = {
        "q_proj": config["num_attention_heads"] * head,
        "v_proj": config["num_key_value_heads"] * head,
    }
    numbers = torch.Generator().manual_seed(seed)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight": 0.2
        * torch.randn(shape, generator=numbers)
        for layer in range(config["num_hidden_layers"])
        for name, rows in out.items()
        for part, shape in (("A", (RANK, wide)), ("B", (rows, RANK)))
    }
    path = folder / f"adapter-{seed}"
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    made = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": [*out]}
    (path / "adapter_config.json").write_text(json.dumps(made))
    return path


def test_adapters_of_one_batch(checkpoint: Any, tmp_path: Path) -> None:
    """Two adapters and none, in the same steps: each has keys and values of its own."""
    model = checkpoint("llama")
    named = [
        LoRARequest(str(number), number, str(adapter(tmp_path, model, number))) for number in (1, 2)
    ]
    given, whose = [prompt(70, 3)] * 3 + [prompt(40, 4)] * 3, [None, *named] * 2

    def asked(llm: LLM) -> list[Answer]:
        # The second time prefixes are found, each adapter's by itself.
        for _ in range(2):
            said = llm.generate(given, sampling(12), use_tqdm=False, lora_request=whose)
        return [answer(output) for output in said]

    found = []
    for choice in (STOCK, OURS):
        with engine(model, choice, enable_lora=True, max_loras=2, max_lora_rank=8) as llm:
            found.append(asked(llm))
    same(found[1], found[0])
    assert len({tuple(one.tokens) for one in found[1][:3]}) == 3
    assert all(one.cached for one in found[1])


@pytest.fixture
def _llvmlite_forgotten() -> Iterator[None]:
    """Drafts of n-grams import numba. As an engine starts, vLLM 0.33 looks at every attribute of
    every module, and fails at an object of llvmlite that answers to any name.
    """
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "llvmlite"]:
        del sys.modules[name]


@pytest.mark.usefixtures("_llvmlite_forgotten")
def test_drafts_are_verified(checkpoint: Any) -> None:
    """Some are taken, as with such weights texts repeat themselves; what is not leaves no trace."""
    model = checkpoint("llama", initializer_range=0.09)
    part = prompt(12, 5)["prompt_token_ids"]
    given = [{"prompt_token_ids": part * 5}, prompt(90, 6), {"prompt_token_ids": part * 3}]
    with engine(model, STOCK) as llm:
        wanted = answers(llm, given, 40)
    with engine(model, OURS, speculative_config=DRAFTS) as llm:
        got = answers(llm, given, 40)
        drafted, taken = (
            metric(llm, f"spec_decode_num_{what}_tokens") for what in ("draft", "accepted")
        )
    assert 0 < taken < drafted
    same(got, wanted)
