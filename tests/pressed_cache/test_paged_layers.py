"""Layers in pages inside transformers' own cache: the model attends over them, else by itself."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvweave
from cache_names import by_name
from families import random_tokens, tiny
from kvweave.adapters import kvpress
from kvweave.adapters.kvpress.head_pages import HeadPages
from kvweave.adapters.kvpress.head_pools import HeadPools, KeptForm
from kvweave.adapters.kvpress.paged_layers import AttendingCache
from kvweave.adapters.kvpress.pressed_layer import PressedLayer
from kvweave.adapters.transformers.kv_geometry import kv_geometry

IDS = torch.as_tensor(random_tokens(80, 1))[None].long()


@pytest.fixture
def model() -> Any:
    return tiny("llama")


def in_pages(model: Any, ids: torch.Tensor, layers: int = 4) -> DynamicCache:
    """A cache of a prefilled text, some of whose layers have been moved into pages."""
    cache, geometry = DynamicCache(), kv_geometry(model)
    form = KeptForm.of(geometry, page_tokens=16, kv_dtype=None, top_k_pages=None, answer_tokens=32)
    with torch.inference_mode():
        model.model(ids, **by_name(model.model, cache))
    for number, layer in enumerate(cache.layers[:layers]):
        moved = PressedLayer(
            HeadPages(lambda counts: HeadPools(form.exact_pool(geometry, counts), None, None))
        )
        moved.update(layer.keys, layer.values)
        moved.settle(None)
        cache.layers[number] = moved
    AttendingCache(model, cache)
    return cache


@torch.inference_mode()
def go_on(model: Any, cache: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    places = torch.arange(60, 60 + ids.shape[1])[None]
    return model(ids, position_ids=places, **by_name(model, cache), **more).logits[0]


@pytest.mark.parametrize("name", ["HeadMapPress", "PagedPress"])
def test_presses_say_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no kvpress; names that there are not are no attributes."""
    monkeypatch.setitem(sys.modules, "kvpress", None)
    for module in ("head_map_press", "paged_press"):
        monkeypatch.delitem(sys.modules, f"kvweave.adapters.kvpress.{module}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"run: pip install 'kvweave\[kvpress\]'"):
        getattr(kvpress, name)
    assert name in kvpress.__all__
    with pytest.raises(AttributeError, match="no attribute 'press'"):
        getattr(kvpress, "press")  # noqa: B009


def test_a_cache_goes_on_in_its_pages(model) -> None:
    wanted = model(IDS, use_cache=False).logits[0, 60:]
    cache = in_pages(model, IDS[:, :60])
    ours = torch.cat((go_on(model, cache, IDS[:, 60:75]), go_on_from(model, cache, 75)))
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
    assert [layer.pages.lengths for layer in cache.layers] == [[80, 80]] * 4
    assert model.config._attn_implementation == "eager"


@torch.inference_mode()
def go_on_from(model: Any, cache: Any, first: int) -> torch.Tensor:
    made = []
    for at in range(first, IDS.shape[1]):
        given = {"input_ids": IDS[:, at : at + 1], "position_ids": torch.tensor([[at]])}
        made.append(model(**given, **by_name(model, cache)).logits[0])
    return torch.cat(made)


def test_generate_goes_on_in_them(model) -> None:
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(IDS, **options)
    cache = in_pages(model, IDS[:, :60])
    assert torch.equal(model.generate(IDS, **by_name(model, cache), **options), wanted)


def test_other_caches_are_not_touched(model) -> None:
    cache, other = in_pages(model, IDS[:, :60]), DynamicCache()
    wanted = model(IDS[:, :20], use_cache=False).logits
    assert torch.equal(model(IDS[:, :20], **by_name(model, other)).logits, wanted)
    assert cache.layers[0].pages.lengths == [60, 60]


def test_two_caches_of_one_model_are_apart(model) -> None:
    wanted = model(IDS, use_cache=False).logits[0, 60:]
    caches = [in_pages(model, IDS[:, :60]) for _ in range(2)]
    said = [go_on(model, cache, IDS[:, 60:]) for cache in caches]
    assert torch.equal(*said)
    torch.testing.assert_close(said[0], wanted, rtol=1e-4, atol=1e-4)


def test_hooks_go_with_the_cache(model) -> None:
    cache = in_pages(model, IDS[:, :60])
    assert len(model.model._forward_pre_hooks) == 1
    del cache
    gc.collect()
    assert not model.model._forward_pre_hooks
    assert not model.model._forward_hooks


def test_a_forward_that_fails_gives_the_model_its_attention_back(model) -> None:
    cache = in_pages(model, IDS[:, :60])
    with pytest.raises(kvweave.PoolFull):
        go_on(model, cache, IDS.repeat(1, 3))
    assert model.config._attn_implementation == "eager"
    with pytest.raises(kvweave.Unsupported, match="expected one row, got 2"):
        go_on(model, cache, IDS[:, :1].repeat(2, 1))
    with pytest.raises(kvweave.InvalidArgument, match="no padding"):
        go_on(model, cache, IDS[:, :2], attention_mask=torch.tensor([[0, 1]]))
    assert model.config._attn_implementation == "eager"


def test_what_is_in_pages_in_part_is_refused(model) -> None:
    cache = in_pages(model, IDS[:, :60], layers=3)
    with pytest.raises(kvweave.Unsupported, match="prefilled in one forward"):
        go_on(model, cache, IDS[:, 60:])


def test_what_takes_tokens_back_or_makes_rows_is_refused(model) -> None:
    cache = in_pages(model, IDS[:, :60])
    for call in (
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.batch_select_indices(torch.tensor([0])),
    ):
        with pytest.raises(kvweave.Unsupported, match="expected one row"):
            call()
