"""Classes looked up when vLLM needs one: only then is the choice of the user known.

`PagedBackend` is ours, and so are the models. A name of vLLM's own backends is vLLM's own class,
untouched, and what was set and nobody reads is said then; but on CPUs, where vLLM takes no notice
of `CUSTOM`, ours where the user asked for that. An unknown version of vLLM is refused before
anything of it is extended.
"""

from __future__ import annotations

from typing import Any

from kvweave.adapters.vllm import versions
from kvweave.adapters.vllm.model_names import MODELS
from kvweave.adapters.vllm.options import options_of
from kvweave.adapters.vllm.served_models import check_attention
from kvweave.adapters.vllm.start_line import log_unread

ON_CPU = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")
"""Backends of which vLLM's CPU platform takes one, whatever was asked for."""


def __getattr__(name: str) -> Any:
    if name == "PagedBackend" or (name in ON_CPU and _asked_for()):
        return _paged_backend()
    if name in MODELS:
        versions.check_installed()
        from kvweave.adapters.vllm import models

        return getattr(models, name)
    # vLLM's names of backends are in capitals; others need not be looked for.
    if name.isupper() and (path := _stock_path(name)):
        return _stock(path)
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


def _stock_path(name: str) -> str | None:
    """Where vLLM has its own class of a backend, whatever is registered in its place."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    found = AttentionBackendEnum.__members__.get(name)
    return None if found is None else found.value


def _stock(path: str) -> Any:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.utils.import_utils import resolve_obj_by_qualname

    config = get_current_vllm_config_or_none()
    if config is not None and config.model_config is not None:
        log_unread(config)
    return resolve_obj_by_qualname(path)


def _asked_for() -> bool:
    """Whether the engine that is being built was told to use `CUSTOM`."""
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return bool(get_current_vllm_config().attention_config.backend is AttentionBackendEnum.CUSTOM)
