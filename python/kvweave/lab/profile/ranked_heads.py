"""Head maps whose whole heads read few pages in decode steps (FlexiCache, section 3.1)."""

from __future__ import annotations

import json

from kvweave.always_read import RECENT_PAGES, SINK_PAGES
from kvweave.arguments import whole
from kvweave.cache import HeadClassMap
from kvweave.errors import InvalidArgument

RERANK_EVERY = 16
"""Decode steps between two rankings of a stable head's pages (FlexiCache, section 4.1)."""

SCORES = ("min-max", "mean")
"""What pages may be ranked by: see `ops.BoundedPages`."""


def with_ranked_pages(
    heads: HeadClassMap,
    pages: int,
    *,
    rerank_every: int = RERANK_EVERY,
    unstable_too: bool = False,
    score: str = "min-max",
    estimate: bool = False,
) -> HeadClassMap:
    """A map's heads that keep every token, those of them that are stable reading `pages` pages.

    They keep every token as before, and are ranked anew after so many decode steps. Heads that are
    unstable read everything or, with `unstable_too`, as many pages ranked at every step, as in the
    paper. Window heads stay what they are. Pages are ranked by what "min-max" or "mean" keys
    score, and with `estimate` the means of those that are not read enter attention.

    # Errors
    `InvalidArgument` for fewer pages than are always read, rankings less than a step apart, or
    another score.
    """
    if score not in SCORES:
        raise InvalidArgument(f"score: expected one of {', '.join(SCORES)}, got {score!r}")
    stable = {
        "kind": "top_k",
        "pages": whole("top-k", pages, SINK_PAGES + RECENT_PAGES),
        "rerank_every": whole("rerank-every", rerank_every, 1),
        "score": score,
        "estimate": bool(estimate),
    }
    classes = {"stable": stable}
    if unstable_too:
        classes["unstable"] = {**stable, "rerank_every": 1}
    plain = json.loads(heads.to_json())
    for entry in plain["heads"]:
        if entry["class"]["kind"] != "window":
            entry["class"] = classes.get(entry["stability"], {"kind": "full"})
    return HeadClassMap.from_json(json.dumps(plain, allow_nan=False))
