"""What the scheduler tells the workers of a step: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvweave.adapters.vllm.segments.document_weighing import StepWork
from kvweave.adapters.vllm.segments.markers import Markers


@dataclass
class Prompt:
    """A request that a worker has not seen, or sees again after a preemption: all its tokens."""

    tokens: list[int]
    markers: Markers


@dataclass
class Chunk:
    """Tokens [start, end) of a request with markers, scheduled in this step.

    `first_slot` is where the KV of `start` goes, as vLLM numbers slots: no other request of the
    batch writes there, so it says which one this is. `prompt` comes with the first chunk.
    """

    request_id: str
    start: int
    end: int
    first_slot: int
    prompt: Prompt | None = None


@dataclass
class SegmentMessage(KVConnectorMetadata):
    """Chunks of this step, and requests of which nothing more will come.

    `reset`: before anything of it is looked up, what requests left in the store is to go.
    `work`: what all requests of the step come to, marked or not, where a folder's documents are
    weighed by it.
    """

    chunks: list[Chunk] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    reset: bool = False
    work: StepWork = field(default_factory=StepWork)
