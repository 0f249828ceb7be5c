"""`model.generate` through pages against the model's own attention, on every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvweave
from cache_names import by_name, needs_both_names
from families import FAMILIES, OTHERS, tiny
from generated import computed_rows, padded, prompt_ids, said
from kvweave.adapters.transformers.cache_argument import CACHE_NAMES
from kvweave.errors import PoolFull

REFUSED = {"llama-dynamic", "stablelm", "nemotron", "deepseek-v3", "llama4", "qwen3-next"}
"""Families whose attention is not handed to transformers' interface, or does what no page has."""
SAME = [name for name in (*FAMILIES, *OTHERS) if name not in REFUSED]


def own(model: Any) -> Any:
    """The model by sdpa, where that knows what its attention does."""
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    return model


@pytest.fixture(scope="module", params=SAME)
def family(request: pytest.FixtureRequest) -> Any:
    return own(tiny(request.param))


@pytest.fixture(scope="module")
def llama() -> Any:
    return own(tiny("llama"))


@pytest.fixture(scope="module")
def alone() -> Any:
    """The same weights, which attend by themselves while the others have a cache."""
    return own(tiny("llama"))


@needs_both_names
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_both_names_of_a_cache_are_taken(llama: Any) -> None:
    ids = prompt_ids(40, 30)
    theirs = said(llama, ids)
    with kvweave.PagedCache(llama, max_tokens=512) as cache:
        for name in CACHE_NAMES:
            assert said(llama, ids, **{name: cache}) == theirs
            assert llama(ids, **{name: cache}).logits.argmax(-1)[0, -1] == theirs[0][40]
        assert cache.plans[0].reused_prefix > 0
        cache.kv.check()


def test_families_say_the_same(family: Any) -> None:
    """A prompt, the same again, and one that differs from the middle on."""
    first, other = prompt_ids(60, 1), prompt_ids(60, 1)
    other[0, 37:] = prompt_ids(23, 2)
    theirs = [said(family, ids) for ids in (first, first, other)]
    with kvweave.PagedCache(family, max_tokens=512) as cache:
        ours, reused = [], []
        for ids in (first, first, other):
            ours.append(said(family, ids, cache=cache))
            reused.append(cache.plans[0].reused_prefix)
        cache.kv.check()
    assert ours == theirs
    assert reused == [0, 59, 37]


def test_families_with_padding_say_the_same(family: Any) -> None:
    """Rows of unlike lengths, of which one has been there before."""
    prompts = [prompt_ids(count, count) for count in (41, 7, 30, 1)]
    theirs = said(family, padded(*prompts))
    with kvweave.PagedCache(family, max_tokens=1024) as cache:
        alone = said(family, prompts[2], cache=cache)
        ours = said(family, padded(*prompts), cache=cache)
        assert [plan.reused_prefix for plan in cache.plans] == [0, 0, 29, 0]
        assert cache.lengths == [52, 18, 41, 12]
    assert ours == theirs
    assert ours[2][-12:] == alone[0][-12:]


def test_families_search_beams(family: Any) -> None:
    ids = prompt_ids(33, 3)
    options = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0}
    theirs = said(family, ids, **options)
    with kvweave.PagedCache(family, max_tokens=512) as cache:
        assert said(family, ids, cache=cache, **options) == theirs
        cache.reset()
        assert cache.kv.stats()["held"] == 0
        cache.kv.check()


@pytest.mark.parametrize("rows", [1, 3])
def test_samples_are_drawn_from_the_same_scores(llama: Any, rows: int) -> None:
    ids = prompt_ids(20, 4)
    options = {"do_sample": True, "top_k": 20, "num_return_sequences": rows}
    torch.manual_seed(5)
    theirs = said(llama, ids, **options)
    with kvweave.PagedCache(llama, max_tokens=512) as cache:
        torch.manual_seed(5)
        assert said(llama, ids, cache=cache, **options) == theirs


def test_rows_of_one_text_hold_it_once(llama: Any) -> None:
    """Until they part: then each holds the block that it writes to."""
    ids = prompt_ids(64, 5)
    with kvweave.PagedCache(llama, max_tokens=512) as cache:
        held = []
        for rows in (1, 4):
            options = {"do_sample": True, "num_return_sequences": rows, "max_new_tokens": 4}
            said(llama, ids, cache=cache, **options)
            held.append(cache.kv.stats()["held"])
        # Three tokens behind a full block each: the fourth is never fed.
        assert held == [5, 4 + 4]


