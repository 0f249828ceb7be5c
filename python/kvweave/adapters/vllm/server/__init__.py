"""Segments through vLLM's OpenAI server.

`vllm serve MODEL --middleware kvweave.adapters.vllm.server.SegmentMiddleware …`.
Texts that a chat marks (`marks`) are found in the rendered prompt (`text_ranges`, `prompts`) and
named to the engine; a knowledge base has routes (`knowledge`).
"""

from kvweave.adapters.vllm.server.middleware import SegmentMiddleware

__all__ = ["SegmentMiddleware"]
