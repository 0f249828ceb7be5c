"""What a payload says of packed tokens: their format, where each lies, and the bases they need.

Packed pages travel as they lie, and nothing is packed or unpacked on the way. A token that a
request reads exactly beside packed documents travels as its exact pages have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvweave.errors import CorruptPayload, InvalidArgument
from kvweave.ops import PackedFormat
from kvweave.payload.formats import TextFormats, check_basis
from kvweave.payload.header_fields import (
    MOST_TOKENS,
    expect,
    expect_count,
    fields_of,
    list_of,
    pairs_of,
)
from kvweave.payload.page_format import PageFormat

VERSION = 1
"""Of how packed parts are laid out, bytes of pages among them."""

PAGES, ENTRIES, WHICH, BASES = "packed.pages", "packed.entries", "packed.which", "packed.bases"
ASIDE, ASIDE_ENTRIES, BOUNDS = "packed.aside", "packed.aside_entries", "packed.bounds"

SCORES = ("min-max", "mean")

_TEXT_FIELDS = {"blocks", "formats"}

PartKind = tuple[str, tuple[int, ...]]
"""A part's dtype, as a header names it, and its shape."""

Choice = tuple[int, int, str]
"""How heads choose packed pages: how many, every how many steps anew, and by which score."""


@dataclass(frozen=True)
class SentText:
    """So many blocks of a text that is packed head by head, and its formats."""

    blocks: int
    formats: TextFormats

    @staticmethod
    def from_json(data: Any) -> SentText:
        """From what `json.loads` made, which may be anything.

        # Errors
        As `TextFormats.from_json`.
        """
        fields = fields_of(data, "packed text", _TEXT_FIELDS)
        return SentText(fields["blocks"], TextFormats.from_json(fields["formats"]))

    def to_json(self) -> dict[str, Any]:
        """It as plain data."""
        return {"blocks": self.blocks, "formats": self.formats.to_json()}


def text_pages(text: int, format: int) -> str:
    """The name of the part that has the pages of a format of a text, both by their numbers."""
    return f"packed.text.{text}.pages.{format}"


def text_basis(text: int, format: int) -> str:
    """The name of the part that has their basis."""
    return f"packed.text.{text}.basis.{format}"


