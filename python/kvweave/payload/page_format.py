"""`PageFormat`: the format of a packed page as headers and provenances say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvweave.errors import CorruptPayload, InvalidArgument
from kvweave.ops import PackedFormat
from kvweave.payload.header_fields import expect, expect_count, fields_of, is_text

_MOST_SIZE = 2**16


@dataclass(frozen=True)
class PageFormat:
    """The format of a packed page, in the words of `ops.PackedFormat`, of which D is not told."""

    kind: str
    page_tokens: int
    scales: str
    kept: int
    group: int
    channels: int
    numbers: str
    token_bytes: int | None

    @staticmethod
    def of(format: PackedFormat) -> PageFormat:
        """What a format is in these words."""
        return PageFormat(
            **{name: getattr(format, name) for name in PageFormat.__dataclass_fields__}
        )

    @staticmethod
    def from_json(data: Any) -> PageFormat:
        """From what `json.loads` made, which may be anything; `for_dim` looks at the words.

        # Errors
        `CorruptPayload` for words that are missing or unknown.
        """
        return PageFormat(**fields_of(data, "format", set(PageFormat.__dataclass_fields__)))

    @property
    def name(self) -> str:
        """Every size of it in one word."""
        sizes = [self.kind, self.page_tokens, self.scales]
        if self.kind == "top-r":
            sizes += [self.kept, self.group, self.channels, self.numbers]
        if self.token_bytes is not None:
            sizes += [self.token_bytes]
        return "/".join(map(str, sizes))

    def for_dim(self, head_dim: int) -> PackedFormat:
        """The format for D channels.

        # Errors
        `CorruptPayload` for words that are those of none.
        """
        for name in ("kind", "scales", "numbers"):
            expect(is_text(getattr(self, name)), f"format {name}", "a string", getattr(self, name))
        for name in ("page_tokens", "kept", "group", "channels"):
            expect_count(f"format {name}", getattr(self, name), 1, _MOST_SIZE)
        if self.token_bytes is not None:
            expect_count("format token_bytes", self.token_bytes, 0, _MOST_SIZE)
        more: dict[str, Any] = {"token_bytes": self.token_bytes}
        if self.kind == "top-r":
            some = ("kept", "group", "channels", "numbers")
            more |= {name: getattr(self, name) for name in some}
        try:
            made = PackedFormat(self.kind, head_dim, self.page_tokens, self.scales, **more)
        except InvalidArgument as error:
            raise CorruptPayload(f"payload format: {error}") from error
        found = PageFormat.of(made)
        expect(found == self, "format", found.name, self.name)
        return made
