"""Whose line a warning is about."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_PASSED_OVER = tuple(
    f"{folder}/" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent)
)


def caller_level() -> int:
    """The `stacklevel` of the nearest caller outside this package, and outside torch's wrappers.

    For a `warnings.warn` in the function that asks.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
        frame, level = frame.f_back, level + 1
    return level
