"""What others have for the best K of each row of scores, called as `select_pages` is.

`torch.topk` (unsorted, and with the indices sorted, which is what a table of pages needs),
FlashInfer's `top_k` and `top_k_ragged_transform`, and the kernels of vLLM's own indexer, the same
in 0.26 and 0.33: `cooperative_topk` for few rows, `persistent_topk` for more, and
`top_k_per_row_decode` for any K. The ragged ones take a length a row, as ours do; none takes a
budget a row, keeps ties, or the first and last pages. What this machine does not have, or what does
not do a shape, says why instead.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

VLLM_K = (512, 1024, 2048)
"""The numbers that vLLM has `cooperative_topk` and `persistent_topk` for."""
COOPERATIVE_ROWS = 64
"""The most rows that it has the former for."""
WORKSPACE_BYTES = 1 << 20
NOT_INSTALLED = "not installed"

Best = Callable[[], torch.Tensor]
"""Indices [R, K] of the best of each row, in any order."""


def peers(scores: torch.Tensor, counts: torch.Tensor, most: int) -> dict[str, Best | str]:
    """By name a call that finds the `most` best of rows f32 [R, S], or why there is none.

    counts i32 [R]: the scores of each row, all of them full.
    """
    made: dict[str, Callable[[], Best]] = {
        "torch.topk": lambda: lambda: torch.topk(scores, most, sorted=False).indices,
        "torch.topk, sorted": lambda: lambda: _sorted(scores, most),
        "flashinfer.top_k": lambda: _flashinfer(scores, most),
        "flashinfer.top_k_ragged_transform": lambda: _flashinfer_ragged(scores, counts, most),
        "vllm cooperative_topk": lambda: _cooperative(scores, counts, most),
        "vllm persistent_topk": lambda: _persistent(scores, counts, most),
        "vllm top_k_per_row_decode": lambda: _per_row(scores, counts, most),
    }
    return {name: _made(name.split()[0].split(".")[0], make) for name, make in made.items()}


def _made(package: str, make: Callable[[], Best]) -> Best | str:
    if find_spec(package) is None:
        return NOT_INSTALLED
    # A package may be there without its kernels, for this device or in this version.
    try:
        return make()
    except Exception as error:
        return reason(error)


def reason(error: Exception) -> str:
    """An error in a few words, for the row of a call that could not be made."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:80]


def _sorted(scores: torch.Tensor, most: int) -> torch.Tensor:
    return torch.topk(scores, most, sorted=False).indices.sort().values


def _flashinfer(scores: torch.Tensor, most: int) -> Best:
    top_k = import_module("flashinfer").top_k
    return lambda: top_k(scores, most)[1]


def _flashinfer_ragged(scores: torch.Tensor, counts: torch.Tensor, most: int) -> Best:
    transform = import_module("flashinfer").top_k_ragged_transform
    offsets = torch.zeros_like(counts)
    return lambda: transform(scores, offsets, counts, most)


def _vllm_op(name: str) -> Any:
    """An op of vLLM's own library, which importing its wrappers registers."""
    import_module("vllm._custom_ops")
    return getattr(torch.ops._C, name)


def _cooperative(scores: torch.Tensor, counts: torch.Tensor, most: int) -> Best:
    if len(scores) > COOPERATIVE_ROWS:
        raise ValueError(f"expected rows up to {COOPERATIVE_ROWS}, got {len(scores)}")
    return _of_indexer("cooperative_topk", scores, counts, most)


def _persistent(scores: torch.Tensor, counts: torch.Tensor, most: int) -> Best:
    return _of_indexer("persistent_topk", scores, counts, most)


def _of_indexer(name: str, scores: torch.Tensor, counts: torch.Tensor, most: int) -> Best:
    if most not in VLLM_K:
        known = ", ".join(map(str, VLLM_K))
        raise ValueError(f"expected K of {known}, got {most}")
    op = _vllm_op(name)
    chosen = _room(scores, most)
    space = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=scores.device)

    def call() -> torch.Tensor:
        op(scores, counts, chosen, space, most, scores.shape[1])
        return chosen

    return call


def _per_row(scores: torch.Tensor, counts: torch.Tensor, most: int) -> Best:
    op, chosen = _vllm_op("top_k_per_row_decode"), _room(scores, most)
    rows, strides = len(scores), (scores.stride(0), scores.stride(1))

    def call() -> torch.Tensor:
        op(scores, 1, counts, chosen, rows, *strides, most)
        return chosen

    return call


def _room(scores: torch.Tensor, most: int) -> torch.Tensor:
    return torch.empty(len(scores), most, dtype=torch.int32, device=scores.device)
