"""A head map as plain arrays: what terminal, figure and notebook draw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvweave.errors import InvalidArgument

PANELS = {
    "score": "score",
    "edge": "attention outside\nsink and window",
    "retrieval": "attention on the\nhidden sentence",
    "key_shift": "keys moved by\nanother prefix",
    "value_shift": "values moved by\nanother prefix",
    "overlap": "important pages\nkept",
}
"""What is measured of heads, by its name in a map's evidence, in two lines of words."""

Values = npt.NDArray[np.float64]


class DrawnHeads:
    """What of a map is drawn: classes bool [L, G], panels [L, G] by name, one line of words.

    `does`: what heads without a window do with everything. `words`: of each (layer, head) what it
    keeps and reads; `kinds` its class.
    """

    def __init__(self, layers: int, heads: int) -> None:
        self.is_global = np.zeros((layers, heads), bool)
        self.panels: dict[str, Values] = {}
        self.headline = ""
        self.does = "reads"
        self.kinds: dict[tuple[int, int], str] = {}
        self.words: dict[tuple[int, int], str] = {}


def read_heads(head_map: Mapping[str, Any]) -> DrawnHeads:
    """Reads a map, its JSON as plain data.

    Raises InvalidArgument for data that is no head map.
    """
    try:
        drawn = DrawnHeads(int(head_map["layers"]), int(head_map["kv_heads"]))
        windows, ranked = set(), list[int]()
        for entry in head_map["heads"]:
            kind, at = entry["class"], (int(entry["layer"]), int(entry["head"]))
            drawn.is_global[at] = kind["kind"] != "window"
            drawn.kinds[at], drawn.words[at] = str(kind["kind"]), "everything"
            if kind["kind"] == "window":
                windows.add((kind["sink"], kind["recent"]))
                drawn.words[at] = f"{kind['sink']} first and {kind['recent']} latest tokens"
            if kind["kind"] == "top_k":
                ranked.append(int(kind["pages"]))
                drawn.words[at] = f"keeps everything, reads {kind['pages']} pages"
        evidence = head_map.get("evidence", {})
        lengths = evidence.get("by_length", {})
        if "score" in evidence:
            drawn.panels["score"] = np.asarray(evidence["score"], np.float64)
        for name in PANELS:
            measured = [scores[name] for scores in lengths.values() if name in scores]
            if measured:
                drawn.panels[name] = np.mean(np.asarray(measured, np.float64), axis=0)
        shapes = {values.shape for values in drawn.panels.values()} - {drawn.is_global.shape}
        if shapes:
            raise ValueError(f"scores of shape {shapes.pop()}")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InvalidArgument(f"head map: expected a map's JSON, got {error!r}") from error
    _name(drawn, ranked, windows, lengths)
    return drawn


def _name(
    drawn: DrawnHeads,
    ranked: list[int],
    windows: set[tuple[int, int]],
    lengths: Mapping[str, Any],
) -> None:
    kept, total = int(drawn.is_global.sum()), drawn.is_global.size
    drawn.does = "keeps" if ranked else "reads"
    words = [
        f"{kept} of {total} KV heads {drawn.does[:-1]} everything ({kept / max(total, 1):.0%})"
    ]
    if ranked:
        pages = " or ".join(map(str, sorted(set(ranked))))
        words.append(f"{len(ranked)} of these read {pages} pages in a decode step")
    if len(windows) == 1:
        ((sink, recent),) = windows
        words.append(f"the others {sink} first and {recent} latest tokens")
    if lengths:
        words.append("prompts of " + ", ".join(lengths) + " tokens")
    drawn.headline = "; ".join(words)
