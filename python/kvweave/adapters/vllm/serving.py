"""The options that vLLM wants for a part of the plugin, put together: for `LLM(…)` or a server.

Plain data; vLLM is not imported.
"""

from __future__ import annotations

import json
from typing import Any

from kvweave.adapters.vllm.composition import NOT_BESIDE, PAGES, SEGMENTS
from kvweave.adapters.vllm.options import SECTION, Options, options_of
from kvweave.adapters.vllm.require import require
from kvweave.adapters.vllm.segments.check_layers import PATH as CHECK
from kvweave.adapters.vllm.served_models import check_architecture
from kvweave.adapters.vllm.store_tier.settings import HOST_EVICTIONS, TierSettings
from kvweave.errors import InvalidArgument

PACKAGE = __package__
BLOCK_TOKENS = 16
"""Small blocks: local heads give theirs back sooner."""


def engine_options(architecture: str, *, metrics: bool = False, **options: Any) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for a model of this architecture (of its `config.json`).

    `options` are those of `additional_config["kvweave"]`: `heads`, `segment_bytes`, …; without
    any, the model is vLLM's own on our attention backend. `metrics`: what a map's heads hold is
    reported too; segments and virtual pages report in any case.

    Errors: `InvalidArgument` for an option that is not known or of another kind; `Unsupported` for
    an architecture without a class of ours, and for options that do not go together.
    """
    read = options_of({SECTION: options}, {})
    if read == Options():
        require("metrics", not metrics, "them of a part that has some", "the backend alone")
        return {"attention_config": {"backend": "CUSTOM"}}
    given: dict[str, Any] = {
        "hf_overrides": {"architectures": [check_architecture(architecture)]},
        "additional_config": {SECTION: options},
    }
    if read.segment_bytes is None or read.heads is not None:
        given["block_size"] = BLOCK_TOKENS
    if read.segment_bytes is None:
        if read.virtual_pages:
            given["kv_transfer_config"] = _connector("KvweavePages", "virtual_pages.connector")
        elif metrics:
            reports = _connector("KvweaveHeads", "heads.connector", "kv_producer")
            given["kv_transfer_config"] = reports
        return given
    why = NOT_BESIDE[SEGMENTS][PAGES]
    require(PAGES, not read.virtual_pages, f"none beside {SEGMENTS}, since {why}", "both")
    return {
        **given,
        "kv_transfer_config": _connector("KvweaveSegments", "segments.connector"),
        "logits_processors": [CHECK],
        "worker_extension_cls": f"{PACKAGE}.segments.extension.KnowledgeBaseWorker",
    }


def offloading_options(
    folder: str,
    host_bytes: int,
    *,
    chunk_tokens: int | None = None,
    host_eviction: str = "lru",
    **settings: Any,
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for vLLM's own offloading with our store as its tier on disk.

    vLLM keeps KV in `host_bytes` of the host's memory, and behind that in a store in `folder`, in
    chunks of `chunk_tokens` (None: vLLM's blocks). What leaves the host's memory first says
    `host_eviction`: vLLM's own "lru" or "arc", or "cost-aware", as our caches do by that name.
    `settings` are those of `TierSettings`: `capacity_bytes`, `quota_bytes` of each `cache_salt`, …

    Errors: `InvalidArgument` for a setting that is not known or of another kind.
    """
    TierSettings.of({"folder": folder, **settings})
    whole = type(host_bytes) is int and host_bytes >= 1
    require("host_bytes", whole, "bytes, at least 1", repr(host_bytes), InvalidArgument)
    known = isinstance(host_eviction, str) and host_eviction in HOST_EVICTIONS
    expected = f"one of {', '.join(HOST_EVICTIONS)}"
    require("host_eviction", known, expected, repr(host_eviction), InvalidArgument)
    tier = {"type": "StoreTier", "module_path": f"{PACKAGE}.store_tier.tier", "folder": folder}
    extra: dict[str, Any] = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": host_bytes}
    if host_eviction != "lru":
        extra |= HOST_EVICTIONS[host_eviction]
    if chunk_tokens is not None:
        extra["block_size"] = chunk_tokens
    extra["secondary_tiers"] = [{**tier, **settings}]
    connector = _connector("KvweaveOffloading", "store_tier.connector")
    return {"kv_transfer_config": {**connector, "kv_connector_extra_config": extra}}


def server_config(architecture: str, *, metrics: bool = False, **options: Any) -> str:
    """The same as the text of a file for `vllm serve MODEL --config FILE` (YAML).

    Segments come with the middleware that reads marked chats and has the routes of knowledge bases.
    """
    given = engine_options(architecture, metrics=metrics, **options)
    if "segment_bytes" in options:
        given["middleware"] = [f"{PACKAGE}.server.SegmentMiddleware"]
    return config_text(given)


def config_text(given: dict[str, Any]) -> str:
    """Keyword arguments of `vllm.LLM` as the text of a file for `vllm serve --config` (YAML)."""
    # JSON is YAML, whatever characters a path has.
    lines = [f"{name.replace('_', '-')}: {json.dumps(value)}" for name, value in given.items()]
    return "\n".join(lines) + "\n"


def _connector(name: str, module: str, role: str = "kv_both") -> dict[str, Any]:
    """Chooses a connector of ours.

    Of one that is no consumer vLLM gives an ended request's blocks back at once, where it has two
    steps in flight: that is for connectors that change nothing in a worker's memory.
    """
    return {
        "kv_connector": name,
        "kv_role": role,
        "kv_connector_module_path": f"{PACKAGE}.{module}",
    }
