"""A head class map as vLLM can carry it: all heads of a class in the blocks of one cache layer.

vLLM keeps one block table for a set of cache layers whose pages are equally large, and knows
nothing of heads. So the global heads of all layers become one cache layer, which keeps everything,
and the local heads another, which keeps a sink and a window (RedKnot, section 4.3). A layer may
have any number of either: its pages are some of those that a block of the class has. Within a layer
heads are put in order when weights are loaded, global ones first. Where a map has several windows
the widest is kept, and each head sees its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from kvweave.adapters.vllm.heads.class_map import HeadClass
from kvweave.adapters.vllm.require import require
from kvweave.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

PROJECTION = re.compile(r"\.layers\.(\d+)\.self_attn\.(q|k|v|qkv|o)_proj\.(\w+)$")
# Along which axis a weight runs over heads; a bias of o_proj runs over none.
AXES = {(p, kind): 0 for p in "qkv" for kind in ("weight", "bias")} | {("o", "weight"): 1}


# Blocks of a class hold so many times as many tokens as vLLM was asked for, at most.
MOST_UNITS = 32
# What a prefix costs that is found in steps of one unit more: as much as this share of all blocks.
STEP_COST = 0.002


class ClassBlocks(NamedTuple):
    """Blocks of a class of heads: `tokens` of each of its heads, and `pages` for as many heads."""

    tokens: int
    pages: int


class Window(NamedTuple):
    """What a local head sees: the latest `recent` tokens and the first `sink`."""

    recent: int
    sink: int


class LayerPart(NamedTuple):
    """Heads of one class in a layer of a rank: how many, behind how many pages of a block."""

    heads: int
    first_page: int


@dataclass(frozen=True)
class HeadSplit:
    """How the G KV heads of each of L layers are split, over `ranks` that hold equal shares.

    `order[layer]` [G]: the heads as they are loaded. Of the G / ranks heads that a rank has of a
    layer the first `whole[layer][rank]` keep everything, the others the first `sink` tokens and the
    latest `recent`. `windows` [L][G], in the map's order: what each head sees of these, where it is
    not the same for all local ones; None of those that see everything.
    """

    order: tuple[tuple[int, ...], ...]
    ranks: int
    whole: tuple[tuple[int, ...], ...]
    sink: int
    recent: int
    windows: tuple[tuple[Window | None, ...], ...] = ()

    @property
    def layers(self) -> int:
        """L."""
        return len(self.order)

    @property
    def kv_heads(self) -> int:
        """G, over all ranks."""
        return len(self.order[0])

    @cached_property
    def heads(self) -> tuple[int, int]:
        """Global and local heads of all layers, of the rank that has most of them."""
        whole = [sum(counts) for counts in zip(*self.whole, strict=True)]
        each = self.layers * self.kv_heads // self.ranks
        return max(whole), each - min(whole)

    def parts(self, rank: int) -> list[tuple[LayerPart, LayerPart]]:
        """The global and the local heads of a rank, layer by layer."""
        parts, before = [], [0, 0]
        for counts in self.whole:
            heads = counts[rank], self.kv_heads // self.ranks - counts[rank]
            whole, local = (LayerPart(*each) for each in zip(heads, before, strict=True))
            parts.append((whole, local))
            before = [before[0] + whole.heads, before[1] + local.heads]
        return parts

    def own_windows(self, layer: int, rank: int) -> list[Window]:
        """What each local head of a rank's share of a layer sees; none where all see the same."""
        if not self.windows:
            return []
        each = self.kv_heads // self.ranks
        local = self.order[layer][rank * each + self.whole[layer][rank] : (rank + 1) * each]
        return [window for head in local if (window := self.windows[layer][head]) is not None]

    def blocks(self, unit: int) -> tuple[ClassBlocks, ClassBlocks]:
        """Blocks of global and of local heads, of equal bytes; tokens are multiples of `unit`.

        vLLM allocates blocks of one size: one of fewer heads holds more tokens. Where numbers of
        tokens that are small do not make them equal, blocks have pages of nobody's.
        """

        def cost(blocks: tuple[int, int, int, int]) -> float:
            whole, local, *pages = blocks
            spare = sum(page / head for page, head in zip(pages, self.heads, strict=True)) - 2
            return spare + STEP_COST * math.lcm(whole, local)

        sizes = range(1, MOST_UNITS + 1)
        found = (_equal(whole, local, *self.heads) for whole in sizes for local in sizes)
        whole, local, *pages = min(found, key=cost)
        return ClassBlocks(unit * whole, pages[0]), ClassBlocks(unit * local, pages[1])

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

    Errors: `Unsupported` for what two cache layers cannot carry: top-k heads, heads that the ranks
    do not divide, or too few of a class for each to have one.
    """
    kinds = {str(head["kind"]) for layer in classes for head in layer}
    carried = kinds <= {"full", "window"}
    require("heads: kinds of heads", carried, "full and window", ", ".join(kinds))
    if kinds == {"full"}:
        return None
    windows = tuple(tuple(map(_window_of, layer)) for layer in classes)
    known = {window for layer in windows for window in layer if window is not None}
    heads = len(classes[0])
    expected = f"a number that {ranks} ranks divide"
    require("heads: KV heads", heads % ranks == 0, expected, str(heads))
    counts = [sum(head["kind"] == "full" for head in layer) for layer in classes]
    few = min(sum(counts), heads * len(counts) - sum(counts))
    got = f"{sum(counts)} of {heads * len(counts)} global"
    require("heads: heads of a class", few >= ranks, f"at least one for each of {ranks}", got)
    whole = _shared_out(counts, ranks)
    order = tuple(_order(*layer) for layer in zip(classes, whole, strict=True))
    sink, recent = (max(sizes) for sizes in zip(*((w.sink, w.recent) for w in known), strict=True))
    return HeadSplit(order, ranks, whole, sink, recent, windows if len(known) > 1 else ())


def _window_of(head: HeadClass) -> Window | None:
    """What a head sees; None of one that sees everything."""
    if head["kind"] == "full":
        return None
    return Window(int(head["recent"]), int(head["sink"]))


def _shared_out(counts: list[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Each layer's global heads shared out among ranks, so that all have the same in the end.

    What ranks do not divide goes to those that have fewest by then.
    """
    totals, shared = [0] * ranks, []
    for count in counts:
        least = sorted(range(ranks), key=totals.__getitem__)[: count % ranks]
        shares = [count // ranks + (rank in least) for rank in range(ranks)]
        totals = [a + b for a, b in zip(totals, shares, strict=True)]
        shared.append(tuple(shares))
    return tuple(shared)


def _order(layer: list[HeadClass], shares: tuple[int, ...]) -> tuple[int, ...]:
    """Heads of a layer so that each rank's share starts with its share of global heads."""
    whole = [number for number, head in enumerate(layer) if head["kind"] == "full"]
    local = [number for number, head in enumerate(layer) if head["kind"] == "window"]
    each, order = len(layer) // len(shares), []
    for count in shares:
        order += whole[:count] + local[: each - count]
        whole, local = whole[count:], local[each - count :]
    return tuple(order)


def _equal(whole: int, local: int, *heads: int) -> tuple[int, int, int, int]:
    """Blocks of so many units of both classes: the fewest pages with which they are equal."""
    step = math.lcm(whole, local)
    a, b = (step // units for units in (whole, local))
    times = max(-(-count // pages) for count, pages in zip(heads, (a, b), strict=True))
    return whole, local, times * a, times * b
