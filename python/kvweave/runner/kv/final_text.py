"""`FinalText`: a text that is packed by a strategy of its own, and its pages, format by format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kvweave import ops
from kvweave.cache import KvRequest
from kvweave.runner.kv.places import Place
from kvweave.runner.kv.tables import Int32, send_index
from kvweave.runner.kv.text_memory import Size, TextMemory, sizes_of

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class FormatData:
    """Of a text the pages of one format, wherever they come from.

    `ranks` i64 [K]: which pages of a block, sorted. `data` u8 [blocks, K, bytes] in a `basis` f32
    [K, 2, rows, D], if the format has one.
    """

    format: ops.PackedFormat
    ranks: Int64
    data: torch.Tensor
    basis: torch.Tensor | None

    @property
    def sizes(self) -> tuple[Size, ...]:
        """What it takes beside a pool."""
        return sizes_of(self.format, len(self.ranks), len(self.data))

    def sent(self, send: Callable[[torch.Tensor], torch.Tensor]) -> FormatData:
        """The same with its tensors where `send` has them."""
        basis = None if self.basis is None else send(self.basis)
        return replace(self, data=send(self.data), basis=basis)


@dataclass(frozen=True, eq=False)
class FormatPages:
    """The same where it lies: of each block K pages of `format`, behind those of a null block.

    `places` in `memory`: of the pages, and of their bases.
    """

    memory: TextMemory
    format: ops.PackedFormat
    ranks: Int64
    places: tuple[Place, ...]

    @property
    def data(self) -> torch.Tensor:
        """Its pages u8 [pages, bytes], block by block: valid until it moves."""
        return self.memory.part(self.places[0]).view(-1, self.format.page_bytes)

    @property
    def pages(self) -> ops.PackedPages:
        """The same as pages of blocks that are all in its basis."""
        of, data, basis = self.format, self.data, self.basis
        if basis is None:
            return ops.PackedPages(data, of)
        numbers = torch.zeros(len(data), dtype=torch.int32, device=data.device)
        return ops.PackedPages(data, of, ops.PackedBases(basis[None], numbers))

    @property
    def basis(self) -> torch.Tensor | None:
        """The basis f32 [K, 2, rows, D] of its pages, if its format has one; as `data`."""
        if self.format.basis_rows is None:
            return None
        numbers = self.memory.part(self.places[1]).view(torch.float32)
        return numbers.view(len(self.ranks), 2, self.format.basis_rows, self.format.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of its pages, and of the basis that they are packed in."""
        return sum(place.nbytes for place in self.places)

    def fill(self, made: FormatData) -> None:
        """Writes pages and basis where they lie."""
        count = len(self.ranks)
        self.data[count:].view(made.data.shape).copy_(made.data)
        if self.basis is not None:
            assert made.basis is not None
            self.basis.copy_(made.basis)

    def note_basis(self) -> None:
        """Says of each page where all pages of the format are looked at which basis it has."""
        bases = self.memory.pages(self.format).bases
        if bases is None:
            return
        first, pages, count = self.places[1].number, self.places[0], len(self.ranks)
        of = bases.of[pages.number : pages.end // pages.unit].view(-1, count)
        of.copy_(torch.arange(first, first + count, dtype=of.dtype, device=of.device))

    def firsts(self) -> Int64:
        """Where the first page of each of its ranks lies [K], among all pages of its format.

        The page of block n is n · K behind that.
        """
        count = len(self.ranks)
        return self.places[0].number + count + np.arange(count, dtype=np.int64)

    def blocks(self, numbers: Int32) -> Int32:
        """The first pages of blocks, by their numbers in the text."""
        return _behind_null(len(self.ranks), numbers)

    def unpack(
        self,
        numbers: Int32,
        tokens: Int32,
        into: torch.Tensor,
        exact: Int32,
        within: tuple[int, int] | None,
    ) -> None:
        """Writes what blocks stand for into the pages of exact blocks [N, n], those of `ranks`.

        `within`: of the pages of a block those from one to below another, from the first of which
        exact blocks begin; else all.
        """
        pages, ranks = self.pages, self.ranks
        if within is not None:
            among = np.flatnonzero((ranks >= within[0]) & (ranks < within[1]))
            if not len(among):
                return
            pages, ranks = _some_of_each(pages, len(ranks), among), ranks[among] - within[0]
        count, parts = len(ranks), exact.shape[1]
        at = (exact.reshape(-1, 1).astype(np.int64) + ranks).reshape(-1)
        there = send_index(into.device, at).long()
        between = torch.zeros((count * (1 + exact.size), *into.shape[1:]), dtype=into.dtype)
        between = between.to(into.device)
        # Slots behind the last token stay as they are.
        between[count:] = into.index_select(0, there)
        firsts = _behind_null(count, np.arange(exact.size, dtype=np.int32)).reshape(-1, parts)
        packs = np.column_stack((_behind_null(count, numbers), tokens, firsts)).astype(np.int32)
        ops.unpack_pages(pages, between, packs, pages=count)
        into.index_copy_(0, there, between[count:])


def _behind_null(count: int, numbers: Int32) -> Int32:
    """The first pages of blocks of so many pages, by their numbers behind a null block."""
    firsts: Int32 = (count * (1 + numbers)).astype(np.int32)
    return firsts


def _some_of_each(pages: ops.PackedPages, count: int, among: Int64) -> ops.PackedPages:
    """Of blocks of so many pages some of each, neighbours in their bases, as smaller blocks."""
    blocks = len(pages.data) // count
    index = (count * np.arange(blocks)[:, None] + among).reshape(-1)
    data = pages.data.index_select(0, send_index(pages.data.device, index).long())
    bases = None
    if pages.bases is not None:
        some = pages.bases.data[:, int(among[0]) : int(among[-1]) + 1]
        bases = ops.PackedBases(some, pages.bases.of.new_zeros(len(data)))
    return ops.PackedPages(data, pages.format, bases)


@dataclass(frozen=True, eq=False)
class FinalText:
    """A text packed by a strategy of its own.

    `held`: what holds its blocks in the books, and `blocks` their first pages there: those of all
    of `held`, or the last, where other text comes before. `parts`: its pages, format by format.
    `most_lost`: the most that a KV head of a layer loses of its keys or values, and `over_bound`
    how many lose more than they should.
    """

    held: KvRequest
    parts: tuple[FormatPages, ...]
    most_lost: float
    over_bound: int
    blocks: Int32

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(part.nbytes for part in self.parts)

    @property
    def places(self) -> list[Place]:
        """Where all of it lies."""
        return [place for part in self.parts for place in part.places]
