"""Stand-ins for peers that need a GPU: their declared interfaces, computed in plain torch.

They show that what we hand to FA3 and FlashInfer (tables, lengths, layouts) means what they take it
to mean, where neither can run.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

# As the library of vLLM 0.26.0 declares them.
FWD = """fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v,
Tensor!? out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new,
Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table,
Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin,
Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale,
float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap,
bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa,
int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k)
-> Tensor[]"""
SCHEDULE = """get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k,
int num_heads, int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype,
Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new,
Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal,
int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa,
int sm_margin) -> Tensor"""


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window_left: int = -1
) -> torch.Tensor:
    """q [R, H, D], k and v [T, G, D]; with `causal` the last row sees all keys, or as many before
    its own as a window says."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("rhd,thd->hrt", q.float(), k) * q.shape[2] ** -0.5
    if causal:
        rows = torch.arange(len(q))[:, None] + len(k) - len(q)
        scores = scores.masked_fill(torch.arange(len(k)) > rows, -torch.inf)
    if window_left >= 0:
        assert causal
        scores = scores.masked_fill(torch.arange(len(k)) < rows - window_left, -torch.inf)
    return torch.einsum("hrt,thd->rhd", scores.softmax(-1), v).to(q.dtype)


def _fwd(*given: Any) -> list[torch.Tensor]:
    names = [a.name for a in torch.ops._vllm_fa3_C.fwd.default._schema.arguments]
    a = dict(zip(names, given, strict=True))
    assert (a["window_size_right"], a["softcap"]) == (-1, 0.0)
    assert a["softmax_scale"] == a["q"].shape[2] ** -0.5
    starts = a["cu_seqlens_q"].tolist()
    assert max(end - start for start, end in pairwise(starts)) == a["max_seqlen_q"]
    out = torch.empty_like(a["q"])
    for number, (start, end) in enumerate(pairwise(starts)):
        if a["page_table"] is None:
            first, last = a["cu_seqlens_k"][number : number + 2].tolist()
            k, v = a["k"][first:last], a["v"][first:last]
        else:
            # [pages, P, G, D] by any strides.
            used = int(a["seqused_k"][number])
            assert used <= a["max_seqlen_k"]
            pages = a["page_table"][number].long()
            k, v = (a[name][pages].flatten(0, 1)[:used] for name in "kv")
        out[start:end] = attention(a["q"][start:end], k, v, a["is_causal"], a["window_size_left"])
    return [out, torch.empty(0)]


def _schedule(*given: Any) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32)


def fa3_library() -> torch.library.Library:
    """Registers the double; it is gone when the returned object is."""
    library = torch.library.Library("_vllm_fa3_C", "FRAGMENT")
    library.define(FWD.replace("\n", " "))
    library.define(SCHEDULE.replace("\n", " "))
    library.impl("fwd", _fwd, "CPU")
    library.impl("get_scheduler_metadata", _schedule, "CPU")
    return library


class BatchDecodeWithPagedKVCacheWrapper:
    """FlashInfer's wrapper: pages of sequence i are indices[indptr[i] : indptr[i + 1]]."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, **chosen: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert chosen == {"use_tensor_cores": True, "backend": "fa2"}
        self.layout = kv_layout

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **dtypes: torch.dtype,
    ) -> None:
        assert {t.dtype for t in (indptr, indices, last_page_len)} == {torch.int32}
        assert len(indptr) == len(last_page_len) + 1
        assert int(indptr[-1]) == len(indices)
        self.sequences = [
            (indices[start:end].long(), page_size * (end - start - 1) + last)
            for (start, end), last in zip(
                pairwise(indptr.tolist()), last_page_len.tolist(), strict=True
            )
        ]
        self.shape = (len(last_page_len), num_qo_heads, head_dim)
        self.kv_shape = (page_size, num_kv_heads, head_dim)

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        assert q.shape == self.shape
        k, v = (x.transpose(1, 2) if self.layout == "HND" else x for x in pages)
        assert k.stride() == v.stride()
        assert k.shape[1:] == self.kv_shape
        rows = [
            attention(q[number, None], *(x[chosen].flatten(0, 1)[:used] for x in (k, v)), False)
            for number, (chosen, used) in enumerate(self.sequences)
        ]
        return torch.cat(rows)