@dataclass(frozen=True)
class PackedHeader:
    """What lies packed of a request, between its sink and its newest tokens.

    `sights`: window and sink of each (layer, KV head), layer by layer, (0, 0) where it reads all:
    packed pages of these alone travel. `choices`: how heads choose pages, and `chooses` which of
    these each of them does, −1 where it reads all. `tokens`: up to where positions lie packed or
    aside; what is behind is in exact pages until its page is full. `blocks` packed blocks are
    listed by `entries` rows, and packed in `bases` bases; `basis` is which of these the request's
    next pages are packed in, 0 for the axes, None for whatever the receiver packs in.
    `aside_tokens` exact ones are listed by `aside_entries` rows. `texts`: of texts that are packed
    head by head the blocks that are listed, which follow those of the one format by their numbers.
    """

    version: int
    format: PageFormat
    sights: tuple[tuple[int, int], ...]
    choices: tuple[Choice, ...]
    chooses: tuple[int, ...]
    tokens: int
    blocks: int
    entries: int
    bases: int
    basis: int | None
    aside_entries: int
    aside_tokens: int
    texts: tuple[SentText, ...] = ()

    def check(self, pairs: int, head_dim: int, tokens: int) -> None:
        """Holds it against the (layer, KV head) pairs, D and T of the payload.

        # Errors
        `CorruptPayload` naming the field that cannot be.
        """
        expect_count("packed version", self.version, VERSION, VERSION)
        of = self.format.for_dim(head_dim)
        expect(len(self.sights) == pairs, "sights", f"{pairs} heads", len(self.sights))
        for sight in self.sights:
            for number in sight:
                expect_count("sight", number, 0, MOST_TOKENS)
            expect(sight[0] > 0 or sight[1] == 0, "sight", "no sink without a window", sight)
        self._check_choices(pairs)
        whole = tokens // of.page_tokens * of.page_tokens
        right = type(self.tokens) is int and self.tokens in (whole, tokens)
        expect(right, "packed tokens", f"{whole} or {tokens}", self.tokens)
        expect_count("packed entries", self.entries, 0, self.tokens)
        expect_count("packed blocks", self.blocks, 0, self.entries)
        expect_count("aside tokens", self.aside_tokens, 0, self.tokens)
        expect_count("aside entries", self.aside_entries, 0, self.aside_tokens)
        expect_count("packed bases", self.bases, 0, 0 if of.basis_rows is None else self.blocks + 1)
        if self.basis is not None:
            expect(of.basis_rows is not None, "packed basis", "none of this format", self.basis)
            expect_count("packed basis", self.basis, _least_basis(of), self.bases)
        self._check_texts(of, pairs)

    def _check_texts(self, of: PackedFormat, pairs: int) -> None:
        left = self.entries - self.blocks
        for text in self.texts:
            expect_count("packed text blocks", text.blocks, 1, left)
            left -= text.blocks
            for made in text.formats.check(self.sent.tolist(), pairs, of.head_dim):
                right = made.page_tokens == of.page_tokens
                expect(right, "packed text pages", f"{of.page_tokens} tokens", made.page_tokens)

    @property
    def all_blocks(self) -> int:
        """Blocks that are listed by entries, those of texts among them."""
        return self.blocks + sum(text.blocks for text in self.texts)

    def _check_choices(self, pairs: int) -> None:
        for pages, every, score in self.choices:
            expect_count("choice pages", pages, 1, MOST_TOKENS)
            expect_count("choice steps", every, 1, MOST_TOKENS)
            expect(score in SCORES, "choice score", f"one of {', '.join(SCORES)}", score)
        expect(len(self.chooses) == pairs, "chooses", f"{pairs} heads", len(self.chooses))
        for number, (window, _) in zip(self.chooses, self.sights, strict=True):
            most = len(self.choices) - 1 if window == 0 else -1
            expect_count("chooses", number, -1, most)

    @property
    def bounded(self) -> npt.NDArray[np.int64]:
        """Which pages of a block have bounds, as their heads choose among them: their ranks."""
        return np.flatnonzero(np.asarray(self.chooses) >= 0)

    @property
    def sent(self) -> npt.NDArray[np.int64]:
        """Which pages of a block travel: their ranks."""
        return np.flatnonzero(np.asarray(self.sights)[:, 0] == 0)

    def part_kinds(self, pairs: int, head_dim: int, dtype: str) -> dict[str, PartKind]:
        """The parts by name: dtype and shape."""
        of = self.format.for_dim(head_dim)
        kinds: dict[str, PartKind] = {
            PAGES: ("u8", (self.blocks, len(self.sent), of.page_bytes)),
            ENTRIES: ("i32", (self.entries, 5)),
            ASIDE: (dtype, (pairs, 2, self.aside_tokens, head_dim)),
            ASIDE_ENTRIES: ("i32", (self.aside_entries, 5)),
        }
        if len(self.bounded):
            kinds[BOUNDS] = ("f32", (self.all_blocks, len(self.bounded), 3, head_dim))
        if of.basis_rows is not None:
            kinds[WHICH] = ("i32", (self.blocks,))
            kinds[BASES] = ("f32", (self.bases, pairs, 2, of.basis_rows, head_dim))
        for number, text in enumerate(self.texts):
            for at, each in enumerate(text.formats.formats):
                own, count = each.format.for_dim(head_dim), len(each.ranks)
                kinds[text_pages(number, at)] = "u8", (text.blocks, count, own.page_bytes)
                if own.basis_rows is not None:
                    shape = count, 2, own.basis_rows, head_dim
                    kinds[text_basis(number, at)] = "f32", shape
        return kinds

    @staticmethod
    def from_json(data: Any, *, texts: bool) -> PackedHeader:
        """A header from what `json.loads` made, which may be anything; whether it has `texts`.

        # Errors
        `CorruptPayload` for a field that is missing, unknown or of another type.
        """
        names = set(PackedHeader.__dataclass_fields__)
        fields = fields_of(data, "packed header", names if texts else names - {"texts"})
        format = PageFormat.from_json(fields["format"])
        read: dict[str, Any] = {"format": format, "sights": pairs_of("sights", fields["sights"])}
        choices = [list_of("choice", choice) for choice in list_of("choices", fields["choices"])]
        for choice in choices:
            expect(len(choice) == 3, "choice", "pages, steps and a score", choice)
        read["choices"] = tuple(map(tuple, choices))
        read["chooses"] = tuple(list_of("chooses", fields["chooses"]))
        if texts:
            read["texts"] = tuple(map(SentText.from_json, list_of("texts", fields["texts"])))
            expect(len(read["texts"]) > 0, "texts", "one or more", "none")
        return PackedHeader(**{**fields, **read})

    def to_json(self) -> dict[str, Any]:
        """The header as plain data: of a request without such texts as it ever was."""
        fields = asdict(self)
        if not self.texts:
            del fields["texts"]
            return fields
        return {**fields, "texts": [text.to_json() for text in self.texts]}


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """The packed tokens of a request away from its pages: a header, and the parts that it names.

    "packed.pages" u8 [blocks, pages of one, bytes]: the pages of heads that read all. Entries i32
    [N, 5] are those of ops, in order of position, over the numbers of these blocks. "packed.which"
    i32 [blocks] is the basis of each block, from 1 on, 0 for the axes, and "packed.bases" f32 [k,
    L · G, 2, rows, D] are they; of formats in a basis alone. "packed.bounds" f32 [blocks, n, 3, D]
    has the least, greatest and mean key of each page that heads choose among. "packed.aside"
    [L · G, 2, n, D]: K and V of exact tokens, in order of their entries, whose numbers of blocks
    count exact ones. "packed.text.<t>.pages.<i>" u8 [blocks, K, bytes] are the pages of one format
    of a text that is packed head by head, "packed.text.<t>.basis.<i>" f32 [K, 2, rows, D] what
    these are packed in.
    """

    header: PackedHeader
    parts: Mapping[str, torch.Tensor]


