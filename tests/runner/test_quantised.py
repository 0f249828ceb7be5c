"""Models of quantised weights: their linear layers are called, whatever their weights are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cache_names import by_name
from families import greedy, random_tokens, reference, tiny
from kvweave import PagedCache, Runner, Segment
from kvweave.runner.model.joined import is_plain
from kvweave.runner.model.joined_layers import with_joined_products
from kvweave.runner.model.model_spec import describe

SIZES = {"hidden_size": 128, "head_dim": 32}


class Packed(torch.nn.Module):
    """A linear layer as GPTQ and AWQ have it: whole numbers and scales in buffers, no weight."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scales = linear.weight.abs().amax(1, keepdim=True) / 7
        self.register_buffer("qweight", (linear.weight / scales).round().to(torch.int8))
        self.register_buffer("scales", scales.detach())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.qweight.to(x.dtype) * self.scales, self.bias)


def packed(name: str, folder: Path) -> Any:
    model = tiny(name, **SIZES)
    for module in list(model.modules()):
        for part, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and child is not model.lm_head:
                setattr(module, part, Packed(child))
    return model


def torchao(name: str, folder: Path) -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = tiny(name, **SIZES)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def bitsandbytes(name: str, folder: Path, **how: Any) -> Any:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    tiny(name, **SIZES).save_pretrained(folder)
    config = transformers.BitsAndBytesConfig(**how)
    read = transformers.AutoModelForCausalLM.from_pretrained
    how = {"quantization_config": config, "dtype": torch.float32, "device_map": "cpu"}
    return read(folder, **how).eval()


def four_bits(name: str, folder: Path) -> Any:
    return bitsandbytes(name, folder, load_in_4bit=True, bnb_4bit_quant_type="nf4")


def eight_bits(name: str, folder: Path) -> Any:
    return bitsandbytes(name, folder, load_in_8bit=True)


@pytest.fixture(scope="module", params=[packed, torchao, four_bits, eight_bits])
def quantise(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("name", ["llama", "phi3", "qwen3"])
def test_it_says_what_it_says_itself(quantise: Any, name: str, tmp_path: Path) -> None:
    model, tokens = quantise(name, tmp_path), random_tokens(90, 1)
    layer = describe(model).layers[0]
    assert not any(is_plain(module) for module in (*layer.heads.modules, layer.out))
    runner = Runner(model, max_tokens=512, progress=False)
    with runner.prefill(tokens, "full", logits_from=0) as done:
        assert torch.allclose(done.logits, reference(model, tokens), atol=1e-4, rtol=0)
    wanted = greedy(model, tokens, 8)
    assert runner.generate(tokens, "full", max_new_tokens=8, stop=()).tokens == wanted
    with PagedCache(model, max_tokens=256) as cache:
        cache.mark(tokens, [(0, 64)])
        ids = torch.as_tensor(tokens)[None].long()
        how = {"max_new_tokens": 8, "eos_token_id": None, "do_sample": False}
        said = model.generate(
            ids, attention_mask=torch.ones_like(ids), **by_name(model, cache), **how
        )
    assert said[0, 90:].tolist() == wanted


def test_documents_of_it_are_reused(quantise: Any, tmp_path: Path) -> None:
    runner = Runner(quantise("llama", tmp_path), max_tokens=1024, progress=False)
    document, question = random_tokens(64, 2).tolist(), random_tokens(9, 3).tolist()
    runner.insert(document, "manual")
    parts = [Segment(tokens=question), Segment(tokens=document), Segment(tokens=question)]
    with runner.prefill(parts, "naive") as done:
        assert done.report.reused_segment == 64
        assert torch.isfinite(done.logits).all()


def test_nothing_of_it_is_laid_side_by_side(quantise: Any, tmp_path: Path) -> None:
    """Which is for plain matrices, and what a GPU's runner does first of all."""
    model = quantise("llama", tmp_path)
    before = {name: id(module) for name, module in model.named_modules()}
    with torch.inference_mode():
        spec = with_joined_products(describe(model))
    assert all(layer.joined_heads is None and layer.gated is None for layer in spec.layers)
    assert {name: id(module) for name, module in model.named_modules()} == before


def test_other_weights_are_another_model(quantise: Any, tmp_path: Path) -> None:
    """Also where they are in no parameter."""
    first, same = (quantise("llama", tmp_path) for _ in range(2))
    assert describe(first).fingerprint == describe(same).fingerprint
    plain = tiny("llama", **SIZES)
    assert describe(first).fingerprint != describe(plain).fingerprint
    assert describe(first).weight_bytes < describe(plain).weight_bytes
    changed = packed("llama", tmp_path)
    before = describe(changed).fingerprint
    changed.model.layers[1].self_attn.k_proj.scales.mul_(1.01)
    assert describe(changed).fingerprint != before


def test_its_flops_are_those_of_the_model_it_was_made_of(quantise: Any, tmp_path: Path) -> None:
    counted = []
    for model in (tiny("llama", **SIZES), quantise("llama", tmp_path)):
        runner = Runner(model, max_tokens=256, progress=False)
        with runner.prefill(random_tokens(50, 1), "full") as done:
            counted.append(done.report.flops)
    assert counted[0] == counted[1]
