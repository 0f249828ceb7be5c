"""Calls over packed pages whose kernels miss an aim, for `benchmarks.device.counters`.

They are those of `packed_decode`, each with pages of its one format: attention of one layer of
Llama-3.1-8B's shape, and packing what one request fills in all its layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.cases.packed_decode import LLAMA, Text, buffer
from kvweave.ops.packed_kv import Preset

ATTENDED: tuple[tuple[Preset, int, int], ...] = (
    # format, requests, tokens of each
    ("int4", 1, 32_768),
    ("int4", 1, 131_072),
    ("int4", 16, 32_768),
    ("half-int4", 16, 32_768),
    ("half-int4", 16, 131_072),
    ("planes-3", 16, 32_768),
    ("planes-3", 16, 131_072),
)
BUFFERED: tuple[Preset, ...] = ("int4", "half-int4", "planes-3")


def _attended(name: Preset, requests: int, tokens: int) -> Callable[[], Any]:
    text = Text.of(LLAMA, requests, tokens, (name,))
    return text.attend_packed(name)


PACKED: dict[str, Callable[[], Callable[[], Any]]] = {
    **{
        f"attention over {name}, B={requests}, {tokens // 1024}K": partial(
            _attended, name, requests, tokens
        )
        for name, requests, tokens in ATTENDED
    },
    **{f"packing a full buffer into {name}": partial(buffer, 1, name) for name in BUFFERED},
}
"""By name: makes what is packed, and returns the call."""