def test_only_what_differs_is_computed(llama: Any) -> None:
    first, other = prompt_ids(200, 6), prompt_ids(200, 6)
    other[0, 180:] = prompt_ids(20, 7)
    with kvweave.PagedCache(llama, max_tokens=512) as cache, computed_rows(llama) as counts:
        said(llama, first, cache=cache, max_new_tokens=3)
        said(llama, other, cache=cache, max_new_tokens=3)
    assert counts == [200, 1, 1, 20, 1, 1]


def test_a_turn_goes_on_from_the_answer_before(llama: Any) -> None:
    with kvweave.PagedCache(llama, max_tokens=512) as cache:
        talk = torch.tensor(said(llama, prompt_ids(50, 8), cache=cache))
        # Padding is left out by an id where no mask is given, and an answer may say that id.
        turn = padded(torch.cat((talk, prompt_ids(9, 9)), 1))
        ours = said(llama, turn, cache=cache)
        # The answer's last token was said and never fed.
        assert cache.plans[0].reused_prefix == 61
    assert ours == said(llama, turn)


@pytest.mark.parametrize("chunk", [1, 16, 49, 1000])
def test_prompts_in_chunks(llama: Any, chunk: int) -> None:
    ids = prompt_ids(50, 10)
    with kvweave.PagedCache(llama, max_tokens=512) as cache:
        ours = said(llama, ids, cache=cache, prefill_chunk_size=chunk)
    assert ours == said(llama, ids)


def test_a_forward_of_ones_own_goes_on_where_it_ended(llama: Any) -> None:
    ids = prompt_ids(40, 11)
    logits = llama(ids, use_cache=False).logits
    with kvweave.PagedCache(llama, max_tokens=512) as cache:
        parts = [
            llama(part, **by_name(llama, cache)).logits for part in ids.split([11, 1, 20, 8], 1)
        ]
        assert torch.allclose(torch.cat(parts, 1), logits, atol=1e-4, rtol=0)
        cache.reset()
        # All logits are wanted, so all rows are computed, though their KV is there.
        again = llama(ids, **by_name(llama, cache), labels=ids)
        assert cache.plans[0].reused_prefix == 39
        assert torch.allclose(again.logits, logits, atol=1e-4, rtol=0)
        cache.reset()
        last = llama(ids, **by_name(llama, cache), logits_to_keep=3).logits
        assert torch.allclose(last, logits[:, -3:], atol=1e-4, rtol=0)


def test_padded_logits_have_the_callers_shape(llama: Any) -> None:
    batch = padded(prompt_ids(9, 12), prompt_ids(4, 13))
    batch = {k: torch.nn.functional.pad(v, (2, 0)) for k, v in batch.items()}
    theirs = llama(**batch, use_cache=False).logits
    with kvweave.PagedCache(llama, max_tokens=512) as cache:
        ours = llama(**batch, **by_name(llama, cache)).logits
    kept = batch["attention_mask"].bool()
    assert ours.shape == theirs.shape
    assert torch.allclose(ours[kept], theirs[kept], atol=1e-4, rtol=0)


