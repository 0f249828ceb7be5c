"""Names of the model classes that the plugin registers beside vLLM's own."""

from __future__ import annotations

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe")
MODELS = tuple(f"Kvweave{family}ForCausalLM" for family in FAMILIES)
