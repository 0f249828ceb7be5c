"""The kinds of runners that a soak loads, as data: what each is asked for, and what has to hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.soak.asked import EXACT, LIBRARY, LONG, POLICIES, WEIGHTS, Asked, Library
from kvweave.ops import PackedFormat
from kvweave.runner import Packing, Strategy

HEAD_DIM, LAYERS, KV_HEADS = 32, 4, 2
HEAD_TOKEN_BYTES = 2 * HEAD_DIM * 4
"""Of a token in a KV head: K and V, numbers of four bytes."""
TOKEN_BYTES = LAYERS * KV_HEADS * HEAD_TOKEN_BYTES

Heads = tuple[tuple[str, ...], ...]
"""Of each layer the classes of its KV heads, by their names in `CLASSES`."""

CLASSES: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "window": {"kind": "window", "sink": 16, "recent": 48},
    "stable": {"kind": "top_k", "pages": 6, "rerank_every": 8},
    "steady": {"kind": "top_k", "pages": 4, "rerank_every": 12},
    "unstable": {"kind": "top_k", "pages": 6, "rerank_every": 1},
}
UNEVEN: Heads = (("full", "window"), ("window", "window"), ("full", "full"), ("full", "window"))
CHOOSING: Heads = (
    ("stable", "window"),
    ("stable", "steady"),
    ("full", "stable"),
    ("steady", "unstable"),
)
AT_HOME = 5
"""KV heads of that map whose pages may lie in the host's memory."""
EXACTLY_PACKED = 192
"""Tokens of a text whose pages are all read exactly where full ones are packed."""
OF_SINK = 64
"""A prefix of so many tokens is read exactly there as well."""


@dataclass(frozen=True)
class Room:
    """Tokens that a runner has room for: on the device, of documents, and of a namespace's."""

    device: int = 3200
    document: int = 640
    stored: int = 2600
    stored_quota: int = 900
    frozen_quota: int = 512


@dataclass(frozen=True)
class Alike:
    """Which answers have to be those of a quiet twin.

    `policies`: of fixed questions. `kinds`: of requests under load. Of these, where False, those
    are left out that are second `turns`, or have given way and were `resumed`; and those that are
    of more than so many `tokens` with their answer, or `found` more of them.
    """

    policies: tuple[str, ...] = POLICIES
    kinds: tuple[str, ...] = EXACT
    turns: bool = True
    resumed: bool = True
    tokens: int | None = None
    found: int | None = None

    def holds(self, asked: Asked, done: Any) -> bool:
        """Whether it does of an answer."""
        report = done.report
        if asked.kind not in self.kinds or asked.n > 1:
            return False
        if (asked.before is not None and not self.turns) or (report.resumed and not self.resumed):
            return False
        found = report.reused_prefix + report.reused_segment
        tokens = len(asked.tokens) + asked.answer
        return not (
            (self.tokens is not None and tokens > self.tokens)
            or (self.found is not None and found > self.found)
        )


@dataclass(frozen=True)
class Kind:
    """What a runner of the soak is asked for, and what may be asked of it.

    `how`: arguments of `Runner`, those in `shared` being its quiet twin's as well. `heads`: the
    classes of its heads, and `twin_heads` those of the twin where they are others. `token_bytes`:
    of the KV of a token in a tier. `without`: what such a runner refuses.
    """

    name: str
    how: dict[str, Any]
    shared: dict[str, Any] = field(default_factory=dict)
    heads: Heads | None = None
    twin_heads: Heads | None = None
    room: Room = Room()
    token_bytes: int = TOKEN_BYTES
    without: frozenset[str] = frozenset()
    library: Library = LIBRARY
    weights: dict[str, int] = field(default_factory=lambda: dict(WEIGHTS))
    alike: Alike = Alike()
    events: tuple[str, ...] = ()

    @property
    def has_tiers(self) -> bool:
        """Whether documents leave its device."""
        return "tiers" not in self.without

    @property
    def is_told(self) -> bool:
        """Whether its cache goes by what `retain` and `demote` say."""
        return self.how.get("eviction") == "cost-aware"

    @property
    def zeroes(self) -> bool:
        """Whether freed blocks are overwritten."""
        return bool(self.how.get("zero_on_free"))

    @property
    def all_events(self) -> Iterator[str]:
        """What must have happened on it, or on another that can have it."""
        yield from (*EVENTS, *self.events)
        if self.has_tiers:
            yield from TIERED
        if "remote" not in self.without and self.has_tiers:
            yield "from remote"
        if "pin" not in self.without:
            yield "pinned"
        if self.is_told:
            yield from ("retained", "demoted")


EVENTS = (
    *("finished", "second turns", "several answers", "stopped by a string", "streamed"),
    *("cancelled", "left", "stopped reading", "timed out", "closed under load", "preempted"),
    *("refused as PoolFull", "refused as InvalidArgument", "refused as NamespaceConflict"),
    *("refused by a quota", "refused by a tenant's quota", "tenants forgotten"),
    *("put", "dropped", "forget", "flushed", "restarts", "emptied"),
)
"""What must have happened on any kind: a soak takes up to twice its time for that."""
TIERED = ("no room in the store", "restored", "restored by another runner")
TIERED += ("from device", "from host", "from disk", "from computed")
AT_HOME_EVENTS = ("times that host memory was taken", "longer than the device")
PACKED_EVENTS = ("pages packed beside their prompt",)
FINAL_EVENTS = ("documents packed finally", "documents left as they were packed")

