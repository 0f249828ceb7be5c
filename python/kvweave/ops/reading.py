"""What the ops that read pages have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvweave._native import Reach, RopeTable
from kvweave.ops.dispatch import OnDevice, Pages, Table, invalid


@dataclass(frozen=True)
class PagedKv:
    """One layer's keys and values in pages, and how rows read them: the same for all calls.

    `cache` [pages, 2, P, D]; the layer's pages of a block are those of its G `kv_heads`. A score is
    q · k times `scale`, `softcap` c maps it to c · tanh(s / c). Keys of an entry with delta ≠ 0 are
    read where they are, q turned back by delta with the layer's frequencies in `rope` (zero-copy
    `share`). With `window` w a row sees only the keys above its position − w. With a `reach` each
    KV head has a table, page, window and sink of its own, and `window` stays None. Over a
    float8_e4m3fn cache `kv_scales` (key, value) are what stored keys and values are multiplied by;
    None is (1, 1). The op that is called with it looks at what it holds.
    """

    cache: Pages
    layer: int
    kv_heads: int
    scale: float
    rope: RopeTable
    window: int | None = None
    softcap: float | None = None
    reach: Reach | None = None
    kv_scales: tuple[float, float] | None = None

    def read(self, q: torch.Tensor, positions: Table, entries: Table) -> Reading:
        """One call that reads it."""
        return Reading(
            q,
            positions,
            entries,
            self.cache,
            self.layer,
            self.kv_heads,
            self.scale,
            self.rope,
            self.window,
            self.softcap,
            self.reach,
            self.kv_scales,
        )


def expect_paged(kv: PagedKv) -> None:
    """Refuses what is no `PagedKv`.

    # Errors
    `InvalidArgument` that says what it is.
    """
    if not isinstance(kv, PagedKv):
        raise invalid("kv", "a PagedKv", type(kv).__name__)


@dataclass(slots=True)
class Reading:
    """Arguments of one call, made anew for each; the native module reads the fields by name."""

    q: torch.Tensor
    positions: Table | OnDevice
    entries: Table | OnDevice
    cache: Pages
    layer: int
    kv_heads: int
    scale: float
    rope: RopeTable
    window: int | None
    softcap: float | None
    reach: Reach | None
    kv_scales: tuple[float, float] | None = None

    def placed(self, tables: Mapping[str, OnDevice]) -> Reading:
        """This call, its tables now on a device."""
        self.positions, self.entries = tables["positions"], tables["entries"]
        return self
