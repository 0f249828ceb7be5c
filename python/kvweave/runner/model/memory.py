"""Bytes that a runner and its prefills take where the model lies, reckoned before they are taken.

Nothing else is allocated that grows with the prompt, so the figure is what torch's allocator
reports as its peak, but for the workspaces of its libraries (tens of MiB).
"""

from __future__ import annotations

import torch

from kvweave.runner.model.layer import FEED_FORWARD_ROWS
from kvweave.runner.model.model_spec import ModelSpec
from kvweave.runner.model.rope import Rotary


def resident_bytes(spec: ModelSpec, rotary: Rotary, pages: torch.Tensor) -> int:
    """Weights, pages and tables of positions: there as long as the runner is."""
    return spec.weight_bytes + rotary.table_bytes + pages.numel() * pages.element_size()


def working_bytes(
    spec: ModelSpec, tokens: int, rows: int, logits: int, head_groups: int = 1
) -> int:
    """The most that one prefill holds at once besides.

    `rows`: the most that a layer computes at once, of a prompt of `tokens` tokens; `logits`: rows
    whose logits are wanted. The peak is in the widest of a layer's steps, the probes being
    narrower. A row has a slot in every head group.
    """
    layer = spec.layers[0]
    element = spec.dtype.itemsize
    width = spec.width
    query, key = spec.query_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    linear = [m for m in layer.feed_forward.modules() if isinstance(m, torch.nn.Linear)]
    between = max((m.out_features for m in linear), default=width)
    part = min(rows, FEED_FORWARD_ROWS)
    # A module multiplies into a third tensor.
    wide = between * (3 if layer.gated is None else 2)
    log_sums = 4 * rows * spec.query_heads
    # Beside a feed-forward that is not behind it, what was attended waits.
    waiting = rows * query if layer.is_parallel else 0
    steps = (
        rows * (2 * width + query + 2 * key) * element,  # projecting
        rows * (width + 2 * query + 3 * key) * element,  # rotating
        rows * (width + 2 * query + 2 * key) * element + log_sums,  # attending
        rows * (2 * width + query) * element,  # back to the width
        (rows * width + part * (width + wide) + waiting) * element,  # feed-forward
        (rows + logits) * width * element + logits * spec.vocabulary * (element + 4),
    )
    turns = sum(layer.rotates for layer in spec.layers) > 0
    tables = tokens * 8 + rows * (4 + 8 * head_groups + turns * 2 * spec.head_dim * element)
    return max(steps) + tables
