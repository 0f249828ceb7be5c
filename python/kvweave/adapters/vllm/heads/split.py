"""A head class map as vLLM can carry it: in every layer, global heads first, then local ones.

vLLM keeps one block table for a set of layers whose pages are equally large. So the KV heads of a
layer become two cache layers, one that keeps everything and one that keeps a sink and a window
(RedKnot, section 4.3), and the heads are put in that order when weights are loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvweave.adapters.vllm.heads.class_map import HeadClass
from kvweave.adapters.vllm.require import require
from kvweave.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

PROJECTION = re.compile(r"\.layers\.(\d+)\.self_attn\.(q|k|v|qkv|o)_proj\.(\w+)$")
# Along which axis a weight runs over heads; a bias of o_proj runs over none.
AXES = {(p, kind): 0 for p in "qkv" for kind in ("weight", "bias")} | {("o", "weight"): 1}


@dataclass(frozen=True)
class HeadSplit:
    """How the G KV heads of each of L layers are split, over `ranks` that hold equal shares.

    `order[layer]` [G]: the heads as they are loaded. Of the G / ranks heads of a rank the first
    `global_heads` keep everything, the others the first `sink` tokens and the latest `recent`.
    """

    order: tuple[tuple[int, ...], ...]
    ranks: int
    global_heads: int
    sink: int
    recent: int

    @property
    def layers(self) -> int:
        """L."""
        return len(self.order)

    @property
    def kv_heads(self) -> int:
        """G, over all ranks."""
        return len(self.order[0])

    @property
    def local_heads(self) -> int:
        """Heads of a rank that keep a window."""
        return self.kv_heads // self.ranks - self.global_heads

    def block_tokens(self, unit: int) -> tuple[int, int]:
        """Tokens of a block of global and of local heads, multiples of `unit`, pages being equal.

        vLLM allocates pages of one size: a block of fewer heads holds more tokens.
        """
        both = math.lcm(self.global_heads, self.local_heads)
        return unit * (both // self.global_heads), unit * (both // self.local_heads)

    def loaded(self, layer: int, weight: torch.Tensor, axis: int) -> torch.Tensor:
        """A weight or bias whose `axis` runs over heads, in the order in which heads are loaded.

        The axis may run over KV heads or over query heads, those of a KV head side by side.

        Errors: `InvalidArgument` when it is not a multiple of G.
        """
        # A map is checked where no weights are, and no torch wanted.
        import torch

        size = weight.shape[axis]
        expected = f"a multiple of {self.kv_heads} (KV heads) on axis {axis}"
        got = f"shape {list(weight.shape)}"
        divided = size % self.kv_heads == 0
        require(f"weight of layer {layer}", divided, expected, got, InvalidArgument)
        starts = torch.tensor(self.order[layer])[:, None] * (size // self.kv_heads)
        rows = (starts + torch.arange(size // self.kv_heads)).flatten()
        return weight.index_select(axis, rows.to(weight.device))


def in_order(
    weights: Iterable[tuple[str, torch.Tensor]], split: HeadSplit
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights by name, those of attention with their heads in the order of the split.

    Errors: `Unsupported` for a tensor of a projection that is neither weight nor bias.
    """
    for name, weight in weights:
        found = PROJECTION.search(name)
        if found is None or found[2] + found[3] == "obias":
            yield name, weight
            continue
        kind = found[2], found[3]
        require("heads", kind in AXES, "weights and biases of q, k, v and o apart", name)
        yield name, split.loaded(int(found[1]), weight, AXES[kind])


def split_of(classes: list[list[HeadClass]], ranks: int) -> HeadSplit | None:
    """The split of a model whose heads have these classes, served by `ranks` GPUs.

    None when every head is full: nothing is to be split.

    Errors: `Unsupported` for what two cache layers cannot carry: top-k heads, several windows,
    layers with different numbers of global heads, numbers that the ranks do not divide.
    """
    kinds = {str(head["kind"]) for layer in classes for head in layer}
    known = kinds <= {"full", "window"}
    require("heads: kinds of heads", known, "full and window", ", ".join(kinds))
    if kinds == {"full"}:
        return None
    windows = {
        (int(head["sink"]), int(head["recent"]))
        for layer in classes
        for head in layer
        if head["kind"] == "window"
    }
    require("heads: windows", len(windows) == 1, "one (sink, recent)", str(sorted(windows)))
    counts = {sum(head["kind"] == "full" for head in layer) for layer in classes}
    same = "the same number in every layer"
    numbers = f"{min(counts)} to {max(counts)}"
    require("heads: global heads", len(counts) == 1, same, numbers)
    (count,), (window,) = counts, windows
    require("heads: global heads", count > 0, "at least one in every layer", "0")
    locals_ = len(classes[0]) - count
    divided = count % ranks == 0 and locals_ % ranks == 0
    expected = f"numbers that {ranks} ranks divide"
    require("heads: global and local heads", divided, expected, f"{count} and {locals_}")
    order = tuple(_order(layer, ranks) for layer in classes)
    return HeadSplit(order, ranks, count // ranks, *window)


def _order(layer: list[HeadClass], ranks: int) -> tuple[int, ...]:
    """Heads of a layer so that each rank's share starts with its share of global heads."""
    whole = [number for number, head in enumerate(layer) if head["kind"] == "full"]
    local = [number for number, head in enumerate(layer) if head["kind"] == "window"]
    a, b = len(whole) // ranks, len(local) // ranks
    shares = (
        whole[rank * a : (rank + 1) * a] + local[rank * b : (rank + 1) * b] for rank in range(ranks)
    )
    return tuple(number for share in shares for number in share)
