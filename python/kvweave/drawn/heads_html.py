"""A head map in a notebook: a grid of layers and KV heads, coloured by what each one keeps."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvweave.drawn.heads import DrawnHeads, read_heads
from kvweave.drawn.markup import Markup, frame, headline, legend, swatch, tag
from kvweave.drawn.spans import COLOURS

if TYPE_CHECKING:
    from kvweave.cache import HeadClassMap

_KINDS = {
    "full": (COLOURS["segment"], "every token"),
    "top_k": (COLOURS["prefix"], "every token, few pages read"),
    "window": ("#8a8a8a", "sink and window"),
}
_FAINTEST = 0.45
_CELL = 12
_EDGE = 46


def heads_html(heads: HeadClassMap) -> str:
    """A map as a piece of HTML that needs nothing else; no script.

    A column a layer, a row a KV head. Where scores were measured, heads of low score are fainter.
    """
    drawn = read_heads(json.loads(heads.to_json()))
    named = [_KINDS[kind] for kind in _KINDS if kind in drawn.kinds.values()]
    words = [swatch(colour, kept) for colour, kept in named]
    if "score" in drawn.panels:
        words.append(tag("span", "fainter: a lower score"))
    keys = legend(*words)
    return frame(headline(drawn.headline), _grid(drawn), keys)


def _grid(drawn: DrawnHeads) -> Markup:
    layers, heads = drawn.is_global.shape
    wide, high = _EDGE + layers * _CELL, heads * _CELL + 18
    parts = [_head(drawn, layer, head) for layer in range(layers) for head in range(heads)]
    words = {"fill": "currentColor", "font_size": 9, "opacity": 0.7}
    # Every head and tenth layer, or as few as find room.
    for head in range(0, heads, max(1, -(-heads // 16))):
        parts.append(tag("text", f"head {head}", x=0, y=head * _CELL + 9, **words))
    for layer in range(0, layers, 10 if layers > 20 else 5):
        parts.append(tag("text", layer, x=_EDGE + layer * _CELL + 1, y=heads * _CELL + 12, **words))
    style = f"width:{wide}px;height:{high}px;display:block"
    named = {"role": "img", "aria_label": drawn.headline, "style": style}
    return tag("svg", *parts, viewBox=f"0 0 {wide} {high}", **named)


def _head(drawn: DrawnHeads, layer: int, head: int) -> Markup:
    at = (layer, head)
    colour, _ = _KINDS.get(drawn.kinds.get(at, ""), _KINDS["window"])
    words, strength = f"layer {layer}, head {head}: {drawn.words.get(at, '')}", 1.0
    score = drawn.panels.get("score")
    if score is not None:
        most = float(score.max())
        words += f"; score {score[at]:.3g}"
        share = float(score[at]) / most if most > 0 else 1.0
        strength = _FAINTEST + (1 - _FAINTEST) * min(max(share, 0.0), 1.0)
        # NaN of a head whose score was not measured.
        strength = strength if strength == strength else _FAINTEST
    place = {"x": _EDGE + layer * _CELL, "y": head * _CELL, "width": _CELL - 1, "height": _CELL - 1}
    return tag("rect", tag("title", words), fill=colour, fill_opacity=f"{strength:.2f}", **place)
