"""What chunks of an engine's KV are of: the weights, and all that says how their bytes lie."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config

from kvweave.adapters.vllm.model_identity import model_identity
from kvweave.adapters.vllm.require import require
from kvweave.adapters.vllm.store_tier.settings import ChunkOrigin
from kvweave.flops import TextSizes

DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
DTYPES |= {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3"}
HASHES = ("sha256", "sha256_cbor")
# Of vLLM's own description of an engine's KV: what no byte of a chunk depends on.
_ELSEWHERE = {"extra_config", "engine_id", "model", "enable_kv_cache_events"}


def chunk_origin(config: Any, kv_cache_config: Any) -> ChunkOrigin:
    """What chunks of an engine are of, from its `VllmConfig` and `KVCacheConfig`.

    A chunk has the parts of all ranks side by side, so the numbers of ranks are in it too.

    Errors: `Unsupported` for weights that have no name (`model_identity`), a KV dtype that no shard
    has, and for block hashes that a tenant could make collide.
    """
    cache, model = config.cache_config, config.model_config
    algorithm = str(cache.prefix_caching_hash_algo)
    known = algorithm in HASHES
    require("prefix_caching_hash_algo", known, f"one of {', '.join(HASHES)}", algorithm)
    found = build_offloading_config(config, kv_cache_config)
    dtype = found.model.dtype
    require("kv_cache_dtype", dtype in DTYPES, f"one of {', '.join(DTYPES)}", dtype)
    described = {
        field.name: getattr(found, field.name)
        for field in fields(found)
        if field.name not in _ELSEWHERE
    }
    described["groups"] = [asdict(group) for group in found.groups]
    described["cache"], described["parallel"] = asdict(found.cache), _ranks(found.parallel)
    others = [vllm.__version__, algorithm, bool(config.use_v2_model_runner), _backend(config)]
    kv_heads, head_dim = int(model.get_total_num_kv_heads()), int(model.get_head_size())
    text = json.dumps([described, others], sort_keys=True, default=str)
    return ChunkOrigin(
        model=model_identity(config),
        dtype=DTYPES[dtype],
        layout=f"vllm-chunk-{hashlib.sha256(text.encode()).hexdigest()[:32]}",
        layers=sum(len(group.layer_names) for group in found.groups),
        kv_heads=kv_heads,
        head_dim=head_dim,
        chunk_tokens=max(group.tokens_per_block for group in found.groups)
        * found.cache.blocks_per_chunk,
        **TextSizes.of_config(model.hf_text_config, kv_heads, head_dim)._asdict(),
    )


def _ranks(parallel: Any) -> dict[str, int]:
    names = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
    return {name: int(getattr(parallel, name)) for name in names}


def _backend(config: Any) -> str:
    """Two backends may lay a block out in two ways, under one name of vLLM's for its layout."""
    return f"{config.attention_config.backend}"
