"""Malformed markers, or what cannot be beside any, are refused where requests are taken.

vLLM has each logits processor look at a request's parameters before anything is scheduled; this
one does nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from kvweave.adapters.vllm.segments.eligibility import check_computed
from kvweave.adapters.vllm.segments.markers import markers_of

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SecondRunners
except ImportError:
    # vLLM 0.26 leaves requests to its first model runner where one is given.
    SecondRunners = object


class MarkerCheck(LogitsProcessor, SecondRunners):
    """`--logits-processors kvweave.adapters.vllm.segments.check:MarkerCheck`.

    vLLM's two model runners have an interface each, and each refuses classes of the other; what
    is done for both is the same: nothing.
    """

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Errors: `InvalidArgument`, a `ValueError`, which the server answers with 400."""
        markers = markers_of(sampling_params.extra_args)
        if markers is not None and not markers.is_idle:
            check_computed(sampling_params)

    def __init__(self, *given: Any) -> None:
        """Holds nothing."""

    def is_argmax_invariant(self) -> bool:
        """Logits stay as they are."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Nothing is kept."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """False: logits of the request stay as they are."""
        return False

    def apply(self, logits: torch.Tensor, *context: Any) -> torch.Tensor:
        """The logits themselves."""
        return logits