def check_packed(
    header: PackedHeader,
    parts: Mapping[str, torch.Tensor],
    head_dim: int,
    page_tokens: int,
    sink: int,
) -> None:
    """Holds parts of the right sizes against what entries, numbers and bases can be.

    `page_tokens`: of exact pages. Bytes of pages may be anything: whoever attends them reads
    nothing outside.

    # Errors
    `CorruptPayload` for entries outside of blocks or that leave out or repeat a position between
    `sink` and the header's tokens, and bases that are not finite, have no room or are not there.
    """
    of = header.format.for_dim(head_dim)
    packed, aside = (_rows(parts[name]) for name in (ENTRIES, ASIDE_ENTRIES))
    _check_entries(ENTRIES, packed, header.all_blocks, of.page_tokens)
    _check_entries(ASIDE_ENTRIES, aside, header.aside_tokens, page_tokens)
    listed = int((aside[:, 2] - aside[:, 1]).sum())
    expect(listed == header.aside_tokens, ASIDE_ENTRIES, f"{header.aside_tokens} tokens", listed)
    expect(not aside[:, 4].any(), ASIDE_ENTRIES, "keys that have not moved", "others")
    # Each slot once: tokens are written there.
    order = np.lexsort((aside[:, 1], aside[:, 0]))
    blocks, first, end = (aside[order, column] for column in (0, 1, 2))
    twice = (blocks[1:] == blocks[:-1]) & (first[1:] < end[:-1])
    expect(not twice.any(), ASIDE_ENTRIES, "slots once each", "one twice")
    named = len(np.unique(packed[:, 0]))
    expect(named == header.all_blocks, ENTRIES, f"all of {header.all_blocks} blocks", named)
    spans = np.concatenate((packed, aside))
    spans = spans[np.argsort(spans[:, 3], kind="stable")]
    starts, ends = spans[:, 3], spans[:, 3] + spans[:, 2] - spans[:, 1]
    least = min(sink, header.tokens)
    borders = np.concatenate(([least], ends)), np.concatenate((starts, [max(least, header.tokens)]))
    whole = np.array_equal(*borders)
    expect(whole, ENTRIES, f"each position of [{least}, {header.tokens}) once", "others")
    if WHICH in parts:
        _check_bases(of, header, parts[WHICH].cpu().numpy(), parts[BASES])
    for number, text in enumerate(header.texts):
        for at, each in enumerate(text.formats.formats):
            own = each.format.for_dim(head_dim)
            if own.basis_rows is not None:
                name = text_basis(number, at)
                check_basis(name, own, parts[name])


def _check_entries(name: str, rows: npt.NDArray[np.int64], blocks: int, page_tokens: int) -> None:
    block, begin, end, position, delta = rows.T
    before = position - delta
    right = (rows[:, :4] >= 0).all(1) & (block < blocks) & (begin < end) & (end <= page_tokens)
    right &= (before >= 0) & (before <= MOST_TOKENS)
    expect(bool(right.all()), name, "slots of its blocks", "others")
    expect(bool((np.diff(position) > 0).all()), name, "positions in order", "others")


def _check_bases(
    of: PackedFormat, header: PackedHeader, which: npt.NDArray[np.int32], bases: torch.Tensor
) -> None:
    least = _least_basis(of)
    right = bool(((least <= which) & (which <= header.bases)).all())
    expect(right, WHICH, f"numbers from {least} to {header.bases}", "others")
    expect(bool(bases.isfinite().all()), BASES, "finite numbers", "others")
    if header.bases:
        try:
            of.check_bases(bases.cpu().contiguous())
        except InvalidArgument as error:
            raise CorruptPayload(f"payload {BASES}: {error}") from error


def _least_basis(of: PackedFormat) -> int:
    """The least number of a basis: codes of planes have their steps there alone."""
    return 1 if of.kind == "planes" else 0


def _rows(part: torch.Tensor) -> npt.NDArray[np.int64]:
    return part.cpu().numpy().astype(np.int64)
