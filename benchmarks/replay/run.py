"""Replays real traces: `python -m benchmarks.replay.run FOLDER [--record]`.

FOLDER has some of `mooncake_conversation_trace.jsonl` and `mooncake_synthetic_trace.jsonl`, of
kvcache-ai/Mooncake (`FAST25-release/traces`), and `agentic_sessions.jsonl`, whose form
`traces.agents` names; gzip may have packed them. In a cache with room for a share of the blocks
that a trace names, how many of all blocks of all prompts are found: by each order of eviction, by
the one that callers tell what they know, and by Belady's, who knows the future. Nothing is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.quality.sampled import show
from benchmarks.replay.belady import found_by_belady
from benchmarks.replay.flops import flops_of_prefix
from benchmarks.replay.through_cache import found_in_cache
from benchmarks.replay.told import Told
from benchmarks.replay.traces import BLOCK_TOKENS, Trace, agents, mooncake
from kvweave.lab.bench.rows import Row, expect

CASE = "replay"
PERCENTS = (5, 10, 25)
HOURS = (1, 8)
"""Agents' sessions begin at random within so many."""

_TOLD = {"told of sessions": Told(sessions=True), "and of a plan": Told(sessions=True, plan=True)}


def traces_in(folder: Path, sessions: int | None = None) -> Iterator[Trace]:
    """The traces of a folder; of agents' sessions the first so many."""
    for name in ("conversation", "synthetic"):
        for path in sorted(folder.glob(f"mooncake_{name}_trace.jsonl*")):
            yield mooncake(path, f"Mooncake, {name}")
    for path in sorted(folder.glob("agentic_sessions.jsonl*")):
        for hours in HOURS:
            span = "an hour" if hours == 1 else f"{hours} hours"
            yield agents(path, f"agents, begun within {span}", hours, sessions)


def row_of(trace: Trace, percent: int) -> Row:
    """What is found of a trace in a cache with room for a share of its blocks."""
    room, prompts = trace.unique * percent // 100, [turn.blocks for turn in trace.turns]
    found = {name: found_in_cache(trace, room, name) for name in ("lru", "cost-aware")}
    found |= {name: found_in_cache(trace, room, name) for name in ("s3-fifo", "lfu")}
    for name, told in _TOLD.items():
        found[name] = found_in_cache(trace, room, "cost-aware", told)
    found["Belady"] = found_by_belady(prompts, room)
    share = {name: sum(blocks) / trace.named for name, blocks in found.items()}
    most = max(share.values())
    expect(most == share["Belady"], f"expected no more than {share['Belady']}, got {most}")
    gap = share["Belady"] - share["lru"]
    closed = {
        f"of the gap: {name}": (share[name] - share["lru"]) / gap if gap else 1.0
        for name in ("cost-aware", *_TOLD)
    }
    whole = sum(flops_of_prefix(turn.tokens) for turn in trace.turns)
    spared = {name: spared_flops(trace, blocks) for name, blocks in found.items()}
    beyond = (spared["and of a plan"] - spared["lru"]) / 1e15
    of = {
        **{name: value for name, value in share.items() if name != "lru"},
        **closed,
        "FLOPs spared: lru": spared["lru"] / whole,
        "FLOPs spared: and of a plan": spared["and of a plan"] / whole,
        "PFLOP beyond lru": beyond,
    }
    return Row(f"{trace.name}, {percent} %: {room} blocks", share["lru"], "", None, of)


def spared_flops(trace: Trace, found: Sequence[int]) -> int:
    """What need not be computed of all prompts; the last token of each is."""
    parts = zip(trace.turns, found, strict=True)
    return sum(flops_of_prefix(min(n * BLOCK_TOKENS, turn.tokens - 1)) for turn, n in parts)


def main(words: list[str] | None = None) -> int:
    """Replays what is there; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.replay.run", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the traces lie")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/records")
    chosen = parser.parse_args(words)
    rows = [row_of(trace, percent) for trace in traces_in(chosen.folder) for percent in PERCENTS]
    if not rows:
        parser.error(f"folder: expected traces in {chosen.folder}, got none")
    show(CASE, rows, chosen.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
