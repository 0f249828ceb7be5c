"""Room that is made for a power of two, so that what grows step by step is made anew seldom."""

from __future__ import annotations


def power_of_two(least: int) -> int:
    """The smallest power of two that is no less than a number; 1 where that is 0."""
    return 1 << max(0, least - 1).bit_length()
