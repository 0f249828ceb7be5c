"""What the heads of a model keep and read in one cache: its groups, and a `Reach` a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from kvweave.always_read import RECENT_PAGES, SINK_PAGES
from kvweave.cache import KvCache, KvRequest
from kvweave.errors import CorruptHeadMap, InvalidArgument, Unsupported
from kvweave.ops import Reach, Table
from kvweave.runner.kv.beside_packed import refuse_beside_packed
from kvweave.runner.kv.host_pool import HostPool
from kvweave.runner.kv.packed_pool import PackedPool
from kvweave.runner.kv.page_budget import PageBudget, budgets_of
from kvweave.runner.kv.tables import Int32, send, send_index
from kvweave.runner.model.model_spec import ModelSpec

Promoted = tuple[tuple[int, int], ...]
"""The (layer, KV head) pairs that a request made full, in the order of their tables."""

Sight = tuple[int, int]
"""How many of the latest tokens a head sees, 0 for all, and how many of the first."""

_MOST_SCORED = 256
"""The largest head dim for which `score_pages` has a kernel."""

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

    `uniform`: one group keeps all tokens of all heads, so that nothing here is needed but where
    pages are chosen. `windows`: (window, sink) of each group; None for one that keeps every token.
    `budgets`: those of groups whose heads choose pages. With a pool of `packed` pages windows say
    what is kept exactly, and heads see all that is kept, or what `packed.heads` says: the rest is
    read packed. `host`: memory for the pages of groups, by their numbers, that may lie there while
    a request decodes.
    `verified`: pages are chosen for guesses alone, and what stays was computed over all of them.
    `fp8_bounds`: bounds that pages are chosen by are kept in e4m3.

    # Errors
    `Unsupported` for top-K heads in a layer with a sliding window of the model's own, or on a GPU
    with a head dim that `score_pages` does not take there, and for `fp8_bounds` of packed pages;
    `CorruptHeadMap` for heads that may not read even the pages that are always read;
    `InvalidArgument` for `fp8_bounds` of no heads.
    """

    def __init__(
        self,
        spec: ModelSpec,
        cache: KvCache,
        packed: PackedPool | None = None,
        host: Mapping[int, HostPool] | None = None,
        *,
        verified: bool = False,
        fp8_bounds: bool = False,
    ) -> None:
        self.spec = spec
        self.verified = verified
        self.cache = cache
        self.packed = packed
        self.host = {} if host is None else host
        self.budgets = budgets_of(cache, fp8=fp8_bounds)
        self.windows = [(g.recent, g.sink) if g.kind == "window" else None for g in cache.groups]
        self.uniform = self.windows == [None]
        self._page_layers: list[Table] = []
        self._made: dict[Promoted, list[Reach]] = {}
        self._whole: dict[tuple[Promoted, int], Reach] = {}
        self._layers: dict[tuple[Promoted, int], LayerHeads] = {}
        self._ranked: dict[int, list[tuple[PageBudget, list[int], list[int]]]] = {}
        refuse_beside_packed(packed, "bounds_dtype", "fp8" if fp8_bounds else None)
        if fp8_bounds and not self.budgets:
            raise InvalidArgument("bounds_dtype: expected top_k heads beside fp8, got none")
        self._check_budgets()

    def _check_budgets(self) -> None:
        least, device = SINK_PAGES + RECENT_PAGES, self.spec.device
        dim = self.spec.head_dim
        if self.budgets and device.type == "cuda" and (dim % 8 or dim > _MOST_SCORED):
            raise Unsupported(
                "head map: expected a head dim that is a multiple of 8 up to "
                f"{_MOST_SCORED} beside top_k heads on {device}, got {dim}"
            )
        for budget in self.budgets:
            if budget.pages < least:
                raise CorruptHeadMap(
                    f"head map: expected top_k.pages of at least {least}, which are always read, "
                    f"got {budget.pages}"
                )
        for layer, of_layer in enumerate(self.spec.layers):
            if of_layer.window is not None and self.ranked(layer):
                raise Unsupported(
                    f"head map: expected no top_k heads in layer {layer}, which has a sliding "
                    "window of its own, got some"
                )

    def ranked(self, layer: int) -> list[tuple[PageBudget, list[int], list[int]]]:
        """The heads of a layer that choose pages: by budget their numbers, and ranks in a block."""
        if not self.budgets:
            return []
        if layer not in self._ranked:
            rows, found = self.cache.head_rows(layer), []
            for budget in self.budgets:
                heads = np.flatnonzero(rows[:, 0] == budget.group)
                if len(heads):
                    found.append((budget, heads.tolist(), rows[heads, 1].tolist()))
            self._ranked[layer] = found
        return self._ranked[layer]

    @property
    def waits(self) -> bool:
        """Whether the host copies pages of host memory that a GPU would read: see `HostPool`."""
        return any(pool.waits for pool in self.host.values())

    @cached_property
    def classes(self) -> Int32:
        """Window (0: full) and sink of every (layer, KV head) as the map has them: [L, G, 2]."""
        layers = range(len(self.spec.layers))
        classes: Int32 = np.stack([self.cache.head_rows(layer)[:, 2:] for layer in layers])
        if self.packed is not None:
            classes[:] = 0
        classes.setflags(write=False)
        return classes

    def reads_all(self, request: KvRequest) -> bool:
        """Whether no head of a request has ever left a page out: it has no more than it may read.

        What was decoded with a choice of pages is not what a prefill would have computed.
        """
        return self.verified or all(len(request.entries(b.group)) <= b.pages for b in self.budgets)

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
            self._made[promoted] = [
                Reach(request.tables, self.prompt_rows(request, layer))
                for layer in range(len(self.spec.layers))
            ]
        return self._made[promoted]

    def prompt_rows(self, request: KvRequest, layer: int) -> Int32:
        """The head rows of a layer as rows of a prompt read by them."""
        rows = self.narrowed(request.head_rows(layer), layer)
        if self.packed is not None:
            rows[:, 2:] = self.packed.heads.sights[layer]
        return rows

    def step_rows(self, layer: int) -> Int32:
        """The head rows of a layer as decode steps read by them."""
        rows = self.narrowed(self.cache.head_rows(layer), layer)
        if self.packed is not None:
            local = self.packed.heads.local(layer)
            rows[local, 2:] = self.packed.heads.sights[layer, local]
        return rows

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
        if self.packed is not None:
            seen = [(window, sink) for window, sink in self.packed.heads.sights[layer].tolist()]
        if not self.uniform and self.packed is None:
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
