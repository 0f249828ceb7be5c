"""Sizes and values that no call can carry out: a typed refusal, never the end of the process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from kvweave import InvalidArgument, ops
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
