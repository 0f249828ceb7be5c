"""What a map says of its model's weights, and whether other weights are told from them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from families import tiny
from head_maps import classes_of, head_map
from kvweave import CorruptHeadMap, HeadClassMap, Runner
from kvweave.runner.model.model_spec import describe
from kvweave.runner.model.sampled_weights import (
    DTYPES,
    check_weights,
    sampled_weights,
    see_tensor,
)
from kvweave.weight_sample import (
    WeightComparison,
    WeightSample,
    places,
    plain_name,
    samples_json,
    samples_of,
)

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def mapped(model: Any, weights: Any = None) -> HeadClassMap:
    """A map of a model, with values of these weights, by default its own."""
    taken = samples_json(sampled_weights(model)) if weights is None else weights
    return head_map(describe(model), classes_of(model), weights=taken)


def changed(model: Any, name: str, place: int) -> Any:
    """A copy of a tiny model in which one element of one tensor is another."""
    other = tiny("llama").to(next(model.parameters()).dtype)
    with torch.no_grad():
        dict(other.get_decoder().named_parameters())[name].view(-1)[place] += 0.5
    return other


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "glm", "gpt-neox"])
def test_values_are_the_models_own(family: str) -> None:
    """By the order of elements in memory, each layer among them, all of it in one number of f32."""
    model = tiny(family)
    own = {plain_name(name): tensor for name, tensor in model.get_decoder().named_parameters()}
    taken = sampled_weights(model)
    assert len({sample.name for sample in taken}) == len(taken)
    for sample in taken:
        elements = own[sample.name].flatten().tolist()
        count = len(sample.values)
        at = [(2 * i + 1) * len(elements) // (2 * count) for i in range(count)]
        assert list(sample.values) == [elements[i] for i in at]
        assert all(a < b for a, b in pairwise(at))
    for layer in range(model.config.num_hidden_layers):
        parts = [s.name for s in taken if f"layers.{layer}." in s.name]
        assert any("norm" in name for name in parts)
        assert any(len(s.shape) == 2 for s in taken if s.name in parts)
    assert any("embed" in sample.name for sample in taken)
    again = samples_of(mapped(model))
    assert sorted(again, key=lambda s: s.name) == sorted(taken, key=lambda s: s.name)


def test_other_weights_are_refused_by_the_tensor_that_differs() -> None:
    model = tiny("llama")
    heads = mapped(model)
    Runner(model, heads=heads, max_tokens=64, check=False, progress=False)
    for name, at in (("layers.3.self_attn.k_proj.weight", 256), ("embed_tokens.weight", 600)):
        other = changed(model, name, at)
        with pytest.raises(CorruptHeadMap, match=rf"whose {name} is with \S+ at element {at}"):
            check_weights(heads, other)
    # The same name and fingerprint, as somebody may have written them, and other values.
    lies = mapped(changed(model, "layers.0.self_attn.q_proj.weight", 512))
    lies = json.loads(lies.to_json()) | {"model_fingerprint": describe(model).fingerprint}
    with pytest.raises(CorruptHeadMap, match="q_proj.weight is with") as raised:
        Runner(model, heads=HeadClassMap.from_json(json.dumps(lies)), max_tokens=64)
    assert "one of another model" in str(raised.value.got)


def test_weights_that_are_no_numbers_are_not_sampled() -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.fill_(torch.nan)
    names = {sample.name for sample in sampled_weights(model)}
    assert "layers.1.self_attn.q_proj.weight" not in names
    assert len(names) == len(sampled_weights(tiny("llama"))) - 1
    check_weights(mapped(model), model)
    with pytest.raises(CorruptHeadMap, match="q_proj.weight is with nan"):
        check_weights(mapped(tiny("llama")), model)


def test_weights_of_another_shape_are_refused() -> None:
    heads = mapped(tiny("llama"))
    with pytest.raises(CorruptHeadMap, match=r"of shape \[301, 64\], got .* \[300, 64\]"):
        check_weights(heads, tiny("llama", vocab_size=301))


def test_a_map_that_says_nothing_of_weights_is_anybodys() -> None:
    model = tiny("llama")
    heads = mapped(model, {})
    assert "weights" not in json.loads(heads.to_json())
    assert samples_of(heads) == ()
    check_weights(heads, changed(model, "norm.weight", 3))


@pytest.mark.parametrize("measured", FLOATS)
@pytest.mark.parametrize("served", FLOATS)
def test_the_same_weights_in_another_dtype_are_the_same(
    measured: torch.dtype, served: torch.dtype
) -> None:
    """And so are those of a checkpoint that has fewer bits than either."""
    for stored in (torch.float32, torch.bfloat16):
        heads = mapped(tiny("llama").to(stored).to(measured))
        check_weights(heads, tiny("llama").to(stored).to(served))
    other = changed(tiny("llama").to(served), "layers.1.self_attn.v_proj.weight", 256)
    with pytest.raises(CorruptHeadMap, match=r"layers\.1\.self_attn\.v_proj"):
        check_weights(mapped(tiny("llama").to(measured)), other)


def alike(said: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether a tensor of one number passes for a sampled one."""
    sample = WeightSample("a", DTYPES[said.dtype], (1,), (float(said),))
    try:
        see_tensor(WeightComparison([sample]), sample, found)
    except CorruptHeadMap:
        return False
    return True


