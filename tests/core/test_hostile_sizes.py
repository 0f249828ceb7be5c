"""Sizes and values that no call can carry out: a typed refusal, never the end of the process."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvweave import InvalidArgument, KvCache, KvShape, ops
from paged import rope_table

SCARCE = """
import resource, sys
import kvweave
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
shape = kvweave.KvShape(1, 1, 8, int(sys.argv[1]), "f32")
windows = kvweave.HeadClassMap.full(shape, "m") if sys.argv[2] == "mapped" else None
try:
    kvweave.KvCache(shape, arena_bytes=1 << int(sys.argv[3]), heads=windows, memory=False)
except kvweave.OutOfMemory as error:
    print(error)
"""


@pytest.mark.parametrize("heads", ["all", "mapped"])
@pytest.mark.parametrize(("page_tokens", "bits"), [(16, 40), (256, 38), (1, 36)])
def test_books_that_find_no_room_are_refused(heads, page_tokens, bits) -> None:
    """A cache without memory for its arena still has books, some bytes a block."""
    call = [sys.executable, "-c", SCARCE, str(page_tokens), heads, str(bits)]
    told = subprocess.run(call, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert "blocks: expected" in told.stdout
    assert "bytes, got fewer on this machine" in told.stdout


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("kv_heads", [99, 2**31, 2**62])
def test_a_copy_of_nothing_is_of_blocks_that_the_cache_can_hold(kv_heads, backend) -> None:
    pages, none = torch.zeros(20, 2, 4, 8), np.zeros((0, 6), np.int32)
    ops.copy_rerotate(pages, none, rope_table(2, 8), kv_heads=10, backend=backend)
    with pytest.raises(InvalidArgument, match="block: expected a block within the cache"):
        ops.copy_rerotate(pages, none, rope_table(2, 8), kv_heads=kv_heads, backend=backend)


class Forged:
    """A producer of a description that no memory has: int32, of any shape, strides and address."""

    def __init__(
        self, shape: Sequence[int], strides: Sequence[int], address: int = 1 << 20
    ) -> None:
        count = len(shape)
        self.sizes = (ctypes.c_int64 * count)(*shape)
        self.steps = (ctypes.c_int64 * count)(*strides)
        # Data, device, axes and dtype (32 bits, 1 lane), shape, strides, offset, owner, deleter.
        described = (address, 1, count | 32 << 40 | 1 << 48)
        arrays = (ctypes.addressof(self.sizes), ctypes.addressof(self.steps))
        self.tensor = (ctypes.c_uint64 * 8)(*described, *arrays, 0, 0, 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **wanted: object) -> object:
        make = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self.tensor), b"dltensor", None)


def test_a_forged_description_is_read_as_it_says() -> None:
    ids = np.arange(8, dtype=np.int32)
    cache = KvCache(KvShape(1, 1, 8, 4), blocks=6)
    with cache.admit(Forged((4,), (1,), ids.ctypes.data)) as request:
        assert request.tokens.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("shape", "strides", "address"),
    [
        ((1 << 62,), (1,), 1 << 20),
        ((1 << 61,), (1,), 1 << 20),
        ((2,), (1 << 62,), 1 << 20),
        ((2,), ((1 << 63) - 1,), 1 << 20),
        ((1 << 40,), (1,), (1 << 64) - 4096),
    ],
)
def test_tensors_beyond_the_address_space_are_refused(shape, strides, address) -> None:
    cache, forged = KvCache(KvShape(1, 1, 8, 4), blocks=6), Forged(shape, strides, address)
    with pytest.raises(InvalidArgument, match="tokens: expected"):
        cache.admit(forged)
    pages, rope = torch.zeros(20, 2, 4, 8), rope_table(1, 8)
    rows = Forged((*shape, 6), (*strides, 1), address)
    for backend in (None, "reference"):
        with pytest.raises(InvalidArgument, match="copies: expected|cache: expected"):
            ops.copy_rerotate(pages, rows, rope, kv_heads=2, backend=backend)
