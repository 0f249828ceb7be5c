"""`python -m benchmarks.replay.segments FOLDER [--record]`: what systems that know prefixes miss.

Documents are laid over real traces as `overlay` says. One cache finds what a prompt begins with;
another, of the same room, finds documents wherever they stand as well, and what a session had
behind them. Neither is told anything: least recently used goes first. FLOPs are those of
Llama-3.1-8B's shape; of every document token that is reused, `RECOMPUTED` is computed again, and a
document that is not there is computed alone before its prompt. Nothing is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.quality.sampled import show
from benchmarks.replay.flops import flops_of_prefix
from benchmarks.replay.overlay import Laid, Library, lay
from benchmarks.replay.run import PERCENTS, traces_in
from benchmarks.replay.through_cache import OTHER, cache_of
from benchmarks.replay.traces import BLOCK_TOKENS, Blocks, Trace
from kvweave.cache import KvCache, PlanSpan
from kvweave.lab.bench.rows import Row, expect

CASE = "replay_segments"
RECOMPUTED = 0.2
"""Of reused documents: what `foresight` takes to keep answers (docs/foresight.md)."""


@dataclass
class Found:
    """Blocks that were found, and FLOPs that were not computed for it."""

    prefix: int = 0
    documents: int = 0
    own: int = 0
    flops: float = 0.0

    @property
    def blocks(self) -> int:
        """All that were found."""
        return self.prefix + self.documents + self.own


def flops_between(start: int, end: int) -> int:
    """FLOPs of the rows of blocks [start, end) of a prompt."""
    return flops_of_prefix(end * BLOCK_TOKENS) - flops_of_prefix(start * BLOCK_TOKENS)


def found_by_prefix(prompts: Sequence[Laid], room: int) -> Found:
    """What prompts find from their first block on."""
    cache, found = cache_of(room, "lru"), Found()
    for prompt in prompts:
        with cache.admit(np.append(prompt.contents, OTHER)) as request:
            blocks = int(request.plan.reused_prefix)
            request.commit(len(prompt.contents), len(prompt.contents))
        found.prefix += blocks
        found.flops += flops_between(0, blocks)
    cache.check()
    return found


def found_with_segments(prompts: Sequence[Laid], room: int) -> Found:
    """What prompts find where each document of theirs is marked, and what is behind the last."""
    cache, found = cache_of(room, "lru"), Found()
    for prompt in prompts:
        for start, end in prompt.documents:
            _insert(cache, prompt.contents[start:end], found)
        length, exact = len(prompt.contents), len(prompt.contents)
        marks = [(start, end, "") for start, end in prompt.documents]
        if prompt.documents:
            exact, behind = prompt.documents[0][0], prompt.documents[-1][1]
            marks += [(behind, length, "")] if behind < length else []
        tokens = np.append(prompt.contents, OTHER)
        with cache.admit(tokens, segments=marks, mode="share") as request:
            _count(found, prompt, request.plan.spans)
            request.finish_copies()
            request.commit(length, exact)
    cache.check()
    return found


def _insert(cache: KvCache, document: Blocks, found: Found) -> None:
    """Computes what is not there of a document, alone."""
    if cache.match_segment(document) == len(document):
        return
    with cache.admit(np.append(document, OTHER)) as request:
        there = int(request.plan.reused_prefix)
        request.commit(len(document), len(document))
    found.documents -= len(document) - there
    found.flops -= flops_between(there, len(document))


def _count(found: Found, prompt: Laid, spans: Sequence[PlanSpan]) -> None:
    """Adds what a plan's spans reuse."""
    of_document = np.zeros(len(prompt.contents) + 1, bool)
    for start, end in prompt.documents:
        of_document[start:end] = True
    for span in spans:
        if span.kind == "recompute":
            continue
        if span.kind == "prefix":
            found.prefix += span.end - span.start
            found.flops += flops_between(span.start, span.end)
        elif of_document[span.start]:
            found.documents += span.end - span.start
            found.flops += (1 - RECOMPUTED) * flops_between(span.start, span.end)
        else:
            found.own += span.end - span.start
            found.flops += flops_between(span.start, span.end)


def row_of(trace: Trace, percent: int, library: Library) -> Row:
    """Both caches over one trace, with room for a share of the contents that differ."""
    prompts = lay(trace, library)
    named = sum(len(prompt.contents) for prompt in prompts)
    unique = len(np.unique(np.concatenate([prompt.contents for prompt in prompts])))
    room = max(unique * percent // 100, max(len(prompt.contents) for prompt in prompts) + 1)
    prefix, segments = found_by_prefix(prompts, room), found_with_segments(prompts, room)
    whole = sum(flops_between(0, len(prompt.contents)) for prompt in prompts)
    documents = sum(end - start for prompt in prompts for start, end in prompt.documents)
    expect(segments.flops <= whole, f"expected no more than {whole} FLOPs, got {segments.flops}")
    of = {
        "with segments": segments.blocks / named,
        "documents, of all blocks": documents / named,
        "documents found by segments": segments.documents / named,
        "FLOPs spared: prefix": prefix.flops / whole,
        "FLOPs spared: segments": segments.flops / whole,
        "PFLOP beyond prefix": (segments.flops - prefix.flops) / 1e15,
    }
    return Row(f"{trace.name}, {percent} %: {room} blocks", prefix.blocks / named, "", None, of)


def main(words: list[str] | None = None) -> int:
    """Replays what is there; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.replay.segments", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the traces lie")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/records")
    chosen = parser.parse_args(words)
    traces = [trace for trace in traces_in(chosen.folder) if trace.name.startswith("Mooncake")]
    rows = [row_of(trace, percent, Library()) for trace in traces for percent in PERCENTS]
    if not rows:
        parser.error(f"folder: expected traces of Mooncake in {chosen.folder}, got none")
    show(CASE, rows, chosen.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
