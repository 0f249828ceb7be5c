"""Answers of tiny models over cached segments, watched while they are decoded; their KV as read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cached_prompts import knowledge
from families import random_tokens
from head_maps import runner_of
from kvweave.runner import Prefill, Runner

TOKENS = 24


def reader(model: Any, mode: str = "materialise", **settings: Any) -> tuple[Runner, list[Any]]:
    """A runner of a tiny model, and a prompt of three segments that it has encoded."""
    runner = runner_of(model, mode=mode, **settings)
    return runner, knowledge(runner, 3)


def kv_of(runner: Runner, done: Prefill) -> torch.Tensor:
    """K at its final rotation and V of every position that is stored, [L, 2, T, G, D].

    Read by plain indexing, page by page; of a runner without a head map, in mode materialise.
    """
    layers, heads = len(runner.spec.layers), runner.spec.kv_heads
    entries = done.request.entries()
    assert not entries[:, 4].any()
    pages = runner._decoder.pages
    found = torch.zeros(layers, 2, done.request.length, heads, runner.spec.head_dim)
    for block, begin, end, position, _ in entries.tolist():
        for layer in range(layers):
            for head in range(heads):
                page = pages[block + layer * heads + head]
                found[layer, :, position : position + end - begin, head] = page[:, begin:end]
    return found


def frozen_kv(runner: Runner, segments: int) -> torch.Tensor:
    """The stored bytes of the segments of `knowledge`, as they lie in the arena: [N, D]."""
    kept = []
    for index in range(segments):
        tokens = random_tokens(90 + 7 * index, index)
        prompt, regime = np.append(tokens, tokens[:1]), runner._prefiller.rotary.table(9).regime
        marks = [(0, len(tokens), "kb")]
        with runner.cache.admit(prompt, segments=marks, mode="share", regime=regime) as request:
            assert request.plan.reused_segment == len(tokens)
            for table in range(request.tables):
                pages = runner.cache.groups[table].pages
                for block, begin, end, position, _ in request.entries(table).tolist():
                    if position < len(tokens):
                        stored = runner._decoder.pages[block : block + pages, :, begin:end]
                        kept.append(stored.reshape(-1, stored.shape[-1]).clone())
    return torch.cat(kept)
