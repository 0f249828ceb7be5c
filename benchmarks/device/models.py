"""Models of known shapes with random weights, made where they run: no download, no host copy."""

from __future__ import annotations

from typing import Any

import torch

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B": (
        "Llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "Qwen3-32B": (
        "Qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "small Llama": (
        "Llama",
        {
            "vocab_size": 4096,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "tiny Llama": (
        "Llama",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
}
LARGE = ("Llama-3.1-8B", "Qwen3-32B")
"""Those that somebody uses; the others are there to see that a case runs."""


def random_model(
    name: str, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, layers: int = 0
) -> Any:
    """A transformers model of a known shape: weights N(0, 0.02²), norms 1, SDPA attention.

    Of so many `layers`, 0 for as many as the shape has.
    """
    import transformers

    family, shape = MODELS[name]
    shape = {**shape, "num_hidden_layers": layers or shape["num_hidden_layers"]}
    config = getattr(transformers, f"{family}Config")(
        **shape, tie_word_embeddings=False, attn_implementation="sdpa", dtype=dtype
    )
    # Made without memory first: the usual initialisation would fill it on the host.
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    model = model.to(dtype).to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    # Frequencies are computed, not stored, and stay f32.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model.eval().requires_grad_(False)


def uneven_heads(model: Any) -> Any:
    """The same model, whose KV heads differ in how many directions their keys and values have.

    Of every three one has all D, one half of them and one a quarter, but for a fiftieth: with
    numbers of four bits these lose some .07, .01 and .01 where half, half and a quarter are kept.
    """
    shape = model.config
    dim, half = shape.head_dim, shape.head_dim // 2
    for layer in model.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            heads = projection.weight.data.view(shape.num_key_value_heads, dim, -1)
            for kind in (1, 2):
                few = half >> kind
                # Channels c and c + D / 2 are turned into each other by RoPE.
                heads[kind::3, few:half] *= 0.02
                heads[kind::3, half + few :] *= 0.02
    return model


def bytes_of(name: str) -> int:
    """About what the weights of a model take in bf16."""
    _, s = MODELS[name]
    heads = 2 * s["num_attention_heads"] + 2 * s["num_key_value_heads"]
    layer = s["hidden_size"] * (heads * s["head_dim"] + 3 * s["intermediate_size"])
    embeddings = 2 * s["vocab_size"] * s["hidden_size"]
    return 2 * (s["num_hidden_layers"] * layer + embeddings)
