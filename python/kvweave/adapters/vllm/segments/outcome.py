"""`PromptOutcome`: what became of one prompt, as its response says it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class PromptOutcome:
    """Tokens of one prompt with marks.

    `found` by kind, `missed` by reason: what a look-up in the store came to. `reused`: those found
    that were scheduled, which vLLM's own prefix cache did not have; `recomputed`, those of these
    that the policy had computed again.
    """

    found: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    reused: int = 0
    recomputed: int = 0

    def add(self, other: PromptOutcome) -> None:
        """Adds what became of further chunks."""
        self.found.update(other.found)
        self.missed.update(other.missed)
        self.reused += other.reused
        self.recomputed += other.recomputed

    def to_dict(self) -> dict[str, Any]:
        """Plain data that any process can read."""
        return {**vars(self), "found": dict(self.found), "missed": dict(self.missed)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PromptOutcome:
        """What `to_dict` gave."""
        return cls(
            Counter(data["found"]), Counter(data["missed"]), data["reused"], data["recomputed"]
        )
