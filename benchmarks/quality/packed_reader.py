"""A model that reads texts over whatever packing made of their keys and values, several at a time.

Attention is transformers' own, in float32. Where a row reads few blocks, these are the packed ones
whose mean key scores highest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.quality.packed_arithmetic import PAGE
from benchmarks.quality.packed_bases import Moments
from kvweave import models
from kvweave.adapters.transformers.cache_argument import cache_argument

SINK, RECENT = 64, 128
"""Tokens at either end of a prompt that stay exact; those before the newest stay so too that make
no whole page."""
BATCH = {"cpu": 4, "cuda": 16}
"""Caches that are read at a time."""


def packed_tokens(length: int) -> int:
    """Of a prompt's tokens, those that are packed, behind the sink."""
    return (length - SINK - RECENT) // PAGE * PAGE


@dataclass(frozen=True, eq=False)
class Read:
    """Keys and values of a prompt f32 [2, layers · G, T, D], and the share of its packed blocks
    that a row reads."""

    kv: torch.Tensor
    blocks: float = 1.0


class Attention:
    """Transformers' own attention; its queries can be summed, and it may read few blocks."""

    NAME = "packed-front"

    def __init__(self) -> None:
        self.queries: list[torch.Tensor] | None = None
        """Of each layer Σ q qᵀ f64 [G, D, D], where it is to be summed."""
        self.blocks: torch.Tensor | None = None
        """Packed blocks that a row of each prompt of a batch reads at most, i64 [B]."""
        self.packed = 0
        """Blocks behind the sink that are packed."""
        AttentionInterface.register(self.NAME, self)
        AttentionMaskInterface.register(self.NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        """As `sdpa`; query [B, H, R, D], key and value [B, G, S, D]."""
        if self.queries is not None:
            rows = query[0].unflatten(0, (key.shape[1], -1)).flatten(1, 2).double()
            self.queries.append(rows.mT @ rows)
        if self.blocks is not None:
            attention_mask = self.readable(query, key, self.blocks)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **rest)

    def readable(
        self, query: torch.Tensor, key: torch.Tensor, blocks: torch.Tensor
    ) -> torch.Tensor:
        """What each row may read [B, H, R, S], bool, of at most so many blocks [B]."""
        (batch, heads, rows, _), (kv_heads, slots) = query.shape, key.shape[1:3]
        read = torch.ones(rows, slots, dtype=torch.bool, device=key.device).tril(slots - rows)
        packed = slice(SINK, SINK + self.packed * PAGE)
        means = key[:, :, packed].unflatten(2, (-1, PAGE)).mean(3)
        scores = query.unflatten(1, (kv_heads, -1)) @ means[:, :, None].mT
        order = scores.amax(2).sort(dim=-1, descending=True, stable=True).indices
        rank = torch.empty_like(order).scatter_(
            -1, order, torch.arange(self.packed, device=key.device).expand_as(order)
        )
        chosen = (rank < blocks[:, None, None, None]).repeat_interleave(PAGE, -1)
        read = read.expand(batch, kv_heads, -1, -1).clone()
        read[..., packed] &= chosen
        return read.repeat_interleave(heads // kv_heads, 1)


class Reader:
    """A model in float32."""

    def __init__(self, name: str, device: str) -> None:
        self.model, self.tokenizer = models.load(name, torch.float32, device=device)
        self.device = torch.device(device)
        self.batch = BATCH[self.device.type]
        self.taken_as = cache_argument(self.model.forward)
        config = self.model.config
        self.layers = config.num_hidden_layers
        self.heads = config.num_attention_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.attention = Attention()
        self.model.set_attn_implementation(Attention.NAME)

    def encode(self, text: str) -> list[int]:
        """The ids of a text alone, without special tokens."""
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False).input_ids]

    @torch.inference_mode()
    def read(self, tokens: torch.Tensor) -> tuple[torch.Tensor, Moments]:
        """Of a prompt [1, T] K and V [2, layers · G, T, D], and the moments of what is packed of it
        and of all of its queries."""
        length = tokens.shape[1]
        self.attention.queries = []
        cache = DynamicCache()
        self.model(tokens, logits_to_keep=1, **{self.taken_as: cache})
        queries, self.attention.queries = torch.cat(self.attention.queries), None
        kv = torch.stack([torch.cat([getattr(layer, side)[0] for layer in cache.layers])
                          for side in ("keys", "values")])  # fmt: skip
        group = self.heads * self.layers // len(queries)
        middle = kv[:, :, SINK : SINK + packed_tokens(length)]
        return kv, Moments.of(middle, queries, group * length)

    @torch.inference_mode()
    def follow(self, reads: Sequence[Read], tokens: torch.Tensor) -> list[torch.Tensor]:
        """Log-probabilities f64 [R, V] of tokens [1, R] that follow, over each of the reads."""
        found: list[torch.Tensor] = []
        for some in self._batches(reads):
            out = self._step(self._cache(some), some, tokens.expand(len(some), -1))
            found += [logits.double().log_softmax(-1) for logits in out]
        return found

    @torch.inference_mode()
    def answers(self, reads: Sequence[Read], tokens: torch.Tensor, most: int) -> list[str]:
        """What is said behind tokens [1, R], greedily, over each of the reads."""
        ends = self.model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        said: list[str] = []
        for some in self._batches(reads):
            cache, given = self._cache(some), tokens.expand(len(some), -1)
            spoken: list[list[int]] = [[] for _ in some]
            for _ in range(most):
                given = self._step(cache, some, given)[:, -1:].argmax(-1)
                for words, token in zip(spoken, given[:, 0].tolist(), strict=True):
                    words.append(token)
            for words in spoken:
                end = next((at for at, token in enumerate(words) if token in ends), most)
                said.append(str(self.tokenizer.decode(words[:end])))
        return said

    def _batches(self, reads: Sequence[Read]) -> list[Sequence[Read]]:
        return [reads[at : at + self.batch] for at in range(0, len(reads), self.batch)]

    def _cache(self, reads: Sequence[Read]) -> DynamicCache:
        self.attention.packed = packed_tokens(reads[0].kv.shape[2]) // PAGE
        cache = DynamicCache()
        layers = [read.kv.chunk(self.layers, 1) for read in reads]
        for layer in range(self.layers):
            k, v = torch.stack([parts[layer] for parts in layers], 1)
            cache.update(k, v, layer)
        return cache

    def _step(
        self, cache: DynamicCache, reads: Sequence[Read], tokens: torch.Tensor
    ) -> torch.Tensor:
        """Logits [B, R, V]."""
        packed = self.attention.packed
        if any(read.blocks < 1.0 for read in reads):
            most = [max(1, round(read.blocks * packed)) for read in reads]
            self.attention.blocks = torch.tensor(most, device=self.device)
        logits = self.model(tokens, **{self.taken_as: cache}).logits
        self.attention.blocks = None
        return torch.as_tensor(logits)
