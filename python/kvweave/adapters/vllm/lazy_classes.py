"""Classes looked up when vLLM needs one: only then is the choice of the user known.

`PagedBackend` is ours, and so are the models. Names of vLLM's own backends are what its CPU platform
gets: ours where the user asked for `CUSTOM`, and otherwise vLLM's own class, untouched. An unknown
version of vLLM is refused before anything of it is extended.
"""

from __future__ import annotations

from typing import Any

from kvweave.adapters.vllm import versions
from kvweave.adapters.vllm.model_names import MODELS
from kvweave.adapters.vllm.options import options_of
from kvweave.adapters.vllm.served_models import check_attention

ON_CPU = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")
"""Backends of which vLLM's CPU platform takes one, whatever was asked for."""


def __getattr__(name: str) -> Any:
    if name == "PagedBackend" or (name in ON_CPU and _asked_for()):
        return _paged_backend()
    if name in MODELS:
        versions.check_installed()
        from kvweave.adapters.vllm import models

        return getattr(models, name)
    if name in ON_CPU:
        return _stock(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _paged_backend() -> Any:
    versions.check_installed()
    from vllm.config import get_current_vllm_config_or_none

    from kvweave.adapters.vllm.backend.paged_backend import PagedBackend

    config = get_current_vllm_config_or_none()
    if config is not None:
        check_attention(config)
        # A model of vLLM's own class does not read them: what can never be right is refused here.
        options_of(config.additional_config)
    return PagedBackend


def _stock(name: str) -> Any:
    """VLLM's own class, whatever is registered in its place."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return resolve_obj_by_qualname(AttentionBackendEnum[name].value)


def _asked_for() -> bool:
    """Whether the engine that is being built was told to use `CUSTOM`."""
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return bool(get_current_vllm_config().attention_config.backend is AttentionBackendEnum.CUSTOM)
