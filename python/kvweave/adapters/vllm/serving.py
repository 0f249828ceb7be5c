"""The options that vLLM wants for a part of the plugin, put together: for `LLM(…)` or a server.

Plain data; vLLM is not imported.
"""

from __future__ import annotations

import json
from typing import Any

from kvweave.adapters.vllm.chosen import FAMILIES
from kvweave.adapters.vllm.options import SECTION, Options, options_of
from kvweave.errors import Unsupported

PACKAGE = __package__
BLOCK_TOKENS = 16
"""Small blocks: local heads give theirs back sooner."""


def engine_options(architecture: str, **options: Any) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for a model of this architecture (of its `config.json`).

    `options` are those of `additional_config["kvweave"]`: `heads`, `segment_bytes`, …; without
    any, the model is vLLM's own on our attention backend.

    Errors: `InvalidArgument` for an option that is not known or of another kind; `Unsupported` for
    an architecture without a class of ours, and for options that do not go together.
    """
    chosen = options_of({SECTION: options}, {})
    if chosen == Options():
        return {"attention_config": {"backend": "CUSTOM"}}
    given: dict[str, Any] = {
        "hf_overrides": {"architectures": [_ours(architecture)]},
        "additional_config": {SECTION: options},
    }
    if chosen.segment_bytes is None:
        given["block_size"] = BLOCK_TOKENS
        if chosen.virtual_pages:
            given["kv_transfer_config"] = _connector("KvweavePages", "virtual_pages")
        return given
    for name in ("heads", "virtual_pages"):
        if getattr(chosen, name):
            text = f"kvweave.segment_bytes: expected it without kvweave.{name}, got both"
            raise Unsupported(text, expected=f"no {name}", got=name)
    return {
        **given,
        "kv_transfer_config": _connector("KvweaveSegments", "segments"),
        "logits_processors": [f"{PACKAGE}.segments.check:MarkerCheck"],
        "worker_extension_cls": f"{PACKAGE}.segments.extension.KnowledgeBaseWorker",
    }


def server_config(architecture: str, **options: Any) -> str:
    """The same as the text of a file for `vllm serve MODEL --config FILE` (YAML).

    Segments come with the middleware that reads marked chats and has the routes of knowledge bases.
    """
    given = engine_options(architecture, **options)
    if "segment_bytes" in options:
        given["middleware"] = [f"{PACKAGE}.server.SegmentMiddleware"]
    # JSON is YAML, whatever stands in a path.
    lines = [f"{name.replace('_', '-')}: {json.dumps(value)}" for name, value in given.items()]
    return "\n".join(lines) + "\n"


def architecture_of(model: str) -> str:
    """The architecture that a model's `config.json` names first; `model` is a folder or a name."""
    from transformers import AutoConfig

    known = AutoConfig.from_pretrained(model).architectures or ["none"]
    return str(known[0])


def _ours(architecture: str) -> str:
    known = {f"{family}ForCausalLM" for family in FAMILIES}
    stock = architecture.removeprefix("Kvweave")
    if stock not in known:
        expected = f"one of {', '.join(sorted(known))}"
        text = f"architecture: expected {expected}, got {architecture}"
        raise Unsupported(text, expected=expected, got=architecture)
    return f"Kvweave{stock}"


def _connector(name: str, part: str) -> dict[str, str]:
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_module_path": f"{PACKAGE}.{part}.connector",
    }
