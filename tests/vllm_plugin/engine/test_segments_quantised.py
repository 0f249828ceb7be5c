"""Segments of a model whose weights and activations are 8-bit integers (compressed-tensors)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import vllm_cpu_ops
from families import tiny
from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from vllm_engines import STOCK, answers, engine, same
from vllm_segments import (
    BOTH,
    DOCUMENT,
    FIRST,
    OTHER,
    SECOND,
    Counterpart,
    Marked,
    ask,
    plain,
    segments,
    settings,
)

pytestmark = pytest.mark.skipif(
    bool(vllm_cpu_ops.options()), reason="this vLLM has no integer products for CPUs"
)
SIZES = {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.15}
NUMBERS = {"num_bits": 8, "type": "int", "symmetric": True}
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**NUMBERS, "strategy": "channel", "dynamic": False},
            "input_activations": {**NUMBERS, "strategy": "token", "dynamic": True},
        }
    },
}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint in whole numbers, and a model in f32 of the weights that they stand for."""
    folder, model = tmp_path_factory.mktemp("quantised"), tiny("llama", **SIZES)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    stored = dict(weights)
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 127
            stored[name] = (weight / scale).round().to(torch.int8)
            stored[f"{name}_scale"] = scale
            weights[name] = stored[name] * scale
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": SCHEME}))
    model.load_state_dict(weights, strict=False)
    return folder, model


def test_answers_are_near_the_runners_over_the_same_weights(quantised: tuple[Path, Any]) -> None:
    """Unmarked prompts are stock's; reused documents differ by what activations are rounded to.

    Rounding to 8 bits moves log-probabilities by up to .16; reuse itself says other tokens.
    """
    folder, model = quantised
    asked = (FIRST, SECOND, BOTH)
    with engine(folder, STOCK) as llm:
        assert llm.llm_engine.vllm_config.quant_config is not None
        given = [{"prompt_token_ids": one.tokens} for one in asked]
        wanted = answers(llm, given, 6)
    runner = Counterpart(model)
    for policy in ("naive", "sparsex"):
        with segments(folder, settings(), enable_prefix_caching=False) as (llm, counts):
            same([plain(llm, one.tokens) for one in asked], wanted, 0.1)
            for document in (DOCUMENT, OTHER):
                ask(llm, Marked([document, [1, 2]]), 1, policy="full")
                runner.ask(Marked([document, [1, 2]]), "full", 1)
            for one, full in zip(asked, wanted, strict=True):
                said = ask(llm, one, policy=policy)
                beside = runner.ask(one, policy, remember=False)
                assert said.tokens[0] == beside.tokens[0] != full.tokens[0]
                assert abs(said.logprobs[0] - beside.logprobs[0]) < 0.3
            assert counts.total.reused_tokens > 2 * len(DOCUMENT)


def test_documents_come_back_from_a_folder_packed_too(
    quantised: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, _ = quantised
    said = {}
    for kind in (None, "int8"):
        chosen = {"store": str(tmp_path / str(kind)), "store_reads": "always"}
        chosen |= {} if kind is None else {"segment_dtype": kind}
        for run in range(2):
            with segments(folder, settings(**chosen), enable_prefix_caching=False) as (llm, counts):
                base = KnowledgeBase(llm.collective_rpc)
                if run == 0:
                    assert base.insert("one", list(DOCUMENT))["kept"]
                said[kind, run] = ask(llm, SECOND, policy="naive")
                assert counts.total.hits["frozen"] == len(DOCUMENT)
                assert base.store()["brought_documents"] == run
        same([said[kind, 1]], [said[kind, 0]])
    apart = abs(said["int8", 0].logprobs[0] - said[None, 0].logprobs[0])
    assert said["int8", 0].tokens[0] == said[None, 0].tokens[0]
    assert 0 < apart < 0.3
