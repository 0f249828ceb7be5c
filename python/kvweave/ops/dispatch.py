"""Which version of an op runs a call, and how tables reach it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvweave._native import Arena
from kvweave.errors import InvalidArgument

Backend: TypeAlias = Literal["cpu", "cuda", "reference"] | None
Pages: TypeAlias = torch.Tensor | Arena
Table: TypeAlias = npt.NDArray[np.int32] | torch.Tensor

_BACKENDS = (None, "cpu", "cuda", "reference")
# The handle without the `Stream` around it, which takes 3 µs to make: torch's compiled code asks
# for it so. It is no promise of torch's.
_RAW_STREAM: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class OnDevice(NamedTuple):
    """A table on a CUDA device, and the same one on the host where it came from there."""

    device: torch.Tensor
    host: Table | None


def cuda_device(what: str, tensor: Any, backend: Backend) -> torch.device | None:
    """The CUDA device that runs a call, chosen by name or by its tensor `what`; None: the host."""
    if backend not in _BACKENDS:
        raise invalid("backend", "cpu, cuda, reference or None", repr(backend))
    there = isinstance(tensor, torch.Tensor) and tensor.is_cuda
    if backend == "cuda" and not there:
        got = str(tensor.device) if isinstance(tensor, torch.Tensor) else "cpu"
        raise invalid(what, "a tensor on cuda", f"one on {got}")
    return tensor.device if there and backend in (None, "cuda") else None


def expect_tensors(**named: torch.Tensor) -> None:
    """Refuses by name what is no tensor of torch, and one whose gradient is wanted.

    Ops are not differentiable, and say so before a wrong gradient is computed.
    """
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise invalid(name, "a tensor of torch", f"an object of type {type(tensor).__name__}")
        if tensor.requires_grad and torch.is_grad_enabled():
            expected = "a tensor without gradient (ops are not differentiable)"
            raise invalid(name, expected, "requires_grad=True")


def stream_of(device: torch.device) -> int:
    """The handle of torch's current stream."""
    if _RAW_STREAM is not None and device.index is not None:
        return _RAW_STREAM(device.index)
    return torch.cuda.current_stream(device).cuda_stream


def on_device(device: torch.device, **tables: Table) -> dict[str, OnDevice]:
    """Tables where kernels of `device` read them: those of the host go over in one copy.

    Nothing is waited for: the copy starts from pinned memory, which torch keeps until it is done.
    """
    placed: dict[str, OnDevice] = {}
    host: dict[str, npt.NDArray[np.int32]] = {}
    for name, table in tables.items():
        if isinstance(table, torch.Tensor) and table.is_cuda:
            placed[name] = OnDevice(table, None)
        else:
            host[name] = _numbers(name, table)
    if not host:
        return placed
    if torch.cuda.is_current_stream_capturing():
        raise invalid(next(iter(host)), "a table on cuda while a graph is captured", "one on cpu")
    sizes = [table.size for table in host.values()]
    pinned = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=True)
    np.concatenate([table.ravel() for table in host.values()], out=pinned.numpy())
    parts = torch.split(pinned.to(device, non_blocking=True), sizes)
    for (name, table), part in zip(host.items(), parts, strict=True):
        placed[name] = OnDevice(part.view(table.shape), tables[name])
    return placed


def counted(what: str, number: Any) -> int:
    """A count that an op is told; `InvalidArgument` for anything else."""
    if not isinstance(number, int | np.integer) or not 0 <= number < 2**31:
        raise invalid(what, "a number from 0 to 2^31 − 1", repr(number)[:40])
    return int(number)


def numbers_of(what: str, table: Any) -> npt.NDArray[np.int64]:
    """The numbers of a table, whatever the op itself will say of it."""
    if not isinstance(table, np.ndarray | torch.Tensor):
        raise invalid(what, "a tensor", f"an object of type {type(table).__name__}")
    return np.asarray(table).reshape(-1).astype(np.int64)


def whole(table: Table) -> Table:
    """Offsets [0, N] of a call with one request, on the side of the table [N, …] they split."""
    length = table.shape[0] if getattr(table, "ndim", 0) else 0
    if isinstance(table, torch.Tensor) and table.is_cuda:
        return torch.linspace(0, length, 2, dtype=torch.int32, device=table.device)
    return np.array([0, length], np.int32)


def _numbers(name: str, table: Any) -> npt.NDArray[np.int32]:
    if isinstance(table, torch.Tensor):
        table = table.numpy()
    if not isinstance(table, np.ndarray):
        raise invalid(name, "a tensor", f"an object of type {type(table).__name__}")
    if table.dtype != np.int32:
        raise invalid(name, "int32", str(table.dtype))
    return table


def invalid(what: str, expected: str, got: str) -> InvalidArgument:
    """A refusal in the words of the native module."""
    text = f"{what}: expected {expected}, got {got}"
    return InvalidArgument(text, expected=expected, got=got)
