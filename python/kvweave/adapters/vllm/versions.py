"""Which versions of vLLM the plugin knows: their backend interface has no promise of stability."""

from __future__ import annotations

from importlib import import_module

from kvweave.errors import Unsupported

SUPPORTED = ("0.26", "0.33")


def is_known(version: str) -> bool:
    """Whether the plugin was tested with a version of vLLM."""
    return ".".join(version.split(".")[:2]) in SUPPORTED


def check(version: str) -> None:
    """Refuses a version of vLLM that the plugin was not tested with.

    Errors: `Unsupported`, naming the versions that are known.
    """
    if is_known(version):
        return
    expected = " or ".join(f"{known}.x" for known in SUPPORTED)
    text = f"vllm: expected version {expected}, got {version}"
    raise Unsupported(text, expected=expected, got=version)


def check_installed() -> None:
    """Refuses the vLLM of this environment if it is not a known one."""
    check(import_module("vllm").__version__)
