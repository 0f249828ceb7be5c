"""FlashInfer's paged decode. It compiles its kernels when they are first planned (nvcc, ninja).

Its plan, made once a step on the host, is not timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from kvweave.lab.bench.contenders.contender import Contender
from kvweave.lab.bench.device_timing import Call
from kvweave.lab.bench.pages import PAGE
from kvweave.lab.bench.pool import Rows
from kvweave.lab.bench.problems import Attention, Problem
from kvweave.lab.bench.shapes import Decode

WORKSPACE = 256 << 20


def missing(device: torch.device) -> str:
    """Imports it."""
    if device.type != "cuda":
        return "it needs a GPU"
    if find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    try:
        import_module("flashinfer")
    except Exception as error:
        # It runs much code at import: whatever goes wrong there, it cannot take part.
        return f"its import fails: {type(error).__name__}: {error}"
    return ""


def contenders(problem: Problem) -> Iterator[Contender]:
    """Decode in our pages and in its customary layout; ragged heads as a batch."""
    if not isinstance(problem, Attention) or not isinstance(problem.work, Decode):
        return
    if problem.work.dense:
        yield Contender("FlashInfer", lambda: _decode(problem, "HND"))
        yield Contender("FlashInfer NHD", lambda: _decode(problem, "NHD"))
    else:
        yield Contender("FlashInfer head-as-batch", lambda: _head_as_batch(problem))


def _decode(problem: Attention, layout: str) -> Call:
    pool = problem.pool
    both = pool.blocks_view()
    if layout == "NHD":
        both = both[0].transpose(1, 2).contiguous(), both[1].transpose(1, 2).contiguous()
    table = pool.block_table()
    counts = np.full(pool.batch, table.shape[1])
    return _planned(problem.q, both, layout, table.flatten(), counts, pool.shape.kv_heads)


def _head_as_batch(problem: Attention) -> Call:
    """Each KV head of each request is a sequence of its own in a cache with one head."""
    pool = problem.pool
    heads = range(pool.shape.kv_heads)
    pages = [pool.head_pages(head)[0] for head in heads]
    indices = [pages[head][request] for request in range(pool.batch) for head in heads]
    counts = np.array([len(row) for row in indices])
    q = problem.q.view(len(indices), -1, pool.shape.head_dim)
    call = _planned(q, pool.heads_view(), "HND", np.concatenate(indices), counts, 1)
    return lambda: call().view(problem.q.shape)


def _planned(
    q: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    layout: str,
    indices: Rows,
    counts: Any,
    kv_heads: int,
) -> Call:
    """`indices` are pages of all sequences, `counts` how many each has; all pages are full."""
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)
    wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        workspace, layout, use_tensor_cores=True, backend="fa2"
    )
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    wrapper.plan(
        torch.from_numpy(offsets),
        torch.from_numpy(np.ascontiguousarray(indices, np.int32)),
        torch.full((len(counts),), PAGE, dtype=torch.int32),
        q.shape[1],
        kv_heads,
        q.shape[2],
        PAGE,
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )

    def call() -> torch.Tensor:
        out: torch.Tensor = wrapper.run(q, pages)
        return out

    return call
