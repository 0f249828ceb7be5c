"""`ClassAttention`: heads of one class, and the first of a layer's classes for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from kvweave.adapters.vllm.backend.attention import PagedAttention
from kvweave.adapters.vllm.backend.metadata import PagedMetadata
from kvweave.adapters.vllm.backend.paged_backend import PagedBackend


class ClassAttention(PagedAttention):
    """As `PagedAttention`, and for the layers of other classes beside it, if there are any.

    A call of vLLM's attention op takes the host as long as some of its kernels take a GPU, and cuts
    a compiled model in two: a decoder layer has one, however many classes its heads are of.
    `beside`: attention layers of the other classes, whose heads lie behind its own.
    """

    beside: Sequence[Any] = ()

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As there, of query [R, H, D], key and value [R, G, D] of all classes."""
        scales: dict[str, Any] = {
            "output_scale": output_scale,
            "output_block_scale": output_block_scale,
        }
        if not self.beside or attn_metadata is None:
            given = query, key, value, kv_cache, attn_metadata, output
            return super().forward(layer, *given, **scales)
        known: Any = get_forward_context().attn_metadata
        parts = layer, *self.beside
        heads = [part.num_kv_heads for part in parts]
        queries = torch.split(query, [part.num_heads for part in parts], 1)
        kv = zip(torch.split(key, heads, 1), torch.split(value, heads, 1), strict=True)
        made = []
        for part, q, (k, v) in zip(parts, queries, kv, strict=True):
            attend = super().forward if part is layer else part.impl.forward
            out = output.new_empty(q.shape)
            given = q, k, v, part.kv_cache, known[part.layer_name], out
            made.append(attend(part, *given, **scales))
        return torch.cat(made, 1, out=output)


class ClassBackend(PagedBackend):
    """The backend of layers whose heads are of some class."""

    @staticmethod
    def get_impl_cls() -> type[ClassAttention]:
        """What attends in a layer."""
        return ClassAttention


class EqualPages(ClassBackend):
    """Both classes' blocks are cut into pages of as many tokens, so that they may share one."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """The one size that every block is a multiple of."""
        return [16]
