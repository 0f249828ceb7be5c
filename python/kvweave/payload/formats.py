"""Which formats the pages of a text have that is packed head by head, and which pages has each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from kvweave.ops import PackedFormat
from kvweave.payload.header_fields import expect, fields_of, list_of
from kvweave.payload.packed import PageFormat


@dataclass(frozen=True)
class FormatRanks:
    """A format, and the pages of a block that have it: their ranks, sorted."""

    format: PageFormat
    ranks: tuple[int, ...]

    @staticmethod
    def from_json(data: Any) -> FormatRanks:
        """From what `json.loads` made, which may be anything.

        # Errors
        `CorruptPayload` for a field that is missing, unknown or of another type.
        """
        fields = fields_of(data, "format ranks", {"format", "ranks"})
        words = fields_of(fields["format"], "format", set(PageFormat.__dataclass_fields__))
        return FormatRanks(PageFormat(**words), tuple(list_of("ranks", fields["ranks"])))

    def to_json(self) -> dict[str, Any]:
        """It as plain data."""
        return {"format": asdict(self.format), "ranks": list(self.ranks)}


def formats_of(
    given: Sequence[FormatRanks], pages: int, head_dim: int, known: Sequence[PackedFormat]
) -> tuple[PackedFormat, ...]:
    """The formats of a text whose blocks have so many pages: each once, and one of each page.

    `known`: those that there may be.

    # Errors
    `CorruptPayload` for others, and for ranks that are not those of all pages, each once.
    """
    formats = tuple(each.format.for_dim(head_dim) for each in given)
    names = ", ".join(PageFormat.of(of).name for of in known)
    for of in formats:
        expect(of in known, "format", f"one of {names}", PageFormat.of(of).name)
    expect(len(set(formats)) == len(formats), "formats", "each once", "one twice")
    for each in given:
        right = all(type(rank) is int for rank in each.ranks) and len(each.ranks) > 0
        right = right and list(each.ranks) == sorted(each.ranks)
        expect(right, "ranks", "sorted integers, one or more", list(each.ranks[:8]))
    ranks = sorted(chain.from_iterable(each.ranks for each in given))
    whole = ranks == list(range(pages))
    expect(whole, "ranks", f"each of {pages} pages once", f"{len(ranks)} of them")
    return formats
