"""What exact pages lose by being packed."""

from __future__ import annotations

import numpy as np
import torch

from kvweave import _native
from kvweave._native import PackedFormat
from kvweave.ops.dispatch import Backend, Table, counted, expect_tensors, invalid


def pack_losses(
    cache: torch.Tensor,
    packs: Table,
    of: PackedFormat,
    *,
    pages: int,
    basis: torch.Tensor | None = None,
    ranks: Table | None = None,
    roots: torch.Tensor | None = None,
    left_out: int = 0,
    packed: torch.Tensor | None = None,
    backend: Backend = None,
) -> torch.Tensor:
    """Σ |x − x̂|² and Σ |x|² of each page of a block over all blocks, f64 [2, K, 2]; on the host.

    Of keys, then of values; x̂ is what `unpack_pages` writes once x has been packed in the format
    `of`. cache [·, 2, P', D] f32, bf16 or f16, and packs i32 [N, 2 + P / P'] as for `pack_pages`,
    whose packed blocks count for nothing. `ranks` i32 [K]: which of the `pages` of an exact block
    are packed, else all. `basis` f32 [K, 2, rows, D] is that of all blocks, for formats that are
    packed in one. `roots` f64 [K, D, D]: errors of keys are multiplied by these first, as by roots
    of a metric. So many tokens at the beginning of the first row, `left_out`, are packed and do not
    count. `packed` u8 [N, K, bytes] takes the packed pages, where they are wanted.

    A page with a number that is NaN or infinite loses NaN. Nothing is made on the way that is as
    large as the pages.

    # Errors
    `InvalidArgument` for what does not belong together.
    """
    given = {"basis": basis, "roots": roots, "packed pages": packed}
    known = {name: tensor for name, tensor in given.items() if tensor is not None}
    expect_tensors(cache=cache, **known)
    if backend == "cuda":
        raise invalid("backend", "cpu, reference or None", repr(backend))
    rows = np.array(packs, np.int32)
    if rows.ndim != 2 or rows.shape[1] < 3:
        raise invalid("packs", "rows of a packed block, tokens and blocks", str(rows.shape))
    rows[:, 0] = 1
    some = np.arange(counted("pages", pages), dtype=np.int32) if ranks is None else ranks
    wanted = (cache, of, rows, pages, some, basis, roots, counted("left_out", left_out), packed)
    return torch.from_numpy(_native.pack_losses(*wanted, backend == "reference"))
