"""Tiny random models of every family that the runner knows, and their own forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

from cache_names import by_name, cache_of

VOCABULARY = 300

FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama3-rope": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-yarn": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-dynamic": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen2-sliding": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 24}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"sliding_window": 24}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 24}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 1, 0, 1]}),
    "gemma-wide": (
        "GemmaConfig",
        "GemmaForCausalLM",
        {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "num_key_value_heads": 1},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "phi": ("PhiConfig", "PhiForCausalLM", {}),
    "phimoe": ("PhimoeConfig", "PhimoeForCausalLM", {"num_local_experts": 4}),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.2,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
        },
    ),
    "granite-moe": (
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.2},
    ),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", {}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", {"sliding_window": 24}),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {"use_qk_norm": True}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", {"sliding_window": 24}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {"sliding_window": 24}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
    "ministral": ("MinistralConfig", "MinistralForCausalLM", {"sliding_window": 24}),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", {"sliding_window": 24}),
    "glm": ("GlmConfig", "GlmForCausalLM", {}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {}),
    "glm4-moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    ),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {"num_key_value_heads": 4}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {"use_parallel_residual": True}),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", {}),
    "minimax-m2": (
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "ernie": ("Ernie4_5Config", "Ernie4_5ForCausalLM", {}),
    "seed-oss": ("SeedOssConfig", "SeedOssForCausalLM", {}),
    "helium": ("HeliumConfig", "HeliumForCausalLM", {}),
    "arcee": ("ArceeConfig", "ArceeForCausalLM", {}),
    "apertus": ("ApertusConfig", "ApertusForCausalLM", {}),
}

OTHERS = {
    "hunyuan": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", {}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"num_key_value_heads": 4}),
    "deepseek-v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 8,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 32,
        },
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "full_attention_interval": 2,
        },
    ),
}
"""Families that a `Runner` does not know."""


def tiny(name: str, **changes: Any) -> Any:
    """A random model of a family, f32 on the CPU."""
    config_name, model_name, extra = {**FAMILIES, **OTHERS}[name]
    torch.manual_seed(1)
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "attn_implementation": "eager",
    }
    config = getattr(transformers, config_name)(**{**options, **extra, **changes})
    return getattr(transformers, model_name)(config).eval()


def random_tokens(count: int, seed: int) -> np.ndarray:
    """Token ids of the tiny models, i32 [count]."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).astype(np.int32)


def reference(model: Any, ids: Any) -> torch.Tensor:
    """Logits f32 [T, V] of the model's own forward, on the CPU."""
    with torch.inference_mode():
        tokens = torch.as_tensor(ids, device=model.device)[None].long()
        return model(tokens, use_cache=False).logits[0].float().cpu()


def greedy(model: Any, tokens: Any, count: int) -> list[int]:
    """The model's own greedy continuation through transformers' cache, no token suppressed."""
    ids, past, said = torch.as_tensor(tokens, device=model.device)[None].long(), None, []
    with torch.inference_mode():
        for _ in range(count):
            out = model(ids, **by_name(model, past), use_cache=True)
            past, ids = cache_of(out), out.logits[:, -1:].argmax(-1)
            said.append(int(ids))
    return said
