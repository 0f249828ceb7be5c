"""Which formats the pages of a text have that is packed head by head, and which pages has each.

Such a list may be of any origin: what is not looked at by `from_json` is by `check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from sys import float_info
from typing import Any

import torch

from kvweave.errors import CorruptPayload, InvalidArgument
from kvweave.ops import PackedFormat
from kvweave.payload.header_fields import expect, expect_count, fields_of, list_of
from kvweave.payload.page_format import PageFormat


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
        format = PageFormat.from_json(fields["format"])
        return FormatRanks(format, tuple(list_of("ranks", fields["ranks"])))


@dataclass(frozen=True)
class TextFormats:
    """What is known of a text that is packed head by head, beside its pages.

    `most_lost`: the most that a KV head of a layer loses of its keys or values, and `over_bound`
    how many lose more than they should.
    """

    formats: tuple[FormatRanks, ...] = ()
    most_lost: float = 0.0
    over_bound: int = 0

    def to_json(self) -> dict[str, Any]:
        """It as plain data. JSON has no infinite number: such a loss is None."""
        finite = self.most_lost <= float_info.max
        return {**asdict(self), "most_lost": self.most_lost if finite else None}

    @staticmethod
    def from_json(data: Any) -> TextFormats:
        """From what `json.loads` made, which may be anything.

        # Errors
        As `FormatRanks.from_json`; `CorruptPayload` for losses that are none.
        """
        fields = fields_of(data, "formats", set(TextFormats.__dataclass_fields__))
        formats = tuple(map(FormatRanks.from_json, list_of("formats", fields["formats"])))
        lost = fields["most_lost"]
        right = lost is None or (type(lost) in (int, float) and 0.0 <= lost <= float_info.max)
        expect(right, "most_lost", "a share from 0 on, or null", lost)
        return TextFormats(
            formats, float("inf") if lost is None else float(lost), fields["over_bound"]
        )

    def check(self, ranks: Sequence[int], pages: int, head_dim: int) -> tuple[PackedFormat, ...]:
        """Its formats, where these are one of each page whose rank in a block is named.

        `pages`: of a block, of which some may not be there.

        # Errors
        `CorruptPayload` for a format that is none or listed twice, and for other ranks.
        """
        expect_count("over_bound", self.over_bound, 0, pages)
        made = tuple(each.format.for_dim(head_dim) for each in self.formats)
        expect(len(set(made)) == len(made), "formats", "each once", "one twice")
        for each in self.formats:
            right = all(type(rank) is int for rank in each.ranks) and len(each.ranks) > 0
            right = right and list(each.ranks) == sorted(each.ranks)
            expect(right, "ranks", "sorted integers, one or more", list(each.ranks[:8]))
        found = sorted(chain.from_iterable(each.ranks for each in self.formats))
        whole = found == sorted(ranks)
        expect(whole, "ranks", f"each of {len(ranks)} pages once", f"{len(found)} of them")
        return made


def expect_known(formats: Sequence[PackedFormat], known: Sequence[PackedFormat]) -> None:
    """Refuses formats that a strategy has not.

    # Errors
    `CorruptPayload` naming those that it has.
    """
    names = ", ".join(PageFormat.of(of).name for of in known)
    for of in formats:
        expect(of in known, "format", f"one of {names}", PageFormat.of(of).name)


def check_basis(name: str, of: PackedFormat, basis: torch.Tensor) -> None:
    """Holds a basis [K, 2, rows, D] against its format.

    # Errors
    `CorruptPayload` for one that is not finite, or whose bits have no room.
    """
    expect(bool(basis.isfinite().all()), name, "finite numbers", "others")
    try:
        of.check_bases(basis.cpu()[None].contiguous())
    except InvalidArgument as error:
        raise CorruptPayload(f"payload {name}: {error}") from error
