"""A profile as certifying a policy writes it, for tests of those who read one."""

from __future__ import annotations

from kvweave.cache import HeadClassMap
from kvweave.policies.policy_profile import (
    Bound,
    Evidence,
    PolicyProfile,
    Text,
    TriedHeads,
    heads_digest,
)


def profile(
    policy: str = "foresight:share=0.1",
    fingerprint: str = "f" * 64,
    heads: HeadClassMap | None = None,
) -> PolicyProfile:
    digest = None if heads is None else heads_digest(heads)
    about = (policy, digest, "all jobs", "all", None, 0)
    found = Evidence("certify", *about, 24, 0, 0.02, 0.01, 0.03, 0.2, 0.9)
    return PolicyProfile(
        model_fingerprint=fingerprint,
        dtype="float32",
        policy=policy,
        bound=Bound("kl", 0.05),
        flops_share=0.2,
        kv_share=0.9,
        evidence=(found,),
        tried_heads=() if digest is None else (TriedHeads(digest, 3, 8),),
        texts=(Text("sotu", "0123456789abcdef"),),
        seed=0,
        kvweave="0.1.0",
        date="2026-01-01",
        heads=heads,
    )
