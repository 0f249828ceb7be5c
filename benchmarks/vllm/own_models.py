"""Shapes of the models that vLLM's own tests name, as a cache of huggingface_hub without weights.

Most of those tests ask for no more than a model's `config.json`. Without a network each of them
would fail before it comes to what it tests, so that both runs of `own_tests` would say little.
What is written here are the published shapes, and for a model of images what its processor reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.vllm.rag_text import write_tokenizer

REVISION = "0" * 40
"""Of every snapshot: the cache goes by the names of commits, and no commit of a hub is meant."""
IMAGE = "<image>"
"""The word that stands for a picture in prompts of LLaVA."""
LLAVA = "llava-hf/llava-1.5-7b-hf"
Shape = dict[str, Any]


def llama_like(kind: str, architecture: str, **fields: object) -> Shape:
    """What decoders of one family share: gated MLPs of SiLU and weights of bfloat16."""
    shared = {"hidden_act": "silu", "torch_dtype": "bfloat16", "use_cache": True}
    return {"architectures": [architecture], "model_type": kind, **shared, **fields}


OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float16",
}
EMBEDDING_GEMMA = {
    "architectures": ["Gemma3TextModel"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 24,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 2048,
    "sliding_window": 512,
    "use_bidirectional_attention": True,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "vocab_size": 262_144,
    "torch_dtype": "float32",
}
LLAVA_SHAPE = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 32_000,
    "image_seq_length": 576,
    "pad_token_id": 32_001,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "torch_dtype": "float16",
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32_064,
        "torch_dtype": "float16",
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
        "projection_dim": 768,
    },
}
SHAPES: dict[str, Shape] = {
    "facebook/opt-125m": OPT,
    "google/embeddinggemma-300m": EMBEDDING_GEMMA,
    LLAVA: LLAVA_SHAPE,
    "meta-llama/Meta-Llama-3-8B": llama_like(
        "llama",
        "LlamaForCausalLM",
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        vocab_size=128_256,
        tie_word_embeddings=False,
    ),
    "microsoft/Phi-tiny-MoE-instruct": llama_like(
        "phimoe",
        "PhiMoEForCausalLM",
        hidden_size=4096,
        intermediate_size=448,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        num_local_experts=16,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        sliding_window=2047,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        attention_bias=True,
        vocab_size=32_064,
        tie_word_embeddings=False,
    ),
    "Qwen/Qwen1.5-7B": llama_like(
        "qwen2",
        "Qwen2ForCausalLM",
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=32_768,
        max_window_layers=28,
        sliding_window=32_768,
        use_sliding_window=False,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        vocab_size=151_936,
        tie_word_embeddings=False,
    ),
    "Qwen/Qwen3-0.6B": llama_like(
        "qwen3",
        "Qwen3ForCausalLM",
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        max_window_layers=28,
        sliding_window=None,
        use_sliding_window=False,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        attention_bias=False,
        vocab_size=151_936,
        tie_word_embeddings=True,
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": llama_like(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        hidden_size=2048,
        intermediate_size=5120,
        num_hidden_layers=48,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        partial_rotary_factor=0.25,
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        decoder_sparse_step=1,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts=512,
        num_experts_per_tok=10,
        norm_topk_prob=True,
        max_position_embeddings=262_144,
        rms_norm_eps=1e-6,
        rope_theta=10_000_000.0,
        vocab_size=151_936,
        tie_word_embeddings=False,
    ),
}
"""A model's name on the hub, and the fields of its `config.json`."""


LLAVA_PROCESSOR: dict[str, Shape] = {
    "processor_config.json": {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE,
        "num_additional_image_tokens": 1,
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
    },
    "preprocessor_config.json": {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        "crop_size": {"height": 336, "width": 336},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": 336},
    },
}
"""The files that LLaVA's processor of pictures is made from, and their fields."""


def write_json(path: Path, fields: Shape) -> None:
    """A file of JSON, with the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields, indent=1))


def write_models(folder: Path) -> None:
    """Writes every shape into a folder, laid out as huggingface_hub lays out its cache.

    LLaVA's tokenizer is one of made-up words: the tests count its tokens, and read none.
    """
    for name, shape in SHAPES.items():
        kept = folder / f"models--{name.replace('/', '--')}"
        write_json(kept / "snapshots" / REVISION / "config.json", shape)
        (kept / "refs").mkdir()
        (kept / "refs" / "main").write_text(REVISION)
        if name == LLAVA:
            for file, fields in LLAVA_PROCESSOR.items():
                write_json(kept / "snapshots" / REVISION / file, fields)
            write_tokenizer(kept / "snapshots" / REVISION, shape["image_token_index"], IMAGE)
