"""How much attention each token gets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvweave import _native
from kvweave.device_memory import needs_memory
from kvweave.ops.dispatch import (
    Backend,
    Table,
    counted,
    cuda_device,
    expect_tensors,
    invalid,
    on_device,
    stream_of,
    whole,
)
from kvweave.ops.reading import PagedKv, expect_paged
from kvweave.ops.workspace import Workspace, launch


@dataclass(frozen=True)
class EdgeMass:
    """Where `score_tokens` writes how much of each row's attention goes to far keys.

    `share` f32 [R, H], contiguous: the softmax mass of row and query head on keys outside the
    first `sink` and the latest `window` (at least 1), from 0 to 1: what a local head would not see
    (RedKnot, sections 1 and 3.2). 0 for a row that sees no key.
    """

    share: torch.Tensor
    window: int
    sink: int = 0


@needs_memory("score_tokens")
def score_tokens(
    q: torch.Tensor,
    positions: Table,
    entries: Table,
    kv: PagedKv,
    *,
    entry_offsets: Table | None = None,
    edge: EdgeMass | None = None,
    tokens: int | None = None,
    workspace: Workspace | None = None,
    backend: Backend = None,
) -> torch.Tensor:
    """Attention mass of every key of one request: Sparse-Q (SparseX, section 3, Algorithm 1).

    q [R, H, D] are the probing rows. With a `reach` of `kv`, entry_offsets i32 [tables + 1] splits
    the entries. Returns f32 [T], T the largest end of an entry: the sum over rows and query heads
    of the softmax weight of each key. The score matrix is never stored. `edge` is written in the
    same passes. `tokens` says T where entries lie on a CUDA device: nothing waits to look there.
    A `workspace` is used on CUDA; without one each call makes its own.
    """
    expect_tensors(q=q)
    expect_paged(kv)
    call = kv.read(q, positions, entries)
    device = cuda_device("cache", kv.cache, backend)
    length = _end_of(entries) if tokens is None else counted("tokens", tokens)
    mass = torch.empty(length, dtype=torch.float32, device=device)
    far = None if edge is None else (edge.share, edge.window, edge.sink)
    if device is None:
        _native.score_tokens(call, entry_offsets, mass, far, backend == "reference")
        return mass
    if edge is not None and not len(mass):
        edge.share.zero_()
    spans = whole(entries) if entry_offsets is None else entry_offsets
    tables = on_device(device, positions=positions, entries=entries, entry_offsets=spans)
    call, offsets, stream = call.placed(tables), tables["entry_offsets"], stream_of(device)
    launch(
        workspace or Workspace(device),
        lambda space: _native.score_tokens_cuda(call, offsets, mass, far, space, stream),
    )
    return mass


def _end_of(entries: Table) -> int:
    """The largest end of an entry; 0 for a table that the op itself will refuse."""
    if isinstance(entries, torch.Tensor) and entries.is_cuda:
        raise invalid("tokens", "the largest end of an entry, as entries lie on cuda", "None")
    if getattr(entries, "ndim", 0) != 2 or entries.shape[1] != 5 or len(entries) == 0:
        return 0
    _, begin, end, position, _ = np.asarray(entries).T.astype(np.int64)
    return max(0, int((position + end - begin).max()))
