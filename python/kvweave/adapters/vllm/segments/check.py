"""Malformed markers are refused in the process that takes requests.

vLLM has each logits processor look at a request's parameters before anything is scheduled; this
one does nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from kvweave.adapters.vllm.segments.markers import markers_of


class MarkerCheck(LogitsProcessor):
    """`--logits-processors kvweave.adapters.vllm.segments.check:MarkerCheck`."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Errors: `InvalidArgument`, a `ValueError`, which the server answers with 400."""
        markers_of(sampling_params.extra_args)

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Holds nothing."""

    def is_argmax_invariant(self) -> bool:
        """Logits stay as they are."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Nothing is kept."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits themselves."""
        return logits
