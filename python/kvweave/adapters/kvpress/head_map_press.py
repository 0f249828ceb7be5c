"""A press by a head map: heads that look nothing up keep a sink and the newest tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from kvpress import BasePress

from kvweave.adapters.kvpress.pressed_cache import MASK
from kvweave.cache import HeadClassMap
from kvweave.errors import InvalidArgument, Unsupported


@dataclass
class HeadMapPress(BasePress):
    """Keeps of each window head of `heads` its sink and its newest tokens, of others everything.

    Beside a `PressedCache` what is not kept is given back, head by head; beside other caches it is
    hidden, as kvpress does it for heads that keep unlike tokens. The window does not move on while
    an answer is decoded.

    # Errors
    `Unsupported` for a map with heads that choose pages, `InvalidArgument` for a map of another
    number of layers or heads, when a model is entered.
    """

    heads: HeadClassMap

    def post_init_from_model(self, model: Any) -> None:
        """Reads the map, whose layers and heads must be the model's."""
        config = model.config.get_text_config(decoder=True)
        sizes = int(config.num_hidden_layers), int(config.num_key_value_heads)
        if sizes != (self.heads.layers, self.heads.kv_heads):
            raise InvalidArgument(
                f"heads: expected a map of {sizes[0]} layers with {sizes[1]} KV heads, "
                f"got {self.heads.layers} with {self.heads.kv_heads}"
            )
        self._windows: dict[tuple[int, int], tuple[int, int]] = {}
        for entry in json.loads(self.heads.to_json())["heads"]:
            kind = entry["class"]
            if kind["kind"] not in ("full", "window"):
                raise Unsupported(f"heads: expected full and window heads, got {kind['kind']}")
            if kind["kind"] == "window":
                at = entry["layer"], entry["head"]
                self._windows[at] = int(kind["sink"]), int(kind["recent"])

    def compress(
        self,
        module: torch.nn.Module,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attentions: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Says which tokens of which heads are left out; keys and values [B, G, T, D] stay."""
        dropped = torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device)
        for (layer, head), (sink, recent) in self._windows.items():
            if layer == module.layer_idx:
                dropped[:, head, sink : max(sink, keys.shape[2] - recent)] = True
        setattr(module, MASK, torch.nonzero(dropped, as_tuple=True))
        return keys, values
