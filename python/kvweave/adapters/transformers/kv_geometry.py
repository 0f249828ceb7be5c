"""What pages must know of a transformers model: read off its config, or refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvweave.adapters.transformers.cache_argument import cache_argument
from kvweave.cache import KvShape
from kvweave.errors import InvalidArgument, Unsupported
from kvweave.runner.model.layer_forms import check_kinds
from kvweave.runner.model.model_spec import KV_DTYPES
from kvweave.runner.model.place import check_place

_CHANGING = ("dynamic", "longrope")
_NAMED = ("input_ids", "position_ids")


@dataclass(frozen=True)
class KvGeometry:
    """The KV of a model: L layers, G KV heads of D elements, and where they lie.

    `windows`: the sliding window of each layer, None for full attention.
    """

    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...]

    def shape(self, page_tokens: int) -> KvShape:
        """The same for a cache with pages of so many tokens."""
        dtype = KV_DTYPES[self.dtype]
        return KvShape(self.layers, self.kv_heads, self.head_dim, page_tokens, dtype)


def kv_geometry(model: Any) -> KvGeometry:
    """The geometry of a causal language model of transformers.

    # Errors
    `Unsupported` naming what nothing here has a form of: an encoder, layers that are not
    attention, KV that layers share, RoPE frequencies that change with the length, weights on
    several devices, a dtype or device without ops, a forward that hands nothing on to its
    attention. `InvalidArgument` for a model in train mode. `DeviceUnavailable` for a GPU that the
    kernels cannot use.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        kind = type(model).__name__
        raise Unsupported(f"model: expected a causal language model of transformers, got {kind}")
    if model.training:
        raise InvalidArgument("model: expected one in eval mode (model.eval()), got train mode")
    _check_forward(model)
    text = config.get_text_config(decoder=True)
    _check_kind(type(model).__name__, config, text)
    parameters = list(model.parameters())
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) != 1:
        raise Unsupported(f"model: expected its weights on one device, got {', '.join(devices)}")
    dtype, device = model.get_input_embeddings().weight.dtype, parameters[0].device
    check_place(dtype, device)
    layers, kv_heads, head_dim = _sizes(text)
    return KvGeometry(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=int(model.get_input_embeddings().weight.shape[0]),
        dtype=dtype,
        device=device,
        windows=_windows(text, layers),
    )


def _sizes(text: Any) -> tuple[int, int, int]:
    """Layers, KV heads and the elements of a head."""
    try:
        heads = int(text.num_attention_heads)
        return (
            int(text.num_hidden_layers),
            int(getattr(text, "num_key_value_heads", None) or heads),
            int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        )
    except Exception as error:
        # Configs of unlike layers refuse to be asked for one number of all, by an error of theirs.
        kind = type(text).__name__
        raise Unsupported(
            f"model: expected layers with KV of one size, got a {kind} that says: {error}"
        ) from error


def _check_forward(model: Any) -> None:
    parameters = inspect.signature(model.forward).parameters
    missing = [name for name in _NAMED if name not in parameters]
    if cache_argument(model.forward) is None:
        missing.append("cache")
    if missing:
        raise Unsupported(
            f"model {type(model).__name__}: expected a forward that takes {', '.join(_NAMED)}, "
            f"cache, got one without {', '.join(missing)}"
        )
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        raise Unsupported(
            f"model {type(model).__name__}: expected a forward that hands other arguments on to "
            "its attention (**kwargs), got one that takes none"
        )


def _check_kind(name: str, config: Any, text: Any) -> None:
    if getattr(config, "is_encoder_decoder", False) or not getattr(text, "is_causal", True):
        raise Unsupported(f"model {name}: expected a causal decoder, got another kind")
    check_kinds(text)
    if getattr(text, "num_kv_shared_layers", 0) or "reuse" in (
        getattr(text, "kv_sharing_modes", None) or ()
    ):
        raise Unsupported(f"model {name}: expected KV of its own in every layer, got shared KV")
    for kind in _rope_types(getattr(text, "rope_parameters", None)):
        if kind in _CHANGING:
            raise Unsupported(
                f"rope: expected frequencies that hold for every length, got {kind}; "
                "kvweave.Runner has a regime for each length"
            )


def _rope_types(settings: Any) -> Iterator[str]:
    """The kinds of RoPE in a config's settings, which may be nested by layer type."""
    if isinstance(settings, Mapping):
        if isinstance(kind := settings.get("rope_type"), str):
            yield kind
        for inner in settings.values():
            yield from _rope_types(inner)


def _windows(text: Any, layers: int) -> tuple[int | None, ...]:
    window = getattr(text, "sliding_window", None)
    if window is None or getattr(text, "use_sliding_window", True) is False:
        return (None,) * layers
    kinds = getattr(text, "layer_types", None) or ("sliding_attention",) * layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
