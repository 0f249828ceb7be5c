"""The ops on paged KV: torch tensors in, torch tensors out, no copies of K or V.

Shapes: R rows, H query heads, G KV heads, D head dim, P tokens a page, B requests, L layers.
`cache` is always the whole arena [pages, 2, P, D] (f32, bf16 or f16): K of a page, then V.
Tables are int32, C-contiguous, numpy or torch: entries [N, 5] (block, begin, end, position,
delta), copies [C, 6] (src_block, src_slot, dst_block, dst_slot, count, delta), slots [R, 2]
(block, slot), as `KvRequest` makes them.

Every op takes `backend`: None picks the fast version for the cache's device, "reference" the
definition in plain loops, which every other version is checked against. Ops are not
differentiable. While an op runs, other threads must not write to its tensors.

Errors: `InvalidArgument` for a wrong dtype, shape, stride, device, alignment, range or overlap,
naming what was expected and what came; `Unsupported` for an op that a device does not have.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvweave import _native
from kvweave._native import Arena, RopeTable
from kvweave.errors import InvalidArgument, Unsupported

__all__ = [
    "RopeTable",
    "attend_decode",
    "attend_prefill",
    "copy_rerotate",
    "merge_states",
    "score_tokens",
    "write_pages",
]

Backend: TypeAlias = Literal["cpu", "cuda", "reference"] | None
Pages: TypeAlias = torch.Tensor | Arena
Table: TypeAlias = npt.NDArray[np.int32] | torch.Tensor

_BACKENDS = (None, "cpu", "cuda", "reference")


def write_pages(
    cache: Pages,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: Table,
    *,
    backend: Backend = None,
) -> None:
    """Scatters new keys and values of one layer into pages.

    k, v [R, G, D], of the cache's dtype; rows and heads may be strided. slots i32 [R, 2], all
    different, never the null block.
    """
    _no_gradient(k, v)
    reference = _on_host("write_pages", cache, backend)
    _native.write_pages(cache, layer, k, v, slots, reference)


def copy_rerotate(
    cache: Pages, copies: Table, rope: RopeTable, *, kv_heads: int, backend: Backend = None
) -> None:
    """Copies tokens of every layer and head between blocks: K rotated by delta, V as it is.

    copies i32 [C, 6]; no block is both read and written, no slot written twice. `rope` has the
    inverse frequencies of all L layers. Moving a key by delta positions turns pair i by
    `delta · inv_freq[i]` (Δ-RoPE: SparseX, section 3); delta 0 copies bits.

    On CUDA one launch on torch's current stream does all layers. A table that lies on the device
    is used as it is, rows outside the cache being skipped: nothing is waited for and the call may
    be captured in a graph. A table on the host is checked first and then uploaded. The first call
    with a `rope` on a device uploads its frequencies, so make one before capturing.
    """
    if backend == "cuda" or (backend is None and _is_cuda(cache)):
        _copy_rerotate_cuda(cache, copies, rope, kv_heads)
        return
    reference = _on_host("copy_rerotate", cache, backend)
    _native.copy_rerotate(cache, copies, rope, kv_heads, reference)


def _copy_rerotate_cuda(cache: Pages, copies: Table, rope: RopeTable, kv_heads: int) -> None:
    if not isinstance(cache, torch.Tensor) or not cache.is_cuda:
        got = "cpu" if not isinstance(cache, torch.Tensor) else str(cache.device)
        raise InvalidArgument(
            f"cache: expected a tensor on cuda, got one on {got}", expected="cuda", got=got
        )
    stream = torch.cuda.current_stream(cache.device).cuda_stream
    if isinstance(copies, torch.Tensor) and copies.is_cuda:
        _native.copy_rerotate_cuda(cache, copies, None, rope, kv_heads, stream)
        return
    uploaded = torch.as_tensor(copies).to(cache.device)
    _native.copy_rerotate_cuda(cache, uploaded, copies, rope, kv_heads, stream)


def attend_prefill(
    q: torch.Tensor,
    positions: Table,
    entries: Table,
    cache: Pages,
    layer: int,
    *,
    kv_heads: int,
    scale: float,
    rope: RopeTable,
    window: int | None = None,
    softcap: float | None = None,
    row_offsets: Table | None = None,
    entry_offsets: Table | None = None,
    out: torch.Tensor | None = None,
    backend: Backend = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of rows at arbitrary positions over paged KV, causal by position.

    q [R, H, D], rotated to its positions i32 [R]; rows in any order. A row sees the keys at
    positions up to its own and, with `window` w, only those above its position − w. Keys of an
    entry with delta ≠ 0 are read where they are, q turned back by delta (zero-copy `share`).
    `softcap` c maps a score s to c · tanh(s / c). For B requests, row_offsets and entry_offsets
    i32 [B + 1] split rows and entries; without them there is one request.

    Returns out [R, H, D] (written to `out` if given) and lse f32 [R, H], natural logarithm. A row
    that sees no key gets 0 and −∞. The bits of a row do not depend on the other rows.
    """
    _no_gradient(q)
    reference = _on_host("attend_prefill", cache, backend)
    out, lse = _results(q, out)
    arguments = {
        "q": q,
        "positions": positions,
        "entries": entries,
        "cache": cache,
        "layer": layer,
        "kv_heads": kv_heads,
        "scale": scale,
        "rope": rope,
        "window": window,
        "softcap": softcap,
    }
    _native.attend_prefill(arguments, row_offsets, entry_offsets, out, lse, reference)
    return out, lse


