"""Weights side by side: the model stays what it is, and who changes it is followed."""

from dataclasses import replace

import pytest
import torch

from families import FAMILIES, tiny
from kvweave.runner.model.joined import FEW_ROWS, Joined
from kvweave.runner.model.joined_layers import with_joined_products
from kvweave.runner.model.layer import RowGrid, project
from kvweave.runner.model.layer_spec import LayerSpec
from kvweave.runner.model.model_spec import ModelSpec, describe


def projected(spec: ModelSpec, layer: LayerSpec, x: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values of rows as the runner computes them, in one tensor."""
    made = project(spec, layer, RowGrid.packed(len(x)), x, None)
    return torch.cat([one.flatten(1) for one in made], dim=1)


def apart(spec: ModelSpec, layer: LayerSpec, x: torch.Tensor) -> torch.Tensor:
    """The same by the modules one by one."""
    return projected(spec, replace(layer, joined_heads=None), x)


def rows(spec: ModelSpec, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, spec.width, generator=generator)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_stays_the_model_it_was(family: str) -> None:
    model = tiny(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.arange(20)[None] % 300
    with torch.inference_mode():
        said = model(ids).logits
        spec = with_joined_products(describe(model))
        assert torch.equal(model(ids).logits, said)
        for count in (1, 3, FEW_ROWS + 1):
            x = rows(spec, count)
            for layer in spec.layers:
                assert (layer.joined_heads is not None) == layer.heads.are_apart
                torch.testing.assert_close(projected(spec, layer, x), apart(spec, layer, x))
                parts = ("gate_proj", "up_proj", "down_proj")
                whole = all(hasattr(layer.feed_forward, part) for part in parts)
                assert (layer.gated is not None) == whole
                if layer.gated is None:
                    continue
                ours = layer.gated.down(layer.gated.inner(x))
                torch.testing.assert_close(ours, layer.feed_forward(x[None])[0])
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    # Its parameters are parameters as ever.
    model.requires_grad_(True)
    with torch.enable_grad():
        model(ids).logits.square().mean().backward()
    assert spec.layers[0].heads.query.weight.grad is not None


def test_weights_are_there_once_and_another_runner_finds_them() -> None:
    model = tiny("qwen2")
    first = with_joined_products(describe(model)).layers[0].joined_heads
    again = with_joined_products(describe(model)).layers[0].joined_heads
    assert first is not None
    assert again is not None
    assert again.weight.data_ptr() == first.weight.data_ptr()
    assert again.bias is not None
    assert torch.equal(again.weight, first.weight)
    held = first.owner.k_proj.weight
    assert held.untyped_storage().data_ptr() == first.weight.untyped_storage().data_ptr()


def another(layer: LayerSpec) -> None:
    matrix = layer.attention.k_proj
    matrix.weight = torch.nn.Parameter(torch.randn_like(matrix.weight))


def in_place(layer: LayerSpec) -> None:
    with torch.no_grad():
        layer.attention.v_proj.weight.mul_(3.0)


def wrapped(layer: LayerSpec) -> None:
    layer.attention.q_proj = torch.nn.Sequential(layer.attention.q_proj, torch.nn.Tanh())


def heard(layer: LayerSpec) -> None:
    layer.attention.q_proj.register_forward_hook(lambda module, given, made: made + 1.0)


@pytest.mark.parametrize("change", [another, in_place, wrapped, heard])
def test_whoever_changes_a_matrix_is_followed(change) -> None:
    spec = with_joined_products(describe(tiny("llama")))
    layer, x = spec.layers[1], rows(spec, 5)
    with torch.inference_mode():
        before = projected(spec, layer, x)
    change(layer)
    with torch.inference_mode():
        torch.testing.assert_close(projected(spec, layer, x), apart(spec, layer, x))
        assert not torch.allclose(projected(spec, layer, x), before)
    assert isinstance(layer.joined_heads, Joined)
    assert layer.joined_heads.holds == (change is in_place)


def test_a_feed_forward_that_is_heard_or_changed_is_left_to_itself() -> None:
    layers = with_joined_products(describe(tiny("llama"))).layers
    assert all(layer.gated is not None and layer.gated.holds for layer in layers)
    layers[0].feed_forward.register_forward_pre_hook(lambda module, given: None)
    layers[1].feed_forward.down_proj = torch.nn.Linear(96, 64)
    layers[2].feed_forward.up_proj.register_forward_hook(lambda module, given, made: None)
    assert [layer.gated is not None and layer.gated.holds for layer in layers] == [
        False,
        False,
        False,
        True,
    ]


def test_what_does_something_else_is_not_taken_apart() -> None:
    model = tiny("llama")
    odd = model.model.layers[0].mlp
    plain = type(odd).forward
    odd.forward = lambda x: plain(odd, x) * 1.5
    spec = with_joined_products(describe(model))
    assert spec.layers[0].gated is None
    assert spec.layers[1].gated is not None


def test_matrices_of_two_kinds_stay_apart() -> None:
    model = tiny("llama")
    attention = model.model.layers[0].self_attn
    attention.k_proj = torch.nn.Linear(64, 32, bias=True)
    model.model.layers[1].self_attn.v_proj.weight = model.model.layers[1].self_attn.k_proj.weight
    spec = with_joined_products(describe(model))
    assert [layer.joined_heads is None for layer in spec.layers] == [True, True, False, False]
