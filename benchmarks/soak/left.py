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
from benchmarks.soak.served import Served, books_of, quota_of
from kvweave.cache import KvCache
from kvweave.runner import Runner
from kvweave.runner.kv.host_pool import HostPool
from kvweave.runner.kv.packed_pool import PackedPool
from kvweave.runner.tiers.host_tier import HostTier
from kvweave.runner.tiers.tiers import Tiers

LIVE = {"LiveRequest", "EngineRequest", "PrefillJob", "Prefill", "Expected", "Load", "Arrivals"}
LIVE |= {"Brought", "Server", "AsyncRunner", "Engine", "Tenant", "HeldBack", "Pin"}
LIVE |= {"Decoding", "RequestKv", "DocumentKv", "PartedJob", "PartedKv", "HostPages"}
LIVE |= {"PackedPrefix", "PackedDocuments", "DraftedDocuments", "TextCopy"}
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
    runner, room = served.runner, served.kind.room
    # Who was cancelled gives back what is just being read once that has ended.
    for reads in () if runner.tiers is None else runner.tiers.reads.values():
        reads.worker.wait()
    yield from _held("the device", runner.cache)
    for pool in runner.host.values():
        yield from _held_at_home(pool)
    if runner.packed is not None:
        yield from _held_packed(runner.packed)
    copied = runner.packing_stats().get("copied_bytes", 0)
    if copied:
        yield f"{copied} bytes of documents that are to be packed finally"
    yield from _kept_bounds(runner)
    quotas, quota = books_of(runner).stats()["quotas"], quota_of(runner, room.frozen_quota)
    for space in NAMESPACES:
        if quotas[space]["frozen"] > quota * len(books_of(runner).groups):
            yield f"{quotas[space]['frozen']} blocks frozen of {space}, of {quota} a group"
    if runner.tiers is not None:
        yield from _left_in_tiers(served, runner.tiers)


def _left_in_tiers(served: Served, tiers: Tiers) -> Iterator[str]:
    """What is on its way to or from tiers, and what they keep beyond their bounds."""
    assert tiers.host is not None
    assert tiers.disk is not None
    yield from _held("the host", tiers.host.cache)
    room, found = served.kind.room, tiers.stats()
    host, most = tiers.host.stats(), served.bytes_of(room.document)
    taken = (host["total"] - host["free"]) * host["block_bytes"]
    if host.get("taken_bytes", taken) > most:
        yield f"more than {most} bytes in the host's memory"
    held, by_space = tiers.disk.store.held()
    if held > served.bytes_of(room.stored):
        yield f"{held} bytes on disk, of {served.bytes_of(room.stored)}"
    quota = served.bytes_of(room.stored_quota)
    yield from (
        f"{size} bytes on disk of {space}, of {quota}"
        for space, size in by_space.items()
        if size > quota
    )
    writing = list((served.folder / "writing").iterdir())
    if writing:
        yield f"{len(writing)} files that nobody writes"
    in_flight = {"reading_bytes": found["reading_bytes"], "writing_bytes": found["writing_bytes"]}
    if found["remote"] is not None:
        in_flight |= {f"remote {name}": found["remote"][name] for name in in_flight}
    yield from (f"{size} {name}" for name, size in in_flight.items() if size)
    troubles = {kind: n for kind, n in found["troubles"].items() if kind not in TROUBLES}
    if troubles:
        yield f"troubles of the tiers: {troubles}"


def _held_at_home(pool: HostPool) -> Iterator[str]:
    """What of host memory pages of requests hold, and what was not brought or spilled at once."""
    pool.cache.check()
    stats, group = pool.stats(), pool.budget.group
    if stats["held"]:
        yield f"{stats['held']} blocks held in the host's memory of head group {group}"
    for what in ("failed", "retried"):
        if stats[what]:
            yield f"{stats[what]} transfers of head group {group} that {what}"


def _held_packed(pool: PackedPool) -> Iterator[str]:
    """Packed blocks that are held by no document, and texts packed finally that are none."""
    pool.cache.check()
    stats = pool.stats()
    # Documents that came from a tier and have no name stay until others need their room.
    cached = stats["final_cached"]
    if stats["held"] - cached != stats["frozen"]:
        yield f"{stats['held']} packed blocks held, {cached} cached, {stats['frozen']} frozen"
    if stats["final_blocks"] - cached > stats["frozen"]:
        yield f"{stats['final_blocks']} blocks packed finally, {stats['frozen']} frozen"


def _kept_bounds(runner: Runner) -> Iterator[str]:
    """Bounds of pages that heads choose from, kept for requests that have ended."""
    for slots in runner._decoder._slots:
        for group in () if slots.chosen is None else slots.chosen.groups:
            kept = len(group.bounds.values) - len(group.bounds.free)
            if kept:
                yield f"{kept} places of bounds of head group {group.budget.group}"


def live_objects() -> Counter[str]:
    """Objects of requests and servers in this process, by kind."""
    gc.collect()
    kinds = [type(one) for one in gc.get_objects()]
    return Counter(kind.__name__ for kind in kinds if kind.__name__ in LIVE and _is_ours(kind))


def _is_ours(kind: type) -> bool:
    return str(kind.__module__).startswith("kvweave.")


def emptied(runner: Runner, zeroes: bool) -> Iterator[str]:
    """Gives up all that a runner has, and says what of it is there then."""
    spaces = {""}
    for one in runner.segments():
        if runner.tiers is None:
            runner.delete(one.name, one.namespace)
        else:
            # A store keeps its names: what is there is restored later.
            books_of(runner).delete(one.name, one.namespace)
            runner._knowledge.deleted(one.name, one.namespace)
        spaces.add(one.namespace)
    for space in (*spaces, *NAMESPACES, "exact", "chats"):
        runner.forget(space)
    if runner.packed is not None:
        stats = runner.packed.stats()
        if stats["held"] or stats["cached"] or stats["final_bytes"]:
            yield f"{stats['held']} packed blocks held, {stats['final_bytes']} bytes packed finally"
    for what, cache, pages in _all_pages(runner):
        stats = cache.stats()
        if stats["held"] or stats["cached"]:
            yield f"{stats['held']} blocks held on {what}, {stats['cached']} cached, of none"
        # By their bytes: numbers of eight bits cannot be counted everywhere.
        left = int(pages.view(torch.uint8).count_nonzero()) if zeroes else 0
        if left:
            yield f"{left} bytes in freed pages of {what}"


def _all_pages(runner: Runner) -> Iterator[tuple[str, KvCache, torch.Tensor]]:
    """The caches of a runner with the pages that they count, but for packed ones."""
    yield "the device", runner.cache, torch.from_dlpack(runner.cache.arena)
    if runner.tiers is not None and runner.tiers.host is not None:
        host = runner.tiers.host
        yield "the host", host.cache, host.pages if isinstance(host, HostTier) else host.slots
    for group, pool in runner.host.items():
        yield f"the host's memory for head group {group}", pool.cache, pool.pages


def _held(what: str, cache: KvCache) -> Iterator[str]:
    cache.check()
    frozen, groups = cache.stats()["frozen"], cache.stats()["groups"]
    held = [group["held"] for group in groups]
    # A document is held in every group; the last one is for heads that a request has promoted.
    if any(count not in (frozen, 0) for count in held) or held[0] != frozen:
        yield f"blocks held on {what} in each group: {held}, {frozen} of them frozen"
