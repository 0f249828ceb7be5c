"""A press by a head map: some heads keep a sink and the newest tokens, some read few pages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from kvpress import BasePress

from kvweave.adapters.kvpress.pressed_cache import MASK
from kvweave.adapters.kvpress.pressed_layer import READS
from kvweave.adapters.transformers.ranked_rows import FEWEST_PAGES, PageRead
from kvweave.cache import HeadClassMap
from kvweave.errors import InvalidArgument, Unsupported
from kvweave.runner.model.sampled_weights import check_weights


@dataclass
class HeadMapPress(BasePress):
    """Keeps of each window head of `heads` its sink and its newest tokens, of others everything.

    Beside a `PressedCache`, or in a `PagedPress`, what is not kept is given back, head by head;
    beside other caches it is hidden, as kvpress does it for heads that keep unlike tokens. The
    window does not move on while an answer is decoded.

    Heads that choose pages keep everything, and where one row attends read so many pages as the
    map says, ranked anew at each step, by bounds or by mean keys: of packed ones where there are
    any, and then all that is exact besides. Heads that the map says nothing of do as the cache's
    `top_k_pages` says.

    # Errors
    When a model is entered `InvalidArgument` for a map of another number of layers or heads, or
    with heads that read fewer pages than are always read, `CorruptHeadMap` for one of another
    model's weights, `Unsupported` for heads that estimate what they leave out. `Unsupported` for
    heads that choose pages beside a cache without any, when a context is prefilled.
    """

    heads: HeadClassMap

    def __post_init__(self) -> None:
        self._windows: dict[tuple[int, int], tuple[int, int]] = {}
        self._reads: dict[int, dict[int, PageRead]] = {}
        self._tokens = 0

    @property
    def compression_ratio(self) -> float:
        """The share of the latest context's keys that is left out; 0 before there is any."""
        heads = self.heads.layers * self.heads.kv_heads * max(1, self._tokens)
        left = (self._tokens - sink - recent for sink, recent in self._windows.values())
        return sum(max(0, count) for count in left) / heads

    @compression_ratio.setter
    def compression_ratio(self, ratio: float) -> None:
        if ratio:
            raise InvalidArgument(
                f"compression_ratio: expected 0 beside a map that says what is kept, got {ratio}"
            )

    def post_init_from_model(self, model: Any) -> None:
        """Reads the map, whose layers and heads must be the model's."""
        config = model.config.get_text_config(decoder=True)
        sizes = int(config.num_hidden_layers), int(config.num_key_value_heads)
        if sizes != (self.heads.layers, self.heads.kv_heads):
            raise InvalidArgument(
                f"heads: expected a map of {sizes[0]} layers with {sizes[1]} KV heads, "
                f"got {self.heads.layers} with {self.heads.kv_heads}"
            )
        check_weights(self.heads, model)
        self._windows, self._reads, self._tokens = {}, {}, 0
        for entry in json.loads(self.heads.to_json())["heads"]:
            kind, layer, head = entry["class"], entry["layer"], entry["head"]
            if kind["kind"] == "window":
                self._windows[layer, head] = int(kind["sink"]), int(kind["recent"])
            elif kind["kind"] == "top_k":
                self._reads.setdefault(layer, {})[head] = _read_of(kind)

    def compress(
        self,
        module: torch.nn.Module,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attentions: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Says which tokens of which heads are left out; keys and values [B, G, T, D] stay."""
        layer: Any = module.layer_idx
        if (reads := self._reads.get(layer)) is not None:
            asked = getattr(module, READS, None)
            if asked is None:
                got = type(kwargs.get("past_key_values")).__name__
                raise Unsupported(
                    "heads: expected a PressedCache, or a PagedPress around this press, whose "
                    f"pages top_k heads choose from, got a {got}"
                )
            asked.update(reads)
        self._tokens = keys.shape[2]
        dropped = torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device)
        for (of, head), (sink, recent) in self._windows.items():
            if of == layer:
                dropped[:, head, sink : max(sink, keys.shape[2] - recent)] = True
        setattr(module, MASK, torch.nonzero(dropped, as_tuple=True))
        return keys, values


def _read_of(kind: dict[str, Any]) -> PageRead:
    """What a head of a class that chooses pages reads."""
    pages = int(kind["pages"])
    if kind.get("estimate"):
        raise Unsupported(
            "heads: expected top_k heads without estimate, got some with it: means of values are "
            "not kept here; kvweave.Runner has them"
        )
    if pages < FEWEST_PAGES:
        raise InvalidArgument(
            f"heads: expected top_k.pages of at least {FEWEST_PAGES}, which are always read, "
            f"got {pages}"
        )
    return PageRead(pages, kind.get("score") == "mean")
