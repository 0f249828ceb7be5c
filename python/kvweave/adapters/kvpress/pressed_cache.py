"""`PressedCache`: the cache of kvpress' pipeline, which holds what a press keeps and no more."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from kvweave.adapters.kvpress.head_pages import HeadPages
from kvweave.adapters.kvpress.head_pools import HeadPools, KeptForm
from kvweave.adapters.kvpress.packed_heads import PackedHeads
from kvweave.adapters.kvpress.pressed_layer import (
    READS,
    PressedLayer,
    ask_reads,
    expect_plain,
    forget_reads,
)
from kvweave.adapters.transformers.attention import NAME, STEP, register
from kvweave.adapters.transformers.cache_argument import given_cache
from kvweave.adapters.transformers.kv_geometry import kv_geometry
from kvweave.adapters.transformers.paged_step import Attends
from kvweave.adapters.transformers.step_rows import Vectors
from kvweave.arguments import whole
from kvweave.cache import KvCache
from kvweave.closing import Closing
from kvweave.device_memory import needs_memory
from kvweave.errors import InvalidArgument, Unsupported
from kvweave.ops import PackedFormat
from kvweave.runner.kv.block_counts import block_counts
from kvweave.runner.kv.packing import Packing
from kvweave.runner.model.layer import dense_attention
from kvweave.runner.model.layer_forms import attention_of

MASK = "masked_key_indices"
"""Where presses leave what a head shall not see, on its attention module."""


class PressedCache(Cache, Closing):
    """Keys and values that a press of kvpress keeps, in kvweave's pages.

        with PressedCache(model, max_tokens=8192) as cache:
            pipe(context, question=question, press=press, cache=cache)
            print(cache.bytes, "of", cache.dense_bytes)

    A context is prefilled by plain attention, layer by layer. What the press keeps of a layer
    moves into pages when the next layer begins, each head's apart: tokens that a press only masks
    for some heads (AdaKV, DuoAttention) are given back there. Questions and answers attend over
    pages, and kvpress' pipeline takes them back afterwards. `reset` begins anew with another
    context.

    `max_tokens`: tokens of a head that there is room for in each layer. While it is open the model
    attends by `attn_implementation="kvweave"`; one cache is open for a model at a time.

    `kv_dtype`, a name of `ops.packed_format`, a format or a `Packing`: of each head all but the
    first 64 and the newest 128 to 191 kept tokens lie packed. A format in a basis has one for each
    head of each layer, made of its own packed tokens where none is given; top-r pages of less than
    eight times the bytes of these have none. Questions and answers stay exact, in room for
    `answer_tokens` beside. `top_k_pages`, at least 3: so many pages of a head are read where one
    row attends, the first, the newest two and those that its query scores highest; of packed pages
    where there are any, and then all that is exact besides.

    # Errors
    `Unsupported` for a model with sliding windows, what `PagedCache` refuses of a model, a batch
    of several rows, presses that change keys while an answer is decoded, a format that the kernels
    do not read; `InvalidArgument` for padding and settings that are none; `PoolFull` for what does
    not fit.
    """

    @needs_memory("cache")
    def __init__(
        self,
        model: Any,
        *,
        max_tokens: int = 8192,
        page_tokens: int = 16,
        kv_dtype: str | PackedFormat | Packing | None = None,
        top_k_pages: int | None = None,
        answer_tokens: int = 512,
    ) -> None:
        super().__init__(layers=[])
        geometry = kv_geometry(model)
        form = KeptForm.of(
            geometry,
            page_tokens=page_tokens,
            kv_dtype=kv_dtype,
            top_k_pages=top_k_pages,
            answer_tokens=0 if kv_dtype is None else answer_tokens,
        )
        self._geometry, self._model, self._context = geometry, model, 0
        tokens, heads = whole("max_tokens", max_tokens, 1), geometry.layers * geometry.kv_heads
        self._exact = form.exact_pool(geometry, [form.most_exact(tokens)] * heads)
        self._packed = form.packed_pool(geometry, [tokens] * heads, 0)

        def pages(layer: int) -> HeadPages:
            pool, packed = self._packed, None
            if pool is not None:
                packed = PackedHeads(pool, layer * geometry.kv_heads)
            return HeadPages(lambda _: HeadPools(self._exact, packed, top_k_pages))

        self.layers = [PressedLayer(pages(layer)) for layer in range(geometry.layers)]
        self._modules = [attention_of(layer) for layer in model.get_decoder().layers]
        register()
        self._before = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        decoder = model.get_decoder()
        self._hooks = (
            decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            decoder.register_forward_hook(self._after_forward, with_kwargs=True),
        )

    # ---- what is there --------------------------------------------------------------------

    @property
    def kv(self) -> KvCache:
        """The allocator of exact pages: `stats()`, `check()`."""
        return self._exact.cache

    @property
    def packed(self) -> KvCache | None:
        """The allocator of packed pages; None without any."""
        return None if self._packed is None else self._packed.cache

    @property
    def bytes(self) -> int:
        """Bytes of the pages that are held, exact and packed, of bases, and of bounds."""
        self._settle(len(self.layers))
        bounds = sum(layer.pages.bound_bytes for layer in self.layers)
        packed = 0 if self._packed is None else self._packed.held_bytes
        return int(self.kv.stats()["held"]) * self.kv.block_bytes + packed + bounds

    @property
    def dense_bytes(self) -> int:
        """What the whole context would take: all of its tokens in all heads."""
        geometry, size = self._geometry, self._geometry.dtype.itemsize
        heads = geometry.layers * geometry.kv_heads
        return self._context * heads * 2 * geometry.head_dim * size

    @property
    def lengths(self) -> list[list[int]]:
        """Tokens of each head of each layer."""
        self._settle(len(self.layers))
        return [layer.pages.lengths for layer in self.layers]

    def __repr__(self) -> str:
        return f"PressedCache(context={self._context}, {block_counts(self.kv, self.packed)})"

    # ---- transformers' cache --------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.layers)

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Takes the keys and values of a layer, and returns them as they are."""
        self._settle(layer_idx)
        if layer_idx == 0 and not self._is_begun:
            self._context = key_states.shape[2]
        return self.layers[layer_idx].update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the head of a layer that has most."""
        return self.layers[layer_idx].get_seq_length()

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        """Those of the new rows alone: no mask is made of the others."""
        return self.layers[layer_idx].get_mask_sizes(query_length)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """−1: a head may be as long as there is room."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Takes nothing back: `Unsupported`; the pipeline cuts each layer itself."""
        raise Unsupported("crop: expected layers to be cut one by one, got a cut of all")

    def reset(self) -> None:
        """Gives everything back, for another context."""
        for layer in self.layers:
            layer.release()
        self._context = 0

    def close(self) -> None:
        """Gives everything back, and the model its own attention; safe to call twice."""
        self.reset()
        for hook in self._hooks:
            hook.remove()
        forget_reads(self._modules)
        if self._model.config._attn_implementation == NAME != self._before:
            self._model.set_attn_implementation(self._before)

    # ---- forwards -------------------------------------------------------------------------

    def attend(self, layer: int, vectors: Vectors, how: Attends) -> torch.Tensor:
        """Attention of a layer's new rows, whose keys and values `update` has: [1, n, H, D]."""
        expect_plain(how)
        one = self.layers[layer]
        if not one.is_open:
            return one.pages.extend(vectors, how)
        q, k, v = (x[0].transpose(0, 1) for x in vectors)
        return dense_attention(q, k, v, how.scale)[None]

    @property
    def _is_begun(self) -> bool:
        return self.layers[0].get_seq_length() > 0

    def _settle(self, end: int) -> None:
        for layer, module in zip(self.layers[:end], self._modules[:end], strict=True):
            if layer.is_open:
                layer.settle(getattr(module, MASK, None), getattr(module, READS, None))
                # kvpress would hide these tokens from attention by keys of its own otherwise.
                if getattr(module, MASK, None) is not None:
                    setattr(module, MASK, None)

    def _before_forward(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if given_cache(kwargs) is not self:
            return None
        self._settle(len(self.layers))
        ask_reads(self._modules)
        mask = kwargs.get("attention_mask")
        if mask is not None and not bool((mask != 0).all()):
            raise InvalidArgument("attention_mask: expected no padding, got some")
        return args, {**kwargs, "attention_mask": None, STEP: self}

    def _after_forward(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        # The last layer has no next one that begins: its length, too, is now of what is kept.
        if given_cache(kwargs) is self:
            self._settle(len(self.layers))
            forget_reads(self._modules)