def attend_decode(
    q: torch.Tensor,
    positions: Table,
    entries: Table,
    cache: Pages,
    layer: int,
    *,
    kv_heads: int,
    scale: float,
    rope: RopeTable,
    entry_offsets: Table,
    window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    backend: Backend = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one row per request: a decode step. Same result as `attend_prefill`.

    q [B, H, D], positions i32 [B], entry_offsets i32 [B + 1]. Returns out [B, H, D] and lse f32
    [B, H].
    """
    _no_gradient(q)
    reference = _on_host("attend_decode", cache, backend)
    out, lse = _results(q, out)
    arguments = {
        "q": q,
        "positions": positions,
        "entries": entries,
        "cache": cache,
        "layer": layer,
        "kv_heads": kv_heads,
        "scale": scale,
        "rope": rope,
        "window": window,
        "softcap": softcap,
    }
    _native.attend_decode(arguments, entry_offsets, out, lse, reference)
    return out, lse


def score_tokens(
    q: torch.Tensor,
    positions: Table,
    entries: Table,
    cache: Pages,
    layer: int,
    *,
    kv_heads: int,
    scale: float,
    rope: RopeTable,
    window: int | None = None,
    softcap: float | None = None,
    backend: Backend = None,
) -> torch.Tensor:
    """Attention mass of every key of one request: Sparse-Q (SparseX, section 3, Algorithm 1).

    q [R, H, D] are the probing rows. Returns f32 [T], T the end of the last entry: the sum over
    rows and query heads of the softmax weight of each key. The score matrix is never stored.
    """
    _no_gradient(q)
    reference = _on_host("score_tokens", cache, backend)
    mass = torch.empty(_end_of(entries), dtype=torch.float32)
    arguments = {
        "q": q,
        "positions": positions,
        "entries": entries,
        "cache": cache,
        "layer": layer,
        "kv_heads": kv_heads,
        "scale": scale,
        "rope": rope,
        "window": window,
        "softcap": softcap,
    }
    _native.score_tokens(arguments, mass, reference)
    return mass


def merge_states(
    outs: torch.Tensor, lses: torch.Tensor, *, backend: Backend = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combines S partial attentions of the same rows over disjoint keys by their log-sum-exp.

    outs [S, R, H, D], lses f32 [S, R, H], both contiguous. Returns out [R, H, D] and lse f32
    [R, H] of attention over the union.
    """
    _no_gradient(outs)
    reference = _on_host("merge_states", outs, backend)
    out, lse = _results(outs[0] if outs.dim() == 4 and len(outs) else outs, None)
    _native.merge_states(outs, lses, out, lse, reference)
    return out, lse


def _results(q: torch.Tensor, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype)
    return out, torch.empty(q.shape[:2], dtype=torch.float32)


def _end_of(entries: Table) -> int:
    if entries.ndim != 2 or entries.shape[1] != 5 or len(entries) == 0:
        return 0
    _, begin, end, position, _ = entries[-1].tolist()
    return max(0, int(position) + int(end) - int(begin))


def _is_cuda(cache: Any) -> bool:
    return isinstance(cache, torch.Tensor) and cache.is_cuda


def _on_host(op: str, cache: Any, backend: Backend) -> bool:
    """Whether the definition was asked for; refuses what a device or a name does not have."""
    if backend not in _BACKENDS:
        names = "cpu, cuda, reference or None"
        raise InvalidArgument(
            f"backend: expected {names}, got {backend!r}", expected=names, got=repr(backend)
        )
    if backend == "cuda" or (backend is None and _is_cuda(cache)):
        got = str(cache.device) if isinstance(cache, torch.Tensor) else "cpu"
        raise Unsupported(
            f"{op}: expected tensors on cpu (CUDA has copy_rerotate only), got {got}",
            expected="cpu",
            got=got,
        )
    return backend == "reference"


def _no_gradient(*tensors: torch.Tensor) -> None:
    if not torch.is_grad_enabled():
        return
    for tensor in tensors:
        if tensor.requires_grad:
            raise InvalidArgument(
                "tensor: expected one without gradient (ops are not differentiable), "
                "got requires_grad=True",
                expected="requires_grad=False",
                got="requires_grad=True",
            )
