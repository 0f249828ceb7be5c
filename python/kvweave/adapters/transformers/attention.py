"""What a model's layers call as their attention: `attn_implementation="kvweave"`."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from transformers import AttentionInterface

from kvweave.adapters.transformers.paged_step import Attends
from kvweave.adapters.transformers.step_rows import Vectors
from kvweave.errors import Unsupported

NAME = "kvweave"
"""The name that the attention is registered under."""

STEP = "kvweave_step"
"""The argument by which a forward hands its `AttentionStep` on to the attention of its layers."""


@runtime_checkable
class AttentionStep(Protocol):
    """What attends for the layers of one forward: a `PagedStep`, or another cache's."""

    def attend(self, layer: int, vectors: Vectors, how: Attends) -> torch.Tensor:
        """Takes a layer's new q [B, H, n, D], k and v [B, G, n, D]; returns [B, n, H, D]."""


_CHANGES = ("sinks", "position_bias", "head_mask", "alibi")


def register() -> None:
    """Makes `attn_implementation="kvweave"` known to transformers, for `from_pretrained`.

    A `PagedCache` does so itself, and asks its model for it. Models that are loaded otherwise are
    not touched.
    """
    AttentionInterface.register(NAME, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Writes a layer's new keys and values into pages and attends over all that its rows see.

    query [B, H, n, D], key and value [B, G, n, D] of the new rows alone, as transformers'
    attention functions take them; s_aux [H] are attention sinks. Returns the attention
    [B, n, H, D], and no weights.

    # Errors
    `Unsupported` outside a forward with an open `PagedCache`, and for arguments that change what
    attention is: a mask, dropout, a bias, keys and values of other sizes.
    """
    step = others.get(STEP)
    if not isinstance(step, AttentionStep):
        raise Unsupported(
            f'attn_implementation "{NAME}": expected cache=PagedCache(model, …), and '
            "layers that hand their arguments on, got one of the two at most; "
            'model.set_attn_implementation("sdpa") runs without'
        )
    changes = [name for name in _CHANGES if others.get(name) is not None]
    if attention_mask is not None:
        changes.append("attention_mask")
    if dropout:
        changes.append("dropout")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        changes.append("is_causal=False")
    if changes:
        kind, got = type(module).__name__, ", ".join(changes)
        raise Unsupported(f"{kind}: expected plain causal attention, got {got}")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer: Any = module
    given = query, key, value
    how = Attends(scale, sliding_window, softcap, s_aux)
    return step.attend(int(layer.layer_idx), given, how), None
