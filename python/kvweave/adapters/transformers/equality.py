"""Proof at the start that a model's forward over pages gives its own logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvweave.adapters.transformers.cache_argument import cache_argument
from kvweave.adapters.transformers.kv_geometry import KvGeometry
from kvweave.device_memory import is_shortage
from kvweave.errors import KvweaveError, Unsupported
from kvweave.runner.model.rounding import own_logits
from kvweave.runner.prefill.verify import TOKENS

_WIDEST = 256
_APPENDED = 4


@dataclass(frozen=True)
class Proof:
    """A short random prompt, i64 [1, T], and the model's own logits of it, f32 [T, V].

    It is longer than the model's narrowest sliding window, where that is at most 256 tokens.
    """

    ids: torch.Tensor
    logits: torch.Tensor

    @staticmethod
    @torch.inference_mode()
    def of(model: Any, geometry: KvGeometry) -> Proof:
        """Asks the model, which attends by its own attention now."""
        windows = [w for w in geometry.windows if w is not None and w <= _WIDEST]
        count = TOKENS + min(windows, default=0)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, geometry.vocabulary, (1, count), generator=generator)
        ids = ids.to(geometry.device)
        return Proof(ids, own_logits(model, ids[0]))

    def blocks(self, page_tokens: int) -> int:
        """Blocks that the prompt takes."""
        return -(-self.ids.shape[1] // page_tokens) + 2

    @torch.inference_mode()
    def sent(self, model: Any, cache: Any) -> torch.Tensor:
        """Logits f32 [T, V] of the prompt through the pages, its last tokens behind the others.

        # Errors
        `Unsupported` when the model's forward does not run so.
        """
        by_name = {str(cache_argument(model.forward)): cache}
        name, first = type(model).__name__, self.ids.shape[1] - _APPENDED
        try:
            ours = [
                model(input_ids=part, use_cache=True, **by_name).logits[0]
                for part in (self.ids[:, :first], self.ids[:, first:])
            ]
        except KvweaveError:
            raise
        except Exception as error:
            if isinstance(error, RuntimeError) and is_shortage(error):
                raise
            raise Unsupported(
                f"model {name}: expected its forward to run over pages, "
                f"got {type(error).__name__}: {error}"
            ) from error
        return torch.cat(ours).float()
