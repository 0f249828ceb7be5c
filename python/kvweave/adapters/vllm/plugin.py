"""What vLLM calls in each of its processes: names are registered, nothing is imported or changed.

An unknown vLLM is refused when the backend is asked for, not here: whoever has kvweave installed
beside a newer vLLM and does not use it must not notice.
"""

from __future__ import annotations

import contextlib
from typing import Any

from kvweave.adapters.vllm import lazy_classes, versions
from kvweave.adapters.vllm.model_names import MODELS
from kvweave.adapters.vllm.segments.check_layers import CheckedLayers
from kvweave.adapters.vllm.start_line import log_unknown


def register() -> None:
    """Entry point of `vllm.general_plugins`; may be called any number of times."""
    from vllm import __version__

    known = versions.is_known(__version__)
    if known:
        log_unknown()
    # What is not known may lack what names are registered with: then none can be asked for.
    with contextlib.nullcontext() if known else contextlib.suppress(ImportError):
        _register_names(known=known)
    if known:
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from kvweave.adapters.vllm.heads.sink_manager import SinkWindowManager
        from kvweave.adapters.vllm.heads.spec import SinkWindowSpec
        from kvweave.adapters.vllm.segments.prefix_guard import MANAGERS
        from kvweave.adapters.vllm.top_k.prompt_prefix import PromptPrefixManager, PromptPrefixSpec

        MODELS_CONFIG_MAP.update(dict.fromkeys(MODELS, CheckedLayers))
        _register_manager(SinkWindowSpec, SinkWindowManager)
        _register_manager(PromptPrefixSpec, PromptPrefixManager)
        for spec, manager in MANAGERS.items():
            _register_manager(spec, manager)
    if versions.is_known(__version__, versions.WITH_VIRTUAL_PAGES):
        from kvweave.adapters.vllm.virtual_pages.manager import VirtualPagesManager
        from kvweave.adapters.vllm.virtual_pages.spec import VirtualPagesSpec

        _register_manager(VirtualPagesSpec, VirtualPagesManager)


def _register_names(*, known: bool) -> None:
    from vllm import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    looked_up = backends_looked_up(current_platform, known=known)
    register_backend(AttentionBackendEnum.CUSTOM, f"{lazy_classes.__name__}.PagedBackend")
    for backend in AttentionBackendEnum:
        if backend.name in looked_up and not backend.is_overridden():
            register_backend(backend, f"{lazy_classes.__name__}.{backend.name}")
    for name in MODELS:
        ModelRegistry.register_model(name, f"{lazy_classes.__name__}:{name}")


def backends_looked_up(platform: Any, *, known: bool) -> list[str]:
    """Backends of vLLM's own whose classes `lazy_classes` looks up, by their names.

    On a CPU vLLM takes one of these whatever backend was asked for. On a GPU its choice is the
    first to know the configuration where an engine has nothing of ours: what was set for us and
    nobody reads is told then. It is vLLM's own class all the same. A vLLM that is not `known` keeps
    its own table there.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if platform.is_cpu():
        return list(lazy_classes.ON_CPU)
    if platform.is_cuda() and known:
        return [backend.name for backend in AttentionBackendEnum if backend.value]
    return []


def _register_manager(spec: type, manager: type) -> None:
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    # vLLM fills the registry with its own specs only while it is empty: they come first.
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})
    KVCacheSpecRegistry.register(spec, manager, uniform_type_base_spec=spec)
