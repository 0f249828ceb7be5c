"""A NIXL agent of our own, in one backend, and the memory that it may touch."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from kvweave.errors import TransferFailed, Unsupported

BACKEND = "UCX"


def make_agent() -> Any:
    """An agent under a name that nobody else has.

    # Errors
    `Unsupported` without the package, `TransferFailed` where its backend does not start.
    """
    try:
        api = import_module("nixl_cu13._api")
    except ModuleNotFoundError as error:
        raise Unsupported(
            "nixl: expected the package nixl-cu13 to be installed; run: pip install 'kvweave[nixl]'"
        ) from error
    with failing("to start"):
        config = api.nixl_agent_config(backends=[BACKEND])
        return api.nixl_agent(f"kvweave-{secrets.token_hex(8)}", config)


@contextmanager
def failing(to: str) -> Iterator[None]:
    """What NIXL raises, as `TransferFailed`."""
    try:
        yield
    except TransferFailed:
        raise
    except Exception as error:
        text = f"nixl: expected {to}, got {type(error).__name__}: {error}"
        raise TransferFailed(text) from error


@contextmanager
def registered(agent: Any, parts: Sequence[torch.Tensor]) -> Iterator[None]:
    """Lets an agent touch tensors u8 [n], all of the host or all of a device, until it is left."""
    with failing("memory to be registered"):
        held = agent.register_memory(list(parts), backends=[BACKEND])
    try:
        yield
    finally:
        agent.deregister_memory(held, backends=[BACKEND])


def by_device(parts: Mapping[str, torch.Tensor]) -> dict[int | None, dict[str, torch.Tensor]]:
    """Parts that have any bytes, by the CUDA device on which they lie; None: on the host."""
    found: dict[int | None, dict[str, torch.Tensor]] = {}
    for name, part in parts.items():
        if part.numel():
            found.setdefault(device_of(part), {})[name] = part
    return found


def device_of(part: torch.Tensor) -> int | None:
    """The CUDA device on which a part lies; None: on the host."""
    return part.get_device() if part.is_cuda else None


def as_bytes(part: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as u8 [n], where it lies."""
    return part.reshape(-1).view(torch.uint8)
