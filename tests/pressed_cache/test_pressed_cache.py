"""Pages that hold what a press keeps, against the model's own attention under masks.

The presses here are hooks as kvpress sets them; kvpress itself is in `test_kvpress.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvweave
from cache_names import by_name
from families import random_tokens, tiny
from kvweave.adapters.kvpress import PressedCache
from press_hooks import Dropped, hooked, masking

CONTEXT, QUESTION = 70, 9


@torch.inference_mode()
def under_masks(model: Any, ids: torch.Tensor, dropped: Dropped) -> torch.Tensor:
    """The model's own forward: rows behind the context do not see what was dropped."""
    length, handles = ids.shape[1], []
    for index, layer in enumerate(model.model.layers):
        seen = torch.ones(length, length, dtype=torch.bool).tril().repeat(2, 1, 1)
        seen[:, CONTEXT:, :CONTEXT] &= ~dropped(index)[:, None]
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo().min)
        mask = mask.repeat_interleave(2, 0)[None]

        def hook(_module: Any, given: Any, named: Any, mask: torch.Tensor = mask) -> Any:
            return given, {**named, "attention_mask": mask}

        handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
    logits = model(ids, use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    return logits


def ragged(layer: int) -> torch.Tensor:
    """Other tokens of each head, and of some heads none at all."""
    generator = torch.Generator().manual_seed(layer)
    return torch.rand(2, CONTEXT, generator=generator) < torch.tensor([[0.7], [0.2 * layer]])


def uniform(layer: int) -> torch.Tensor:
    """As many tokens of each head, not the same ones."""
    scores = torch.rand(2, CONTEXT, generator=torch.Generator().manual_seed(layer))
    return scores < scores.sort(-1).values[:, 40:41]


def gathering(dropped: Dropped) -> Callable[[Any, Any], None]:
    """As presses of scores do it."""

    def press(module: Any, layer: Any) -> None:
        kept = ~dropped(module.layer_idx)
        for name in ("keys", "values"):
            x = getattr(layer, name)
            parts = [x[0, head][kept[head]] for head in range(2)]
            setattr(layer, name, torch.stack(parts)[None])

    return press


@pytest.fixture
def model() -> Any:
    return tiny("llama")


def ids_of(seed: int) -> torch.Tensor:
    return torch.as_tensor(random_tokens(CONTEXT + QUESTION, seed))[None].long()


@torch.inference_mode()
def asked(model: Any, cache: PressedCache, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the question, in one pass but for its last three tokens."""
    places, made = torch.arange(ids.shape[1])[None], []
    for start, end in [(CONTEXT, CONTEXT + 6), *((i, i + 1) for i in range(CONTEXT + 6, 79))]:
        part = slice(start, end)
        given = {"input_ids": ids[:, part], "position_ids": places[:, part]}
        made.append(model(**given, **by_name(model, cache)).logits[0])
    return torch.cat(made)


@pytest.mark.parametrize(
    ("press", "dropped"), [(masking, ragged), (masking, uniform), (gathering, uniform)]
)
def test_what_is_dropped_is_not_seen_and_not_there(model, press, dropped) -> None:
    ids = ids_of(1)
    wanted = under_masks(model, ids, dropped)[CONTEXT:]
    before = model.config._attn_implementation
    with PressedCache(model, max_tokens=256) as cache:
        with hooked(model, press(dropped), cache), torch.inference_mode():
            model.model(ids[:, :CONTEXT], **by_name(model.model, cache))
        kept = [(~dropped(layer)).sum(-1).tolist() for layer in range(4)]
        assert cache.lengths == kept
        blocks = sum(-(-count // 16) for heads in kept for count in heads)
        assert cache.bytes == blocks * 2 * 16 * 16 * 4
        assert cache.dense_bytes == CONTEXT * 4 * 2 * 2 * 16 * 4
        if dropped is uniform:
            assert cache.bytes < cache.dense_bytes
        for _ in range(2):
            lengths = [cache.get_seq_length(layer) for layer in range(len(cache))]
            torch.testing.assert_close(asked(model, cache, ids), wanted, rtol=1e-4, atol=1e-4)
            assert [cache.get_seq_length(layer) for layer in range(4)] == [
                length + QUESTION for length in lengths
            ]
            for layer, length in enumerate(lengths):
                for name in ("keys", "values"):
                    one = cache.layers[layer]
                    setattr(one, name, getattr(one, name)[:, :, :length])
            assert cache.lengths == kept
            assert cache.bytes == blocks * 2 * 16 * 16 * 4
        cache.kv.check()
        cache.reset()
        assert cache.bytes == 0
        assert cache.dense_bytes == 0
    assert model.config._attn_implementation == before
    attentions = [layer.self_attn for layer in model.model.layers]
    assert all(getattr(one, "masked_key_indices", None) is None for one in attentions)


def test_the_last_layers_answer_is_taken_back_as_well(model) -> None:
    """Lengths that are asked for once the context is there are those of what masks have left."""
    with PressedCache(model, max_tokens=256) as cache:
        with hooked(model, masking(ragged), cache), torch.inference_mode():
            model.model(ids_of(1)[:, :CONTEXT], **by_name(model.model, cache))
        lengths = [cache.get_seq_length(layer) for layer in range(len(cache))]
        assert lengths == [int((~ragged(layer)).sum(-1).max()) for layer in range(4)]
        asked(model, cache, ids_of(1))
        for layer, length in zip(cache.layers, lengths, strict=True):
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        assert [cache.get_seq_length(layer) for layer in range(len(cache))] == lengths


def test_without_a_press_it_is_the_models_own(model) -> None:
    ids = ids_of(2)
    with torch.inference_mode():
        wanted = model(ids, use_cache=False).logits[0, CONTEXT:]
        with PressedCache(model, max_tokens=128) as cache:
            model.model(ids[:, :CONTEXT], **by_name(model.model, cache))
            torch.testing.assert_close(asked(model, cache, ids), wanted, rtol=1e-4, atol=1e-4)
        again = model(ids, use_cache=False).logits[0, CONTEXT:]
    assert torch.equal(again, wanted)


def test_what_does_not_fit_is_refused(model) -> None:
    with PressedCache(model, max_tokens=32) as cache, torch.inference_mode():
        with pytest.raises(kvweave.PoolFull):
            model.model(torch.zeros(1, 200, dtype=torch.long), **by_name(model.model, cache))
        cache.reset()
        cache.kv.check()
        assert cache.kv.stats()["held"] == 0


def whole_head(module: Any, _layer: Any) -> None:
    module.masked_key_indices = tuple(
        torch.nonzero(torch.ones(1, 2, CONTEXT, dtype=torch.bool), as_tuple=True)
    )


def unlike(_module: Any, layer: Any) -> None:
    layer.keys = layer.keys[:, :, :5]


@pytest.mark.parametrize(("press", "says"), [(whole_head, "got none"), (unlike, "one shape")])
def test_a_press_that_leaves_nothing_sensible_is_refused(model, press, says) -> None:
    with PressedCache(model, max_tokens=128) as cache, torch.inference_mode():
        with pytest.raises(kvweave.InvalidArgument, match=says), hooked(model, press, cache):
            model.model(ids_of(3)[:, :CONTEXT], **by_name(model.model, cache))
        cache.reset()
        assert cache.bytes == 0


def test_presses_that_come_later_are_refused(model) -> None:
    ids = ids_of(4)
    with PressedCache(model, max_tokens=128) as cache, torch.inference_mode():
        model.model(ids[:, :CONTEXT], **by_name(model.model, cache))
        assert cache.bytes
        layer = cache.layers[1]
        with pytest.raises(kvweave.Unsupported, match="a press reads keys and values while"):
            layer.keys[:, :, 3:]
        with pytest.raises(kvweave.Unsupported, match="got a Tensor later"):
            layer.keys = torch.zeros(1, 2, 4, 16)
        with pytest.raises(kvweave.Unsupported, match="the 70 of the context, got a cut to 4"):
            layer.values = layer.values[:, :, :4]


def test_models_and_batches_without_a_form_are_refused(model) -> None:
    with pytest.raises(kvweave.Unsupported, match="sliding windows"):
        PressedCache(tiny("mistral"))
    with PressedCache(model, max_tokens=128) as cache, torch.inference_mode():
        with pytest.raises(kvweave.Unsupported, match="expected one row, got 2"):
            model.model(ids_of(5).repeat(2, 1), **by_name(model.model, cache))
        cache.reset()
        mask = torch.ones(1, CONTEXT, dtype=torch.long)
        mask[0, 0] = 0
        with pytest.raises(kvweave.InvalidArgument, match="no padding"):
            model.model(ids_of(5)[:, :CONTEXT], attention_mask=mask, **by_name(model.model, cache))
