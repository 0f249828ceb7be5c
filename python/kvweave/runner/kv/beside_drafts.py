"""What does not go with drafts that are verified yet: one table, and the error that names both."""

from __future__ import annotations

from kvweave.arguments import whole
from kvweave.cache import HeadClassMap
from kvweave.errors import InvalidArgument
from kvweave.runner.kv.beside import refuse
from kvweave.runner.kv.heads import HeadReads
from kvweave.runner.model.rope import Rotary

NOT_BESIDE_DRAFTS = {
    "kv_dtype": "a round is verified over exact pages alone",
    "host_arrivals": "a verification waits for all pages, so a draft gains nothing by some",
    "healing": "what it watches are steps of one token",
    "model": "frequencies of RoPE that change with the length differ between the rows of a round",
}
"""By the argument that asks for it: why drafts that are verified do not serve it."""


def check_speculate(
    speculate: int | None, heads: HeadClassMap | None, page_tokens: int, **asked: object
) -> int:
    """How many tokens a round drafts, 0 for none; raises for what is asked for beside it.

    # Errors
    `InvalidArgument` for none, or more than fit into a page with the token before them, and without
    a head map; `Unsupported` as `refuse_beside_drafts`.
    """
    if speculate is None:
        return 0
    drafts = whole("speculate", speculate, 1, max(1, page_tokens - 1))
    for what, got in asked.items():
        # Exact arrivals are what there is where nobody asks.
        refuse_beside_drafts(drafts, what, None if got == "exact" else got)
    if heads is None:
        raise InvalidArgument("speculate: expected a head map with top_k heads, got none")
    return drafts


def check_drafting(drafts: int, reads: HeadReads, rotary: Rotary) -> None:
    """Raises where nothing chooses pages, or rows of a round would be rotated differently.

    # Errors
    `InvalidArgument` for a head map without top_k heads, `Unsupported` for the model.
    """
    if drafts and not reads.budgets:
        raise InvalidArgument("speculate: expected a head map with top_k heads, got one without")
    refuse_beside_drafts(drafts, "model", None if rotary.is_fixed else "dynamic RoPE")


def refuse_beside_drafts(drafts: int, what: str, got: object = "one") -> None:
    """Raises for something that is asked for of a runner that drafts.

    Nothing is said where `drafts` is 0, or `got` is None.

    # Errors
    `Unsupported` naming both.
    """
    if drafts:
        refuse(NOT_BESIDE_DRAFTS, "speculate", "it", what, got)
