"""The attention backend of layers whose heads may choose pages."""

from __future__ import annotations

from typing import Any

from kvweave.adapters.vllm.backend.paged_backend import PagedBackend
from kvweave.adapters.vllm.top_k.attention import ChoosingAttention
from kvweave.adapters.vllm.top_k.builder import ChoosingMetadataBuilder


class ChoosingBackend(PagedBackend):
    """Ragged paged attention, in decode steps through tables of chosen pages."""

    @staticmethod
    def get_impl_cls() -> type[ChoosingAttention]:
        """What attends in a layer."""
        return ChoosingAttention

    @staticmethod
    def get_builder_cls() -> Any:
        """What makes the tables of a step."""
        return ChoosingMetadataBuilder
