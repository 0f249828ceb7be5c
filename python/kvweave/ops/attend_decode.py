"""Attention of one row per request over paged KV."""

from __future__ import annotations

import torch

from kvweave import _native
from kvweave.device_memory import needs_memory
from kvweave.ops.dispatch import Backend, Table, cuda_device, expect_tensors, on_device, stream_of
from kvweave.ops.reading import PagedKv, expect_paged
from kvweave.ops.workspace import Workspace, launch, results


@needs_memory("attend_decode")
def attend_decode(
    q: torch.Tensor,
    positions: Table,
    entries: Table,
    kv: PagedKv,
    *,
    entry_offsets: Table,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    backend: Backend = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one row per request: a decode step. Same result as `attend_prefill`.

    q [B, H, D], positions i32 [B], entry_offsets i32 [B + 1], or [B · tables + 1] with a `reach`.
    Returns out [B, H, D] and lse f32 [B, H]. A `workspace` spares each call on CUDA the memory and
    the zeros that split keys need.
    """
    expect_tensors(q=q)
    expect_paged(kv)
    call = kv.read(q, positions, entries)
    device = cuda_device("cache", kv.cache, backend)
    out, lse = results(q, out)
    if device is None:
        _native.attend_decode(call, entry_offsets, out, lse, backend == "reference")
        return out, lse
    tables = on_device(device, positions=positions, entries=entries, entry_offsets=entry_offsets)
    call, spans, stream = call.placed(tables), tables["entry_offsets"], stream_of(device)
    launch(
        workspace or Workspace(device),
        lambda space: _native.attend_decode_cuda(call, spans, (out, lse), space, stream),
    )
    return out, lse
