"""What vLLM's host memory finds of real prompts, by what leaves it first (vLLM 0.33).

`python -m benchmarks.vllm.host_tier FOLDER [--percents 5 10 25] [--requests N] [--record]` replays
traces (those of `benchmarks.replay.run`) through vLLM's own manager of offloaded chunks, with room
for a share of the chunks that a trace names: its policies "lru" and "arc", and ours. A request asks
for its chunks from the first on, loads those that are there, and offers all of them to be stored.
Nothing stands before the host's memory, and nothing behind it. A chunk has 512 tokens; FLOPs are of
Llama-3.1-8B's shape. Nothing is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from benchmarks.quality.sampled import show
from benchmarks.replay import flops
from benchmarks.replay.run import PERCENTS, spared_flops, traces_in
from benchmarks.replay.traces import BLOCK_TOKENS, Trace
from kvweave.adapters.vllm.store_tier.settings import HOST_EVICTIONS, ChunkCost, ChunkOrigin
from kvweave.flops import TextSizes
from kvweave.lab.bench.rows import Row

CASE = "vllm_host_tier"


def cost_of_shape() -> ChunkCost:
    """What chunks of Llama-3.1-8B's shape cost, with KV of two bytes."""
    row, both = flops.flops_of_prefix(1), flops.flops_of_prefix(2)
    pair = both - 2 * row
    sizes = TextSizes((row - pair) // 2, pair // 4)
    kv = {"layers": flops.LAYERS, "kv_heads": flops.KV_HEADS, "head_dim": flops.HEAD_DIM}
    origin = ChunkOrigin(
        "Llama-3.1-8B", "bf16", "replay", **kv, chunk_tokens=BLOCK_TOKENS, **sizes._asdict()
    )
    size = 2 * 2 * BLOCK_TOKENS * flops.LAYERS * flops.KV_HEADS * flops.HEAD_DIM
    return ChunkCost(origin, size)


def found_in_host(trace: Trace, room: int, eviction: str) -> list[int]:
    """How many chunks each prompt finds, in a host's memory with room for so many."""
    told = HOST_EVICTIONS[eviction]
    module = told.get("cache_policy_module_path")
    manager = CPUOffloadingManager(room, told["eviction_policy"], module)
    cost = cost_of_shape()
    return [_asked(manager, cost, f"{at}", turn.blocks) for at, turn in enumerate(trace.turns)]


def _asked(manager: CPUOffloadingManager, cost: ChunkCost, name: str, blocks: Sequence[int]) -> int:
    context = ReqContext(name)
    context.set_state(cost)
    keys = [make_offload_key(int(block).to_bytes(8, "big"), 0) for block in blocks]
    for place, key in enumerate(keys):
        context.set_offload_key_position(key, BLOCK_TOKENS * (place + 1))
    manager.on_new_request(context)
    hits = 0
    while hits < len(keys) and manager.lookup(keys[hits], context) is LookupResult.HIT:
        hits += 1
    if hits:
        manager.prepare_load(keys[:hits], context)
        manager.complete_load(keys[:hits], context)
    stored = manager.prepare_store(keys, context)
    if stored is not None and stored.keys_to_store:
        manager.complete_store(stored.keys_to_store, context)
    manager.on_request_finished(context)
    return hits


def row_of(trace: Trace, percent: int) -> Row:
    """What is found of a trace with room for a share of its chunks."""
    room = trace.unique * percent // 100
    found = {name: found_in_host(trace, room, name) for name in HOST_EVICTIONS}
    whole = sum(flops.flops_of_prefix(turn.tokens) for turn in trace.turns)
    share = {name: sum(chunks) / trace.named for name, chunks in found.items()}
    of = {name: value for name, value in share.items() if name != "lru"}
    for name, chunks in found.items():
        of[f"FLOPs spared: {name}"] = spared_flops(trace, chunks) / whole
    return Row(f"{trace.name}, {percent} %: {room} chunks", share["lru"], "", None, of)


def _cut(traces: Iterator[Trace], requests: int | None) -> Iterator[Trace]:
    for trace in traces:
        yield trace if requests is None else Trace(trace.name, trace.turns[:requests])


def main(words: list[str] | None = None) -> int:
    """Replays what is there; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.vllm.host_tier", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the traces lie")
    parser.add_argument("--percents", type=int, nargs="+", default=list(PERCENTS))
    parser.add_argument("--requests", type=int, help="the first so many of each trace")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/records")
    chosen = parser.parse_args(words)
    traces = _cut(traces_in(chosen.folder), chosen.requests)
    rows = [row_of(trace, percent) for trace in traces for percent in chosen.percents]
    if not rows:
        parser.error(f"folder: expected traces in {chosen.folder}, got none")
    show(CASE, rows, chosen.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
