"""Memory of the host that a GPU reads and writes where it lies."""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from typing import Any

import torch

_log = logging.getLogger(__name__)


def pin(pages: torch.Tensor, device: torch.device) -> bool:
    """Asks the driver to let a GPU read a tensor of the host where it lies; whether it may.

    torch's own pinned memory is not used: it comes in powers of two.
    """
    if not register(pages.data_ptr(), pages.nbytes, device):
        return False
    weakref.finalize(pages, unregister, [pages.data_ptr()])
    return True


_ELSE = "the host copies what the device would read itself"


def register(address: int, size: int, device: torch.device, otherwise: str = _ELSE) -> bool:
    """Asks the driver to let a GPU read so many bytes where they lie; whether it may.

    It does until `unregister`. A refusal is said in the log, and what happens `otherwise`.
    """
    cudart: Any = torch.cuda.cudart
    with torch.cuda.device(device):
        refused = int(cudart().cudaHostRegister(address, size, 0))
    if not refused:
        return True
    _log.warning(
        "host memory: expected %d bytes to be pinned, got error %d: %s", size, refused, otherwise
    )
    # The driver remembers the error, and the next launch would be told of it.
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
    return False


def unregister(addresses: list[int]) -> None:
    """Ends what `register` began."""
    cudart: Any = torch.cuda.cudart
    for address in addresses:
        cudart().cudaHostUnregister(address)
