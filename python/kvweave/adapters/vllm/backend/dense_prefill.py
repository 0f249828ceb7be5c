"""Dense prefill by the FlashAttention that vLLM brings along, where that is the faster kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends import fa_utils

FASTER = 3
"""The version, for Hopper, that was measured to be faster than ours where no key is left out."""


@dataclass
class Runs:
    """B requests whose rows are the last tokens of each, in a run, and see all before them.

    `blocks` i32 [B, N] are vLLM's, `lengths` i32 [B] tokens of each request with its rows. The
    largest of rows and of lengths are known on the host.
    """

    blocks: torch.Tensor
    lengths: torch.Tensor
    most_rows: int
    longest: int


class DensePrefill:
    """FlashAttention for a layer of head size D over pages [blocks · G, 2, P, D].

    `block_pages`: from a block to the next; more than G where other layers' heads are between.
    """

    def __init__(self, scale: float, softcap: float | None, kv_heads: int) -> None:
        self.scale = scale
        self.softcap = softcap or 0.0
        self.kv_heads = self.block_pages = kv_heads

    @staticmethod
    def is_there(head_size: int, dtype: torch.dtype) -> bool:
        """Whether this machine has it, for these heads."""
        fits = head_size % 8 == 0 and head_size <= 256
        if not fits or dtype not in (torch.float16, torch.bfloat16):
            return False
        if not current_platform.is_cuda() or not fa_utils.is_flash_attn_varlen_func_available():
            return False
        version: int | None = fa_utils.get_flash_attn_version(head_size=head_size)
        return version == FASTER

    def attend(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        row_offsets: torch.Tensor,
        runs: Runs,
        output: torch.Tensor,
    ) -> None:
        """Attends query [R, H, D], row_offsets i32 [B + 1], into output [R, H, D]."""
        count, _, page_tokens, head_size = pages.shape
        page, *within = pages.stride()
        blocks = (count - self.kv_heads) // self.block_pages + 1
        heads = pages.as_strided(
            (blocks, self.kv_heads, 2, page_tokens, head_size),
            (self.block_pages * page, page, *within),
        )
        # [blocks, P, G, D] without a copy: the kernel takes strides.
        keys, values = (heads[:, :, part].transpose(1, 2) for part in (0, 1))
        fa_utils.flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            out=output,
            cu_seqlens_q=row_offsets,
            max_seqlen_q=runs.most_rows,
            seqused_k=runs.lengths,
            max_seqlen_k=runs.longest,
            softmax_scale=self.scale,
            causal=True,
            softcap=self.softcap,
            block_table=runs.blocks,
            fa_version=FASTER,
        )
