"""Whether vLLM can serve a head map, asked before an engine is started. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from kvweave.adapters.vllm.heads.class_map import read_classes
from kvweave.adapters.vllm.heads.split import split_of
from kvweave.adapters.vllm.require import require
from kvweave.adapters.vllm.top_k.map import budgets_of, has_top_k
from kvweave.adapters.vllm.virtual_pages.layout import layout_of
from kvweave.errors import InvalidArgument


def check_map(
    path: Path,
    layers: int,
    kv_heads: int,
    ranks: int,
    *,
    virtual_pages: bool = False,
    host: bool = False,
) -> None:
    """Refuses a map that a model of L layers and G KV heads could not be started with.

    Errors: as `read_classes`, and as the part that would serve the map: `split_of`, `budgets_of`
    and, with virtual pages, `layout_of`; `InvalidArgument` for memory of the `host` that no head of
    the map needs.
    """
    classes = read_classes(path, layers, kv_heads)
    needed = not host or has_top_k(classes)
    require("host_bytes", needed, "a map with top_k heads beside it", "none", InvalidArgument)
    if virtual_pages:
        layout_of(classes, 16, ranks)
        if has_top_k(classes):
            budgets_of(classes, ranks, 0, windows=True)
    elif has_top_k(classes):
        budgets_of(classes, ranks, 0)
    else:
        split_of(classes, ranks)
