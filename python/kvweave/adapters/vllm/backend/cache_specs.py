"""Cache specs of vLLM, what layers keep, read as what their rows attend to."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvweave.adapters.vllm.backend.attention_span import AttentionSpan


def attention_span_of(spec: Any) -> AttentionSpan:
    """What must be listed for layers of one of vLLM's cache specs.

    A full spec may have layers with windows among others without (vLLM merges them where its
    hybrid cache is off), so all it holds is listed, and each layer's own window hides the rest.
    """
    if not isinstance(spec, SlidingWindowSpec):
        return AttentionSpan()
    return AttentionSpan(spec.sliding_window, getattr(spec, "sink", 0))
