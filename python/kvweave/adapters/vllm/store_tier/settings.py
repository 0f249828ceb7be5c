"""What vLLM is told of the tier: an entry of `kv_connector_extra_config["secondary_tiers"]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvweave.adapters.vllm.require import require
from kvweave.errors import InvalidArgument
from kvweave.flops import TextSizes
from kvweave.store import Provenance

WHERE = "secondary_tiers"
CHOICES = {"eviction": ("lru", "cost-aware"), "admission": ("all", "second-sight")}
HOST_EVICTIONS: Mapping[str, Mapping[str, str]] = {
    "lru": {"eviction_policy": "lru"},
    "arc": {"eviction_policy": "arc"},
    "cost-aware": {
        "eviction_policy": "CostAware",
        "cache_policy_module_path": f"{__package__}.cost_policy",
    },
}
"""What vLLM is told of the order in which chunks leave the host's memory."""
OF = "of"
"""The entry's field that the connector fills: what chunks are of."""


@dataclass(frozen=True)
class TierSettings:
    """`folder` of the store, which may take `capacity_bytes`, a namespace `quota_bytes` of that.

    A chunk is nobody's hit `ttl_s` seconds after it was written. So many threads read first, and
    so many write first; the others of the two help where they have nothing to do. `eviction`: what
    goes first, "lru" or "cost-aware": what took few FLOPs for its bytes and was used once.
    `shared`: several models may use the folder; else it belongs to the first that did.
    `admission`: "all" chunks are written, or by "second-sight", once the store is full, those that
    were offered before.
    """

    folder: str
    capacity_bytes: int | None = None
    quota_bytes: int | None = None
    ttl_s: float | None = None
    read_threads: int = 8
    write_threads: int = 4
    eviction: str = "lru"
    admission: str = "all"
    shared: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> TierSettings:
        """Reads an entry without what vLLM takes of it.

        Errors: `InvalidArgument` naming the field.
        """
        names = [field.name for field in fields(cls)]
        for name in given:
            require(WHERE, name in names, f"the fields {', '.join(names)}", name, InvalidArgument)
        folder = given.get("folder")
        path = isinstance(folder, str) and bool(folder)
        require(f"{WHERE}.folder", path, "a path", repr(folder), InvalidArgument)
        for name in ("capacity_bytes", "quota_bytes", "ttl_s"):
            value = given.get(name)
            kinds = (int, float) if name == "ttl_s" else (int,)
            fits = value is None or (type(value) in kinds and 0 < value < 2**63)
            require(f"{WHERE}.{name}", fits, "more than 0", repr(value), InvalidArgument)
        for name in ("read_threads", "write_threads"):
            value = given.get(name, 1)
            fits = type(value) is int and 1 <= value <= 256
            require(f"{WHERE}.{name}", fits, "1 to 256", repr(value), InvalidArgument)
        shared = given.get("shared", False)
        fits = isinstance(shared, bool)
        require(f"{WHERE}.shared", fits, "true or false", repr(shared), InvalidArgument)
        for name, words in CHOICES.items():
            value = given.get(name, words[0])
            expected = " or ".join(words)
            require(f"{WHERE}.{name}", value in words, expected, repr(value), InvalidArgument)
        return cls(**given)


@dataclass(frozen=True)
class ChunkOrigin:
    """Everything that a chunk's bytes depend on, but its text: plain data, `vars` of it go along.

    `model` and `layout` name the weights and how the bytes of a chunk lie; see `origin`. What it
    costs to compute one of `chunk_tokens` is no part of that, nor are the `TextSizes` by which it
    is counted, `weights` and `width`.
    """

    model: str
    dtype: str
    layout: str
    layers: int
    kv_heads: int
    head_dim: int
    chunk_tokens: int = 0
    weights: int = 0
    width: int = 0

    def cost(self, end: int | None) -> int:
        """FLOPs of the chunk that ends before position `end`; None: of the first one."""
        last = self.chunk_tokens if end is None else end
        first = max(0, last - self.chunk_tokens)
        return TextSizes(self.weights, self.width).flops(first, last)

    def provenance(self, namespace: str, chunk_bytes: int) -> Provenance:
        """What the store compares of a chunk of a namespace."""
        return Provenance(
            self.model,
            dtype=self.dtype,
            layout=f"{self.layout}-{chunk_bytes}",
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            namespace=namespace,
        )


@dataclass(frozen=True)
class ChunkCost:
    """What chunks of a request cost: the tier says so with the request, for whoever ranks them."""

    origin: ChunkOrigin
    chunk_bytes: int

    def density(self, end: int | None) -> int:
        """FLOPs for each byte of the chunk that ends before position `end`; 1 where it is less."""
        return max(1, self.origin.cost(end) // max(1, self.chunk_bytes))
