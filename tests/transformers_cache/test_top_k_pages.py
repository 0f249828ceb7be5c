"""Decode steps that read few pages, against transformers' own decoding masked to these pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvweave
from cache_names import by_name
from families import tiny
from generated import padded, prompt_ids, said
from ranked_pages import PlainDecoding, top_k

PAGE = 4


@pytest.fixture(scope="module", params=["llama", "qwen3", "granite", "olmo2"])
def pair(request: pytest.FixtureRequest) -> Any:
    """Two models of the same weights: one has a cache while the other attends by itself."""
    return tiny(request.param), tiny(request.param)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


@torch.inference_mode()
def stepped(model: Any, cache: Any, ids: torch.Tensor, first: int) -> torch.Tensor:
    """Logits behind the first tokens, then behind each of the others, one by one."""
    known = by_name(model, cache)
    places = torch.arange(first)[None]
    made = [model(ids[:, :first], position_ids=places, **known).logits[0, -1]]
    for at in range(first, ids.shape[1]):
        places = torch.tensor([[at]])
        made.append(model(ids[:, at : at + 1], position_ids=places, **known).logits[0, -1])
    return torch.stack(made).float()


@torch.inference_mode()
@pytest.mark.parametrize(("pages", "first"), [(3, 50), (6, 41), (7, 5)])
def test_logits_are_those_of_the_definition(pair: Any, pages: int, first: int) -> None:
    """The first page, the newest two and the best by their bounds, from a prompt of any length."""
    model, alone = pair
    ids = prompt_ids(first + 30, pages)
    plain = PlainDecoding(alone, [top_k(pages)], PAGE)
    wanted = [plain.feed(ids[0, :first].tolist())]
    wanted += [plain.feed([token]) for token in ids[0, first:].tolist()]
    settings = {"max_tokens": 256, "page_tokens": PAGE}
    with kvweave.PagedCache(model, top_k_pages=pages, **settings) as cache:
        ours = stepped(model, cache, ids, first)
        torch.testing.assert_close(ours, torch.stack(wanted), rtol=2e-4, atol=2e-4)
        # The same text again: a prompt reads all, though only one of its rows is computed.
        again = stepped(model, cache, ids, first)
        assert cache.plans[0].reused_prefix == first - 1
        torch.testing.assert_close(again, ours, rtol=1e-4, atol=1e-4)
        cache.kv.check()
    with kvweave.PagedCache(model, **settings) as cache:
        dense = stepped(model, cache, ids, first)
    error = (torch.stack(wanted) - ours).abs().max()
    assert (dense - ours).abs().max() > 50 * error, "few pages are not all of them"


def test_as_many_pages_as_there_are_change_no_bit(llama: Any) -> None:
    ids = prompt_ids(60, 1)
    made = []
    for pages in (None, 23):
        settings = {"max_tokens": 256, "page_tokens": PAGE, "top_k_pages": pages}
        with kvweave.PagedCache(llama, **settings) as cache:
            made.append(stepped(llama, cache, ids, 30))
    assert torch.equal(*made)


def test_rows_of_a_batch_say_what_each_says_alone(llama: Any) -> None:
    """Rows of unlike lengths, of which one reads all; and beams, whose rows share their prompt."""
    prompts = [prompt_ids(count, count) for count in (61, 9, 40)]
    settings = {"max_tokens": 1024, "page_tokens": PAGE, "top_k_pages": 4}
    with kvweave.PagedCache(llama, **settings) as cache:
        together = said(llama, padded(*prompts), cache=cache)
        alone = [said(llama, ids, cache=cache)[0] for ids in prompts]
        assert [row[61:] for row in together] == [row[-12:] for row in alone]
        beams = {"num_beams": 3, "num_return_sequences": 3}
        rows = said(llama, prompts[0], cache=cache, **beams)
        assert len({tuple(row) for row in rows}) == 3
        cache.reset()
        assert cache.kv.stats()["held"] == 0
        cache.kv.check()


def test_bounds_are_given_back_with_their_rows(llama: Any) -> None:
    settings = {"max_tokens": 512, "page_tokens": PAGE, "top_k_pages": 3}
    with kvweave.PagedCache(llama, **settings) as cache:
        said(llama, prompt_ids(80, 1), cache=cache)
        most = cache.bound_bytes
        # 22 pages but the newest, and a spare quarter at most: bounds f32 of 4 layers of 2 heads.
        assert 22 * 8 * 3 * 16 * 4 <= most <= 30 * 8 * 3 * 16 * 4
        for seed in range(2, 8):
            said(llama, prompt_ids(80, seed), cache=cache)
        assert cache.bound_bytes == most


def test_what_few_pages_said_is_no_exact_prefix(llama: Any) -> None:
    """Of a text that goes on behind an answer the prompt is found, and the answer computed."""
    ids = prompt_ids(41, 1)
    known = []
    for pages in (None, 3):
        settings = {"max_tokens": 512, "page_tokens": PAGE, "top_k_pages": pages}
        with kvweave.PagedCache(llama, **settings) as cache:
            answered = said(llama, ids, cache=cache)
            said(llama, torch.tensor(answered), cache=cache)
            known.append(cache.plans[0].reused_prefix)
    assert known == [52, 41]


def test_windows_stay_windows() -> None:
    """Layers with a window read it as ever, the others few pages."""
    kinds = ["sliding_attention", "full_attention"] * 2
    model = tiny("gemma3", layer_types=kinds)
    ids = prompt_ids(90, 3)
    settings = {"max_tokens": 256, "page_tokens": PAGE}
    with kvweave.PagedCache(model, **settings) as cache:
        dense = stepped(model, cache, ids, 70)
    with kvweave.PagedCache(model, top_k_pages=30, **settings) as cache:
        assert torch.equal(stepped(model, cache, ids, 70), dense)
    with kvweave.PagedCache(model, top_k_pages=3, **settings) as cache:
        assert not torch.equal(stepped(model, cache, ids, 70), dense)


@pytest.mark.parametrize("pages", [2, 0, -1, 4.5, "8", True])
def test_too_few_pages_are_refused(llama: Any, pages: Any) -> None:
    with pytest.raises(kvweave.InvalidArgument, match="top_k_pages: expected"):
        kvweave.PagedCache(llama, top_k_pages=pages)
