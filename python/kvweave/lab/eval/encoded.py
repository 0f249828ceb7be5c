"""What is encoded before a sample is measured: its segments, each alone, once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvweave.closing import Ending
from kvweave.lab.eval.sample import Sample
from kvweave.runner import Runner, Segment


@dataclass(frozen=True)
class Encoded:
    """A sample whose segments are in the knowledge base; FLOPs of encoding them, each once."""

    sample: Sample
    flops: int = 0


class KnowledgeBase(Ending):
    """Segments in a runner's knowledge base under a namespace of their own; a context manager.

    They are deleted again at the end, whatever happens.
    """

    def __init__(self, runner: Runner, namespace: str) -> None:
        self._runner = runner
        self._namespace = namespace
        self._names: dict[Segment, str] = {}
        self._flops = 0

    def holding(self, sample: Sample) -> Encoded:
        """The sample with its segments in the knowledge base: those that are not yet are encoded.

        The FLOPs are those of all that are there by then.
        """
        for segment in sample.knowledge:
            if segment not in self._names:
                name = f"segment-{len(self._names)}"
                report = self._runner.encode(_content(segment), name, self._namespace)
                self._flops += sum(report.flops.values())
                self._names[segment] = name
        parts = tuple(
            replace(part, namespace=self._namespace) if isinstance(part, Segment) else part
            for part in sample.parts
        )
        return Encoded(replace(sample, parts=parts), self._flops)

    def _end_of_block(self) -> None:
        names, self._names = self._names, {}
        for name in names.values():
            self._runner.delete(name, self._namespace)


@contextmanager
def inserted(runner: Runner, sample: Sample, namespace: str) -> Iterator[Encoded]:
    """The sample with its segments in the runner's knowledge base, as long as this is open."""
    with KnowledgeBase(runner, namespace) as base:
        yield base.holding(sample)


def _content(segment: Segment) -> str | Sequence[int]:
    if segment.tokens is not None:
        return segment.tokens
    return segment.text or ""
