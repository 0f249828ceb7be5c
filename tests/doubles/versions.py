"""The versions of the ops, each callable with tensors on the host.

A test of all versions is written once, for tensors on the CPU: `version.attend_prefill(...)` runs
there, or takes the tensors to a CUDA device and brings back the results and what was written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch

import kvweave
from kvweave import ops
from kvweave.ops.score_pages import widest_table
from paged import READS, as_read

STATUS = kvweave.cuda_status()
if not torch.cuda.is_available():
    NO_CUDA = "torch sees no CUDA device"
elif not STATUS.startswith("available"):
    NO_CUDA = f"kvweave: {STATUS}"
else:
    NO_CUDA = ""

needs_cuda = pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA or "CUDA is there")


@dataclass(frozen=True)
class Version:
    """One version of every op: where it runs, and whether tables lie there too."""

    name: str
    backend: str | None
    device: str = "cpu"
    tables_there: bool = False

    def __getattr__(self, op: str) -> Callable[..., Any]:
        # No op begins so, and those who print an object ask it for methods that do.
        if op.startswith("_"):
            raise AttributeError(op)
        return lambda *given, **named: self._call(getattr(ops, op), given, named)

    def _call(self, op: Callable[..., Any], given: tuple, named: dict) -> Any:
        if op in READS:
            given, named = as_read(given, named)
        if self.device == "cpu":
            return op(*given, backend=self.backend, **named)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self.tables_there:
            named = {**sizes_of(op, given, named), **named}
        given = tuple(self._there(value, pairs) for value in given)
        named = {name: self._there(value, pairs) for name, value in named.items()}
        result = op(*given, backend=self.backend, **named)
        for here, there in pairs:
            here.copy_(there)
        return back(result, pairs)

    def _there(self, value: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Numbers or bytes on the device, their strides kept; a table where it is wanted."""
        if is_dataclass(value):
            parts = {field.name: getattr(value, field.name) for field in fields(value)}
            return type(value)(**{name: self._there(part, pairs) for name, part in parts.items()})
        if isinstance(value, tuple):
            return tuple(self._there(part, pairs) for part in value)
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value).to(self.device) if self.tables_there else value
        if not isinstance(value, torch.Tensor):
            return value
        if value.dtype in (torch.int32, torch.int64):
            return value.to(self.device) if self.tables_there else value
        there = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=self.device
        )
        pairs.append((value, there.copy_(value)))
        return there


def back(result: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Results on the host: those that were given room in that same room."""
    if isinstance(result, tuple):
        return tuple(back(part, pairs) for part in result)
    if not isinstance(result, torch.Tensor):
        return result
    return next((here for here, there in pairs if there is result), result.cpu())


def sizes_of(op: Callable[..., Any], given: tuple, named: dict) -> dict[str, int]:
    """What a call has to say of tables on a device, as nothing waits to look there."""
    if op is ops.score_tokens:
        return {"tokens": end_of(given[2])}
    if op is ops.score_pages:
        return {"width": widest_table(named["entry_offsets"], given[2])}
    return {"most": int(given[2].max(initial=0))} if op is ops.select_pages else {}


def end_of(entries: np.ndarray) -> int:
    return int((entries[:, 3] + entries[:, 2] - entries[:, 1]).max(initial=0))


CPU = Version("cpu", None)
REFERENCE = Version("reference", "reference")
CUDA = Version("cuda", None, "cuda")
CUDA_TABLES = Version("cuda-tables", "cuda", "cuda", tables_there=True)

VERSIONS = [
    pytest.param(version, id=version.name, marks=[needs_cuda] if version.device == "cuda" else [])
    for version in (CPU, REFERENCE, CUDA, CUDA_TABLES)
]
RUNNABLE = [CPU, REFERENCE] if NO_CUDA else [CPU, REFERENCE, CUDA, CUDA_TABLES]
