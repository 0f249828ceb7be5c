"""Segments under `model.generate`: reused at any position, as the Runner reuses them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import kvweave
from families import random_tokens, tiny
from generated import computed_rows, padded, prompt_ids, said
from kvweave.errors import InvalidArgument, Unsupported

DOCUMENT = random_tokens(90, 31).clip(3)
FAMILIES = ("llama", "qwen3", "gemma3", "mistral")


def asked(document: np.ndarray, before: int, seed: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """A prompt with a document in the middle, and where it stands."""
    parts = (random_tokens(before, seed).clip(3), document, random_tokens(12, seed + 1).clip(3))
    return np.concatenate(parts), [(before, before + len(document))]


def runner_says(model: Any, policy: Any, prompts: list[Any]) -> list[int]:
    """The last prompt's answer by a Runner that was given them in order."""
    runner = kvweave.Runner(model, max_tokens=1024, progress=False)
    for tokens, segments in prompts:
        edges = sorted({0, len(tokens), *(edge for segment in segments for edge in segment)})
        # Text that is new is recomputed whether it is marked or not.
        parts = [kvweave.Segment(tokens=tokens[a:b]) for a, b in pairwise(edges)]
        answer = runner.generate(parts, policy, max_new_tokens=12, stop=())
    return answer.tokens


@pytest.mark.parametrize("policy", ["naive", "epic", "random"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_segment_is_what_the_runner_makes_of_it(family: str, policy: str) -> None:
    model = tiny(family)
    prompts = [(DOCUMENT, [(0, 90)]), asked(DOCUMENT, 21, 40)]
    with kvweave.PagedCache(model, max_tokens=1024, policy=policy) as cache:
        for tokens, segments in prompts:
            cache.mark(tokens, segments)
            with computed_rows(model) as counts:
                ours = said(model, torch.from_numpy(tokens).long()[None], cache=cache)
        plan = cache.plans[0]
        cache.kv.check()
    assert plan.reused_segment >= 80
    assert counts[0] < len(tokens) - 60
    assert ours[0][-12:] == runner_says(model, policy, prompts)


def test_computing_everything_is_the_models_own() -> None:
    model = tiny("llama")
    tokens, segments = asked(DOCUMENT, 21, 40)
    ids = torch.from_numpy(tokens).long()[None]
    theirs = said(model, ids)
    policy = kvweave.Epic(first=90)
    with kvweave.PagedCache(model, max_tokens=1024, policy=policy) as cache:
        said(model, torch.from_numpy(DOCUMENT).long()[None], cache=cache)
        cache.mark(ids, segments)
        ours = said(model, ids, cache=cache)
        assert cache.plans[0].reused_segment >= 80
    assert ours == theirs


def test_what_segments_brought_is_nobodys_exact_prefix() -> None:
    model = tiny("llama")
    tokens, segments = asked(DOCUMENT, 21, 40)
    ids = torch.from_numpy(tokens).long()[None]
    with kvweave.PagedCache(model, max_tokens=1024, policy="naive") as cache:
        said(model, torch.from_numpy(DOCUMENT).long()[None], cache=cache)
        cache.mark(ids, segments)
        said(model, ids, cache=cache)
        cache.mark(ids, [])
        assert said(model, ids, cache=cache) == said_without(ids)
        assert cache.plans[0].reused_prefix == 21


def said_without(ids: torch.Tensor) -> list[list[int]]:
    return said(tiny("llama"), ids)


def test_rows_of_a_batch_have_their_own_marks() -> None:
    model = tiny("llama")
    (one, marked), (other, _) = asked(DOCUMENT, 21, 40), asked(DOCUMENT, 33, 50)
    prompts = [torch.from_numpy(tokens).long()[None] for tokens in (one, other)]
    with kvweave.PagedCache(model, max_tokens=1024, policy="naive") as cache:
        said(model, torch.from_numpy(DOCUMENT).long()[None], cache=cache)
        cache.mark(one, marked)
        ours = said(model, padded(*prompts), cache=cache)
        assert [plan.reused_segment > 0 for plan in cache.plans] == [True, False]
    assert ours[1][-12:] == said(model, prompts[1])[0][-12:]
    answers = [(DOCUMENT, [(0, 90)]), (one, marked)]
    assert ours[0][-12:] == runner_says(model, "naive", answers)


def test_text_is_found_without_marks() -> None:
    model = tiny("llama")
    tokens, _ = asked(DOCUMENT, 21, 40)
    with kvweave.PagedCache(model, max_tokens=1024, policy="naive", discover=True) as cache:
        said(model, torch.from_numpy(DOCUMENT).long()[None], cache=cache)
        said(model, torch.from_numpy(tokens).long()[None], cache=cache)
        assert cache.plans[0].reused_segment >= 64


def test_marks_that_are_none() -> None:
    model = tiny("llama")
    with kvweave.PagedCache(model, max_tokens=256) as cache:
        for segments in ([(5, 5)], [(0, 91)], [(-1, 4)], ["ab"], [(1,)], [(0.5, 4)], [(0, 4, 7)]):
            with pytest.raises(InvalidArgument):
                cache.mark(DOCUMENT, segments)
        for tokens in ([[1, 2], [3, 4]], [1.5], [10**6], "text", None):
            with pytest.raises(InvalidArgument):
                cache.mark(tokens, [(0, 1)])
        cache.mark(DOCUMENT, [(0, 50), (40, 90)])
        with pytest.raises(InvalidArgument):
            said(model, torch.from_numpy(DOCUMENT).long()[None], cache=cache)
        assert cache.kv.stats()["held"] == 0
        ids = prompt_ids(9, 1)
        assert said(model, ids, cache=cache) == said_without(ids)


def test_a_model_whose_keys_nothing_moves_says_so() -> None:
    model = tiny("hunyuan")
    cache = kvweave.PagedCache(model, max_tokens=256)
    with cache, pytest.raises(Unsupported, match="expected our forward"):
        cache.mark(DOCUMENT, [(0, 90)])
    with pytest.raises(Unsupported, match="expected our forward"):
        kvweave.PagedCache(model, max_tokens=256, discover=True)
    assert model.config._attn_implementation == "eager"
