"""Recovery policies, one a file; each yields a plan for every layer and never runs a model."""

from __future__ import annotations

from collections.abc import Callable

from kvweave.errors import InvalidArgument
from kvweave.policies.base import Policy
from kvweave.policies.cacheblend import CacheBlend
from kvweave.policies.epic import Epic
from kvweave.policies.foresight import Foresight
from kvweave.policies.full import Full
from kvweave.policies.naive import Naive
from kvweave.policies.prefix import Prefix
from kvweave.policies.redknot import RedKnot
from kvweave.policies.sparsex import SparseX
from kvweave.policies.weave import Weave

POLICIES: dict[str, Callable[[], Policy]] = {
    "full": Full,
    "prefix": Prefix,
    "naive": Naive,
    "epic": Epic,
    "cacheblend": CacheBlend,
    "sparsex": SparseX,
    "foresight": Foresight,
    "redknot": RedKnot,
    "weave": Weave,
}
"""Policies by name, in the order that tables show them."""


def policy_of(policy: str | Policy) -> Policy:
    """A policy by its name with default settings, or the policy itself.

    # Errors
    `InvalidArgument` naming the known policies; also for a policy's class instead of the policy.
    """
    if isinstance(policy, type):
        raise InvalidArgument(f"policy: expected a name or {policy.__name__}(), got the class")
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise InvalidArgument(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
    return POLICIES[policy]()


__all__ = [
    "POLICIES",
    "CacheBlend",
    "Epic",
    "Foresight",
    "Full",
    "Naive",
    "Policy",
    "Prefix",
    "RedKnot",
    "SparseX",
    "Weave",
    "policy_of",
]
