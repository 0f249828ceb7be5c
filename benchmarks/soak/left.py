"""What a quiet runner still holds that it should not: blocks, bytes, threads, files, requests."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.soak.asked import NAMESPACES
from benchmarks.soak.served import HOST_BYTES, QUOTA_BLOCKS, QUOTA_BYTES, STORE_BYTES, Served
from kvweave.cache import KvCache
from kvweave.runner import Runner

LIVE = {"LiveRequest", "EngineRequest", "PrefillJob", "Prefill", "Expected", "Load", "Arrivals"}
LIVE |= {"Brought", "Server", "AsyncRunner", "Engine", "Tenant", "HeldBack", "Pin"}
"""Objects that end with a request, or a server."""
FEWEST = 8
"""Looks at threads before halves are compared: in the first ones libraries still make theirs."""
TROUBLES = {"unwritten"}
"""What a store may say: a quota is used up, which is so here."""


@dataclass(frozen=True)
class Open:
    """Threads of this process, those that Python knows and all, and its open files."""

    threads: int
    known: tuple[str, ...]
    files: int

    @staticmethod
    def now() -> Open:
        """As it is now."""
        known = sorted(thread.name for thread in threading.enumerate())
        threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        return Open(threads, tuple(known), files)

    def beyond(self, before: Open) -> Iterator[str]:
        """What there is more of than before."""
        for name, now, was in (
            ("threads of Python", len(self.known), len(before.known)),
            ("open files", self.files, before.files),
        ):
            if now > was:
                yield f"{now} {name}, {was} before: {self.known}"


def more_threads(counts: list[int]) -> Iterator[str]:
    """Whether there were more threads in the second half of samples than ever in the first.

    A library makes its own when it first needs them, as a runtime's pool for blocking calls does,
    and may keep them; what a request left behind would add up.
    """
    half = len(counts) // 2
    if half < FEWEST:
        return
    first, second = max(counts[:half]), max(counts[half:])
    if second > first:
        yield f"{second} threads in the second half, {first} in the first"


def left_behind(served: Served) -> Iterator[str]:
    """What is held or kept where nothing is asked any more. Raises what the books' checks raise."""
    runner, tiers = served.runner, served.runner.tiers
    assert tiers is not None
    assert tiers.host is not None
    assert tiers.disk is not None
    # Who was cancelled gives back what is just being read once that has ended.
    for reads in tiers.reads.values():
        reads.worker.wait()
    stats, found = runner.cache.stats(), tiers.stats()
    yield from _held("the device", runner.cache)
    yield from _held("the host", tiers.host.cache)
    for space in NAMESPACES:
        frozen = stats["quotas"][space]["frozen"]
        if frozen > QUOTA_BLOCKS * len(runner.cache.groups):
            yield f"{frozen} blocks frozen of {space}, of {QUOTA_BLOCKS} a group"
    host = tiers.host.cache.stats()
    if (host["total"] - host["free"]) * tiers.host.stats()["block_bytes"] > HOST_BYTES:
        yield f"more than {HOST_BYTES} bytes in the host's memory"
    held, by_space = tiers.disk.store.held()
    if held > STORE_BYTES:
        yield f"{held} bytes on disk, of {STORE_BYTES}"
    yield from (
        f"{size} bytes on disk of {space}, of {QUOTA_BYTES}"
        for space, size in by_space.items()
        if size > QUOTA_BYTES
    )
    writing = list((served.folder / "writing").iterdir())
    if writing:
        yield f"{len(writing)} files that nobody writes"
    in_flight = {"reading_bytes": found["reading_bytes"], "writing_bytes": found["writing_bytes"]}
    in_flight |= {f"remote {name}": found["remote"][name] for name in in_flight}
    yield from (f"{size} {name}" for name, size in in_flight.items() if size)
    troubles = {kind: n for kind, n in found["troubles"].items() if kind not in TROUBLES}
    if troubles:
        yield f"troubles of the tiers: {troubles}"


def live_objects() -> Counter[str]:
    """Objects of requests and servers in this process, by kind."""
    gc.collect()
    kinds = [type(one) for one in gc.get_objects()]
    return Counter(kind.__name__ for kind in kinds if kind.__name__ in LIVE and _is_ours(kind))


def _is_ours(kind: type) -> bool:
    return str(kind.__module__).startswith("kvweave.")


def emptied(runner: Runner, zeroes: bool) -> Iterator[str]:
    """Gives up all that a runner has, and says what of it is there then."""
    tiers = runner.tiers
    assert tiers is not None
    assert tiers.host is not None
    spaces = {""}
    for one in runner.segments():
        runner.cache.delete(one.name, one.namespace)
        spaces.add(one.namespace)
    for space in (*spaces, *NAMESPACES, "exact", "chats"):
        runner.forget(space)
    for what, cache, pages in (
        ("the device", runner.cache, torch.from_dlpack(runner.cache.arena)),
        ("the host", tiers.host.cache, tiers.host.pages),
    ):
        stats = cache.stats()
        if stats["held"] or stats["cached"]:
            yield f"{stats['held']} blocks held on {what}, {stats['cached']} cached, of none"
        if zeroes and int(pages.count_nonzero()):
            yield f"{int(pages.count_nonzero())} numbers in freed pages of {what}"


def _held(what: str, cache: KvCache) -> Iterator[str]:
    cache.check()
    frozen, groups = cache.stats()["frozen"], cache.stats()["groups"]
    held = [group["held"] for group in groups]
    # A document is held in every group; the last one is for heads that a request has promoted.
    if any(count not in (frozen, 0) for count in held) or held[0] != frozen:
        yield f"blocks held on {what} in each group: {held}, {frozen} of them frozen"
