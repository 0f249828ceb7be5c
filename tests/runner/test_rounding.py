"""The comparison at start of deep models that round coarsely: rounding passes, nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvweave
from cache_names import by_name
from families import tiny
from kvweave import PagedCache, Runner, Unsupported
from kvweave.adapters.transformers.cache_argument import given_cache
from kvweave.runner.model.rounding import (
    MOST_TIMES,
    TOLERANCE,
    expect_rounding,
    largest_apart,
    own_logits,
)

DEEP = {"num_hidden_layers": 48, "initializer_range": 0.25}
IDS = torch.arange(24) * 7 % 300


def deep(dtype: torch.dtype) -> Any:
    """A random model whose own attentions differ by more than is not asked about."""
    model = tiny("llama", **DEEP).to(dtype)
    spread = largest_apart(*(by(model, name) for name in ("eager", "sdpa")))
    assert spread > TOLERANCE[dtype]
    return model


@torch.inference_mode()
def by(model: Any, attention: str) -> torch.Tensor:
    model.set_attn_implementation(attention)
    return own_logits(model, IDS)


def turned_back(module: Any, given: Any, named: dict[str, Any]) -> Any:
    """A layer whose own attention turns heads the other way."""
    cos, sin = named["position_embeddings"]
    return given, {**named, "position_embeddings": (cos, -sin)}


def with_another_rope(model: Any, layers: slice) -> Any:
    """In some layers, which our forward does not know of."""
    for layer in model.model.layers[layers]:
        layer.self_attn.register_forward_pre_hook(turned_back, with_kwargs=True)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_rounds_coarsely_is_taken(dtype: torch.dtype) -> None:
    model = deep(dtype)
    runner = Runner(model, max_tokens=256, progress=False)
    assert len(runner.generate(IDS, "full", max_new_tokens=4, stop=()).tokens) == 4
    with PagedCache(model, max_tokens=256) as cache:
        assert model.generate(IDS[None], **by_name(model, cache), max_new_tokens=4).shape[1] > 24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_rope_in_one_layer_of_it_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(Unsupported, match=r"within 0\.001 of their size"):
        Runner(with_another_rope(deep(dtype), slice(20, 21)), max_tokens=256)


def halved(module: Any, given: Any, named: Any, out: Any) -> Any:
    return None if given_cache(named) is None else (out[0] / 2, *out[1:])


def test_attention_that_changes_over_pages_is_refused() -> None:
    model = deep(torch.bfloat16)
    model.model.layers[20].self_attn.register_forward_hook(halved, with_kwargs=True)
    before = model.config._attn_implementation
    with pytest.raises(Unsupported, match=r"within 0\.001 of their size"):
        PagedCache(model, max_tokens=256)
    assert model.config._attn_implementation == before
    assert not model._forward_hooks


def without_a_copy(model: Any) -> Any:
    """As a model of quantised weights, of which there is no copy in float32."""
    model.register_buffer("packed", torch.zeros(4, dtype=torch.int8))
    return model


def test_without_a_copy_the_spread_of_its_own_attentions_decides() -> None:
    model = without_a_copy(tiny("llama", num_hidden_layers=24, initializer_range=0.25).bfloat16())
    before = model.config._attn_implementation
    ours, own = by(model, "sdpa"), by(model, before)
    assert largest_apart(ours, own) > TOLERANCE[torch.bfloat16]
    with torch.inference_mode():
        expect_rounding(model, IDS, (ours, own), pytest.fail)
        assert model.config._attn_implementation == before
        Runner(model, max_tokens=256, progress=False)
        with pytest.raises(Unsupported, match="own two attentions are"):
            expect_rounding(model, IDS, (own + 3 * (ours - own), own), pytest.fail)
    assert model.config._attn_implementation == before
    with pytest.raises(Unsupported, match="own two attentions are"):
        Runner(with_another_rope(model, slice(None)), max_tokens=256)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_no_rounding(bad: float) -> None:
    model = tiny("llama").bfloat16()
    own = by(model, "eager")
    with pytest.raises(Unsupported, match="expected our forward"):
        expect_rounding(model, IDS, (torch.full_like(own, bad), own), pytest.fail)


def test_twice_as_far_from_float32_is_no_rounding() -> None:
    """A forward that is right in float32, and rounds more than it should."""
    model, seen = deep(torch.bfloat16), []
    with torch.inference_mode():
        own = by(model, "eager")
        exact = own_logits(tiny("llama", **DEEP).bfloat16().float(), IDS)
        coarse = exact + 1.5 * MOST_TIMES * (own - exact)
        with pytest.raises(Unsupported, match="times as far from float32 as its own"):
            expect_rounding(model, IDS, (coarse, own), seen.append)
        expect_rounding(model, IDS, (2 * exact - own, own), seen.append)
    assert [type(copy) for copy in seen] == [type(model)] * 2
    assert all(weight.dtype == torch.float32 for copy in seen for weight in copy.parameters())
    assert model.dtype == torch.bfloat16


def test_in_float32_a_difference_is_a_difference() -> None:
    model = tiny("llama")
    own = by(model, "eager")
    with pytest.raises(kvweave.Unsupported, match="expected our forward"):
        expect_rounding(model, IDS, (own * 1.01, own), pytest.fail)
