"""`attend_prefill` on CUDA where computed rows lie between tokens of segments that have moved."""

from __future__ import annotations

import pytest
import torch

from kvweave import ops
from paged import reads, rope_table
from versions import needs_cuda

pytestmark = needs_cuda

TOKENS, ROWS, BLOCKS = 3000, 200, 40
MOVED = (0, 1000, -350)
SHAPES = [
    # KV heads, query heads, head dim, tokens of a page, dtype
    (2, 8, 128, 16, torch.bfloat16),
    (1, 5, 64, 16, torch.bfloat16),
    (2, 4, 64, 32, torch.float16),
    (1, 2, 128, 64, torch.bfloat16),
    (1, 2, 128, 128, torch.bfloat16),
    (2, 4, 64, 16, torch.float32),
    (1, 3, 96, 8, torch.bfloat16),
]


def woven(generator, kv_heads, query_heads, head_dim, page, dtype, others) -> dict:
    """Rows over a table in which runs of tokens come from pages moved in one way or another.

    `others` is the share of runs whose rotation is drawn anew; a run is 1 to `page` tokens of one
    page, from a slot on that is drawn.
    """

    def draw(end: int) -> int:
        return int(torch.randint(end, (1,), generator=generator))

    entries, position, delta = [], 0, 0
    while position < TOKENS:
        if draw(1000) < 1000 * others:
            delta = MOVED[draw(len(MOVED))]
        begin = draw(page) if draw(2) else 0
        count = min(page - begin, TOKENS - position)
        count = 1 + draw(count) if draw(2) else count
        entries.append([draw(BLOCKS) * kv_heads, begin, begin + count, position, delta])
        position += count
    rows = torch.randperm(TOKENS, generator=generator)[:ROWS].sort().values
    return {
        "q": torch.randn(ROWS, query_heads, head_dim, generator=generator).to(dtype),
        "positions": rows.int(),
        "entries": torch.tensor(entries, dtype=torch.int32),
        "cache": torch.randn(BLOCKS * kv_heads, 2, page, head_dim, generator=generator).to(dtype),
        "layer": 0,
        "kv_heads": kv_heads,
        "scale": head_dim**-0.5,
        "rope": rope_table(1, head_dim),
    }


def on_device(call: dict) -> dict:
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in call.items()}


@pytest.mark.parametrize("others", [0.0, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_entries_of_several_rotations_are_put_together(generator, shape, others) -> None:
    call = woven(generator, *shape, others)
    exact = call["q"].dtype == torch.float32
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if exact else {"rtol": 2e-2, "atol": 4e-3}
    for window in (None, 700):
        out, lse = reads(ops.attend_prefill, **on_device(call), window=window)
        wanted, wanted_lse = reads(ops.attend_prefill, **call, window=window)
        torch.testing.assert_close(out.cpu(), wanted, **tolerance)
        torch.testing.assert_close(lse.cpu(), wanted_lse, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_entries_give_the_same_bits(generator, shape) -> None:
    call = on_device(woven(generator, *shape, 0.7))
    first = reads(ops.attend_prefill, **call)
    for _ in range(3):
        for one, again in zip(first, reads(ops.attend_prefill, **call), strict=True):
            assert torch.equal(one, again)


def test_under_classes_of_heads(generator) -> None:
    """Heads that see all, a window, and a window behind first tokens, of one table."""
    call = woven(generator, 4, 8, 128, 16, torch.bfloat16, 0.8)
    classes = [[0, 0, 0, 0], [0, 1, 900, 0], [0, 2, 256, 16], [0, 3, 40, 100]]
    heads = torch.tensor(classes, dtype=torch.int32)
    call |= {
        "reach": ops.Reach(1, heads.numpy()),
        "entry_offsets": torch.tensor([0, len(call["entries"])], dtype=torch.int32),
    }
    wanted, wanted_lse = reads(ops.attend_prefill, **call)
    out, lse = reads(ops.attend_prefill, **on_device(call))
    torch.testing.assert_close(out.cpu(), wanted, rtol=2e-2, atol=4e-3)
    torch.testing.assert_close(lse.cpu(), wanted_lse, rtol=1e-3, atol=1e-2)
