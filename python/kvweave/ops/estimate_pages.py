"""Attention over some pages, and an estimate of the pages that it left out."""

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
from kvweave.ops.page_means import PageMeans, ReadEntries
from kvweave.ops.workspace import Workspace, launch, results


@needs_memory("estimate_pages")
def estimate_pages(
    q: torch.Tensor,
    attended: tuple[torch.Tensor, torch.Tensor],
    entries: Table,
    pages: PageMeans,
    *,
    entry_offsets: Table,
    read: ReadEntries,
    workspace: Workspace | None = None,
    backend: Backend = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds to attention over some pages an estimate of the others that requests list.

    q [B, H, D] f32, bf16 or f16; `attended` out [B, H, D] and lse f32 [B, H] as `attend_decode`
    returns them for what was `read`; entries i32 [N, 5] and entry_offsets i32 [B + 1], or
    [B · tables + 1] with a `reach`, of all pages that count. Returns out [B, H, D] and lse f32
    [B, H] of the softmax over what was attended to and one term for each entry at whose position
    none was read: of logit softcap(scale · q · mean key) + ln(tokens of the entry), and of its mean
    value (after RetroInfer, whose clusters of tokens are pages here). No term is subtracted
    anywhere.

    An entry whose mean key has an element that is not finite has no term, and its mean value is not
    looked at. Without a term attention stays as it is, bit for bit. Windows do not matter.

    On CUDA the head dim is a multiple of 8 up to 256, else `Unsupported`. In tables there, entries
    whose page has no means have no term; positions of a table rise. A row's result does not depend
    on the others. A `workspace` as for `attend_decode`.
    """
    out, lse = attended
    expect_tensors(q=q, attended=out, lse=lse)
    if not isinstance(pages, PageMeans):
        raise invalid("pages", "a PageMeans", type(pages).__name__)
    if not isinstance(read, ReadEntries):
        raise invalid("read", "a ReadEntries", type(read).__name__)
    expect_tensors(means=pages.means)
    device = cuda_device("q", q, backend)
    made = results(q, None)
    if device is None:
        listed, known = (entries, entry_offsets), (read.entries, read.offsets, read.reach)
        reference = backend == "reference"
        _native.estimate_pages(q, attended, listed, pages, known, made, reference)
        return made
    tables = on_device(
        device,
        entries=entries,
        entry_offsets=entry_offsets,
        read=read.entries,
        read_offsets=read.offsets,
    )
    there = tables["entries"], tables["entry_offsets"]
    known_there = tables["read"], tables["read_offsets"], read.reach
    stream = stream_of(device)
    launch(
        workspace or Workspace(device),
        lambda space: _native.estimate_pages_cuda(
            q, attended, there, pages, known_there, made, space, stream
        ),
    )
    return made
