"""The attention backend of virtual pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvweave.adapters.vllm.backend.paged_backend import PagedBackend
from kvweave.adapters.vllm.virtual_pages.attention import VirtualAttention
from kvweave.adapters.vllm.virtual_pages.builder import VirtualMetadataBuilder
from kvweave.adapters.vllm.virtual_pages.choosing_attention import VirtualChoosingAttention
from kvweave.adapters.vllm.virtual_pages.choosing_builder import VirtualChoosingBuilder


class VirtualBackend(PagedBackend):
    """Ragged paged attention through tables from virtual page to block."""

    @staticmethod
    def get_impl_cls() -> type[VirtualAttention]:
        """What attends in a layer."""
        return VirtualAttention

    @staticmethod
    def get_builder_cls() -> type[VirtualMetadataBuilder]:
        """What makes the tables of a step."""
        return VirtualMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The spec with its price: how much memory vLLM allocates for a virtual page."""
        return replace(spec, num_head_slots=spec.layout.head_slots)


class VirtualChoosingBackend(VirtualBackend):
    """The same, where heads choose pages in decode steps."""

    @staticmethod
    def get_impl_cls() -> type[VirtualChoosingAttention]:
        """What attends in a layer."""
        return VirtualChoosingAttention

    @staticmethod
    def get_builder_cls() -> Any:
        """What makes the tables of a step."""
        return VirtualChoosingBuilder
