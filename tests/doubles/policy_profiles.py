"""A profile as certifying a policy writes it, for tests of those who read one."""

from __future__ import annotations

from kvweave.policies.policy_profile import Bound, Evidence, PolicyProfile, Text


def profile(policy: str = "foresight:share=0.1", fingerprint: str = "f" * 64) -> PolicyProfile:
    found = Evidence("certify", policy, "all jobs", "all", None, 0, 24, 0, 0.02, 0.01, 0.03, 0.2)
    texts = (Text("sotu", "0123456789abcdef"),)
    bound = Bound("kl", 0.05)
    return PolicyProfile(
        fingerprint, "float32", policy, bound, 0.2, (found,), texts, 0, "0.1.0", "2026-01-01"
    )
