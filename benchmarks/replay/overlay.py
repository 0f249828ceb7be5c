"""Documents laid over a trace, for its own files name blocks by chained numbers alone.

Hashes that are chained tell two prompts apart from their first other block on, so no trace says
which text stands in several prompts at different places. Here part of each session's own text is
taken to be documents of a library that all sessions ask: how many, how long and how popular they
are is an assumption, `Library` says it, and the rest is the trace's: when prompts come, how long
they are, and what they share with earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.replay.traces import Blocks, Trace, owners


@dataclass(frozen=True)
class Library:
    """`documents` of `least` to `most` blocks each, asked with weight 1 / rank^`skew`.

    `share`: of the text that a session's first prompt has for itself, at most so much is documents.
    """

    documents: int = 2000
    least: int = 4
    most: int = 16
    skew: float = 1.0
    share: float = 0.5


@dataclass(frozen=True, eq=False)
class Laid:
    """A prompt with documents: its blocks' contents i32 [n], and [start, end) of each document."""

    contents: Blocks
    documents: Sequence[tuple[int, int]]


def lay(trace: Trace, library: Library, seed: int = 0) -> list[Laid]:
    """The prompts of a trace, with documents behind the first block that is a session's own.

    Later prompts of the session have them where they name the same blocks. Contents that are no
    document's keep their numbers.
    """
    draws = np.random.default_rng(seed)
    sizes = draws.integers(library.least, library.most, library.documents, endpoint=True)
    weights = 1 / np.arange(1, library.documents + 1) ** library.skew
    beyond = 1 + max(int(turn.blocks.max(initial=-1)) for turn in trace.turns)
    first = beyond + np.concatenate(([0], np.cumsum(sizes)[:-1]))
    own = owners(trace)
    content: dict[int, int] = {}
    begun: set[int] = set()
    for turn in trace.turns:
        if turn.session in begun:
            continue
        begun.add(turn.session)
        blocks = [block for block in turn.blocks.tolist() if own[block] == turn.session]
        room = blocks[1 : 1 + int(library.share * len(blocks))]
        for document in _drawn(draws, weights, sizes, len(room)):
            part, room = room[: sizes[document]], room[sizes[document] :]
            content.update((block, int(first[document]) + at) for at, block in enumerate(part))
    begins = frozenset(first.tolist())
    return [_laid(turn.blocks, content, begins) for turn in trace.turns]


def _drawn(
    draws: np.random.Generator,
    weights: npt.NDArray[np.float64],
    sizes: npt.NDArray[np.int64],
    room: int,
) -> Iterator[int]:
    """Documents that differ, until the next has no room."""
    if room < sizes.min():
        return
    shares = weights / weights.sum()
    most = min(len(sizes), room // int(sizes.min()) + 1)
    for document in draws.choice(len(sizes), most, replace=False, p=shares).tolist():
        room -= int(sizes[document])
        if room < 0:
            return
        yield document


def _laid(blocks: Blocks, content: dict[int, int], begins: frozenset[int]) -> Laid:
    contents = np.asarray([content.get(block, block) for block in blocks.tolist()], np.int32)
    documents: list[tuple[int, int]] = []
    for at, block in enumerate(blocks.tolist()):
        if block not in content:
            continue
        if content[block] in begins:
            documents.append((at, at + 1))
        elif documents and documents[-1][1] == at:
            documents[-1] = (documents[-1][0], at + 1)
    return Laid(contents, documents)