@given(st.floats(-60000, 60000, width=32), st.sampled_from(FLOATS), st.sampled_from(FLOATS))
def test_rounding_is_told_from_other_numbers(
    value: float, measured: torch.dtype, served: torch.dtype
) -> None:
    weight = torch.tensor([value])
    said, found = weight.to(measured), weight.to(served)
    assert alike(said, found)
    # Three steps of the coarser dtype away is no rounding any more.
    steps = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}
    step = max(steps[measured], steps[served]) * max(abs(value), 2**-14)
    assert not alike(said, (weight + 3.0 * step).to(served))
    assert not alike(said, torch.full_like(found, torch.nan))
    assert not alike(said, torch.full_like(found, torch.inf))


def test_tensors_of_any_layout_and_packed_ones() -> None:
    weight = torch.arange(96.0).reshape(8, 12)
    at = places((8, 12), 5)
    sample = WeightSample("q", "f32", (8, 12), tuple(weight.flatten()[at].tolist()))
    for tensor in (weight, weight.T.contiguous().T, weight.repeat(1, 2)[:, :12]):
        compared = WeightComparison([sample])
        see_tensor(compared, sample, tensor)
        assert compared.told() == "5 values of 1 tensors are the map's"
    compared = WeightComparison([sample, WeightSample("other", "f32", (1,), (0.0,))])
    see_tensor(compared, sample, weight.to(torch.int8))
    assert not compared.seen
    assert "1 tensors are quantised" in compared.told()
    assert "1 tensors were not found" in compared.told()
    with pytest.raises(CorruptHeadMap, match=r"of shape \[96\]"):
        see_tensor(compared, sample, weight.flatten())


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([], "invalid type"),
        ({"": {"dtype": "f32", "shape": [1], "values": [0.0]}}, "names of 1 to 256 bytes"),
        ({"a": {"dtype": "int8", "shape": [1], "values": [0.0]}}, "unknown variant"),
        ({"a": {"dtype": "f32", "shape": [2**63, 4], "values": [0.0]}}, "a: shape: expected"),
        ({"a": {"dtype": "f32", "shape": [-1], "values": [0.0]}}, "invalid value"),
        ({"a": {"dtype": "f32", "shape": [1], "values": []}}, "expected 1 to 1 values, got 0"),
        ({"a": {"dtype": "f32", "shape": [9], "values": [0.0] * 65}}, "expected 1 to 9 values"),
        ({"a": {"dtype": "f32", "shape": [9], "values": [1e300]}}, "finite numbers, got inf"),
        ({"a": {"dtype": "f32", "shape": [9], "values": [0.0], "more": 1}}, "unknown field"),
    ],
)
def test_hostile_values_are_refused(weights: Any, says: str) -> None:
    with pytest.raises(CorruptHeadMap, match=says):
        mapped(tiny("llama"), weights)
    text = mapped(tiny("llama")).to_json()
    number = str(np.float32(sampled_weights(tiny("llama"))[0].values[0]))
    assert number in text
    with pytest.raises(CorruptHeadMap):
        HeadClassMap.from_json(text.replace(number, "NaN"))
