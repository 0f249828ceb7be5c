"""How many of the reused tokens a policy recomputes: a share of them, or a count."""

from __future__ import annotations

from kvweave.arguments import real, whole


def check_budget(policy: str, share: float, count: int | None) -> None:
    """Refuses a budget that no prompt has, in a policy's name.

    # Errors
    `InvalidArgument` for a share outside 0..1 or a count below 0.
    """
    real(policy, share, 0.0, 1.0, name="share")
    if count is not None:
        whole(policy, count, 0, name="count")


def rows_of(share: float, count: int | None, reused: int) -> int:
    """How many of so many reused tokens are recomputed: the count, where there is one."""
    return min(round(share * reused) if count is None else count, reused)
