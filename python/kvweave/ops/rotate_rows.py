"""Rotary position embedding of new queries and keys."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from kvweave import _native
from kvweave.ops.dispatch import Backend, cuda_device, expect_tensors, stream_of

Pairing: TypeAlias = Literal["half", "interleaved"]
"""Which elements of a vector turn together: (x[i], x[i + W/2]) or (x[2i], x[2i + 1])."""


def rotate_rows(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    pairing: Pairing = "half",
    out: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    backend: Backend = None,
) -> None:
    """Rotates queries and keys of rows by RoPE, in place (RoFormer, section 3.4.2).

    q [R, H, D] and k [R, G, D] (None: queries alone), f32, bf16 or f16; rows and heads may be
    strided, and lie between each other as views of one projection's output do. cos and sin
    [R, W], of their dtype, as transformers makes them: pair i of W/2 turns by element i, the second
    half, which repeats the first or says nothing, is not read. Elements from W ≤ D on stay.

    With `out`, tensors of the shapes of q and k, q and k stay as they are. Everything is computed
    in f32, without fused steps, and rounded to the dtype once: an element has the same bits on the
    CPU and on CUDA, whatever the other rows and the strides are.

    On CUDA one launch does both. Nothing is allocated.
    """
    expect_tensors(q=q, cos=cos, sin=sin)
    if k is not None:
        expect_tensors(k=k)
    if out is not None:
        named = {"out of q": out[0], "out of k": out[1]}
        expect_tensors(**{name: x for name, x in named.items() if x is not None})
    device = cuda_device("q", q, backend)
    if device is None:
        _native.rotate_rows((q, k), (cos, sin), pairing, out, backend == "reference")
    else:
        _native.rotate_rows_cuda((q, k), (cos, sin), pairing, out, stream_of(device))