_LONG = {**WEIGHTS, LONG: 1}
_AT_HOME = Room(device=1280, frozen_quota=256)
_HOST_BYTES = 2200 * AT_HOME * HEAD_TOKEN_BYTES
"""Less than eight requests have pages of."""
_OVER_HOST: dict[str, Any] = {"heads": CHOOSING, "room": _AT_HOME, "weights": _LONG}
_PACKED_WITHOUT = frozenset({"pin", "healing", "remote"})
# Who gave way finds its own packed pages, and goes on behind these.
_ALIKE_PACKED = Alike(resumed=False, tokens=EXACTLY_PACKED, found=OF_SINK)
_LONG_LIBRARY = Library(shortest=300, spread=320, marked=2)
_LONG_DOCUMENTS = Room(6400, 2400, 9000, 4000, 1800)
_OWN_BASES = Packing(
    PackedFormat("top-r", HEAD_DIM, kept=16, channels=16, numbers="bf16"), copy_bytes=5 << 20
)
"""A format whose bases documents may own that a soak has time for, and room for two copies."""


def _dense(heads: Heads) -> Heads:
    """The same map where nobody chooses pages."""
    kept = ("full", "window")
    return tuple(tuple(of if of in kept else "full" for of in layer) for layer in heads)


KINDS = (
    Kind("materialise", {"eviction": "cost-aware"}, {"mode": "materialise"}),
    Kind(
        "share, windows, zeroed",
        {"eviction": "s3-fifo", "zero_on_free": True},
        {"mode": "share"},
        heads=UNEVEN,
    ),
    Kind(
        "host memory, exact arrivals",
        {"host_bytes": _HOST_BYTES, "host_arrivals": "exact", "eviction": "cost-aware"},
        {"mode": "materialise"},
        **_OVER_HOST,
        # Who gave way has its answer so far computed by all pages, and so may find who comes later.
        alike=Alike(kinds=(*EXACT, LONG), turns=False, resumed=False),
        events=AT_HOME_EVENTS,
    ),
    Kind(
        "host memory, whole arrivals",
        {"host_bytes": _HOST_BYTES, "host_arrivals": "whole", "eviction": "lru"},
        {"mode": "materialise"},
        **_OVER_HOST,
        alike=Alike(policies=(), kinds=()),
        events=AT_HOME_EVENTS,
    ),
    Kind(
        "host memory, late arrivals, fp8, mirrored, zeroed",
        {"host_bytes": _HOST_BYTES // 4, "host_dtype": "fp8", "host_copies": "mirror"}
        | {"zero_on_free": True, "eviction": "lfu"},
        {"mode": "materialise"},
        **_OVER_HOST,
        alike=Alike(policies=(), kinds=()),
        events=AT_HOME_EVENTS,
    ),
    Kind(
        "host memory, drafts, share",
        {"host_bytes": _HOST_BYTES, "speculate": 3},
        {"mode": "share"},
        **_OVER_HOST,
        twin_heads=_dense(CHOOSING),
        without=frozenset({"healing"}),
        alike=Alike(kinds=(*EXACT, LONG)),
        events=(*AT_HOME_EVENTS, "tokens drafted", "drafts accepted"),
    ),
    Kind(
        "int4, heads that choose",
        {"chunk_tokens": 320, "eviction": "cost-aware"},
        {"kv_dtype": "int4"},
        heads=CHOOSING,
        token_bytes=LAYERS * KV_HEADS * 38,
        without=_PACKED_WITHOUT,
        alike=_ALIKE_PACKED,
        events=PACKED_EVENTS,
    ),
    Kind(
        "bases of documents",
        {"chunk_tokens": 320, "eviction": "s3-fifo"},
        {"kv_dtype": _OWN_BASES},
        room=_LONG_DOCUMENTS,
        token_bytes=LAYERS * KV_HEADS * 2 * 34,
        without=_PACKED_WITHOUT,
        library=_LONG_LIBRARY,
        # The shared basis is made of what comes first.
        alike=replace(_ALIKE_PACKED, policies=("full", "prefix")),
        events=(*PACKED_EVENTS, *FINAL_EVENTS),
    ),
    Kind(
        "int8, documents by strategies",
        {"chunk_tokens": 320},
        {"kv_dtype": Packing("int8", strategy=Strategy(bound=0.5), copy_bytes=5 << 20)},
        heads=CHOOSING,
        room=replace(_LONG_DOCUMENTS, frozen_quota=1400),
        token_bytes=LAYERS * KV_HEADS * 40,
        without=_PACKED_WITHOUT,
        library=_LONG_LIBRARY,
        # A document for which there is no room beside the pool stays there.
        alike=replace(_ALIKE_PACKED, policies=("full", "prefix")),
        events=FINAL_EVENTS,
    ),
)
