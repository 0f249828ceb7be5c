"""What the heads of a model keep and read in one cache: its groups, and a `Reach` a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from kvweave.cache import KvCache, KvRequest
from kvweave.errors import Unsupported
from kvweave.ops import Reach, Table
from kvweave.runner.kv.tables import Int32, send, send_index
from kvweave.runner.model.model_spec import ModelSpec

Promoted = tuple[tuple[int, int], ...]
"""The (layer, KV head) pairs that a request made full, in the order of their tables."""

Sight = tuple[int, int]
"""How many of the latest tokens a head sees, 0 for all, and how many of the first."""

_MOST_PROMOTED = 256
_MOST_KEPT = 4096


@dataclass(frozen=True)
class SomeHeads:
    """Some KV heads of a layer of a model on a device."""

    heads: Sequence[int]
    device: torch.device

    @cached_property
    def index(self) -> torch.Tensor:
        """The heads as an index, i64, on the device."""
        return send_index(self.device, np.asarray(self.heads, np.int32)).long()


@dataclass(frozen=True)
class LayerHeads:
    """What the KV heads of one layer see in a request.

    `seen` by each of the G heads. `local`: those in a window group, `others`: the rest. `narrowed`:
    what some see that is less than the model lets them, and which heads these are, bool [G].
    """

    seen: list[Sight]
    local: SomeHeads
    others: SomeHeads
    narrowed: list[tuple[Sight, torch.Tensor]]


class HeadReads:
    """The head groups of a cache, and what every head of a layer reads.

    `uniform`: every head is full, so that a block holds all heads and nothing here is needed.
    `windows`: (window, sink) of each group; None for a full one.

    # Errors
    `Unsupported` for a map with heads of another kind than full and window.
    """

    def __init__(self, spec: ModelSpec, cache: KvCache) -> None:
        self.spec = spec
        self.cache = cache
        groups = cache.groups
        for group in groups:
            if group.kind not in ("full", "window"):
                raise Unsupported(
                    f"head map: expected full and window heads, got {group.kind} heads"
                )
        self.windows = [(g.recent, g.sink) if g.kind == "window" else None for g in groups]
        self.uniform = self.windows == [None]
        self._page_layers: list[Table] = []
        self._made: dict[Promoted, list[Reach]] = {}
        self._whole: dict[tuple[Promoted, int], Reach] = {}
        self._layers: dict[tuple[Promoted, int], LayerHeads] = {}

    @cached_property
    def classes(self) -> Int32:
        """Window (0: full) and sink of every (layer, KV head) as the map has them: [L, G, 2]."""
        layers = range(len(self.spec.layers))
        classes: Int32 = np.stack([self.cache.head_rows(layer)[:, 2:] for layer in layers])
        classes.setflags(write=False)
        return classes

    def page_layers(self, group: int) -> Table | None:
        """The layer of each page of a group's blocks; None where a page's rank says it."""
        if self.uniform:
            return None
        if not self._page_layers:
            sent = [self.cache.page_layers(g) for g in range(len(self.windows))]
            self._page_layers = list(send(self.spec.device, *sent))
        return self._page_layers[group]

    def reaches(self, request: KvRequest) -> list[Reach] | None:
        """What the heads of every layer read in a request; None when they read all and alike."""
        if self.uniform:
            return None
        promoted = tuple(request.promoted)
        if promoted not in self._made:
            _make_room(self._made, _MOST_PROMOTED)
            layers = range(len(self.spec.layers))
            self._made[promoted] = [
                Reach(request.tables, self.narrowed(request.head_rows(layer), layer))
                for layer in layers
            ]
        return self._made[promoted]

    def whole(self, request: KvRequest, layer: int) -> Reach | None:
        """The reach of a layer whose heads see all that is kept for them, as the model lets them.

        None as for `reaches`.
        """
        if self.uniform:
            return None
        key = (tuple(request.promoted), layer)
        if key not in self._whole:
            _make_room(self._whole, _MOST_KEPT)
            rows = request.head_rows(layer)
            rows[:, 2:] = self.seen_by_model(layer)
            self._whole[key] = Reach(request.tables, rows)
        return self._whole[key]

    def seen_by_model(self, layer: int) -> list[Sight]:
        """What each head of a layer would see without a head map."""
        return [(self.spec.layers[layer].window or 0, 0)] * self.spec.kv_heads

    def of_layer(self, request: KvRequest, layer: int) -> LayerHeads:
        """What the heads of a layer see in a request, and where their KV is kept."""
        # Other layers' promoted heads change nothing here.
        key = (tuple(place for place in request.promoted if place[0] == layer), layer)
        if key not in self._layers:
            _make_room(self._layers, _MOST_KEPT)
            self._layers[key] = self._described(request, layer)
        return self._layers[key]

    def _described(self, request: KvRequest, layer: int) -> LayerHeads:
        own = seen = self.seen_by_model(layer)
        local = list[int]()
        if not self.uniform:
            rows = self.narrowed(request.head_rows(layer), layer)
            seen = [(window, sink) for _, _, window, sink in rows.tolist()]
            tables = request.head_rows(layer)[:, 0].tolist()
            local = [head for head, table in enumerate(tables) if self.is_window(table)]
        device = self.spec.device
        narrowed = [
            (window, torch.tensor([some == window for some in seen]).to(device, non_blocking=True))
            for window in sorted(set(seen) - set(own))
        ]
        others = [head for head in range(len(seen)) if head not in local]
        return LayerHeads(seen, SomeHeads(local, device), SomeHeads(others, device), narrowed)

    def is_window(self, table: int) -> bool:
        """Whether a table of a request is of a window group: tables of promoted heads are not."""
        return table < len(self.windows) and self.windows[table] is not None

    def narrowed(self, rows: Int32, layer: int) -> Int32:
        """The head rows of a layer, changed in place: where the model has a window, the narrower.

        A layer with a sliding window of its own keeps no sink: the model never saw one there.
        """
        own = self.spec.layers[layer].window
        if own is not None:
            rows[:, 2] = np.where(rows[:, 2] == 0, own, np.minimum(rows[:, 2], own))
            rows[:, 3] = 0
        return rows


def _make_room(made: dict[Any, Any], most: int) -> None:
    if len(made) >= most:
        del made[next(iter(made))]
