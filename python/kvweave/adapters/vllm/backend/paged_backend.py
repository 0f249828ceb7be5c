"""The attention backend that vLLM calls `CUSTOM`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend

from kvweave.adapters.vllm.backend.attention import PagedAttention
from kvweave.adapters.vllm.backend.builder import PagedMetadataBuilder
from kvweave.adapters.vllm.backend.memory_layout import HeadMajor


class PagedBackend(HeadMajor, AttentionBackend):
    """Ragged paged attention on the KV tensors that vLLM allocates."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enumeration for backends that plugins bring."""
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
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
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

    @classmethod
    def supports_sink(cls) -> bool:
        """A learned sink scales what is attended, by the sum of the row's weights."""
        return True
