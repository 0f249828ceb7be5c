"""Attention over packed pages as they are."""

from __future__ import annotations

import torch

from kvweave import _native
from kvweave.device_memory import needs_memory
from kvweave.ops.dispatch import (
    Backend,
    Table,
    cuda_device,
    expect_tensors,
    invalid,
    on_device,
    stream_of,
)
from kvweave.ops.packed_kv import PackedKv, expect_packed
from kvweave.ops.reading import Reading
from kvweave.ops.workspace import Workspace, launch, results


@needs_memory("attend_packed")
def attend_packed(
    q: torch.Tensor,
    positions: Table,
    entries: Table,
    kv: PackedKv,
    *,
    entry_offsets: Table,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    backend: Backend = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one row per request over packed pages, as they are: a decode step.

    The result of `attend_decode` over what the pages stand for. q [B, H, D] f32, bf16 or f16,
    positions i32 [B], entries i32 [N, 5] of packed blocks, entry_offsets i32 [B + 1], or
    [B · tables + 1] with a `reach`. Returns out [B, H, D] and lse f32 [B, H]; a row that sees no
    key gets 0 and −∞.

    Of top-r pages and planes the basis meets the query and the output, never a key or a value
    (MosaicKV, section 5.3): q is turned back by an entry's delta, then rotated, so a text that was
    moved keeps the basis it was packed in. One call may read texts of several bases.

    On CUDA D is 64 or 128 and q has the dtype of the format's scales, over numbers of bf16 bf16;
    else `Unsupported`. Scales are multiplied into queries and weights there, and queries rotated,
    which rounds these once more to q's dtype. Blocks without a basis, or whose bits are no planes
    or too many, count as blocks without tokens where only the kernel sees that.
    """
    expect_tensors(q=q)
    if not isinstance(kv, PackedKv):
        raise invalid("kv", "a PackedKv", type(kv).__name__)
    pages = expect_packed(kv.pages)
    call = Reading(
        q,
        positions,
        entries,
        pages.data,
        kv.layer,
        kv.kv_heads,
        kv.scale,
        kv.rope,
        kv.window,
        kv.softcap,
        kv.reach,
    )
    device = cuda_device("packed pages", pages.data, backend)
    out, lse = results(q, out)
    if device is None:
        reference = backend == "reference"
        bases = pages.native_bases
        _native.attend_packed(call, pages.format, bases, entry_offsets, out, lse, reference)
        return out, lse
    tables = on_device(device, positions=positions, entries=entries, entry_offsets=entry_offsets)
    call, spans, stream = call.placed(tables), tables["entry_offsets"], stream_of(device)
    of, into = (pages.format, pages.bases_on(device)), (out, lse)
    launch(
        workspace or Workspace(device),
        lambda space: _native.attend_packed_cuda(call, *of, spans, into, space, stream),
    )
    return out, lse
