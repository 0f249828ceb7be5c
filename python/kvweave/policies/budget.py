"""How many of the reused tokens a policy recomputes: a share of them, or a count."""

from __future__ import annotations

from kvweave.errors import InvalidArgument


def check_budget(policy: str, share: float, count: int | None) -> None:
    """Refuses a budget that no prompt has, in a policy's name.

    # Errors
    `InvalidArgument` for a share outside 0..1 or a count below 0.
    """
    if not 0.0 <= share <= 1.0:
        raise InvalidArgument(f"{policy}: expected 0 <= share <= 1, got {share}")
    if count is not None and count < 0:
        raise InvalidArgument(f"{policy}: expected count >= 0, got {count}")


def rows_of(share: float, count: int | None, reused: int) -> int:
    """How many of so many reused tokens are recomputed: the count, where there is one."""
    return min(round(share * reused) if count is None else count, reused)
