"""FLOPs of the matrix products that rows of a text take. No torch.

    product_flops(rows, weights)                    # rows by weights that multiply each of them
    attention_flops(visible_pairs(rows), width)     # queries by keys, and what comes by values

A product of [m, k] and [k, n] counts 2·m·k·n. Rows that only pad a grid, norms, activations and
rotations do not count. Prefills are counted so, what a document or a chunk costs in a store is, and
so is what loading is weighed against.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


def product_flops(rows: int, weights: int) -> int:
    """Of so many rows by so many weights."""
    return 2 * rows * weights


def attention_flops(pairs: int, width: int) -> int:
    """Of pairs of a row and a key that it sees; `width`: query heads × dims of a head."""
    return 4 * pairs * width


def visible_pairs(rows: npt.NDArray[Any], window: int = 0, sink: int = 0) -> int:
    """Keys that rows at some positions see, all together, with a window (0: all) and a sink."""
    seen = rows.astype(np.int64) + 1
    if window:
        near = np.minimum(seen, window)
        seen = near + np.minimum(seen - near, sink)
    return int(seen.sum())


class TextSizes(NamedTuple):
    """What rows of a text are multiplied by in all layers, where each sees all before it.

    `weights` multiply each row; `width`: query heads × dims of a head.
    """

    weights: int
    width: int

    @staticmethod
    def of_config(config: Any, kv_heads: int, head_dim: int) -> TextSizes:
        """By the names that configurations use, for whoever has not the model's modules.

        Feed-forwards are gated; of a mixture of experts those count that a row is sent to. A field
        that is not there counts as nothing.
        """

        def size(*names: str) -> int:
            found = (getattr(config, name, None) for name in names)
            return next((value for value in found if type(value) is int), 0)

        layers, hidden = size("num_hidden_layers"), size("hidden_size")
        heads = size("num_attention_heads")
        experts = size("num_experts_per_tok", "num_experts_per_token")
        inner = size("moe_intermediate_size") if experts else 0
        inner = (inner or size("intermediate_size")) * max(1, experts)
        attention = 2 * (heads + kv_heads) * head_dim
        return TextSizes(layers * hidden * (attention + 3 * inner), layers * heads * head_dim)

    def flops(self, start: int, end: int) -> int:
        """Of the rows at [start, end)."""
        pairs = visible_pairs(np.arange(start, end))
        return product_flops(end - start, self.weights) + attention_flops(pairs, self.width)
