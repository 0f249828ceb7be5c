"""What a soak holds an engine to: nothing left when idle, flat memory, true metrics, quiet logs."""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvweave.adapters.vllm.versions import is_known

MIB = 1 << 20
MOST_GROWTH = 8 * MIB
"""Memory that a process may seem to gain over the second half: allocators give back in pieces."""
RIGHT_COUNTS = ("0.33",)


def left_behind(llm: Any) -> list[str]:
    """What an engine without requests still holds for some: blocks, prompts, names."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool, worker = scheduler.kv_cache_manager.block_pool, get_kv_transfer_group().worker
    stats = worker.store.cache.stats()
    found = {
        "requests of the scheduler": len(scheduler.requests),
        "blocks of vLLM": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "marked requests of the scheduler": len(scheduler.connector.requests._marked),
        "admitted prompts of the worker": len(worker._admitted),
        "prompts of the worker": len(worker._prompts),
        "held blocks of the store beyond the frozen": stats["held"] - stats["frozen"],
        "names of the front": len(llm.llm_engine.output_processor.request_states),
    }
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        name = type(manager).__name__
        found[f"requests of {name}"] = sum(map(bool, manager.req_to_blocks.values()))
        found[f"guarded requests of {name}"] = len(manager._exact)
    worker.store.cache.check()
    return [f"{count} {what}" for what, count in found.items() if count]


@dataclass
class Memory:
    """Memory of this process, of the GPU and in objects, each time that the engine was idle."""

    seconds: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)

    def look(self, at: float) -> None:
        """Takes a sample, behind a collection of garbage."""
        import torch

        gc.collect()
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        self.seconds.append(at)
        self.resident.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.device.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
        self.objects.append(len(gc.get_objects()))

    def growth(self, samples: list[int]) -> float:
        """What a line through the second half of samples rises by."""
        half = len(samples) // 2
        if len(samples) - half < 3:
            return 0.0
        seconds = np.array(self.seconds[half:])
        slope = float(np.polyfit(seconds, np.array(samples[half:], float), 1)[0])
        return slope * float(seconds[-1] - seconds[0])

    def complaints(self) -> list[str]:
        """Where memory is not flat."""
        grown = {"resident": self.growth(self.resident), "device": self.growth(self.device)}
        return [
            f"{what} memory grew by {size / MIB:.1f} MiB over the second half"
            for what, size in grown.items()
            if size > MOST_GROWTH
        ]


class LogWatch(logging.Handler):
    """Errors, and whatever has a traceback, in the logs of vLLM and kvweave.

    Made once vLLM is imported, which takes away handlers that were there before.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.errors: list[str] = []
        for name in ("vllm", "kvweave", ""):
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps what is an error."""
        text = record.getMessage()
        if record.levelno >= logging.ERROR or record.exc_info or "Traceback" in text:
            self.errors.append(f"{record.name}: {text}")

    def close(self) -> None:
        """Hears no more."""
        for name in ("vllm", "kvweave", ""):
            logging.getLogger(name).removeHandler(self)
        super().close()


def counted() -> Counter[str]:
    """The metrics of vLLM and kvweave, summed over labels but those of what they are of."""
    from prometheus_client import REGISTRY

    found: Counter[str] = Counter()
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith(("vllm:", "kvweave_")):
                own = [sample.labels[key] for key in ("kind", "state") if key in sample.labels]
                found[".".join([sample.name, *own])] += sample.value
    return found


def metric_complaints(ended: Counter[str]) -> list[str]:
    """Where metrics do not say what happened. `ended`: sequences by how they ended; engine idle.

    An offline `LLM` of vLLM 0.26 drops what a step says in which nobody got a token, as
    docs/vllm.md says: there only vLLM's own counts are looked at.
    """
    import vllm
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    found, store = counted(), get_kv_transfer_group().worker.store
    hits = sum(n for name, n in found.items() if name.startswith("kvweave_hit_tokens_total"))
    misses = found["kvweave_missed_tokens_total"]
    reused, again = (found[f"kvweave_{n}_tokens_total"] for n in ("reused", "recomputed"))
    scheduled = found["kvweave_prompt_tokens_total"]
    copied, moved = (found[f"kvweave_{n}_keys_total"] for n in ("copied", "moved"))
    said = {state: found[f"kvweave_store_bytes.{state}"] for state in store.bytes_by_state()}
    finished = found["vllm:request_success_total"]
    ours = {
        f"{reused} reused tokens of {hits} found": 0 < reused <= hits,
        f"{again} recomputed tokens of {reused} reused": 0 < again <= reused,
        f"{moved} moved keys of {copied} copied": 0 < moved <= copied,
        f"{scheduled} tokens scheduled of {hits + misses} looked up": scheduled <= hits + misses,
        f"bytes of the store {said}, {store.bytes_by_state()} held": said == store.bytes_by_state(),
    }
    holds = {
        **(ours if is_known(vllm.__version__, RIGHT_COUNTS) else {}),
        f"{finished} finished sequences, {ended} answered": finished >= ended["finished"],
        "running requests": not found["vllm:num_requests_running"],
        "waiting requests": not found["vllm:num_requests_waiting"],
    }
    return [what for what, is_so in holds.items() if not is_so]
