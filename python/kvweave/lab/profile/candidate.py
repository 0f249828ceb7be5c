"""`Candidate`: a policy, and the head map that it runs under."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvweave.cache import HeadClassMap
from kvweave.policies import Policy
from kvweave.policies.policy_profile import heads_digest
from kvweave.policies.policy_text import text_of


@dataclass(frozen=True)
class Candidate:
    """What may be certified; `heads` None: every head keeps every token."""

    policy: Policy
    heads: HeadClassMap | None = None

    @cached_property
    def digest(self) -> str | None:
        """Names what each head keeps: see `heads_digest`; None without a map."""
        return None if self.heads is None else heads_digest(self.heads)

    @cached_property
    def text(self) -> str:
        """The policy as `read_policy` reads it."""
        return text_of(self.policy)

    @property
    def name(self) -> str:
        """What it is measured under: no two candidates share one."""
        return self.text if self.digest is None else f"{self.text} under {self.digest}"
