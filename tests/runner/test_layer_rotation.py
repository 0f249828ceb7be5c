"""A layer rotates what it projects, and nothing that somebody else holds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from families import random_tokens, reference, tiny
from kvweave.runner import Runner
from kvweave.runner.model.layer import RowGrid, owns_keys, owns_queries, project
from kvweave.runner.model.model_spec import ModelSpec, describe
from rotary import rotated_by_torch

ROWS = 5


class Kept(torch.nn.Module):
    """A projection that keeps what it returned."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.made: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.made.append(self.inner(x))
        return self.made[-1]


def turn_of(spec: ModelSpec) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = spec.rotary(torch.zeros(1), torch.arange(3, 3 + ROWS)[None])
    return cos[0], sin[0]


def projected(spec: ModelSpec, hidden: torch.Tensor, **parts: torch.nn.Module) -> tuple:
    """Q, k, v of the first layer with other projections."""
    layer = spec.layers[0]
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    attention = {name: getattr(layer.attention, name) for name in names} | parts
    layer = replace(layer, heads=replace(layer.heads, owner=SimpleNamespace(**attention)))
    with torch.inference_mode():
        return project(spec, layer, RowGrid.packed(ROWS), hidden, turn_of(spec))


@pytest.fixture
def spec() -> ModelSpec:
    """Every projection as wide as the states, so that one can pass them on."""
    return describe(tiny("llama", num_attention_heads=4, num_key_value_heads=4, head_dim=16).eval())


def test_states_that_a_projection_passes_on_stay(spec) -> None:
    """Queries, keys and values that are all one tensor, which is the residual too."""
    hidden = torch.randn(ROWS, 64)
    before, same = hidden.clone(), torch.nn.Identity()
    spec = replace(spec, layers=(replace(spec.layers[0], attention_in_norm=same),))
    q, k, v = projected(spec, hidden, q_proj=same, k_proj=same, v_proj=same)
    wanted = rotated_by_torch(before.view(ROWS, 4, 16), *turn_of(spec))
    assert torch.equal(hidden, before)
    assert torch.equal(v, before.view(ROWS, 4, 16))
    assert torch.equal(q, wanted)
    assert torch.equal(k, wanted)


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_what_a_module_keeps_stays(spec, name) -> None:
    hidden = torch.randn(ROWS, 64)
    inner = getattr(spec.layers[0].attention, name)
    plain = projected(spec, hidden)
    kept = Kept(inner)
    for got, wanted in zip(projected(spec, hidden, **{name: kept}), plain, strict=True):
        assert torch.equal(got, wanted)
    with torch.inference_mode():
        assert torch.equal(kept.made[0], inner(spec.layers[0].attention_in_norm(hidden)))


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_what_a_hook_heard_stays(spec, name) -> None:
    module, hidden = getattr(spec.layers[0].attention, name), torch.randn(ROWS, 64)
    plain, heard = projected(spec, hidden), []
    hook = module.register_forward_hook(lambda module, inputs, out: heard.append((inputs[0], out)))
    got = projected(spec, hidden)
    hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
    ((x, out),) = heard
    with torch.inference_mode():
        assert torch.equal(out, module(x))


def test_norms_may_pass_heads_on(spec) -> None:
    hidden, layer = torch.randn(ROWS, 64), spec.layers[0]
    plain, kept = projected(spec, hidden), Kept(torch.nn.Identity())
    spec = replace(spec, layers=(replace(layer, query_norm=kept, key_norm=torch.nn.Identity()),))
    assert not owns_queries(spec.layers[0])
    assert not owns_keys(spec.layers[0])
    got = projected(spec, hidden)
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
    with torch.inference_mode():
        wanted = layer.attention.q_proj(layer.attention_in_norm(hidden))
    assert torch.equal(kept.made[0].flatten(1), wanted)


def test_what_plain_projections_make_is_the_layers_own(spec) -> None:
    """As in most models: nothing is allocated for them."""
    assert owns_queries(spec.layers[0])
    assert owns_keys(spec.layers[0])


def test_a_model_that_is_listened_to_says_the_same() -> None:
    """With a hook on every projection, from the check at the start on."""
    model = tiny("llama").eval()
    tokens = random_tokens(70, 3)
    wanted, heard = reference(model, tokens), []
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            module = getattr(layer.self_attn, name)
            module.register_forward_hook(lambda _, __, out: heard.append((out, out.clone())))
    runner = Runner(model, None, max_tokens=256, progress=False)
    with runner.prefill(tokens, "full") as done:
        got = done.logits
    torch.testing.assert_close(got[-1:], wanted[-1:], rtol=1e-4, atol=1e-4)
    assert heard
    assert all(torch.equal(out, was) for out, was in heard)
