"""What `model.generate` says by a model's own attention, and through a `PagedCache`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cache_names import by_name
from families import random_tokens


def prompt_ids(count: int, seed: int) -> torch.Tensor:
    """Token ids i64 [1, count] of the tiny models, none of them the padding."""
    return torch.from_numpy(random_tokens(count, seed)).long().clamp_min(3)[None]


def padded(*prompts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Prompts [1, T] as a batch with its padding, id 0, on the left."""
    most = max(prompt.shape[1] for prompt in prompts)
    rows = [torch.nn.functional.pad(prompt, (most - prompt.shape[1], 0)) for prompt in prompts]
    masks = [torch.ones_like(prompt) for prompt in prompts]
    marks = [torch.nn.functional.pad(mask, (most - mask.shape[1], 0)) for mask in masks]
    return {"input_ids": torch.cat(rows), "attention_mask": torch.cat(marks)}


def said(model: Any, given: Any, cache: Any = None, **settings: Any) -> list[list[int]]:
    """All tokens of `generate`, by rows; greedy unless told otherwise, and never ended early."""
    named = given if isinstance(given, dict) else {"input_ids": given}
    if cache is not None:
        named = {**named, **by_name(model, cache)}
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(**named, **{**options, **settings}).tolist()


@contextmanager
def computed_rows(model: Any) -> Iterator[list[int]]:
    """While entered, how many tokens each forward of a model computed, counted at its embedding."""
    counts: list[int] = []
    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _m, given, _o: counts.append(given[0].numel()))
    try:
        yield counts
    finally:
        hook.remove()
