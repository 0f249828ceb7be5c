"""What segment reuse did, counted; it travels to the front process as vLLM's connector stats."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvweave.adapters.vllm.segments.known_documents import Change
from kvweave.adapters.vllm.segments.outcome import PromptOutcome


@dataclass
class SegmentStats:
    """Counts since the last report of a worker (of the first of its group: all count the same).

    `requests` with markers whose prompt was looked up; `prompt_tokens` of their scheduled chunks.
    `hits` by kind: tokens that the store had, "prefix" (exact, of any request), "request" and
    "frozen" (segments of an earlier request, of a knowledge base). `reused_tokens`: those of them
    that were scheduled, which vLLM's own prefix cache did not have; `recomputed_rows`, those of
    these that the policy had computed again. `rows`: (row, layer) pairs of chunks with reuse that
    were computed, by each pass anew; `rows_spared`, those that no pass computed. `copied_keys`:
    (token, layer) pairs copied from the store; `moved_keys`, those rotated to another position
    (Delta-RoPE). `misses`: tokens not reused, by the store's reasons, and
    "refused" for prompts that the store had no room for or could not take. `store_bytes`: how
    much more of the store is "free", "held", "cached" and (of these) "frozen" than at the last
    report. For the scheduler alone: `outcomes`, by request what became of its prompt, and
    `documents`, those that came into the store and went.
    """

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    recomputed_rows: int = 0
    rows: int = 0
    rows_spared: int = 0
    copied_keys: int = 0
    moved_keys: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    store_bytes: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, PromptOutcome] = field(default_factory=dict)
    documents: list[Change] = field(default_factory=list)

    def outcome(self, request: str) -> PromptOutcome:
        """What became of a request's prompt, to be added to."""
        return self.outcomes.setdefault(request, PromptOutcome())

    def add(self, other: SegmentStats) -> None:
        """Adds the counts of another interval."""
        for request, outcome in other.outcomes.items():
            self.outcome(request).add(outcome)
        for name, value in vars(other).items():
            if name == "outcomes":
                continue
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that any process can read."""
        plain = {
            name: dict(value) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }
        outcomes = {request: outcome.to_dict() for request, outcome in self.outcomes.items()}
        return {**plain, "outcomes": outcomes}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SegmentStats:
        """What `to_dict` gave."""
        counters = {name: Counter(value) for name, value in data.items() if isinstance(value, dict)}
        outcomes = {
            request: PromptOutcome.from_dict(outcome)
            for request, outcome in data.get("outcomes", {}).items()
        }
        return cls(**{**data, **counters, "outcomes": outcomes})


class SegmentConnectorStats(KVConnectorStats):
    """`SegmentStats` as vLLM carries and adds them; `data` is `SegmentStats.to_dict`."""

    @property
    def counts(self) -> SegmentStats:
        """The counts of the interval."""
        return SegmentStats.from_dict(self.data)

    def reset(self) -> None:
        """Starts a new interval."""
        self.data = SegmentStats().to_dict()

    def take_documents(self) -> list[Change]:
        """Documents that came and went; the report is then of counts alone."""
        return [(kind, name, tokens) for kind, name, tokens in self.data.pop("documents", ())]

    def take_outcomes(self) -> dict[str, PromptOutcome]:
        """What became of prompts, by request; the report is then of nobody's in particular."""
        taken = self.data.pop("outcomes", {})
        return {request: PromptOutcome.from_dict(outcome) for request, outcome in taken.items()}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds another interval to this one."""
        counts = self.counts
        counts.add(SegmentStats.from_dict(other.data))
        self.data = counts.to_dict()
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log shows of an interval."""
        counts = self.counts
        return {
            "Prompts with segments": counts.requests,
            "Reused tokens": counts.reused_tokens,
            "Recomputed rows": counts.recomputed_rows,
        }

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return self.counts == SegmentStats()
