"""What all ranks of tensor parallelism find together: each of them has to ask."""

from __future__ import annotations

import hashlib

import torch
from torch.distributed import ReduceOp, all_reduce
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_reduce,
)


def over_ranks(found: torch.Tensor) -> torch.Tensor:
    """What each rank measured over its own heads, summed."""
    if get_tensor_model_parallel_world_size() == 1:
        return found
    summed: torch.Tensor = tensor_model_parallel_all_reduce(found)
    return summed


def all_of(holds: bool) -> bool:
    """Whether something holds on every rank."""
    return _least([int(holds)])[0] == 1


def agreed(name: str | None) -> str | None:
    """A name where every rank has found the same one."""
    digest = hashlib.sha256(repr(name).encode()).digest()
    number = int.from_bytes(digest[:7], "little")
    least, least_of_negated = _least([number, -number])
    return name if least == -least_of_negated else None


def _least(numbers: list[int]) -> list[int]:
    """The least of each number on all ranks."""
    group = get_tp_group()
    if group.world_size == 1:
        return numbers
    said = torch.tensor(numbers)
    all_reduce(said, ReduceOp.MIN, group=group.cpu_group)
    return [int(number) for number in said]
