"""Attention of rows at arbitrary positions over paged KV."""

from __future__ import annotations

import torch

from kvweave import _native
from kvweave.device_memory import needs_memory
from kvweave.ops.dispatch import (
    Backend,
    Table,
    cuda_device,
    expect_tensors,
    on_device,
    stream_of,
    whole,
)
from kvweave.ops.reading import PagedKv, expect_paged
from kvweave.ops.workspace import Workspace, launch, results


@needs_memory("attend_prefill")
def attend_prefill(
    q: torch.Tensor,
    positions: Table,
    entries: Table,
    kv: PagedKv,
    *,
    row_offsets: Table | None = None,
    entry_offsets: Table | None = None,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    backend: Backend = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of rows at arbitrary positions over paged KV, causal by position.

    q [R, H, D], rotated to its positions i32 [R]; rows in any order. A row sees the keys at
    positions up to its own, as `kv` says. For B requests, row_offsets and entry_offsets i32 [B + 1]
    split rows and entries; without them there is one request. With a `reach` entry_offsets has
    B · tables + 1 numbers. Over a float8_e4m3fn cache q is f32, bf16 or f16.

    Returns out [R, H, D] (written to `out` if given) and lse f32 [R, H], natural logarithm. A row
    that sees no key gets 0 and −∞. The bits of a row do not depend on the other rows, except on
    CUDA where few rows have their keys split. A `workspace` is used on CUDA; without one each
    call makes its own. On CUDA with bf16 or f16 a value that is NaN or infinite may also reach
    rows of the same request that do not see its key but stand next to one that does.
    """
    expect_tensors(q=q)
    expect_paged(kv)
    call = kv.read(q, positions, entries)
    device = cuda_device("cache", kv.cache, backend)
    out, lse = results(q, out)
    if device is None:
        reference = backend == "reference"
        _native.attend_prefill(call, row_offsets, entry_offsets, out, lse, reference)
        return out, lse
    tables = on_device(
        device,
        positions=positions,
        entries=entries,
        row_offsets=whole(positions) if row_offsets is None else row_offsets,
        entry_offsets=whole(entries) if entry_offsets is None else entry_offsets,
    )
    call = call.placed(tables)
    rows, spans, stream = tables["row_offsets"], tables["entry_offsets"], stream_of(device)
    launch(
        workspace or Workspace(device),
        lambda space: _native.attend_prefill_cuda(call, rows, spans, (out, lse), space, stream),
    )
    return out, lse
