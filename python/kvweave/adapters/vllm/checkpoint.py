"""Tensors of a safetensors file of any origin, a few elements at a time. No vLLM, no torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvweave.adapters.vllm.require import require
from kvweave.errors import InvalidArgument

MOST_HEADER_BYTES = 100 * 2**20
"""That safetensors itself reads."""


def _bf16(data: bytes) -> float:
    """bfloat16 is the upper half of a float of 32 bits."""
    number: float = struct.unpack("<f", b"\0\0" + data)[0]
    return number


def _as(form: str) -> Callable[[bytes], float]:
    return lambda data: float(struct.unpack(form, data)[0])


FLOATS: dict[str, tuple[str, int, Callable[[bytes], float]]] = {
    "F32": ("f32", 4, _as("<f")),
    "BF16": ("bf16", 2, _bf16),
    "F16": ("f16", 2, _as("<e")),
}
"""By a dtype's name in such a file, its own name, its bytes and how these are read."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor at bytes [begin, end) of its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a file, by name; the first byte behind its header is `base`."""

    path: Path
    base: int
    by_name: dict[str, StoredTensor]

    @classmethod
    def of(cls, path: Path) -> StoredTensors:
        """Reads the header of a file.

        Errors: `InvalidArgument` for what is no safetensors file, or cannot be read.
        """
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                most = min(MOST_HEADER_BYTES, size - 8)
                text = file.read(length) if 2 <= length <= most else b""
        except OSError as error:
            _require(path, False, "a readable file", error.strerror)
            raise
        _require(path, len(text) > 0, f"a header of 2 to {most} bytes", length)
        header = _parsed(path, text)
        base = 8 + length
        found = {
            name: _tensor(path, name, said, base, size)
            for name, said in header.items()
            if name != "__metadata__"
        }
        return cls(path, base, found)

    def floats(self, tensor: StoredTensor, places: Sequence[int]) -> list[float]:
        """Elements of a tensor of `FLOATS`, by their places in row-major order.

        Errors: `InvalidArgument` for a tensor whose bytes are not those of its elements, or a file
        that has become shorter.
        """
        _, width, read = FLOATS[tensor.dtype]
        size = width * math.prod(tensor.shape)
        got = tensor.end - tensor.begin
        _require(self.path, got == size, f"{size} bytes of {list(tensor.shape)}", got)
        found = []
        with self.path.open("rb") as file:
            for place in places:
                file.seek(tensor.begin + place * width)
                data = file.read(width)
                _require(self.path, len(data) == width, "bytes up to its end", len(data))
                found.append(read(data))
        return found


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        _require(path, False, "a header of JSON", type(error).__name__)
        raise
    _require(path, isinstance(header, dict), "a header by names", type(header).__name__)
    named: dict[str, Any] = header
    return named


def _tensor(path: Path, name: str, said: Any, base: int, size: int) -> StoredTensor:
    fields = said if isinstance(said, dict) else {}
    # Data of any kind, until they are looked at.
    shape: Any = fields.get("shape")
    ends: Any = fields.get("data_offsets")
    dtype = fields.get("dtype")
    _require(path, isinstance(dtype, str), f"a dtype of {name}", dtype)
    _require(path, _are_counts(shape), f"sizes of {name}", shape)
    within = _are_counts(ends) and len(ends) == 2 and ends[0] <= ends[1] <= size - base
    _require(path, within, f"bytes of {name} within the file", ends)
    return StoredTensor(str(dtype), tuple(shape), base + ends[0], base + ends[1])


def _are_counts(given: Any) -> bool:
    return isinstance(given, list) and all(type(one) is int and 0 <= one < 2**63 for one in given)


def _require(path: Path, holds: bool, expected: str, got: object) -> None:
    require(f"weights {path.name}", holds, expected, f"{got!r:.80}", InvalidArgument)