def test_rows_are_picked_and_repeated(llama: Any) -> None:
    batch = padded(prompt_ids(9, 14), prompt_ids(30, 15))
    with kvweave.PagedCache(llama, max_tokens=512) as cache:
        llama(**batch, **by_name(llama, cache))
        cache.batch_repeat_interleave(2)
        assert cache.lengths == [9, 9, 30, 30]
        cache.batch_select_indices(torch.tensor([3, 0]))
        assert cache.lengths == [30, 9]
        cache.reorder_cache(torch.tensor([1, 1]))
        nexts = torch.tensor([[7], [8]])
        logits = llama(nexts, **by_name(llama, cache)).logits[:, -1]
        assert cache.kv.stats()["held"] == 2
    rows = [torch.cat((prompt_ids(9, 14), one[None]), 1) for one in nexts]
    theirs = torch.cat([llama(row, use_cache=False).logits[:, -1] for row in rows])
    assert torch.allclose(logits, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(dtype: torch.dtype) -> None:
    model = own(tiny("llama")).to(dtype)
    ids = prompt_ids(60, 16)
    theirs = model(ids, use_cache=False).logits.float()
    with kvweave.PagedCache(model, max_tokens=512) as cache:
        ours = model(ids, **by_name(model, cache)).logits.float()
    assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()


def test_what_does_not_fit_is_refused_and_takes_nothing(llama: Any) -> None:
    with kvweave.PagedCache(llama, max_tokens=64) as cache:
        for ids in (prompt_ids(100, 17), torch.cat([prompt_ids(40, 18), prompt_ids(40, 19)])):
            with pytest.raises(PoolFull):
                said(llama, ids, cache=cache)
            assert cache.lengths == []
            assert cache.kv.stats()["held"] == 0
        with pytest.raises(PoolFull):
            said(llama, prompt_ids(60, 20), cache=cache, max_new_tokens=40)
        assert cache.kv.stats()["held"] == 0
        cache.kv.check()
        ids = prompt_ids(50, 21)
        assert said(llama, ids, cache=cache) == said(own(tiny("llama")), ids)


def test_a_forward_that_raises_leaves_nothing_behind(llama: Any) -> None:
    ids = prompt_ids(40, 22)
    fails = [True]

    def hook(*_given: Any) -> None:
        if fails.pop():
            raise RuntimeError("a layer that fails")

    handle = llama.model.layers[2].register_forward_hook(hook)
    with kvweave.PagedCache(llama, max_tokens=512, check=False) as cache:
        with pytest.raises(RuntimeError, match="a layer that fails"):
            said(llama, ids, cache=cache)
        handle.remove()
        ours = said(llama, ids, cache=cache)
        assert cache.plans[0].reused_prefix == 0
    assert ours == said(llama, ids)


def test_closing_gives_everything_back(llama: Any) -> None:
    before = llama.config._attn_implementation
    hooks = len(llama._forward_pre_hooks), len(llama._forward_hooks)
    cache = kvweave.PagedCache(llama, max_tokens=512)
    assert llama.config._attn_implementation == "kvweave"
    said(llama, prompt_ids(20, 23), cache=cache)
    assert "rows=1, tokens=31" in repr(cache)
    cache.close()
    cache.close()
    assert cache.kv.stats()["held"] == 0
    assert llama.config._attn_implementation == before
    assert (len(llama._forward_pre_hooks), len(llama._forward_hooks)) == hooks


@given(st.data())
@settings(max_examples=12)
def test_any_calls_in_a_row_are_the_models_own(llama: Any, alone: Any, data: Any) -> None:
    """Batches over shared beginnings, appended to and picked from, with hardly any room."""
    stem = prompt_ids(120, 24)
    with kvweave.PagedCache(llama, max_tokens=400, check=False) as cache:
        for _ in range(data.draw(st.integers(1, 4))):
            shapes = st.tuples(st.integers(0, 60), st.integers(1, 40), st.integers(0, 3))
            shapes_of_rows = data.draw(st.lists(shapes, min_size=1, max_size=4))
            rows = [
                torch.cat((stem[:, :kept], prompt_ids(more, 25 + seed)), 1)
                for kept, more, seed in shapes_of_rows
            ]
            kept = data.draw(st.sampled_from([0, 1, 5]))
            try:
                batch = padded(*rows)
                places = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
                placed = {"position_ids": places, **by_name(llama, cache)}
                llama(**batch, **placed, logits_to_keep=kept)
                for _ in range(data.draw(st.integers(0, 3))):
                    picks = st.integers(0, len(rows) - 1)
                    order = data.draw(st.lists(picks, min_size=len(rows), max_size=len(rows)))
                    cache.reorder_cache(torch.tensor(order))
                    new = prompt_ids(data.draw(st.integers(1, 20)), 40).repeat(len(rows), 1)
                    new[:, -1] = torch.arange(len(rows)) + 7
                    ours = llama(new, **by_name(llama, cache)).logits
                    rows = [torch.cat((rows[at], new[i : i + 1]), 1) for i, at in enumerate(order)]
                    for row, logits in zip(rows, ours, strict=True):
                        theirs = alone(row, use_cache=False).logits[0, -new.shape[1] :]
                        assert torch.allclose(logits, theirs, atol=1e-4, rtol=0)
                assert cache.lengths == [row.shape[1] for row in rows]
            except PoolFull:
                assert cache.lengths == []
            cache.kv.check()
        cache.reset()
        assert cache.kv.stats()["held"] == 0


def test_hidden_states_and_scores_are_those_of_all_rows(llama: Any, alone: Any) -> None:
    ids = prompt_ids(30, 41)
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_hidden_states": True, "output_logits": True, "pad_token_id": 0}
    theirs = alone.generate(ids, **options)
    with kvweave.PagedCache(llama, max_tokens=256) as cache:
        said(llama, ids, cache=cache)
        ours = llama.generate(ids, **by_name(llama, cache), **options)
        assert cache.plans[0].reused_prefix == 29
    for mine, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        for layer, wanted in zip(mine, other, strict=True):
            assert torch.allclose(layer, wanted, atol=1e-4, rtol=0)
    for mine, wanted in zip(ours.logits, theirs.logits, strict=True):
        assert torch.allclose(mine, wanted, atol=1e-4, rtol=0)
