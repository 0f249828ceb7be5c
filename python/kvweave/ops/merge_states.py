"""Partial attentions put together."""

from __future__ import annotations

import torch

from kvweave import _native
from kvweave.device_memory import needs_memory
from kvweave.ops.dispatch import Backend, cuda_device, expect_tensors, stream_of


@needs_memory("merge_states")
def merge_states(
    outs: torch.Tensor, lses: torch.Tensor, *, backend: Backend = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combines S partial attentions of the same rows over disjoint keys by their log-sum-exp.

    outs [S, R, H, D], lses f32 [S, R, H], both contiguous. Returns out [R, H, D] and lse f32
    [R, H] of attention over the union.
    """
    expect_tensors(outs=outs, lses=lses)
    device = cuda_device("outs", outs, backend)
    shape = outs.shape[1:] if outs.dim() == 4 else outs.shape
    out = torch.empty(shape, dtype=outs.dtype, device=outs.device)
    lse = torch.empty(shape[:2], dtype=torch.float32, device=outs.device)
    if device is None:
        _native.merge_states(outs, lses, out, lse, backend == "reference")
    else:
        _native.merge_states_cuda(outs, lses, out, lse, stream_of(device))
    return out, lse
