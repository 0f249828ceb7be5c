"""Classes looked up when vLLM needs one: only then is the choice of the user known.

`PagedBackend` is ours. `CpuBackend` is what vLLM's CPU platform gets: ours where the user asked
for `CUSTOM`, and otherwise vLLM's own class, untouched. The models are ours. An unknown version
of vLLM is refused before anything of it is extended.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvweave.adapters.vllm import versions
from kvweave.adapters.vllm.model_names import MODELS

STOCK_CPU = ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackend")


def __getattr__(name: str) -> Any:
    if name == "PagedBackend" or (name == "CpuBackend" and _asked_for()):
        versions.check_installed()
        from kvweave.adapters.vllm.backend.paged_backend import PagedBackend

        return PagedBackend
    if name in MODELS:
        versions.check_installed()
        from kvweave.adapters.vllm import models

        return getattr(models, name)
    if name == "CpuBackend":
        module, stock = STOCK_CPU
        return getattr(import_module(module), stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _asked_for() -> bool:
    """Whether the engine that is being built was told to use `CUSTOM`."""
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return bool(get_current_vllm_config().attention_config.backend is AttentionBackendEnum.CUSTOM)
