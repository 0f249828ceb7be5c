"""`PressedCache`: the cache of kvpress' pipeline, which holds what a press keeps and no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import Cache

from kvweave import ops
from kvweave.adapters.kvpress.head_pages import HeadPages
from kvweave.adapters.kvpress.pressed_layer import PressedLayer
from kvweave.adapters.transformers.attention import NAME, STEP, register
from kvweave.adapters.transformers.cache_argument import given_cache
from kvweave.adapters.transformers.kv_geometry import KvGeometry, kv_geometry
from kvweave.adapters.transformers.page_pool import PagePool
from kvweave.adapters.transformers.paged_step import Attends, Vectors
from kvweave.arguments import whole
from kvweave.cache import KvCache
from kvweave.closing import Closing
from kvweave.device_memory import needs_memory
from kvweave.errors import InvalidArgument, Unsupported
from kvweave.policies import policy_of
from kvweave.runner.kv.pages import make_cache_of
from kvweave.runner.model.layer import dense_attention
from kvweave.runner.model.layer_forms import attention_of

_MASK = "masked_key_indices"
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

    # Errors
    `Unsupported` for a model with sliding windows, what `PagedCache` refuses of a model, a batch
    of several rows, presses that change keys while an answer is decoded; `InvalidArgument` for
    padding; `PoolFull` for what does not fit.
    """

    @needs_memory("cache")
    def __init__(self, model: Any, *, max_tokens: int = 8192, page_tokens: int = 16) -> None:
        super().__init__(layers=[])
        geometry = kv_geometry(model)
        if any(window is not None for window in geometry.windows):
            raise Unsupported("model: expected full attention in every layer, got sliding windows")
        self._geometry, self._model, self._context = geometry, model, 0
        pages = -(-whole("max_tokens", max_tokens, 1) // whole("page_tokens", page_tokens, 1)) + 1
        self._pool = _pool(geometry, page_tokens, pages * geometry.layers * geometry.kv_heads + 1)
        self.layers = [PressedLayer(HeadPages(self._pool)) for _ in range(geometry.layers)]
        self._modules = [attention_of(layer) for layer in model.get_decoder().layers]
        register()
        self._before = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        self._hook = model.get_decoder().register_forward_pre_hook(
            self._before_forward, with_kwargs=True
        )

    # ---- what is there --------------------------------------------------------------------

    @property
    def kv(self) -> KvCache:
        """The allocator of the pages: `stats()`, `check()`."""
        return self._pool.cache

    @property
    def bytes(self) -> int:
        """Bytes of the pages that are held, and of tensors that have not moved there yet."""
        self._settle(len(self.layers))
        return int(self.kv.stats()["held"]) * self.kv.block_bytes

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
        self.layers[layer_idx].update(key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the head of a layer that has most."""
        return self.layers[layer_idx].get_seq_length()

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        """Those of the new rows alone: no mask is made of the others."""
        return (query_length if isinstance(query_length, int) else len(query_length)), 0

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
        self._hook.remove()
        if self._model.config._attn_implementation == NAME != self._before:
            self._model.set_attn_implementation(self._before)

    # ---- forwards -------------------------------------------------------------------------

    def attend(self, layer: int, vectors: Vectors, how: Attends) -> torch.Tensor:
        """Attention of a layer's new rows, whose keys and values `update` has: [1, n, H, D]."""
        if how.window is not None or how.softcap is not None or how.sinks is not None:
            raise Unsupported("attention: expected no window, soft cap or sinks, got one of them")
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
                layer.settle(getattr(module, _MASK, None))
                # kvpress would hide these tokens from attention by keys of its own otherwise.
                if getattr(module, _MASK, None) is not None:
                    setattr(module, _MASK, None)

    def _before_forward(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if given_cache(kwargs) is not self:
            return None
        self._settle(len(self.layers))
        mask = kwargs.get("attention_mask")
        if mask is not None and not bool((mask != 0).all()):
            raise InvalidArgument("attention_mask: expected no padding, got some")
        return args, {**kwargs, "attention_mask": None, STEP: self}


def _pool(geometry: KvGeometry, page_tokens: int, blocks: int) -> PagePool:
    """Pages of one head each, whichever layer it is of."""
    one = KvGeometry(
        layers=1,
        kv_heads=1,
        head_dim=geometry.head_dim,
        vocabulary=geometry.kv_heads,
        dtype=geometry.dtype,
        device=geometry.device,
        windows=(None,),
    )
    shape = one.shape(page_tokens)
    cache, pages = make_cache_of(shape, one.dtype, one.device, blocks=blocks)
    space = ops.Workspace(one.device) if one.device.type == "cuda" else None
    # Keys stay where they are: nothing turns them.
    rope = ops.RopeTable(np.zeros((1, 1), np.float32), "half")
    return PagePool(one, cache, pages, rope, policy_of("full"), False, space)
