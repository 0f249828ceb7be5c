"""Where a model lies, and in which numbers: whether there are ops for that."""

from __future__ import annotations

import torch

from kvweave.cache import cuda_status
from kvweave.errors import DeviceUnavailable, Unsupported
from kvweave.runner.model.model_spec import KV_DTYPES


def check_place(dtype: torch.dtype, device: torch.device) -> None:
    """Refuses a model that no op can serve where it lies.

    # Errors
    `Unsupported` for its dtype or kind of device, `DeviceUnavailable` for a GPU that the kernels
    cannot use.
    """
    if dtype not in KV_DTYPES:
        raise Unsupported(
            f"model dtype: expected one of {', '.join(map(str, KV_DTYPES))}, got {dtype}"
        )
    if device.type not in ("cpu", "cuda"):
        raise Unsupported(f"model device: expected cpu or cuda, got {device}")
    if device.type == "cuda":
        status = cuda_status()
        if not status.startswith("available"):
            raise DeviceUnavailable(f"model on {device}: {status}")
