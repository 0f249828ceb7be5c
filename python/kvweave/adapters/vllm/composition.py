"""What goes together in one engine: the table by which the plugin refuses. Needs no vLLM.

Every refusal of a pair, of two parts of the plugin or of a part and a setting of vLLM, is a row
here. What a part asks of a setting that it goes with (sizes of blocks, kinds of heads) it checks
itself. Windows and top-k heads of virtual pages are these pages' own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from kvweave.adapters.vllm.require import require

HEADS = "head classes"
TOP_K = "top-k heads"
PAGES = "virtual pages"
SEGMENTS = "segments"
PACKED = "packed segments"
FOLDER = "documents in a folder"
PARTS = (HEADS, TOP_K, PAGES, SEGMENTS, PACKED, FOLDER)

OURS = ("KvweaveHeads", "KvweavePages", "KvweaveSegments")
"""The plugin's own connectors, which load and save none of vLLM's blocks."""


def _ranks(name: str) -> Callable[[Any], str]:
    def read(config: Any) -> str:
        count = int(getattr(config.parallel_config, name))
        return str(count) if count > 1 else ""

    return read


def _context_ranks(config: Any) -> str:
    parallel = config.parallel_config
    shards = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    return str(shards) if shards > 1 else ""


def _is_there(name: str) -> Callable[[Any], str]:
    return lambda config: "one" if getattr(config, name) is not None else ""


def _connector(config: Any) -> str:
    transfer = config.kv_transfer_config
    name = None if transfer is None else transfer.kv_connector
    return "" if name is None or name in OURS else str(name)


def _of_model(name: str) -> Callable[[Any], str]:
    """A number in the model's own configuration that says how it attends; 0 or none: not so."""

    def read(config: Any) -> str:
        found = getattr(config.model_config.hf_text_config, name, None)
        return str(found) if found else ""

    return read


SETTINGS: dict[str, Callable[[Any], str]] = {
    "enable_prefix_caching": lambda c: "true" if c.cache_config.enable_prefix_caching else "",
    "tensor_parallel_size": _ranks("tensor_parallel_size"),
    "pipeline_parallel_size": _ranks("pipeline_parallel_size"),
    "context parallelism": _context_ranks,
    "quantization": _is_there("quant_config"),
    "lora_config": _is_there("lora_config"),
    "speculative_config": _is_there("speculative_config"),
    "kv_transfer_config": _connector,
    "disable_hybrid_kv_cache_manager": lambda c: (
        "true" if c.scheduler_config.disable_hybrid_kv_cache_manager else ""
    ),
    "kv_lora_rank": _of_model("kv_lora_rank"),
    "attention_chunk_size": _of_model("attention_chunk_size"),
}
"""Settings of vLLM and of a model, and what a `VllmConfig` has of each; "" where it is off."""

_KINDS = "blocks with bounds are of one size with those of all heads, and a window's are not"
_STAGES = "it numbers the layers of a whole model"
_CONTEXT = "a request's pages would lie on several devices"
_WEIGHTS = "packed weights were not tried; where heads are put in order they cannot be"
_ADAPTERS = "adapters were not tried; where heads are put in order theirs would not be"
_DRAFTS = "a verification has several rows a request, which are read as a prompt's"
_LATENT = "pages of MLA (DeepSeek, Kimi) hold a latent vector a token, not keys and values of heads"
_LOCAL = "with chunked local attention (Llama 4) a row sees its own chunk, whatever a head keeps"
_OTHERS = (
    "one that carries blocks knows nothing of these, and ours is not looked for in a MultiConnector"
)

_PLACES = "a step's copies and measures know blocks of vLLM, not tables of places"

_OF_SEGMENTS = {
    PAGES: _PLACES,
    "pipeline_parallel_size": "a policy passes through all layers in one step of one worker",
    "context parallelism": _CONTEXT,
    "lora_config": "KV of one adapter would be found under another",
    "speculative_config": _DRAFTS,
    "kv_transfer_config": _OTHERS,
    "kv_lora_rank": _LATENT,
    "attention_chunk_size": _LOCAL,
}

NOT_BESIDE: dict[str, dict[str, str]] = {
    HEADS: {
        TOP_K: _KINDS,
        "pipeline_parallel_size": _STAGES,
        "context parallelism": _CONTEXT,
        "quantization": _WEIGHTS,
        "lora_config": _ADAPTERS,
        "speculative_config": _DRAFTS,
        "kv_transfer_config": _OTHERS,
        "disable_hybrid_kv_cache_manager": "local heads would keep every token",
        "kv_lora_rank": _LATENT,
        "attention_chunk_size": _LOCAL,
    },
    TOP_K: {
        HEADS: _KINDS,
        "pipeline_parallel_size": _STAGES,
        "context parallelism": _CONTEXT,
        "quantization": _WEIGHTS,
        "lora_config": _ADAPTERS,
        "speculative_config": _DRAFTS,
        "kv_transfer_config": _OTHERS,
        "kv_lora_rank": _LATENT,
        "attention_chunk_size": _LOCAL,
    },
    PAGES: {
        SEGMENTS: _PLACES,
        PACKED: _PLACES,
        FOLDER: _PLACES,
        "pipeline_parallel_size": _STAGES,
        "context parallelism": _CONTEXT,
        "quantization": _WEIGHTS,
        "lora_config": _ADAPTERS,
        "speculative_config": _DRAFTS,
        "kv_transfer_config": _OTHERS,
        "kv_lora_rank": _LATENT,
        "attention_chunk_size": _LOCAL,
    },
    SEGMENTS: _OF_SEGMENTS,
    PACKED: _OF_SEGMENTS,
    FOLDER: _OF_SEGMENTS,
}
"""By part, the parts and settings that it refuses, and why."""


def check_together(parts: Collection[str], config: Any) -> None:
    """Refuses parts of the plugin that do not go together, or not with a `VllmConfig`.

    Errors: `Unsupported`, naming the setting and the part that it is not beside.
    """
    for part in parts:
        for other, why in NOT_BESIDE[part].items():
            got = SETTINGS[other](config) if other in SETTINGS else _and(other, parts)
            require(other, not got, f"none beside {part}, since {why}", got)


def _and(other: str, parts: Collection[str]) -> str:
    return "both" if other in parts else ""
