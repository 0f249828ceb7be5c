"""FLOPs of the matrix products that a prefill ran, counted by part as they are asked for.

What counts, and how, says `kvweave.flops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvweave.flops import attention_flops, product_flops, visible_pairs
from kvweave.plan import Rows
from kvweave.runner.kv.heads import HeadReads
from kvweave.runner.kv.tables import RowMemo
from kvweave.runner.model.layer_spec import LayerSpec
from kvweave.runner.model.model_spec import ModelSpec

PARTS = ("projections", "attention", "feed_forward", "logits", "scores")
"""What is counted: q, k, v and output projections; attention over the keys that each row and head
sees; the feed-forward; the head of the model; the query-key products of probes."""


def _elements(module: Any) -> int:
    """Weights of a module that multiply each row; of experts only those that a row is sent to."""
    chosen = [int(m.top_k) for m in module.modules() if isinstance(getattr(m, "top_k", None), int)]
    count = 0
    for one in module.modules():
        if _is_matrix(one):
            count += one.in_features * one.out_features
            continue
        for weight in one.parameters(recurse=False):
            if weight.dim() == 3 and chosen:
                count += weight[0].numel() * chosen[0]
            elif weight.dim() >= 2:
                count += weight.numel()
    return count


def _is_matrix(module: Any) -> bool:
    """Whether a module multiplies by a matrix of stated size, however its weights are stored."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return all(isinstance(size, int) for size in sizes) and not any(module.children())


@dataclass(frozen=True)
class LayerWeights:
    """Weights of a layer that multiply each row: of q, of k and v together, of the rest."""

    query: int
    key_value: int
    output: int
    feed_forward: int

    @staticmethod
    def of(layer: LayerSpec) -> LayerWeights:
        """Counted in the layer's modules."""
        heads = layer.heads
        all_three = sum(_elements(module) for module in heads.modules)
        query = all_three * heads.query_heads // (heads.query_heads + 2 * heads.kv_heads)
        return LayerWeights(
            query, all_three - query, _elements(layer.out), _elements(layer.feed_forward)
        )


class ModelWeights:
    """The same of every layer, and of the head of the model: counted once, it takes a while."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.layers = [LayerWeights.of(layer) for layer in spec.layers]
        self.head = _elements(spec.head)


class RowFlops:
    """What computing consecutive rows of a prompt takes, in all layers; of no logits."""

    def __init__(self, spec: ModelSpec, heads: HeadReads) -> None:
        self._spec = spec
        self._heads = heads
        self._weights: ModelWeights | None = None

    def __call__(self, start: int, end: int) -> int:
        """FLOPs of the rows at [start, end)."""
        if self._weights is None:
            self._weights = ModelWeights(self._spec)
        count, rows = FlopCount(self._weights), np.arange(start, end, dtype=np.int32)
        for layer in range(len(self._spec.layers)):
            table = self._heads.narrowed(self._heads.cache.head_rows(layer), layer)
            count.project(layer, len(rows))
            count.attend(layer, rows, [(window, sink) for _, _, window, sink in table.tolist()])
            count.feed_forward(layer, len(rows))
        return sum(count.parts.values())


class FlopCount:
    """The running count of one prefill; `parts` has a number for each of `PARTS`."""

    def __init__(self, weights: ModelWeights) -> None:
        self.spec = weights.spec
        self.weights = weights
        self.parts = dict.fromkeys(PARTS, 0)
        # The rows of a layer, and those that ask what matters in it.
        self._seen = RowMemo[dict[tuple[int, int], int]](2)

    def project(self, layer: int, rows: int, spared: tuple[int, int] = (0, 0)) -> None:
        """Q, k and v of some rows; `spared`: so many KV heads of only so many rows."""
        heads, fewer = spared
        self.parts["projections"] += product_flops(rows, self.weights.layers[layer].query)
        self.project_heads(layer, self.spec.kv_heads - heads, rows)
        self.project_heads(layer, heads, fewer)

    def project_heads(self, layer: int, heads: int, rows: int) -> None:
        """K and v of some KV heads of some rows."""
        both = self.weights.layers[layer].key_value
        self.parts["projections"] += product_flops(rows, heads * both // self.spec.kv_heads)

    def attend(self, layer: int, rows: Rows, reaches: list[tuple[int, int]]) -> None:
        """Attention of rows and its output projection; a (window, sink) for each KV head."""
        pairs = self._pairs(rows, reaches)
        self.parts["attention"] += attention_flops(pairs, self.spec.head_dim)
        self.parts["projections"] += product_flops(len(rows), self.weights.layers[layer].output)

    def feed_forward(self, layer: int, rows: int) -> None:
        """The feed-forward of some rows."""
        self.parts["feed_forward"] += product_flops(rows, self.weights.layers[layer].feed_forward)

    def logits(self, rows: int) -> None:
        """The head's product of some rows."""
        self.parts["logits"] += product_flops(rows, self.weights.head)

    def score(self, rows: Rows, reaches: list[tuple[int, int]]) -> None:
        """Query-key products of a probe; a (window, sink) for each KV head."""
        self.parts["scores"] += product_flops(self._pairs(rows, reaches), self.spec.head_dim)

    def _pairs(self, rows: Rows, reaches: list[tuple[int, int]]) -> int:
        """Pairs of a row and a key over all query heads."""
        seen = self._seen.get(rows, lambda _: {})
        for reach in set(reaches) - seen.keys():
            seen[reach] = visible_pairs(rows, *reach)
        group = self.spec.query_heads // self.spec.kv_heads
        return group * sum(seen[reach] for reach in reaches)
