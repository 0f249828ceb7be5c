"""Recovery policies, one a file; each yields a plan for every layer and never runs a model."""

from __future__ import annotations

from collections.abc import Callable

from kvweave.arguments import shown
from kvweave.errors import InvalidArgument
from kvweave.policies.base import Policy
from kvweave.policies.cacheblend import CacheBlend
from kvweave.policies.epic import Epic
from kvweave.policies.foresight import Foresight
from kvweave.policies.full import Full
from kvweave.policies.infoflow import InfoFlow
from kvweave.policies.naive import Naive
from kvweave.policies.prefix import Prefix
from kvweave.policies.prophet import Prophet
from kvweave.policies.random_rows import RandomRows
from kvweave.policies.redknot import RedKnot
from kvweave.policies.sparsex import SparseX
from kvweave.policies.weave import Weave

POLICIES: dict[str, Callable[[], Policy]] = {
    "full": Full,
    "prefix": Prefix,
    "naive": Naive,
    "random": RandomRows,
    "epic": Epic,
    "cacheblend": CacheBlend,
    "sparsex": SparseX,
    "prophet": Prophet,
    "infoflow": InfoFlow,
    "foresight": Foresight,
    "redknot": RedKnot,
    "weave": Weave,
}
"""Policies by name, in the order that tables show them."""

DEFAULT_POLICY = "foresight"
"""What recovers a prompt for which no policy is named."""


def is_exact(policy: Policy) -> bool:
    """Whether a policy is known to compute what full prefill does, but for rounding."""
    return isinstance(policy, (Full, Prefix))


def policy_of(policy: str | Policy) -> Policy:
    """A policy by its name with default settings, or the policy itself.

    # Errors
    `InvalidArgument` naming the known policies; also for a policy's class instead of the policy,
    and for what is no policy at all.
    """
    if isinstance(policy, type):
        raise InvalidArgument(f"policy: expected a name or {policy.__name__}(), got the class")
    if not isinstance(policy, str):
        if not callable(getattr(policy, "plan", None)) or not hasattr(policy, "reuse"):
            raise InvalidArgument(f"policy: expected a name or a policy, got {shown(policy)}")
        return policy
    if policy not in POLICIES:
        raise InvalidArgument(f"policy: expected one of {', '.join(POLICIES)}, got {shown(policy)}")
    return POLICIES[policy]()


__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "CacheBlend",
    "Epic",
    "Foresight",
    "Full",
    "InfoFlow",
    "Naive",
    "Policy",
    "Prefix",
    "Prophet",
    "RandomRows",
    "RedKnot",
    "SparseX",
    "Weave",
    "is_exact",
    "policy_of",
]
