"""Pages far into a large arena are read as those at its beginning are, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvweave import ops
from versions import needs_cuda

KV_HEADS, HEADS, PAGE, DIM = 2, 8, 16, 128
BLOCK = 2 * PAGE * DIM * KV_HEADS
BEYOND = 2**32
"""Elements that 32 bits count."""

pytestmark = needs_cuda


@pytest.fixture(scope="module")
def pages() -> torch.Tensor:
    """An arena [pages, 2, P, D] in bf16 whose last blocks lie beyond `BEYOND` elements."""
    size = BEYOND + 128 * BLOCK
    if torch.cuda.mem_get_info()[0] < 2 * size + 2**30:
        pytest.skip("needs 10 GiB of GPU memory")
    return torch.empty(size // (2 * PAGE * DIM), 2, PAGE, DIM, dtype=torch.bfloat16, device="cuda")


def entries_of(first: int, tokens: int) -> torch.Tensor:
    """Entries of a table whose blocks lie side by side from a page on."""
    count = -(-tokens // PAGE)
    rows = np.zeros((count, 5), np.int32)
    rows[:, 0] = first + np.arange(count) * KV_HEADS
    rows[:, 3] = np.arange(count) * PAGE
    rows[:, 2] = np.minimum(PAGE, tokens - rows[:, 3])
    return torch.from_numpy(rows).cuda()


@pytest.mark.parametrize("tokens", [1, 200, 1000])
@pytest.mark.parametrize("rows", [1, 130])
def test_far_pages_are_read_as_near_ones(pages: torch.Tensor, tokens: int, rows: int) -> None:
    torch.manual_seed(tokens + rows)
    rows = min(rows, tokens)
    count = -(-tokens // PAGE) * KV_HEADS
    far = BEYOND // (2 * PAGE * DIM) + 3 * KV_HEADS
    pages[:count].normal_()
    pages[far : far + count] = pages[:count]
    q = torch.randn(rows, HEADS, DIM, device="cuda").bfloat16()
    rope = ops.RopeTable(np.ones((1, DIM // 2), np.float32), "half")
    kv = ops.PagedKv(pages, 0, KV_HEADS, DIM**-0.5, rope)
    positions = torch.arange(tokens - rows, tokens, dtype=torch.int32, device="cuda")
    near_out, near_lse = ops.attend_prefill(q, positions, entries_of(0, tokens), kv)
    far_out, far_lse = ops.attend_prefill(q, positions, entries_of(far, tokens), kv)
    assert torch.equal(near_out, far_out)
    assert torch.equal(near_lse, far_lse)
    assert bool(near_out.isfinite().all())
    newest, last = q[-1:].contiguous(), positions[-1:].contiguous()
    offsets = torch.tensor([0, -(-tokens // PAGE)], dtype=torch.int32, device="cuda")
    near, _ = ops.attend_decode(newest, last, entries_of(0, tokens), kv, entry_offsets=offsets)
    gone, _ = ops.attend_decode(newest, last, entries_of(far, tokens), kv, entry_offsets=offsets)
    assert torch.equal(near, gone)


def test_what_is_written_far_away_lies_there(pages: torch.Tensor) -> None:
    far = BEYOND // (2 * PAGE * DIM) + KV_HEADS
    slots = torch.tensor([[far, 3], [far + 2 * KV_HEADS, 15]], dtype=torch.int32, device="cuda")
    k, v = torch.randn(2, 2, KV_HEADS, DIM, device="cuda").bfloat16()
    ops.write_pages(pages, 0, k, v, slots)
    for row, (page, slot) in enumerate(slots.tolist()):
        assert torch.equal(pages[page : page + KV_HEADS, 0, slot], k[row])
        assert torch.equal(pages[page : page + KV_HEADS, 1, slot], v[row])
