"""Which models the plugin has classes for, and why others have none. Needs no vLLM.

A class of ours may be named in `--hf-overrides` for any checkpoint; whether it is of the model that
the class extends is told by the configuration's `model_type`.
"""

from __future__ import annotations

from typing import Any

from kvweave.adapters.vllm.model_names import FAMILIES, MODELS
from kvweave.adapters.vllm.require import require

STOCK = tuple(f"{family}ForCausalLM" for family in FAMILIES)

_SINKS = "learned sinks, and windows of its own in every other layer"
_LATENT = "pages with a latent vector a token (MLA), not keys and values of heads"
_LOCAL = "rows that see their own chunk alone (chunked local attention), whatever a head keeps"
_STATES = "layers of states beside attention: no token of theirs can be kept or moved"

WITHOUT = {
    "GptOssForCausalLM": _SINKS,
    **dict.fromkeys(
        (
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "DeepseekV32ForCausalLM",
            "KimiK25ForConditionalGeneration",
        ),
        _LATENT,
    ),
    **dict.fromkeys(("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), _LOCAL),
    **dict.fromkeys(
        (
            "BambaForCausalLM",
            "FalconH1ForCausalLM",
            "GraniteMoeHybridForCausalLM",
            "JambaForCausalLM",
            "KimiLinearForCausalLM",
            "Lfm2ForCausalLM",
            "MiniMaxForCausalLM",
            "MiniMaxText01ForCausalLM",
            "NemotronHForCausalLM",
            "Qwen3NextForCausalLM",
            "Zamba2ForCausalLM",
        ),
        _STATES,
    ),
}
"""By architecture, what it has that parts of the plugin know nothing of.

Our attention backend alone may serve it none the less.
"""


def described(architecture: str) -> str:
    """An architecture as a refusal names it: with what it has of its own, where that is known."""
    why = WITHOUT.get(architecture)
    return architecture if why is None else f"{architecture}, which has {why}"


def check_architecture(architecture: str) -> str:
    """The name of our class for an architecture of vLLM, or for what is one of ours already.

    Errors: `Unsupported`, naming the architecture and what it has of its own.
    """
    stock = architecture.removeprefix("Kvweave")
    expected = f"one of {', '.join(sorted(STOCK))}"
    require("architecture", stock in STOCK, expected, described(architecture))
    return f"Kvweave{stock}"


def check_class(part: str, config: Any) -> None:
    """Refuses a `VllmConfig` whose model is of vLLM's own class, which knows nothing of a `part`.

    Errors: `Unsupported`, naming the model and what it has of its own.
    """
    name = str((config.model_config.architectures or ["none"])[0])
    expected = f"one of {', '.join(MODELS)} beside {part}"
    require("architecture", name in MODELS, expected, described(name))


def check_attention(config: Any) -> None:
    """Refuses a `VllmConfig` whose model attends by MLA, of which our backend alone has no form.

    A configuration without a model says nothing, and passes.

    Errors: `Unsupported`, naming the model and what it has of its own.
    """
    model = config.model_config
    if model is not None:
        name = str((model.architectures or ["none"])[0])
        expected = "keys and values of heads for backend CUSTOM"
        require("attention", not model.use_mla, expected, f"MLA of {described(name)}")


def check_model(ours: str, config: Any) -> None:
    """Refuses a `VllmConfig` of another model than the one that our class `ours` extends.

    A `model_type` that transformers has no decoder for says nothing, and passes.

    Errors: `Unsupported`, naming the model and what it has of its own.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    stock = ours.removeprefix("Kvweave")
    found = KNOWN.get(getattr(config.model_config.hf_text_config, "model_type", ""))
    expected = f"{stock} for {ours}"
    require("architecture", found in (None, stock), expected, described(str(found)))
