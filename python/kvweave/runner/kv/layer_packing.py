"""`LayerPacking`: pages that rows of a prompt fill, packed layer by layer as these are computed.

Keys and values of a layer are what they will be once its rows are written, long before those of the
last layer are. So each layer is packed then, while the layers behind it are computed (MosaicKV,
section 5.2): on a GPU on a stream of its own, for which the host never waits, on a CPU in order.
Nothing reads a packed page before all of its layers are there, and exact pages stay until then.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvweave import ops
from kvweave.runner.kv.aside import Aside
from kvweave.runner.kv.packed_pool import PackedPool
from kvweave.runner.kv.tables import Int32, RowTable, send


class LayerPacking:
    """What becomes of the pages that the rows of positions [first, end) fill.

    `basis` as `PackedPool.pack` has it, where the shared one is there. `why` says what went wrong,
    if anything did: then the pages are to be packed from what is exact once their rows are done.
    """

    def __init__(
        self, pool: PackedPool, aside: Aside, span: tuple[int, int], basis: int | None
    ) -> None:
        self.why = ""
        self._pool, self._aside = pool, aside
        self._span, self._basis = span, basis
        self._layers: set[int] = set()
        # What is packed where, in all layers, by the numbers of blocks and by where they lie.
        self._packs: tuple[Int32, Int32] | None = None
        # The same of each layer, where it is packed: those that lie so, and those with bounds.
        self._tables: ops.Table | None = None
        self._bounded: ops.Table | None = None

    def written(self, layer: int, rows: RowTable, packs: Callable[[], Int32]) -> None:
        """Packs a layer whose rows have been written, behind all that was asked for by now.

        `packs` gives rows as `PackedPool.pack` takes them. Rows that are not all of the span leave
        the layer to be packed later, as does anything that goes wrong.
        """
        self._layers.discard(layer)
        if self.why or not self._is_whole(rows):
            return
        try:
            if self._packs is None:
                self._begin(packs())
            self._aside.do(lambda: self._pack(layer))
        except Exception as error:
            self.why = f"layer {layer}: {type(error).__name__}: {error}"
            return
        self._layers.add(layer)

    def _is_whole(self, rows: RowTable) -> bool:
        first, end = self._span
        at = rows.rows
        if len(at) != end - first or rows.written is not None:
            return False
        return bool(at[0] == first and at[-1] == end - 1)

    def _begin(self, packs: Int32) -> None:
        pool, placed = self._pool, self._pool.placed(packs)
        if pool.bases is not None:
            self._basis = pool.bases.shared if self._basis is None else self._basis
            pool.bases.assign(placed[:, 0], self._basis)
        tables = [self._by_layer(placed)]
        if placed is not packs and pool.bounds is not None:
            tables.append(self._by_layer(packs))
        self._tables, *bounded = send(pool.device, *tables)
        self._bounded = bounded[0] if bounded else self._tables
        self._packs = packs, placed

    def _by_layer(self, packs: Int32) -> Int32:
        """Packs of whole blocks as those of each layer's pages alone [L, N, n]."""
        pool = self._pool
        first = pool.kv_heads * np.arange(pool.cache.shape.layers, dtype=np.int32)
        tables = np.repeat(packs[None], len(first), axis=0)
        tables[:, :, 0] += first[:, None]
        tables[:, :, 2:] += first[:, None, None]
        return tables

    def _pack(self, layer: int) -> None:
        pool, pages, tables = self._pool, self._pool.pages, self._tables
        bounded = self._bounded
        assert tables is not None
        assert bounded is not None
        heads = pool.kv_heads
        if pool.bases is not None:
            assert self._basis is not None
            own = pool.bases.of_pages(self._basis, layer * heads, heads)
            pages = ops.PackedPages(pages.data, pages.format, own)
        ops.pack_pages(pool.exact, pages, tables[layer], pages=heads)
        pool.bound_exact(pool.exact, bounded[layer], heads)

    def finish(self, packs: Int32) -> bool:
        """Whether all layers have been packed just so; what is asked for from now on finds them.

        Where they have not, nothing that was packed counts.
        """
        self.join()
        if self._packs is None or self.why:
            return False
        pool, now = self._pool, (packs, self._pool.placed(packs))
        same = all(np.array_equal(*each) for each in zip(self._packs, now, strict=True))
        return same and len(self._layers) == pool.cache.shape.layers

    def join(self) -> None:
        """Has the device do nothing more before what was begun is done; the host does not wait."""
        self._aside.join()
