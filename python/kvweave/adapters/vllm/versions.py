"""Which versions of vLLM the plugin knows: their backend interface has no promise of stability."""

from __future__ import annotations

from importlib import import_module

from kvweave.adapters.vllm.require import require

SUPPORTED = ("0.26", "0.33")
# Since 0.28 a backend may price what vLLM allocates.
WITH_VIRTUAL_PAGES = ("0.33",)
# Since 0.33 its offloading takes tiers of others.
WITH_TIERS = ("0.33",)


def is_known(version: str, known: tuple[str, ...] = SUPPORTED) -> bool:
    """Whether the plugin, or a part of it, was tested with a version of vLLM."""
    return ".".join(version.split(".")[:2]) in known


def check(version: str, known: tuple[str, ...] = SUPPORTED) -> None:
    """Refuses a version of vLLM that the plugin, or a part of it, was not tested with.

    Errors: `Unsupported`, naming the versions that are known.
    """
    expected = " or ".join(f"{number}.x" for number in known)
    require("vllm", is_known(version, known), f"version {expected}", version)


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it refuses: in 0.33 that is no `ValueError` any more."""
    known = import_module("vllm.exceptions")
    return ValueError, TypeError, RuntimeError, getattr(known, "VLLMClientError", ValueError)


def check_installed(known: tuple[str, ...] = SUPPORTED) -> None:
    """Refuses the vLLM of this environment if it is not a known one."""
    check(import_module("vllm").__version__, known)
