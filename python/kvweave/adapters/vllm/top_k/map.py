"""How many pages the heads of a model read in a decode step, by a head class map. Needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from kvweave.adapters.vllm.heads.class_map import HeadClass
from kvweave.adapters.vllm.require import require
from kvweave.always_read import RECENT_PAGES, SINK_PAGES
from kvweave.errors import InvalidArgument

ALL = 0
"""The budget of a head that reads all its pages."""
FEWEST = SINK_PAGES + RECENT_PAGES
PLAIN = {"score": "min-max", "estimate": "False"}
"""How heads choose and what becomes of the rest where a map does not say otherwise."""


@dataclass(frozen=True)
class PageBudgets:
    """`of` [L][G]: the pages that each head of a rank reads; `ALL` of a head that reads all.

    `ranked`: the layers in which some head of some rank chooses, which have bounds. `least` and
    `most` of all ranks: with no more pages than the least budget nobody chooses; the largest is K.
    """

    of: tuple[tuple[int, ...], ...]
    ranked: tuple[int, ...]
    least: int
    most: int


def has_top_k(classes: list[list[HeadClass]]) -> bool:
    """Whether a map has heads that choose pages."""
    return any(head["kind"] == "top_k" for layer in classes for head in layer)


def budgets_of(
    classes: list[list[HeadClass]], ranks: int, rank: int, *, windows: bool = False
) -> PageBudgets:
    """The budgets of one of `ranks` that hold equal shares of the heads, in the model's order.

    `rerank_every` is not looked at here: pages are ranked at every step, but where a layout is
    paced. `windows`: whether other heads may have some.

    Errors: `Unsupported` for heads with a window beside top-k heads that may not have one, for
    heads that the ranks do not divide, and for those that score pages by mean keys or estimate what
    they do not read: vLLM's blocks have no means beside them. `InvalidArgument` for a budget below
    the pages that are always read.
    """
    kinds = {str(head["kind"]) for layer in classes for head in layer}
    known = windows or kinds <= {"full", "top_k"}
    require("heads: kinds of heads", known, "full and top_k, or full and window", str(kinds))
    for name, plain in PLAIN.items():
        got = {str(head[name]) for layer in classes for head in layer if name in head} - {plain}
        require(f"heads: top_k.{name}", not got, f"{plain} in vLLM", ", ".join(sorted(got)))
    heads = len(classes[0])
    expected = f"a number that {ranks} ranks divide, beside top-k heads"
    require("heads: KV heads", heads % ranks == 0, expected, str(heads))
    pages = [
        [int(head["pages"]) if head["kind"] == "top_k" else ALL for head in layer]
        for layer in classes
    ]
    least = min(count for layer in pages for count in layer if count != ALL)
    what, expected = "heads: top_k.pages", f"at least {FEWEST}, which are always read"
    require(what, least >= FEWEST, expected, str(least), InvalidArgument)
    share = slice(rank * (heads // ranks), (rank + 1) * (heads // ranks))
    return PageBudgets(
        tuple(tuple(layer[share]) for layer in pages),
        tuple(number for number, layer in enumerate(pages) if any(layer)),
        least,
        max(max(layer) for layer in pages),
    )
