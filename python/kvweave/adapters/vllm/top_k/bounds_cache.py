"""Bounds of a layer's keys as a cache layer of vLLM, beside the layer's keys and values.

vLLM allocates them with the blocks that they are of, by the same numbers, and takes them out of the
same memory. A block that several requests share has one set of bounds, and a block that changes
hands is full, and its bounds are written, before anybody scores it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from kvweave.adapters.vllm.backend.paged_backend import PagedBackend
from kvweave.adapters.vllm.require import require
from kvweave.adapters.vllm.segments.prefix_guard import guarded
from kvweave.adapters.vllm.top_k.bounds import bounds_of
from kvweave.adapters.vllm.top_k.prompt_prefix import PromptPrefixSpec


class _NothingToBuild(AttentionMetadataBuilder[AttentionMetadata]):
    """Nobody attends to bounds."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AttentionMetadata:
        """Metadata that says nothing."""
        return AttentionMetadata()


class BoundsBackend(PagedBackend):
    """How bounds lie: as keys and values do."""

    @staticmethod
    def get_builder_cls() -> Any:
        """What makes nothing of a step."""
        return _NothingToBuild


class BoundsCache(nn.Module, AttentionLayerBase):
    """Bounds of the pages of one layer's G heads of size D, [blocks · G, vectors, D].

    Errors: `Unsupported` for a head size by which that is no whole number of elements a token.
    """

    def __init__(
        self, whole: Attention, config: VllmConfig, exact_tokens: int, *, reusing: bool
    ) -> None:
        super().__init__()
        dtype: torch.dtype = whole.kv_cache_torch_dtype
        self.vectors, self.dtype = bounds_of(dtype, config.device_config.device)
        self.head_size = whole.head_size
        tokens = config.cache_config.block_size
        # vLLM prices a key and a value for each token of a block: here, parts of a page's bounds.
        parts, left = divmod(
            self.vectors * self.head_size * self.dtype.itemsize, 2 * tokens * dtype.itemsize
        )
        expected = f"one whose bounds are shared out among {tokens} tokens, beside top-k heads"
        require("head_size", left == 0, expected, str(self.head_size))
        spec = PromptPrefixSpec(
            block_size=tokens,
            num_kv_heads=whole.num_kv_heads,
            head_size=parts,
            dtype=dtype,
            exact_tokens=exact_tokens,
        )
        self.spec = guarded(spec) if reusing else spec
        self.kv_cache = torch.tensor([])
        name = f"{whole.layer_name}_bounds"
        config.compilation_config.static_forward_context[name] = self

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        """What the scheduler must keep: as many blocks as of keys and values."""
        return self.spec

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Whose layout the memory has."""
        return BoundsBackend

    def values(self) -> torch.Tensor:
        """The bounds, where vLLM allocated them."""
        return self.kv_cache.view(self.dtype).view(-1, self.vectors, self.head_size)
