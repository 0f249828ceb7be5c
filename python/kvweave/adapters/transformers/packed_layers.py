"""Packed pages of a model that are written and read a layer at a time, as its forward goes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kvweave import ops
from kvweave.plan import Rows
from kvweave.runner.kv.packed_pool import PackedPool, on_host
from kvweave.runner.kv.pool_bases import (
    SHARED,
    FoundBasis,
    PositionRange,
    needs_steps,
    shared_bases,
    some_queries,
)
from kvweave.runner.kv.tables import Int32, send


class LayerBases:
    """The bases of a pool, each layer's made of the first tokens that are packed there.

    To ops a layer's pages of a block are a block of their own, and so are its bases: `data` f32
    [n · L, G, 2, rows, D] has for each layer one that rotates nothing, then the shared ones, which
    are `given` f32 [L · G, 2, rows, D], or come of a `FoundBasis`, of which the second is for texts
    within `positions`. As in `PoolBases`, planes have the steps of the tokens that were packed
    first until then.
    """

    def __init__(
        self,
        bases: ops.PackedBases,
        of: ops.PackedFormat,
        given: torch.Tensor | None,
        positions: PositionRange,
    ) -> None:
        self._bases, self._format = bases, of
        count, self._heads = bases.data.shape[:2]
        self._layers = count // shared_bases(refines=given is None)
        if not needs_steps(of):
            axes = torch.eye(of.head_dim)[: of.channels]
            bases.data[: self._layers, :, :, 1:] = axes.to(bases.data.device)
        # Of each layer what its shared bases are made of, where none is given.
        self._found: list[FoundBasis] | None = None
        if given is None:
            ranges = (replace(positions, first_layer=layer) for layer in range(self._layers))
            self._found = [FoundBasis(of, self._heads, each) for each in ranges]
        else:
            whole = given.view(self._layers, *bases.data.shape[1:])
            bases.data[self._layers * SHARED :] = whole.to(bases.data)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self._bases.data.nbytes

    def take_queries(self, layer: int, q: torch.Tensor, places: Rows) -> None:
        """Takes note of some of the queries [R, H, D] of a layer, before what they read is packed.

        They say which errors of keys matter, where a basis spends bits by that. `places` [N]: which
        pages of their texts come to be full.
        """
        if self._found is not None and self._found[layer].wants_queries(places):
            self._found[layer].add_queries(some_queries(q), 0, self._heads)

    def assign(self, layer: int, exact: torch.Tensor, packs: Int32, places: Rows) -> None:
        """Says which basis packed blocks of a layer have, as they are about to be packed.

        `places` [N]: which pages of their texts they are.
        """
        number = SHARED
        if self._found is not None:
            found = self._found[layer]
            some, made = found.wanted(places), None
            if some.any():
                known = on_host(exact, packs[some], self._heads)
                made = found.add(*known, places[some])
            number = found.number
            if made is not None:
                self._bases.data[number * self._layers + layer] = made.to(self._bases.data.device)
        blocks = torch.from_numpy(packs[:, 0]).long()
        self._bases.of[blocks] = number * self._layers + layer


@dataclass(frozen=True)
class LayeredPool(PackedPool):
    """Packed blocks, of which a layer's pages are known as blocks of their own.

    `by_layer`: their bases, of a format that has any. Decode steps read `most` pages of each head
    where there are bounds.
    """

    by_layer: LayerBases | None = None
    most: int = 0

    @property
    def converted_pages(self) -> int:
        """Pages of a block that are packed and unpacked at once: those of a layer."""
        return self.kv_heads

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, of bases and of bounds."""
        return super().nbytes + (0 if self.by_layer is None else self.by_layer.nbytes)

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that are held and of their bounds; of bases while any is held."""
        held = int(self.cache.stats()["held"])
        block = self.block_bytes
        if self.bounds is not None:
            block += self.block_pages * self.bounds[0].nbytes
        return held * block + (self.by_layer.nbytes if held and self.by_layer is not None else 0)

    def pack(self, packs: Int32, places: Rows, basis: int | None = None, left_out: int = 0) -> None:
        """As `PackedPool.pack`, layer by layer, in the shared basis of each."""
        for layer in range(self.cache.shape.layers):
            own = self._shifted(layer, packs, slice(2, None))
            self.pack_layer(layer, own, places, self.exact)

    def pack_layer(self, layer: int, packs: Int32, places: Rows, exact: torch.Tensor) -> None:
        """Packs one layer of blocks; `exact` has its pages alone where `packs` says, G a block.

        `places` as `pack` has them.
        """
        own = self._shifted(layer, packs, slice(1))
        if self.by_layer is not None:
            self.by_layer.assign(layer, exact, own, places)
        (table,) = send(self.device, own)
        ops.pack_pages(exact, self.pages, table, pages=self.kv_heads)
        self.bound_exact(exact, table)

    def unpack(self, packs: Int32, into: torch.Tensor) -> None:
        """Writes what blocks stand for into exact pages, all layers and KV heads."""
        for layer in range(self.cache.shape.layers):
            own = self._shifted(layer, packs, slice(1))
            (table,) = send(self.device, self._shifted(layer, own, slice(2, None)))
            ops.unpack_pages(self.pages, into, table, pages=self.kv_heads)

    def take_queries(self, layer: int, q: torch.Tensor, places: Rows) -> None:
        """Takes note of the queries [R, H, D] of a layer where pages are packed by them.

        `places` as `pack` has them, of the pages that are packed next.
        """
        if self.by_layer is not None:
            self.by_layer.take_queries(layer, q, places)

    def entries_of(self, layer: int, entries: ops.Table) -> torch.Tensor:
        """Entries i32 [N, 5] of blocks as those of a layer's pages."""
        own = torch.as_tensor(entries).clone()
        own[:, 0] += layer * self.kv_heads
        return own

    def _shifted(self, layer: int, packs: Int32, columns: slice) -> Int32:
        """Packs whose blocks in some columns are a layer's; the null block stays."""
        own: Int32 = packs.copy()
        own[:, columns] += np.where(own[:, columns] > 0, layer * self.kv_heads, 0).astype(np.int32)
        return own
