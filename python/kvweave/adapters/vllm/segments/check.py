"""Markers that can never have an effect are refused where requests are taken.

vLLM has each logits processor look at a request's parameters before anything is scheduled; this
one does nothing else.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from kvweave.adapters.vllm.segments.check_layers import layers_in
from kvweave.adapters.vllm.segments.eligibility import check_computed
from kvweave.adapters.vllm.segments.markers import markers_of

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SecondRunners
except ImportError:
    # vLLM 0.26 leaves requests to its first model runner where one is given.
    SecondRunners = object

_log: Any = init_logger("vllm.kvweave.segments")
UNKNOWN = (
    "logits_processors: expected an architecture of ours beside MarkerCheck, got none; whether the "
    "model has the layers of a request's policy is not checked"
)


class MarkerCheck(LogitsProcessor, SecondRunners):
    """`--logits-processors kvweave.adapters.vllm.segments.check:MarkerCheck`.

    vLLM's two model runners have an interface each, and each refuses classes of the other; what
    is done for both is the same: nothing.

    `layers`: of the model, None where nobody said how many.
    """

    layers: ClassVar[int | None] = None

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Errors: `InvalidArgument`, a `ValueError`, which the server answers with 400."""
        markers = markers_of(sampling_params.extra_args)
        if markers is None:
            return
        markers.check_acts()
        if cls.layers is not None:
            markers.check_layers(cls.layers)
        elif markers.names_layers:
            _log.warning_once("%s", UNKNOWN)
        if not markers.is_idle:
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


def __getattr__(name: str) -> Any:
    """`MarkerCheckOf30Layers`, for any number: the check beside a model of so many."""
    layers = layers_in(name)
    if layers is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _check_of(name, layers)


@cache
def _check_of(name: str, layers: int) -> type[MarkerCheck]:
    return type(name, (MarkerCheck,), {"layers": layers, "__module__": __name__})
