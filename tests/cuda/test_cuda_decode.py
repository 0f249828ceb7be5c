"""`attend_decode` on CUDA where a request's keys are shared out among many thread blocks."""

from __future__ import annotations

import pytest
import torch

from kvweave import ops
from paged import reads, rope_table
from versions import needs_cuda

pytestmark = needs_cuda

BLOCKS = 40
SHAPES = [
    # tokens of a request, KV heads, query heads, head dim, tokens of a page
    ([40_005], 1, 4, 128, 16),  # every thread block has keys of the one KV head
    ([50_001], 1, 16, 128, 48),  # and of two chunks of query heads
    ([33_333], 1, 6, 64, 8),
    ([30_000, 7, 20_000], 2, 8, 64, 16),
    ([20_000, 41_000], 1, 3, 256, 16),
]


def long_requests(generator, tokens, kv_heads, query_heads, head_dim, page) -> dict:
    """Decode steps over tables whose entries are a few blocks again and again."""
    shape = (BLOCKS * kv_heads, 2, page, head_dim)
    entries, offsets = [], [0]
    for count in tokens:
        for begin in range(0, count, page):
            block = int(torch.randint(BLOCKS, (1,), generator=generator)) * kv_heads
            delta = 1000 if begin // 4096 % 2 else 0
            entries.append([block, 0, min(page, count - begin), begin, delta])
        offsets.append(len(entries))
    return {
        "q": torch.randn(len(tokens), query_heads, head_dim, generator=generator).bfloat16(),
        "positions": torch.tensor(tokens, dtype=torch.int32) - 1,
        "entries": torch.tensor(entries, dtype=torch.int32),
        "cache": torch.randn(shape, generator=generator).bfloat16(),
        "layer": 0,
        "kv_heads": kv_heads,
        "scale": head_dim**-0.5,
        "rope": rope_table(1, head_dim),
        "entry_offsets": torch.tensor(offsets, dtype=torch.int32),
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_of_many_blocks_are_added_up(generator, shape) -> None:
    call = long_requests(generator, *shape)
    there = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    out, lse = reads(ops.attend_decode, **there)
    wanted, wanted_lse = reads(ops.attend_decode, **call)
    torch.testing.assert_close(out.cpu(), wanted, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(lse.cpu(), wanted_lse, rtol=1e-3, atol=1e-2)
    # What is counted in the workspace is 0 again, and the order of sums does not depend on time.
    for _ in range(3):
        again, again_lse = reads(ops.attend_decode, **there)
        assert torch.equal(again, out)
        assert torch.equal(again_lse, lse)
