"""What a soak holds an engine of vLLM to: nothing left when idle, and true metrics."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvweave.adapters.vllm.versions import is_known

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


def held_far(llm: Any) -> list[str]:
    """As `left_behind`, of an engine whose pages may lie in the host's memory."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    scheduler, worker = llm.llm_engine.engine_core.engine_core.scheduler, get_kv_transfer_group()
    pool, manager = scheduler.kv_cache_manager.block_pool, scheduler.connector.manager
    far, memory = manager.far, worker.far
    found = {
        "requests of the scheduler": len(scheduler.requests),
        "blocks of vLLM": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "requests of the manager": sum(map(bool, manager.req_to_blocks.values())),
        "blocks of requests": manager.residency.pages.stats()["held"],
        "pages of the host": far.held,
        "requests with pages there": far.away,
        "requests with a seat": len(far._of),
        "seats taken for good": memory.nobody - len(far._seats),
        "requests of the worker": int((memory.seat_of != memory.nobody).sum()),
        "pages of the worker at home": int(memory.counts.sum()),
        "transfers of the worker that failed": memory.transfers.failed,
        "names of the front": len(llm.llm_engine.output_processor.request_states),
    }
    manager.residency.pages.check()
    return [f"{count} {what}" for what, count in found.items() if count]


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


def metric_complaints(ended: int) -> list[str]:
    """Where metrics do not say what happened. `ended`: sequences that were answered; engine idle.

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
        f"{finished} finished sequences, {ended} answered": finished >= ended,
        "running requests": not found["vllm:num_requests_running"],
        "waiting requests": not found["vllm:num_requests_waiting"],
    }
    return [what for what, is_so in holds.items() if not is_so]
