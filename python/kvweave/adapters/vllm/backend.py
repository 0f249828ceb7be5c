"""The attention backend that vLLM calls `CUSTOM`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend

from kvweave.adapters.vllm.attention import PagedAttention
from kvweave.adapters.vllm.builder import PagedMetadataBuilder


class PagedBackend(AttentionBackend):
    """Ragged paged attention on the KV tensors that vLLM allocates."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enumeration that stands for backends like this one."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagedAttention]:
        """What attends in a layer."""
        return PagedAttention

    @staticmethod
    def get_builder_cls() -> type[PagedMetadataBuilder]:
        """What makes the tables of a step."""
        return PagedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        """Tokens of a page that the kernels are fast with; larger blocks are cut into such."""
        return [16, 32, 64]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Vectors are read 8 elements at a time."""
        return head_size % 8 == 0 and head_size <= 256

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """A window is a condition on positions."""
        return True

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Blocks, heads, tokens, and K beside V: `attention.pages_of` says how it is used."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Memory in the order of the shape, each layer apart."""
        return (0, 1, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)
