"""Places of bytes in one memory, each at a multiple of a unit of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Place:
    """Bytes that begin at a multiple of their `unit`; they may come to lie elsewhere."""

    begin: int
    nbytes: int
    unit: int

    @property
    def number(self) -> int:
        """Of the first unit, among all of the memory."""
        return self.begin // self.unit

    @property
    def end(self) -> int:
        """Where the next place may begin."""
        return self.begin + self.nbytes


def next_multiple(at: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-at // unit) * unit


def first_fit(
    places: list[Place], nbytes: int, unit: int, between: tuple[int, int]
) -> Place | None:
    """A place in the first gap that is large enough, put among those there are, in their order.

    `between`: where the memory begins and ends.
    """
    ends = [between[0], *(place.end for place in places)]
    begins = [*(place.begin for place in places), between[1]]
    for at, (end, begin) in enumerate(zip(ends, begins, strict=True)):
        first = next_multiple(end, unit)
        if first + nbytes <= begin:
            place = Place(first, nbytes, unit)
            places.insert(at, place)
            return place
    return None
