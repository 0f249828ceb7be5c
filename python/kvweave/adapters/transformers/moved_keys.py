"""How a model's keys are turned to other positions, or why nothing here can turn them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvweave.device_memory import is_shortage
from kvweave.errors import Unsupported
from kvweave.ops import RopeTable
from kvweave.runner.model.model_spec import describe
from kvweave.runner.model.rope import Rotary
from kvweave.runner.prefill.verify import verify


@dataclass(frozen=True)
class MovedKeys:
    """The frequencies by which keys are moved, zeros where they never are; then `reason` says why.

    An exact prefix moves nothing, so a model without such frequencies has all but segments.
    """

    rope: RopeTable
    reason: str | None

    @staticmethod
    def of(model: Any, layers: int, check: bool) -> MovedKeys:
        """Those of a model; with `check` proved by its own forward, which must be its own now."""
        try:
            with torch.inference_mode():
                spec = describe(model)
                if check:
                    verify(model, spec)
                return MovedKeys(Rotary(spec).fixed(1).rope, None)
        except Exception as error:
            # A family that a Runner does not know fails in any way; without room it is no answer.
            if isinstance(error, RuntimeError) and is_shortage(error):
                raise
            none = RopeTable(np.zeros((layers, 1), np.float32), "half")
            return MovedKeys(none, str(error) or type(error).__name__)

    def expect(self) -> None:
        """Refuses a model whose keys cannot be moved.

        # Errors
        `Unsupported` saying why not.
        """
        if self.reason is not None:
            raise Unsupported(f"segments: expected keys that can be moved, got {self.reason}")
