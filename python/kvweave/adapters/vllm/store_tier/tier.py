"""`StoreTier`: chunks of vLLM's host memory in a `kvweave.Store`, a shard each.

vLLM's manager calls it in the scheduler's process, which must not wait: files are looked at, read
and written by threads. A chunk's name is vLLM's own hash of its text and all text before it, with
the number of its group of layers; in a shard the words of that name stand where token ids stand
elsewhere, so they are compared on every hit. Nothing that differs or is spoiled is served: vLLM is
told that the chunk could not be loaded, and computes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobId, JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

from kvweave.adapters.vllm.own_store import opened_for
from kvweave.adapters.vllm.require import require
from kvweave.adapters.vllm.store_tier.metrics import TierCounts, metric_definitions
from kvweave.adapters.vllm.store_tier.settings import (
    OF,
    WHERE,
    ChunkCost,
    ChunkOrigin,
    TierSettings,
)
from kvweave.adapters.vllm.store_tier.sights import Sights
from kvweave.errors import InvalidArgument, KvweaveError
from kvweave.store import Provenance

_log = logging.getLogger(__name__)
PART = "chunk"


@dataclass(frozen=True)
class _Owner:
    """What is noted with a request: the namespace of its chunks."""

    namespace: str


@dataclass
class _Job:
    """A load or a store that goes on; `done` are the keys that came through.

    Of these `waiting` are not to be written before they come again.
    """

    job: TransferJob
    done: list[OffloadKey] = field(default_factory=list)
    waiting: list[OffloadKey] = field(default_factory=list)


class StoreTier(SecondaryTierManager):
    """Chunks on disk behind vLLM's host memory, with the settings of `TierSettings`.

    Errors: `InvalidArgument` for settings that cannot be, and those of `Store`.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **given: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        origin = given.pop(OF, None)
        expected = "kv_connector KvweaveOffloading, which says what chunks are of"
        require(WHERE, origin is not None, expected, "another connector", InvalidArgument)
        self.settings, self.origin = TierSettings.of(given), ChunkOrigin(**origin)
        self._cost = ChunkCost(self.origin, self.block_size_bytes)
        # Names in SHA-256, as vLLM's own: a tenant chooses what is hashed.
        self.store = opened_for(
            None if self.settings.shared else self.origin.model,
            f"{WHERE}.shared",
            self.settings.folder,
            hash="sha256",
            capacity_bytes=self.settings.capacity_bytes,
            quota_bytes=self.settings.quota_bytes,
            eviction=self.settings.eviction,
        )
        self.counts = TierCounts()
        self._sights = Sights()
        self._expected: dict[str, str] = {}
        self._jobs: dict[JobId, _Job] = {}
        self._told: set[str] = set()
        self._lookups = _Lookups(self)
        self._pool = DualQueueThreadPool(
            self.settings.read_threads, self.settings.write_threads, "kvweave_store_tier"
        )

    # ---- requests --------------------------------------------------------------------------------

    def expect(self, request_id: str, namespace: str) -> None:
        """Says whose a request is that vLLM is about to tell of."""
        self._expected[request_id] = namespace

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunks are offloaded as they come; what they cost is for the host memory's policy too."""
        req_context.set_state(_Owner(self._expected.pop(req_context.req_id, "")))
        req_context.set_state(self._cost)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forgets what was looked up for a request."""
        self._lookups.cleanup(req_context.req_id)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a chunk is in the store: asked of a thread, so known in a later step."""
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Has the thread look for what was asked in this step."""
        self._lookups.flush()

    # ---- transfers -------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Writes chunks of the host's memory, each for itself, unless they are there."""
        self._submit(job_metadata, self._put, self._pool.enqueue_store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Reads chunks into the host's memory."""
        self._submit(job_metadata, self._get, self._pool.enqueue_load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """What has ended since the last call; of loads, which chunks came."""
        results = []
        for job_id, _, seconds in self._pool.get_finished():
            ended = self._jobs.pop(job_id)
            keys = list(ended.job.keys)
            whole = len(ended.done) == len(keys)
            if ended.job.is_promotion and not whole:
                came = set(ended.done)
                # Else vLLM would ask for it again and again.
                self._lookups.mark_miss([key for key in keys if key not in came])
            loaded = tuple(ended.done) if ended.job.is_promotion and not whole else None
            size = (len(ended.done) - len(ended.waiting)) * self.block_size_bytes
            results.append(JobResult(job_id, whole, loaded or None, seconds, size))
        return results

    def drain_jobs(self) -> None:
        """Returns when no thread reads or writes the host's memory."""
        self._pool.wait_idle()

    def shutdown(self) -> None:
        """Ends the threads; what was not begun to be written is not kept."""
        self._lookups.shutdown()
        self._pool.shutdown(wait=True)

    # ---- metrics ---------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """What the server's `/metrics` has of such a tier."""
        return metric_definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call."""
        return self.counts.taken()

    # ---- in a thread -----------------------------------------------------------------------------

    def has(self, keys: Iterable[OffloadKey], namespace: str) -> list[bool]:
        """Which chunks the store has, by their heads."""
        of = self._provenance(namespace)
        return [self._tried("look_up", self.store.contains, of, words(key)) for key in keys]

    def _submit(self, job: TransferJob, action: Any, enqueue: Any) -> None:
        begun = self._jobs[job.job_id] = _Job(job)
        of = self._provenance(namespace_of(job.req_context))
        pairs = zip(job.keys, job.chunk_ids, strict=True)
        tasks = [partial(self._task, action, begun, of, key, int(chunk)) for key, chunk in pairs]
        enqueue(job.job_id, len(tasks), tasks)

    def _task(self, action: Any, job: _Job, of: Provenance, key: OffloadKey, chunk: int) -> None:
        # A view of vLLM's memory is held no longer than the thread works on it.
        memory = np.asarray(self._primary_kv_view)[chunk].view(np.uint8)
        if action(job, of, key, memory):
            job.done.append(key)
        if not job.job.is_promotion and len(job.done) == len(job.job.keys):
            self._tried("count", self._count)

    def _put(self, job: _Job, of: Provenance, key: OffloadKey, memory: Any) -> bool:
        if not self._admits(of, key):
            self.counts.first_sight()
            job.waiting.append(key)
            return True
        ttl, now = self.settings.ttl_s, int(time.time() * 1000)
        expires = None if ttl is None else now + int(ttl * 1000)
        cost = self.origin.cost(job.job.req_context.get_offload_key_position(key))
        terms = {"expires": expires, "cost": cost, "now": now}
        return self._tried("store", self.store.put, of, words(key), {PART: memory}, **terms)

    def _admits(self, of: Provenance, key: OffloadKey) -> bool:
        """Whether a chunk may be written: what comes once drives out nothing."""
        if self.settings.admission == "all":
            return True
        if self._sights.again((of.namespace, bytes(key))):
            return True
        parts = {PART: self.block_size_bytes}
        return self._tried("look_up", self.store.has_room, of, len(words(key)), parts)

    def _count(self) -> bool:
        self.counts.holds(self.store.held()[0])
        return True

    def _get(self, job: _Job, of: Provenance, key: OffloadKey, memory: Any) -> bool:
        return self._tried("load", self._read, of, words(key), memory)

    def _read(self, of: Provenance, name: npt.NDArray[np.uint32], memory: Any) -> bool:
        shard = self.store.get(of, name)
        if shard is None:
            return False
        self.counts.path(shard.read_into(PART, memory))
        return True

    def _tried(self, what: str, action: Any, *given: Any, **named: Any) -> bool:
        """Whether an action came through; what the store refuses is counted, and told of once."""
        try:
            return bool(action(*given, **named))
        except KvweaveError as error:
            kind = type(error).__name__
            self.counts.refused(what, kind)
            if kind not in self._told:
                self._told.add(kind)
                text = "kvweave store tier: could not %s a chunk: %s; later ones are counted alone"
                _log.warning(text, what.replace("_", " "), error)
            return False

    def _provenance(self, namespace: str) -> Provenance:
        return self.origin.provenance(namespace, self.block_size_bytes)


class _Lookups(AsyncLookupManager):
    """vLLM's own books of what is being looked up, with our store to look in."""

    def __init__(self, tier: StoreTier) -> None:
        self._store_tier = tier
        super().__init__(tier_type=tier.tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        """In the thread of this object."""
        return self._store_tier.has(keys, namespace_of(req_context))


def namespace_of(req_context: ReqContext) -> str:
    """Whose a request is; "" where nobody said."""
    owner = req_context.get_state(_Owner)
    return "" if owner is None else owner.namespace


def words(key: OffloadKey) -> npt.NDArray[np.uint32]:
    """A key as little-endian words, u32 [bytes / 4]."""
    return np.frombuffer(bytes(key), "<u4")
