"""Runners that pack documents by a strategy, and what their pages stand for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from families import tiny
from kvweave import ops
from kvweave.runner import Packing, Runner, Strategy
from kvweave.runner.kv.final_text import FinalText
from kvweave.runner.tiers import strategies
from packed_decoding import packed_runner
from page_meaning import Layer, Meaning, of_format

DIM, LAYERS, HEADS = 32, 2, 2
SIZES = {"head_dim": DIM, "max_position_embeddings": 8192, "num_hidden_layers": LAYERS}
LONG = 2500
"""Tokens of a document that has a basis of its own."""
BLOCKS = -(-LONG // 64)


def uneven_model(dim: int = DIM) -> Any:
    """One whose heads of D channels differ: in either layer one has few directions."""
    made = tiny("llama", **{**SIZES, "head_dim": dim})
    for number, layer in enumerate(made.model.layers):
        own = slice(dim * number, dim * (number + 1))
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            rows = projection.weight.data[own]
            # Two channels, which RoPE turns into each other, and little of the others.
            rows[1 : dim // 2] *= 0.02
            rows[dim // 2 + 1 :] *= 0.02
    return made


def runner_of(model: Any, bound: float, of: str = "int4", **settings: Any) -> Runner:
    packing = Packing(of, strategy=Strategy(bound))
    given = {"kv_dtype": packing, "max_tokens": 8192, "chunk_tokens": 400, **settings}
    return packed_runner(model, **given)


def text_of(runner: Runner) -> FinalText:
    """The one text that a runner has packed finally."""
    assert runner.packed is not None
    assert runner.packed.final is not None
    (text,) = runner.packed.final.texts
    return text


def formats_of(text: FinalText) -> dict[int, tuple[ops.PackedFormat, torch.Tensor | None]]:
    """Of each page of a block its format and its basis [2, rows, D]."""
    known = {}
    for part in text.parts:
        basis = part.basis
        for at, rank in enumerate(part.ranks.tolist()):
            known[rank] = part.format, None if basis is None else basis[at]
    return known


def meaning_of(text: FinalText) -> Meaning:
    """What a text's pages make of it, KV head by KV head."""
    known = formats_of(text)

    def meaning(layer: int, of: Layer) -> Layer:
        meant = []
        for head in range(HEADS):
            form, basis = known[layer * HEADS + head]
            own = of_format(form, None if basis is None else basis[None])
            meant.append(own(0, (of[0][head : head + 1], of[1][head : head + 1])))
        return torch.cat([keys for keys, _ in meant]), torch.cat([values for _, values in meant])

    return meaning


@contextmanager
def held_back(monkeypatch: Any) -> Iterator[threading.Event]:
    """Final packings wait until the event is set."""
    go, made = threading.Event(), strategies.ChosenFormats

    def late(*given: Any) -> Any:
        assert go.wait(60)
        return made(*given)

    with monkeypatch.context() as patched:
        patched.setattr(strategies, "ChosenFormats", late)
        yield go
        go.set()


def all_is_back(runner: Runner) -> bool:
    """Whether all blocks are back, those that are kept back among them, and the books agree."""
    pool = runner.packed
    assert pool is not None
    assert pool.final is not None
    runner.cache.check()
    pool.cache.check()
    final = pool.final
    places = final._place[1:]
    backed = np.sort(places[places >= 0])
    sound = np.array_equal(backed, pool.block_pages * np.arange(1, 1 + len(backed)))
    known = pool.stats()
    memory = final.memory
    empty = known["held"] == known["final_bytes"] == 0 and memory.fits([(memory.most_bytes, 1)])
    return sound and empty and final.kept_back == final.extra


def all_is_gone(runner: Runner) -> bool:
    """The same once somebody has computed, as whoever computes lets go of what nobody reads."""
    with runner._prefiller.computing:
        pass
    return all_is_back(runner)
