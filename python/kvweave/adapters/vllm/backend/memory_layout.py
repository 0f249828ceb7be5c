"""How vLLM lays out keys and values: in 0.26 as a shape and its order, later as a named layout."""

from __future__ import annotations

from typing import Any


class HeadMajor:
    """Mixed in before a backend class: blocks × heads × tokens × (K beside V), each layer apart.

    `attention.pages_of` says how that is used.
    """

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """The tensor of a layer, for vLLM up to 0.28."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Memory in the order of the shape, for vLLM up to 0.28."""
        return (0, 1, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """The same, for vLLM from 0.29 on: layers, blocks, heads, tokens, content."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LBHNC,)
