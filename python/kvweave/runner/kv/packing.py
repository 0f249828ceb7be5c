"""`Packing`: in which format a runner packs full pages, in which bases, and by what strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch

from kvweave import ops
from kvweave.arguments import flag, real, shown, whole
from kvweave.errors import InvalidArgument, Unsupported
from kvweave.ops.packed_kv import Preset
from kvweave.packed_page import MOST_FIRST, PAGE_TOKENS

FORMATS: tuple[str, ...] = get_args(Preset)
"""Names of the formats that full pages are packed in."""


@dataclass(frozen=True)
class Strategy:
    """How documents are packed finally: each by what it loses (MosaicKV, sections 4.3 and 5.5).

    `bound`: the share of Σ |x|² of the keys, and of the values, that each KV head of each layer may
    lose. Of the `candidates`, top-r formats of the model's sizes, it has the one of fewest bytes
    that loses no more; by default they are the paper's, `ops.top_r_candidates`. The `fallback`, a
    name of a format without a basis, is one of them, and what a head has for which there is none.
    `final_share`: bytes
    for documents that are packed so, of those that the packed pages of a runner take, which they
    come on top of.

    # Errors
    `InvalidArgument` for a bound below 0 or that is not finite, no candidates or others than top-r
    formats, another fallback, or a share that is not above 0 and at most 1.
    """

    bound: float
    candidates: tuple[ops.PackedFormat, ...] | None = None
    fallback: str = "int4"
    final_share: float = 0.5

    def __post_init__(self) -> None:
        real("bound", self.bound, 0.0)
        given: Any = self.candidates
        if given is not None:
            sound = isinstance(given, tuple) and len(given) > 0
            if not sound or any(
                not isinstance(of, ops.PackedFormat) or of.kind != "top-r" for of in given
            ):
                raise InvalidArgument(
                    f"candidates: expected None or a tuple of top-r formats, got {shown(given)}"
                )
        if self.fallback not in ("int4", "int8"):
            raise InvalidArgument(
                f"fallback: expected 'int4' or 'int8', got {shown(self.fallback)}"
            )
        if real("final_share", self.final_share, 0.0, 1.0) == 0.0:
            raise InvalidArgument("final_share: expected a share above 0, got 0")

    def formats(
        self, head_dim: int, page_tokens: int, scales: str
    ) -> tuple[tuple[ops.PackedFormat, ...], ops.PackedFormat]:
        """The candidates of a model's pages, and what they fall back to.

        # Errors
        `InvalidArgument` for candidates of other sizes, and for a head dim that has none.
        """
        found = self.candidates or ops.top_r_candidates(head_dim, page_tokens, scales)
        for of in found:
            Packing(of).pages(head_dim, page_tokens, scales)
        name: Any = self.fallback
        return found, ops.packed_format(name, head_dim, page_tokens, scales)


@dataclass(frozen=True)
class Packing:
    """What a runner makes of full pages, given as its `kv_dtype`; a name alone has the defaults.

    `format`: a name of `ops.packed_format`, or any format of the model's head dim in pages of 64
    tokens, with scales of f16 for a model in f16 and of bf16 else. The others say something of
    formats in a basis.
    `basis` f32 [pages, 2, rows, D], as `ops.Moments.basis` makes it of all layers and KV heads: in
    which everything is packed that has no basis of its own. None has it made of the first tokens
    that the runner packs, whoever's they are; until there are enough of them nothing is rotated.
    A second one is made of them, at any position, once a text is longer than those were, and what
    comes from then on is packed in it.
    `copy_bytes`: so much of the host's memory for exact copies of documents, from which they are
    packed once more in a basis of their own, behind whoever inserted them (MosaicKV, section 5.4).
    Beside a GPU so much of it is pinned as was ever needed at once, and 1 GiB ahead of that.
    `beside`: whether each layer of a prompt is packed while the layers behind it are computed
    (section 5.2), which changes no byte; False packs what rows fill once all layers have them.
    `strategy`: by what each of them loses; None has all in the pool's format.
    `segment_tokens`: text of requests is packed finally too, in segments of so many tokens, whole
    pages of 64 (MosaicKV has 65 536): in bases of their own, or by the strategy. None has it stay
    as it was packed at once.
    `exact_first`: so many tokens at the beginning of each document stay exact beside its pages, 64
    at most; by default one where documents are packed in bases, which their first token fits worst,
    and none else.
    """

    format: str | ops.PackedFormat
    basis: torch.Tensor | None = None
    copy_bytes: int = 1 << 33
    beside: bool = True
    strategy: Strategy | None = None
    exact_first: int | None = None
    segment_tokens: int | None = None

    def __post_init__(self) -> None:
        given: Any = self.format
        named = isinstance(given, str) and given in FORMATS
        if not named and not isinstance(given, ops.PackedFormat):
            known = f"one of {', '.join(FORMATS)}, a PackedFormat or a Packing"
            raise InvalidArgument(f"kv_dtype: expected None or {known}, got {shown(given)}")
        if self.basis is not None and not isinstance(self.basis, torch.Tensor):
            raise InvalidArgument(f"basis: expected a tensor or None, got {shown(self.basis)}")
        whole("copy_bytes", self.copy_bytes, 0)
        flag("beside", self.beside)
        if self.exact_first is not None:
            whole("exact_first", self.exact_first, 0, MOST_FIRST)
        if self.strategy is not None and not isinstance(self.strategy, Strategy):
            raise InvalidArgument(
                f"strategy: expected a Strategy or None, got {shown(self.strategy)}"
            )
        if self.segment_tokens is not None:
            self._check_segments(self.segment_tokens)

    def _check_segments(self, tokens: int) -> None:
        """Refuses segments that are no whole pages, or of which nothing could be packed finally."""
        if whole("segment_tokens", tokens, PAGE_TOKENS) % PAGE_TOKENS:
            raise InvalidArgument(
                f"segment_tokens: expected a multiple of {PAGE_TOKENS}, got {tokens}"
            )
        of: Any = self.format
        kind = of if isinstance(of, str) else of.kind
        if self.strategy is None and kind in ("int4", "int8"):
            raise InvalidArgument(
                f"segment_tokens: expected None beside {self.named} without a strategy, which has "
                f"no bases, got {tokens}"
            )

    @staticmethod
    def of(kv_dtype: object) -> Packing | None:
        """What a runner was asked for.

        # Errors
        `InvalidArgument` for what is neither None, a name, a format nor a `Packing`.
        """
        if kv_dtype is None or isinstance(kv_dtype, Packing):
            return kv_dtype
        given: Any = kv_dtype
        return Packing(given)

    def expect_no_documents(self, of: str) -> None:
        """Refuses what is said of documents for what has none.

        # Errors
        `Unsupported` naming both.
        """
        if self.strategy is not None:
            raise Unsupported(
                f"kv_dtype: expected a Packing without a strategy for {of}, got one: only a Runner "
                "has documents, which are packed by it"
            )
        if self.exact_first:
            raise Unsupported(
                f"kv_dtype: expected a Packing without exact_first for {of}, got "
                f"{self.exact_first}: only a Runner has documents, whose first tokens those are"
            )
        if self.segment_tokens is not None:
            raise Unsupported(
                f"kv_dtype: expected a Packing without segment_tokens for {of}, got "
                f"{self.segment_tokens}: only a Runner packs text finally"
            )

    def first_tokens(self, of: ops.PackedFormat) -> int:
        """How many tokens at the beginning of documents stay exact, where `of` is the pool's."""
        if self.exact_first is not None:
            return self.exact_first
        return 0 if of.basis_rows is None and self.strategy is None else 1

    @property
    def refines(self) -> bool:
        """Whether the shared basis that a pool makes may give way to one for longer texts."""
        return self.basis is None

    @property
    def named(self) -> str:
        """The format as a caller writes it."""
        return repr(self.format)

    def pages(self, head_dim: int, page_tokens: int, scales: str) -> ops.PackedFormat:
        """The format of a model's pages.

        # Errors
        `InvalidArgument` for a head dim that it has not, and for a format of other sizes.
        """
        if isinstance(self.format, ops.PackedFormat):
            wanted = head_dim, page_tokens, scales
            of = self.format
            if (of.head_dim, of.page_tokens, of.scales) != wanted:
                raise InvalidArgument(
                    f"kv_dtype: expected a format with head_dim={head_dim}, page_tokens="
                    f"{page_tokens} and scales={scales!r} for this model, got {self.named}"
                )
            return of
        name: Any = self.format
        return ops.packed_format(name, head_dim, page_tokens, scales)
