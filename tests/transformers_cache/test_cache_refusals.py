"""Models and calls that a `PagedCache` does not take: refused by name, and nothing is held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import kvweave
from cache_names import by_name
from families import tiny
from generated import padded, prompt_ids, said
from kvweave.adapters.transformers import register
from kvweave.adapters.transformers.cache_argument import given_cache
from kvweave.errors import InvalidArgument, Unsupported

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def made(config: str, model: str, **changes: Any) -> Any:
    torch.manual_seed(1)
    options = {**SIZES, **changes}
    return getattr(transformers, model)(getattr(transformers, config)(**options)).eval()


MODELS = {
    "dynamic frequencies": (lambda: tiny("llama-dynamic"), "dynamic"),
    "linear attention": (lambda: tiny("qwen3-next"), "linear_attention"),
    "latent attention": (lambda: tiny("deepseek-v3"), "expected keys"),
    "layers of unlike sizes": (lambda: made("Gemma4TextConfig", "Gemma4ForCausalLM"), "head_dim"),
    "layers that hand nothing on": (
        lambda: tiny("stablelm"),
        "hand their arguments on",
    ),
    "an encoder": (
        lambda: made("T5Config", "T5ForConditionalGeneration", d_model=64, d_kv=16, d_ff=96),
        "position_ids",
    ),
    "no model": (lambda: torch.nn.Linear(2, 2), "transformers"),
    "another dtype": (lambda: tiny("llama").double(), "float64"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_does_something_else_is_refused(name: str) -> None:
    make, says = MODELS[name]
    model = make()
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with pytest.raises(Unsupported, match=says):
        kvweave.PagedCache(model, max_tokens=256)
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == before
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_model_in_train_mode_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="eval"):
        kvweave.PagedCache(tiny("llama").train(), max_tokens=256)


def test_a_model_whose_logits_differ_is_refused() -> None:
    """One whose attention scales its values, which no argument tells."""
    model = tiny("llama")

    def halved(module: Any, given: Any, named: Any, out: Any) -> Any:
        if given_cache(named) is None:
            return None
        return out[0] / 2, *out[1:]

    model.model.layers[1].self_attn.register_forward_hook(halved, with_kwargs=True)
    with pytest.raises(Unsupported, match="logits"):
        kvweave.PagedCache(model, max_tokens=256)
    assert model.config._attn_implementation == "eager"


SETTINGS = [
    ({"policy": "foresight"}, Unsupported, "single pass"),
    ({"policy": "sparsex"}, Unsupported, "single pass"),
    ({"policy": "no such"}, InvalidArgument, "policy"),
    ({"max_tokens": 0}, InvalidArgument, "max_tokens"),
    ({"max_tokens": 64, "arena_bytes": 1 << 20}, InvalidArgument, "both"),
    ({"max_tokens": None, "arena_bytes": 1}, InvalidArgument, "arena"),
    ({"page_tokens": 0}, InvalidArgument, "page_tokens"),
    ({"eviction": "never"}, InvalidArgument, "never"),
    ({"discover": "yes"}, InvalidArgument, "discover"),
]


@pytest.mark.parametrize(("settings", "error", "says"), SETTINGS)
def test_settings_that_are_none(settings: dict[str, Any], error: Any, says: str) -> None:
    model = tiny("llama")
    with pytest.raises(error, match=says):
        kvweave.PagedCache(model, **{"max_tokens": 256, **settings})
    assert model.config._attn_implementation == "eager"
    assert not model._forward_pre_hooks


@pytest.fixture
def model() -> Any:
    return tiny("llama")


IDS = prompt_ids(12, 1)
ONES = torch.ones_like(IDS)
RIGHT = torch.tensor([[1] * 9 + [0] * 3])
CALLS = [
    ({"inputs_embeds": torch.zeros(1, 12, 64)}, Unsupported, "input_ids"),
    ({"input_ids": IDS, "output_attentions": True}, Unsupported, "output_attentions"),
    ({"input_ids": IDS, "attention_mask": RIGHT}, InvalidArgument, "left"),
    ({"input_ids": IDS, "attention_mask": 0 * ONES}, InvalidArgument, "none in row 0"),
    ({"input_ids": IDS, "attention_mask": ONES[None, None]}, InvalidArgument, "4-D"),
    ({"input_ids": IDS, "attention_mask": ONES[:, 1:]}, InvalidArgument, "attention_mask"),
    ({"input_ids": IDS[0]}, InvalidArgument, "input_ids"),
    ({"input_ids": IDS[:, :0]}, InvalidArgument, "input_ids"),
    ({"input_ids": IDS.float()}, InvalidArgument, "whole numbers"),
    ({"input_ids": IDS + 300}, InvalidArgument, "token ids"),
    ({"input_ids": -IDS}, InvalidArgument, "token ids"),
    ({"input_ids": IDS, "position_ids": ONES.cumsum(1)}, InvalidArgument, "position 0"),
    ({"input_ids": IDS, "position_ids": 0 * ONES}, InvalidArgument, "one after the other"),
    ({"input_ids": IDS, "position_ids": ONES.cumsum(1)[None]}, InvalidArgument, "position_ids"),
    ({"input_ids": IDS, "pixel_values": torch.zeros(1)}, Unsupported, "pixel_values"),
    (
        {"input_ids": IDS, "attention_mask": torch.ones(1, 20, dtype=torch.long)},
        InvalidArgument,
        "keep",
    ),
]


@pytest.mark.parametrize(("given", "error", "says"), CALLS)
def test_calls_that_are_refused_take_nothing(
    model: Any, given: dict[str, Any], error: Any, says: str
) -> None:
    with kvweave.PagedCache(model, max_tokens=256, check=False) as cache:
        with pytest.raises(error, match=says):
            model(**given, **by_name(model, cache))
        assert cache.kv.stats()["held"] == 0
        ours = said(model, IDS, cache=cache)
    assert ours == said(model, IDS)


def test_decoding_that_takes_tokens_back_is_refused(model: Any) -> None:
    with kvweave.PagedCache(model, max_tokens=256, check=False) as cache:
        with pytest.raises(Unsupported, match="assisted"):
            said(model, IDS, cache=cache, assistant_model=tiny("llama"))
        with pytest.raises(Unsupported, match="crop"):
            cache.crop(-1)
        with pytest.raises(InvalidArgument, match="rows"):
            cache.reorder_cache(torch.tensor([0]))


def test_the_attention_wants_a_cache_and_the_cache_its_model(model: Any) -> None:
    cache = kvweave.PagedCache(model, max_tokens=256, check=False)
    with pytest.raises(Unsupported, match="PagedCache"):
        model(IDS)
    with pytest.raises(InvalidArgument, match="this very model"):
        tiny("llama")(IDS, **by_name(model, cache))
    model.set_attn_implementation("sdpa")
    with pytest.raises(InvalidArgument, match='expected "kvweave"'):
        model(IDS, **by_name(model, cache))
    cache.close()
    with pytest.raises(InvalidArgument, match="closed"):
        model(IDS, **by_name(model, cache))


def test_gradients_are_refused(model: Any) -> None:
    with kvweave.PagedCache(model, max_tokens=256, check=False) as cache:
        with torch.enable_grad(), pytest.raises(InvalidArgument, match="not differentiable"):
            model(IDS, **by_name(model, cache))
        assert said(model, IDS, cache=cache)


def test_a_model_may_be_loaded_for_it(model: Any, tmp_path: Any) -> None:
    register()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="kvweave"
    ).eval()
    with kvweave.PagedCache(loaded, max_tokens=256) as cache:
        ours = said(loaded, padded(IDS, IDS[:, 4:]), cache=cache)
    assert loaded.config._attn_implementation == "kvweave"
    assert ours == said(model, padded(IDS, IDS[:, 4:]))


def test_a_model_has_one_open_cache(model: Any) -> None:
    """What the first one gives back when it closes is the model's own attention."""
    before = model.config._attn_implementation
    with kvweave.PagedCache(model, max_tokens=64, check=False):
        with pytest.raises(InvalidArgument, match="without an open PagedCache"):
            kvweave.PagedCache(model, max_tokens=64, check=False)
        assert model.config._attn_implementation == "kvweave"
    assert model.config._attn_implementation == before
    kvweave.PagedCache(model, max_tokens=64, check=False).close()
    assert model.config._attn_implementation == before
