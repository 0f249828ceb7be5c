"""vLLM's own manager of tiers over our store, without an engine."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.base import make_offload_key as key_of
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvweave.adapters.vllm.store_tier import tier as tier_module
from kvweave.adapters.vllm.store_tier.settings import ChunkOrigin

CHUNK = 4096 * 3
ORIGIN = ChunkOrigin("a model", "bf16", "vllm-chunk", layers=4, kv_heads=2, head_dim=32)
PATIENCE_S = 60


def keys(count: int, seed: int = 0) -> list[OffloadKey]:
    """Names of chunks, as vLLM hashes them."""
    digests = (hashlib.sha256(f"{seed} {number}".encode()).digest() for number in range(count))
    return [key_of(digest, 0) for digest in digests]


def content(key: OffloadKey) -> np.ndarray:
    """What is in a chunk of a name, u8 [CHUNK]."""
    return np.random.default_rng(list(key)).integers(0, 256, CHUNK, np.uint8)


class Tiers:
    """A primary tier in vLLM's shared region, and the tiers behind it."""

    def __init__(self, settings: dict[str, Any], chunks: int, policy: dict[str, str]) -> None:
        extra = {"cpu_bytes_to_use": chunks * CHUNK, "secondary_tiers": [settings], **policy}
        parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False)
        self.spec = TieringOffloadingSpec(
            OffloadingConfig(
                groups=(OffloadingGroupConfig(16, ("layer.0",), 0),),
                worker_kv_bytes_per_block=CHUNK,
                enable_kv_cache_events=False,
                extra_config=extra,
                engine_id=uuid.uuid4().hex,
                model=OffloadingModelConfig("a model", "bfloat16", 512),
                cache=OffloadingCacheConfig(16, 1),
                parallel=parallel,
            )
        )
        self.manager: Any = self.spec.get_manager()
        self.tier: Any = self.manager.secondary_tiers[0]
        self.requests = 0

    def begin(self, salt: str = "") -> ReqContext:
        """A request comes."""
        self.requests += 1
        context = ReqContext(f"request {self.requests}")
        if hasattr(self.tier, "expect"):
            self.tier.expect(context.req_id, salt)
        self.manager.on_new_request(context)
        return context

    def end(self, context: ReqContext) -> None:
        """It is over, and all that it asked for too."""
        self.manager.on_request_finished(context)
        self.settle()

    def step(self) -> None:
        """What vLLM says once a step."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        """Steps until nothing goes on."""
        end = time.monotonic() + PATIENCE_S
        self.step()
        while self.manager.has_pending_work():
            assert time.monotonic() < end, "expected an end of transfers"
            time.sleep(0.001)
            self.step()

    def store(self, names: Sequence[OffloadKey], salt: str = "") -> None:
        """A request whose chunks an engine has computed, as `content` has them."""
        context = self.begin(salt)
        for place, name in enumerate(names):
            context.set_offload_key_position(name, 16 * (place + 1))
        given = self.manager.prepare_store(names, context)
        assert given is not None
        rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        for name, chunk in zip(given.keys_to_store, given.store_spec.chunk_ids, strict=True):
            rows[chunk, :CHUNK] = content(name)
        del rows
        if given.keys_to_store:
            self.manager.complete_store(given.keys_to_store, context)
        self.end(context)

    def found(self, names: Sequence[OffloadKey], salt: str = "") -> list[bool]:
        """Which chunks come when a request asks; those that do are as `content` has them."""
        context, found = self.begin(salt), []
        for name in names:
            end = time.monotonic() + PATIENCE_S
            said = self.manager.lookup(name, context)
            while said in (LookupResult.RETRY, LookupResult.HIT_PENDING):
                assert time.monotonic() < end, "expected an answer"
                self.step()
                time.sleep(0.001)
                said = self.manager.lookup(name, context)
            found.append(said is LookupResult.HIT)
            if found[-1]:
                chunk = self.manager.prepare_load([name], context).chunk_ids[0]
                rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
                assert np.array_equal(rows[chunk, :CHUNK], content(name))
                del rows
                self.manager.complete_load([name], context)
        self.end(context)
        return found


@contextmanager
def tiers(
    folder: Path,
    chunks: int = 64,
    origin: ChunkOrigin = ORIGIN,
    policy: dict[str, str] | None = None,
    **settings: Any,
) -> Iterator[Tiers]:
    """A manager with room for so many chunks before a store in a folder."""
    tier = {"type": "StoreTier", "module_path": tier_module.__name__, "of": asdict(origin)}
    made = Tiers({**tier, "folder": str(folder), **settings}, chunks, policy or {})
    try:
        yield made
    finally:
        made.manager.shutdown()


def write_for_ever(folder: Path, seed: int, said: Any) -> None:
    """Stores chunks, and says of each run of eight when all of them were acknowledged."""
    with tiers(folder) as made:
        # Who is killed removes nothing; the mapping stays.
        Path(made.spec._scheduler_mmap.mmap_path).unlink()
        for run in range(10**6):
            made.store(keys(8, seed + run))
            said.send(seed + run)
