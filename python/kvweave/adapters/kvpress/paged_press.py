"""`PagedPress`: a press that leaves what is kept in kvweave's pages, packed or read in part."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from kvpress import BasePress, DecodingPress, PrefillDecodingPress
from transformers import DynamicCache

from kvweave.adapters.kvpress.head_pages import HeadPages
from kvweave.adapters.kvpress.head_pools import HeadPools, KeptForm
from kvweave.adapters.kvpress.packed_heads import PackedHeads
from kvweave.adapters.kvpress.paged_layers import AttendingCache
from kvweave.adapters.kvpress.pressed_cache import MASK
from kvweave.adapters.kvpress.pressed_layer import READS, PressedLayer, ask_reads, forget_reads
from kvweave.adapters.transformers.kv_geometry import KvGeometry, kv_geometry
from kvweave.errors import InvalidArgument, Unsupported
from kvweave.ops import PackedFormat
from kvweave.runner.kv.packing import Packing
from kvweave.runner.model.layer_forms import attention_of


@dataclass
class PagedPress(BasePress):
    """Moves what a context keeps into pages as it is prefilled, layer by layer.

        press = PagedPress(kvpress.SnapKVPress(0.5), kv_dtype="int4")
        pipe(context, question=question, press=press)
        print(press.bytes, "of", press.dense_bytes)

    `press`: what decides what is kept; None keeps all. Its tensors, which the cache of the pipeline
    has until then, are let go of behind each layer. `kv_dtype`, `top_k_pages`, `page_tokens` and
    `answer_tokens` are those of `PressedCache`; each layer's pages are as many as it keeps, and an
    answer takes. The cache is transformers' `DynamicCache`, of one row. While it lives the model
    attends over these pages in the forwards that are given it, and by its own attention in others.

    # Errors
    When a model is entered, what `PressedCache` raises of a model and of settings, and
    `Unsupported` for presses that act while an answer is decoded. `Unsupported` for another cache,
    or for several rows, when a context is prefilled.
    """

    press: BasePress | None = None
    kv_dtype: str | PackedFormat | Packing | None = None
    top_k_pages: int | None = None
    page_tokens: int = 16
    answer_tokens: int = 512

    def __post_init__(self) -> None:
        if isinstance(self.press, (DecodingPress, PrefillDecodingPress)):
            raise Unsupported(
                "press: expected one that acts while the context is prefilled, got "
                f"{type(self.press).__name__}"
            )
        self._kept: dict[int, _Kept] = {}
        self._cache: weakref.ref[Any] | None = None

    @property
    def compression_ratio(self) -> float:
        """The inner press's, by tokens."""
        return float(getattr(self.press, "compression_ratio", None) or 0.0)

    @compression_ratio.setter
    def compression_ratio(self, ratio: float) -> None:
        if self.press is not None:
            inner: Any = self.press
            inner.compression_ratio = ratio
        elif ratio:
            raise InvalidArgument(f"compression_ratio: expected 0 without a press, got {ratio}")

    @property
    def bytes(self) -> int:
        """Bytes that the allocators held of the latest context: pages, and what packed ones need.

        Bounds of exact pages come with the first step that ranks these, and are not among them.
        """
        return sum(kept.held for kept in self._kept.values())

    @property
    def arena_bytes(self) -> int:
        """Bytes that were allocated for it, with the room for an answer."""
        return sum(kept.room for kept in self._kept.values())

    @property
    def dense_bytes(self) -> int:
        """What it would take as tensors: all tokens of all heads, whatever the press kept."""
        return sum(kept.dense for kept in self._kept.values())

    @property
    def lengths(self) -> list[list[int]]:
        """Tokens of it that each head of each layer kept."""
        return [kept.lengths for _, kept in sorted(self._kept.items())]

    def post_init_from_model(self, model: Any) -> None:
        """Reads the model's geometry and checks what was asked for."""
        self._model, self._geometry = model, kv_geometry(model)
        self._form = KeptForm.of(
            self._geometry,
            page_tokens=self.page_tokens,
            kv_dtype=self.kv_dtype,
            top_k_pages=self.top_k_pages,
            answer_tokens=self.answer_tokens,
        )

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """While entered, contexts that the model prefills move into pages."""
        # Hooks run in the order in which they are set: the inner press first.
        with (
            _reads_are_asked(model),
            self.press(model) if self.press is not None else nullcontext(),
            super().__call__(model),
        ):
            yield

    def forward_hook(self, module: Any, input: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Moves a layer whose context has been prefilled into pages."""
        cache: Any = kwargs.get("past_key_values")
        number = int(module.layer_idx)
        if type(cache) is not DynamicCache:
            raise Unsupported(f"cache: expected a DynamicCache, got a {type(cache).__name__}")
        layer = cache.layers[number]
        if isinstance(layer, PressedLayer):
            return output
        if self._cache is None or self._cache() is not cache:
            self._cache, self._kept = weakref.ref(cache), {}
            AttendingCache(self._model, cache)
        context = kwargs["hidden_states"].shape[1]
        cache.layers[number] = self._moved(number, module, layer, context)
        return output

    def _moved(self, number: int, module: Any, layer: Any, context: int) -> PressedLayer:
        pools = _LayerPools(self._geometry, self._form, number)
        moved = PressedLayer(HeadPages(pools))
        moved.update(layer.keys, layer.values)
        moved.settle(getattr(module, MASK, None), getattr(module, READS, None))
        setattr(module, MASK, None)
        ask_reads([module])
        geometry = self._geometry
        dense = context * geometry.kv_heads * 2 * geometry.head_dim * geometry.dtype.itemsize
        self._kept[number] = _Kept(*pools.taken(), dense, moved.pages.lengths)
        return moved


@contextmanager
def _reads_are_asked(model: Any) -> Iterator[None]:
    """While entered, presses may say what heads read of the pages that layers move into."""
    modules = [attention_of(layer) for layer in model.get_decoder().layers]
    ask_reads(modules)
    try:
        yield
    finally:
        forget_reads(modules)


@dataclass(frozen=True)
class _Kept:
    """What one layer of a context took: bytes held, bytes of room, bytes as tensors; its tokens."""

    held: int
    room: int
    dense: int
    lengths: list[int]


class _LayerPools:
    """Pools of one layer alone, made when it is known what its heads keep."""

    def __init__(self, geometry: KvGeometry, form: KeptForm, layer: int) -> None:
        self._geometry, self._form, self._layer = geometry, form, layer

    def __call__(self, counts: Sequence[int]) -> HeadPools:
        form = self._form
        self._exact = form.exact_pool(self._geometry, counts)
        self._packed = form.packed_pool(self._geometry, counts, self._layer)
        packed = None if self._packed is None else PackedHeads(self._packed, 0)
        return HeadPools(self._exact, packed, form.top_k_pages)

    def taken(self) -> tuple[int, int]:
        """Bytes that are held, and bytes of all pages."""
        cache = self._exact.cache
        held, room = int(cache.stats()["held"]) * cache.block_bytes, self._exact.pages.nbytes
        if self._packed is None:
            return held, room
        return held + self._packed.held_bytes, room + self._packed.nbytes
