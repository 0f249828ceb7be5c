"""Runners whose packed pages are more than one format for all: heads that choose, final texts."""

from __future__ import annotations

from typing import Any

import numpy as np

from document_decoding import documents, fresh
from families import random_tokens
from kvweave.runner import Packing, Runner, Strategy
from packed_decoding import packed_runner
from ranked_pages import FULL, kinds_map, top_k

KINDS = ("choosing", "segments", "segments, choosing", "documents", "documents, choosing")
SEGMENTS = {32: 640, 64: 2112}
"""Tokens of a segment, by head dim: long enough for a basis of its own."""
LONG = 2500
"""Tokens of a document."""
EVERY = 24


def runner_of(model: Any, kind: str, **settings: Any) -> Runner:
    """Half of the heads read three pages where the kind says that they choose."""
    packing: Any = "int4"
    if "segments" in kind:
        packing = Packing(
            "int4", strategy=Strategy(0.3), segment_tokens=SEGMENTS[model.config.head_dim]
        )
    elif "documents" in kind:
        packing = Packing("int4", strategy=Strategy(0.3))
    given = {"kv_dtype": packing, "max_tokens": 32768, "chunk_tokens": 800, **settings}
    if "choosing" in kind:
        plain = Runner(model, max_tokens=64, check=False, progress=False)
        given["heads"] = kinds_map(plain.spec, [top_k(3, EVERY), FULL])
    return packed_runner(model, **given)


def prompts_of(runner: Runner, kind: str, count: int) -> list[Any]:
    """So many prompts of unlike lengths, and the documents that they read packed by then."""
    if "documents" not in kind:
        segment = SEGMENTS[runner.spec.head_dim]
        length = segment + 100 if "segments" in kind else 700
        return [random_tokens(length + 37 * at, at) for at in range(count)]
    (doc,) = documents([LONG])
    runner.encode(doc.tokens, "long")
    runner.flush()
    return [[fresh(70 + 9 * at, at), doc, fresh(30, 40 + at)] for at in range(count)]


def policy_of(kind: str) -> str:
    return "naive" if "documents" in kind else "full"


def same_bits(one: Any, other: Any) -> bool:
    """Whether the logits of as many steps are equal."""
    pairs = zip(one, other, strict=True)
    return all(np.array_equal(a.cpu().numpy(), b.cpu().numpy()) for a, b in pairs)
