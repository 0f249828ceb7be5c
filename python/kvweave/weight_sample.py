"""A few values of a model's weights in a head map, by which others tell whether it is theirs.

A map's fingerprint names weights, their dtype and their class in one library: a server that loads
the same weights in another way cannot make it again. Values it can compare wherever it has tensors:
in a checkpoint's files, while they are loaded, or in a model in memory. No torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvweave.cache import HeadClassMap
from kvweave.errors import CorruptHeadMap

MANTISSA_BITS = {"f32": 23, "bf16": 7, "f16": 10}
"""The dtypes that are compared, and the bits of their mantissas."""
_LEAST_F16 = 2.0**-24
"""The distance of numbers near 0 in f16, which has few exponents."""


@dataclass(frozen=True)
class WeightSample:
    """Values of one tensor of S elements: value i of n is element (2i + 1)·S / 2n, rounded down.

    `name`: the tensor's in a checkpoint from its layers on (`plain_name`). `dtype`: f32, bf16 or
    f16, which the values are rounded to.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def places(self) -> list[int]:
        """Where the values stand in row-major order."""
        return places(self.shape, len(self.values))

    def to_json(self) -> dict[str, Any]:
        """As maps have it beside the name."""
        return {"dtype": self.dtype, "shape": list(self.shape), "values": list(self.values)}


def places(shape: Sequence[int], count: int) -> list[int]:
    """Positions of `count` values, evenly apart, in a tensor's elements in row-major order."""
    size = math.prod(shape)
    return [(2 * i + 1) * size // (2 * count) for i in range(count)]


def plain_name(name: str) -> str:
    """A tensor's name in a checkpoint, as the decoder has it: `layers.0.input_layernorm.weight`.

    What stands before that depends on who has saved the weights, and for what.
    """
    return name.rpartition("model.")[2]


def samples_json(samples: Iterable[WeightSample]) -> dict[str, Any]:
    """The field `weights` of a map; empty where there are none."""
    return {sample.name: sample.to_json() for sample in samples}


def samples_of(heads: HeadClassMap) -> tuple[WeightSample, ...]:
    """The values that a map has of its model's weights; none of maps that say nothing of them."""
    found: Mapping[str, Any] = json.loads(heads.to_json()).get("weights", {})
    return tuple(
        # Numbers of a map are those of f32 in as few digits as name them.
        WeightSample(name, said["dtype"], tuple(said["shape"]), tuple(map(_f32, said["values"])))
        for name, said in found.items()
    )


class WeightComparison:
    """Compares a map's values with the tensors of a model, one after another.

    `seen`: names that were compared. `skipped`: names whose tensors hold packed numbers.
    """

    def __init__(self, samples: Iterable[WeightSample]) -> None:
        self._samples = {sample.name: sample for sample in samples}
        self.seen: set[str] = set()
        self.skipped: set[str] = set()

    def sample(self, name: str) -> WeightSample | None:
        """What the map has of a tensor of this name in a checkpoint or a model, if anything."""
        return self._samples.get(plain_name(name))

    def see(
        self,
        sample: WeightSample,
        dtype: str | None,
        shape: Sequence[int],
        read: Callable[[list[int]], Sequence[float]],
    ) -> None:
        """Compares a tensor of a `shape`; `read` gives its values at places in row-major order.

        `dtype` as `WeightSample` has it, None for any other: such a tensor is skipped.

        Errors: `CorruptHeadMap` naming the tensor and the first value that is another.
        """
        if dtype is None:
            self.skipped.add(sample.name)
            return
        if tuple(shape) != sample.shape:
            _refuse(sample.name, f"of shape {list(shape)}", f"of shape {list(sample.shape)}")
        at = sample.places
        for place, found, said in zip(at, read(at), sample.values, strict=True):
            if not _alike(found, dtype, said, sample.dtype):
                where = f"at element {place} of {list(shape)}"
                _refuse(sample.name, f"with {found:.9g} {where}", f"with {said:.9g}")
        self.seen.add(sample.name)

    def told(self) -> str:
        """What was compared, in a few words."""
        values = sum(len(self._samples[name].values) for name in self.seen)
        said = f"{values} values of {len(self.seen)} tensors are the map's"
        if self.skipped:
            said += f"; {len(self.skipped)} tensors are quantised and were not compared"
        left = len(self._samples) - len(self.seen) - len(self.skipped)
        return f"{said}; {left} tensors were not found by their names" if left else said


def _alike(found: float, dtype: str, said: float, said_dtype: str) -> bool:
    """Whether two values may be one weight's in two dtypes; in the same one they must be equal.

    Each may have been rounded to the other's dtype once, and once to its own.
    """
    if dtype == said_dtype:
        return found == said
    bits = min(MANTISSA_BITS[dtype], MANTISSA_BITS[said_dtype])
    apart = 2.0**-bits * max(abs(found), abs(said))
    if "f16" in (dtype, said_dtype):
        apart += _LEAST_F16
    return math.isfinite(found) and abs(found - said) <= apart


def _refuse(name: str, expected: str, got: str) -> None:
    raise CorruptHeadMap(
        f"head map weights: expected a map of this model, whose {name} is {expected}, "
        f"got one of another model, {got}",
        expected=f"a map whose {name} is {expected}",
        got=f"one of another model, {got}",
    )


def _f32(value: float) -> float:
    """The number of f32 that is nearest."""
    nearest: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return nearest
