"""`TextMemory`: the bytes in which texts that are packed finally lie, whatever their formats are.

A launch reads pages of one format, of one tensor. So that it can read those of all texts, these lie
in one, which is looked at as pages of any format: page n of one with pages of b bytes is that which
begins at byte n · b. A text's pages of a format lie next to each other, and its bases likewise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

import torch

from kvweave import ops
from kvweave.device_memory import needs_memory
from kvweave.errors import PoolFull
from kvweave.runner.kv.places import Place, first_fit, next_multiple
from kvweave.runner.kv.pool_bases import basis_bytes

MOVED_BYTES = 1 << 26
"""So many bytes are copied at once where places move."""

Size = tuple[int, int]
"""So many bytes, which begin at a multiple of others."""


def sizes_of(of: ops.PackedFormat, pages: int, blocks: int) -> tuple[Size, ...]:
    """What a text takes of one format: so many pages of each block, the null block's, a basis."""
    sizes: tuple[Size, ...] = ((pages * of.page_bytes * (1 + blocks), of.page_bytes),)
    one = basis_bytes(of, 1)
    return (*sizes, (pages * one, one)) if one else sizes


def memory_bytes(nbytes: int, formats: Collection[ops.PackedFormat]) -> int:
    """What a memory for so many bytes of texts takes, with the bases that all its pages have."""
    whole = nbytes + max(of.page_bytes for of in formats)
    of_bases = (of for of in set(formats) if of.basis_rows is not None)
    return whole + sum(whole // of.page_bytes * torch.int32.itemsize for of in of_bases)


class TextMemory:
    """So many bytes for texts in any of some formats.

    `data` u8 [bytes]. The first of them are nobody's: entries take page 0 of a format for none.
    """

    def __init__(
        self, nbytes: int, formats: Collection[ops.PackedFormat], device: torch.device
    ) -> None:
        self.most_bytes = nbytes
        self._nobodys = max(of.page_bytes for of in formats)
        self.data = _zeros(self._nobodys + nbytes, torch.uint8, device)
        self._pages = {of: self._as_pages(of) for of in formats}
        # In the order in which they lie.
        self._places: list[Place] = []
        self.moves = 0

    @property
    def nbytes(self) -> int:
        """Bytes of it, and of which bases pages of each format are packed in."""
        tables = [pages.bases.of for pages in self._pages.values() if pages.bases is not None]
        return self.data.nbytes + sum(table.nbytes for table in tables)

    def pages(self, of: ops.PackedFormat) -> ops.PackedPages:
        """All of it as pages of a format, each a block of its own with a basis of its own."""
        return self._pages[of]

    def _as_pages(self, of: ops.PackedFormat) -> ops.PackedPages:
        count = len(self.data) // of.page_bytes
        data = self.data[: count * of.page_bytes].view(count, of.page_bytes)
        if of.basis_rows is None:
            return ops.PackedPages(data, of)
        numbers = _zeros(count, torch.int32, self.data.device)
        return ops.PackedPages(data, of, ops.PackedBases(self._as_bases(of), numbers))

    def _as_bases(self, of: ops.PackedFormat) -> torch.Tensor:
        assert of.basis_rows is not None
        one = basis_bytes(of, 1)
        whole = self.data[: len(self.data) // one * one].view(torch.float32)
        return whole.view(-1, 1, 2, of.basis_rows, of.head_dim)

    def part(self, place: Place) -> torch.Tensor:
        """The bytes of a place u8 [bytes]."""
        return self.data[place.begin : place.end]

    # ---- places ---------------------------------------------------------------------------

    def fits(self, sizes: Iterable[Size], without: Collection[Place] = ()) -> bool:
        """Whether there is room for places of these sizes, without some of those that there are."""
        left = [(place.nbytes, place.unit) for place in self._places if place not in without]
        end = self._nobodys
        for nbytes, unit in (*left, *sizes):
            end = next_multiple(end, unit) + nbytes
        return end <= len(self.data)

    def take(self, sizes: Sequence[Size]) -> list[Place]:
        """A place of each size, all of them or none.

        Others move where the room that is left lies in pieces, which `moves` counts.

        # Errors
        `PoolFull` without room, `OutOfMemory` without memory to move others; nothing has changed.
        """
        if not self.fits(sizes):
            raise self.shortage(sizes)
        taken: list[Place] = []
        for nbytes, unit in sizes:
            place = first_fit(self._places, nbytes, unit, (self._nobodys, len(self.data)))
            if place is None:
                self.give(taken)
                self._close_up()
                return [self._behind_all(*size) for size in sizes]
            taken.append(place)
        return taken

    def shortage(self, sizes: Iterable[Size]) -> PoolFull:
        """The error of places of these sizes that there is no room for."""
        wanted = sum(nbytes for nbytes, _ in sizes)
        left = self.most_bytes - sum(place.nbytes for place in self._places)
        return PoolFull(
            f"packed documents: expected room for {wanted} bytes beside the pool, got {left}"
        )

    def give(self, places: Iterable[Place]) -> None:
        """Takes places back."""
        for place in places:
            self._places.remove(place)

    def _behind_all(self, nbytes: int, unit: int) -> Place:
        end = self._places[-1].end if self._places else self._nobodys
        place = Place(next_multiple(end, unit), nbytes, unit)
        self._places.append(place)
        return place

    def _close_up(self) -> None:
        """Moves all places to the beginning, in their order.

        # Errors
        `OutOfMemory` without room for what is on its way; nothing has moved then.
        """
        largest = max((place.nbytes for place in self._places), default=0)
        between = _zeros(min(largest, MOVED_BYTES), torch.uint8, self.data.device)
        end = self._nobodys
        for place in self._places:
            begin = next_multiple(end, place.unit)
            if begin != place.begin:
                self._move(place, begin, between)
                self.moves += 1
            end = place.end

    def _move(self, place: Place, begin: int, between: torch.Tensor) -> None:
        """Moves a place forward; what it lay in before may be part of where it lies then."""
        cuts = [*range(0, place.nbytes, MOVED_BYTES), place.nbytes]
        for first, end in pairwise(cuts):
            part = between[: end - first]
            part.copy_(self.data[place.begin + first : place.begin + end])
            self.data[begin + first : begin + end].copy_(part)
        place.begin = begin


@needs_memory("packed documents")
def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype, device=device)
