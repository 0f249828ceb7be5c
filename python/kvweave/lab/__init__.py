"""Where policies, heads and ops are measured, and what was measured is drawn."""

from importlib import import_module
from types import ModuleType

_PACKAGES = ("bench", "drawing", "eval", "profile")


def __getattr__(name: str) -> ModuleType:
    if name not in _PACKAGES:
        raise AttributeError(f"module 'kvweave.lab' has no attribute {name!r}")
    return import_module(f"kvweave.lab.{name}")
