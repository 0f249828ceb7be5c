"""How much of the device's KV memory requests hold, by the engine's own metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

EVERY_S = 0.25
"""A look at the metrics goes through all of them."""
USED, POOL = "vllm:kv_cache_usage_perc", "vllm:cache_config_info"
OURS = "kvweave_kv_bytes"


def held_bytes(block_bytes: int) -> float:
    """As `held_of`, of this process's metrics."""
    from prometheus_client import REGISTRY

    return held_of([s for family in REGISTRY.collect() for s in family.samples], block_bytes)


def held_of(samples: Sequence[Any], block_bytes: int) -> float:
    """Bytes of the device that requests hold by `samples` of metrics, of each worker.

    Over virtual pages by the arena's own count: blocks with keys and values, and slots. Elsewhere
    by vLLM's share of its blocks, of `block_bytes` each with all layers.
    """
    ours = [
        sample.value
        for sample in samples
        if sample.name == OURS
        and sample.labels["tier"] == "device"
        and sample.labels["state"] != "free"
    ]
    if ours:
        return float(sum(ours))
    used = sum(sample.value for sample in samples if sample.name == USED)
    blocks = [int(sample.labels["num_gpu_blocks"]) for sample in samples if sample.name == POOL]
    return float(used * max(blocks, default=0) * block_bytes)


@dataclass
class Watched:
    """Steps of an engine, between which what it holds is looked at every so often."""

    step: Callable[[], Iterator[tuple[str, int]]]
    look: Callable[[], float]
    seen: list[float] = field(default_factory=list)
    _next: float = 0.0

    def __call__(self) -> Iterator[tuple[str, int]]:
        """Who said how many tokens in one step."""
        yield from self.step()
        now = time.perf_counter()
        if now >= self._next:
            self.seen.append(self.look())
            self._next = now + EVERY_S

    def taken(self) -> dict[str, float]:
        """The most and the mean of what was held since this was last asked, in bytes."""
        seen, self.seen = self.seen or [0.0], []
        return {"bytes": max(seen), "mean": sum(seen) / len(seen)}
