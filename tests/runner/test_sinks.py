"""Attention sinks: a key of each query head that has a logit and no value (GPT-OSS)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cache_names import by_name
from families import greedy, random_tokens, reference, tiny
from kvweave import PagedCache, Runner, Unsupported
from kvweave.runner.model.sinks import beside_sinks


def by_definition(scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Softmax over scores [R, H, T] and the sink, over values [T, H, D], in float64."""
    whole = torch.cat([scores, sinks.expand(len(scores), -1)[..., None]], dim=-1).double()
    return torch.einsum("rht,thd->rhd", whole.softmax(-1)[..., :-1], values.double())


@pytest.mark.parametrize("sink", [-80.0, -2.0, 0.0, 3.0, 80.0])
def test_a_sink_takes_its_share(sink: float) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 4, 7, generator=generator) * 4
    values, sinks = torch.randn(7, 4, 8, generator=generator), torch.full((4,), sink)
    out = torch.einsum("rht,thd->rhd", scores.softmax(-1), values)
    made = beside_sinks((out, scores.logsumexp(-1)), sinks)
    torch.testing.assert_close(
        made.double(), by_definition(scores, values, sinks), rtol=1e-5, atol=1e-6
    )


def test_a_row_that_sees_nothing_stays_nothing() -> None:
    out, lse = torch.zeros(2, 4, 8), torch.full((2, 4), -torch.inf)
    assert torch.equal(beside_sinks((out, lse), torch.zeros(4)), out)
    assert beside_sinks((out, lse), None) is out


@pytest.fixture(scope="module")
def model() -> Any:
    """Sinks that take much, and of each head another share."""
    model = tiny("gpt-oss")
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.sinks.data = torch.tensor([-1.0, 0.5, 2.0, 4.0]) + number
    return model


def test_sinks_that_take_much_are_the_models_own(model: Any) -> None:
    tokens = random_tokens(150, 4)
    with torch.inference_mode():
        without = tiny("gpt-oss")
        for layer in without.model.layers:
            layer.self_attn.sinks.data.fill_(-1e4)
        assert (reference(model, tokens) - reference(without, tokens)).abs().max() > 1e-3
    runner = Runner(model, max_tokens=1024, progress=False)
    with runner.prefill(tokens, "full", logits_from=0) as done:
        assert torch.allclose(done.logits, reference(model, tokens), atol=1e-4, rtol=0)
    wanted = greedy(model, tokens, 12)
    assert runner.generate(tokens, "full", max_new_tokens=12, stop=()).tokens == wanted
    with PagedCache(model, max_tokens=512) as cache:
        logits = cache_logits(model, cache, tokens)
    assert torch.allclose(logits, reference(model, tokens), atol=1e-4, rtol=0)


@torch.inference_mode()
def cache_logits(model: Any, cache: PagedCache, tokens: np.ndarray) -> torch.Tensor:
    ids = torch.as_tensor(tokens)[None].long()
    parts = [model(part, **by_name(model, cache)).logits[0] for part in ids.split([100, 50], 1)]
    return torch.cat(parts)


def test_packed_pages_beside_sinks(model: Any) -> None:
    """Sinks weigh against what was read of both kinds of pages together."""
    tokens = random_tokens(400, 5)
    model = tiny("gpt-oss", layer_types=["full_attention"] * 4).eval()
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(2.0)
    with torch.inference_mode():
        own = reference(model, np.append(tokens, greedy(model, tokens, 1)))[-1]
    runner = Runner(model, max_tokens=1024, kv_dtype="int4", progress=False)
    with runner.prefill(tokens, "full") as done:
        said = runner.decode(done, max_new_tokens=2, stop=())
    assert said.tokens[1] in own.topk(5).indices.tolist()


def test_sinks_of_another_shape_are_refused() -> None:
    model = tiny("gpt-oss")
    for layer in model.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(Unsupported, match=r"a logit of each query head, got \[3\]"):
        Runner(model, max_tokens=64)
