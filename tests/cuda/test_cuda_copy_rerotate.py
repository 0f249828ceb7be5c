"""`copy_rerotate` on a CUDA device against the definition on the CPU and f64 torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvweave
from kvweave import InvalidArgument, ops
from paged import rope_table, rotated
from versions import needs_cuda

pytestmark = needs_cuda

LAYERS, KV_HEADS = 3, 5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ULP = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""One unit in the last place, as a share of a number: at most 2^-(bits of the fraction)."""
DEVICE = "cuda"


def arena(
    blocks: int, page_tokens: int, head_dim: int, dtype: torch.dtype, *, shift: int = 0
) -> torch.Tensor:
    """Random pages on the CPU; `shift` elements off their natural alignment."""
    pages = (blocks + 1) * LAYERS * KV_HEADS
    size = pages * 2 * page_tokens * head_dim
    flat = torch.randn(size + shift, generator=torch.Generator().manual_seed(1)).to(dtype)
    return flat[shift:].view(pages, 2, page_tokens, head_dim)


def random_copies(blocks: int, page_tokens: int, deltas: list[int], seed: int = 0) -> np.ndarray:
    """One run from each of half the blocks to another block, slots and counts at random."""
    rng = np.random.default_rng(seed)
    order = (rng.permutation(blocks) + 1) * LAYERS * KV_HEADS
    half = blocks // 2
    count = rng.integers(1, page_tokens + 1, half)
    src_slot = rng.integers(0, page_tokens - count + 1)
    dst_slot = rng.integers(0, page_tokens - count + 1)
    columns = (order[:half], src_slot, order[half : 2 * half], dst_slot, count)
    return np.stack((*columns, rng.choice(deltas, half)), 1).astype(np.int32)


def on_device(pages: torch.Tensor, shift: int = 0) -> torch.Tensor:
    flat = torch.zeros(pages.numel() + shift, dtype=pages.dtype, device=DEVICE)[shift:]
    return flat.view(pages.shape).copy_(pages)


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """V equal bit for bit, K within one ulp of the largest element of its vector."""
    got = got.cpu()
    assert torch.equal(got[:, 1], wanted[:, 1])
    apart = (got[:, 0].double() - wanted[:, 0].double()).abs()
    size = wanted[:, 0].double().abs().amax(-1, keepdim=True)
    assert float((apart / size).nan_to_num(0).max()) <= ULP[wanted.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(64, 64), (128, 128), (80, 80), (80, 32), (96, 96), (256, 256), (128, 20), (8, 8), (64, 16)],
)
@pytest.mark.parametrize("page_tokens", [8, 16, 64])
def test_it_is_the_definition(dtype, pairing, head_dim, rotary_dim, page_tokens) -> None:
    pages = arena(12, page_tokens, head_dim, dtype)
    copies = random_copies(12, page_tokens, [0, 1, -900, 5000])
    rope = rope_table(LAYERS, rotary_dim, pairing)
    device = on_device(pages)
    ops.copy_rerotate(device, copies, rope, kv_heads=KV_HEADS)
    ops.copy_rerotate(pages, copies, rope, kv_heads=KV_HEADS, backend="reference")
    same(device, pages)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_odd_addresses(dtype, shift) -> None:
    pages = arena(8, 16, 64, dtype)
    copies = random_copies(8, 16, [77])
    rope = rope_table(LAYERS, 64)
    device = on_device(pages, shift)
    assert device.data_ptr() % 16 != 0
    ops.copy_rerotate(device, copies, rope, kv_heads=KV_HEADS)
    ops.copy_rerotate(pages, copies, rope, kv_heads=KV_HEADS, backend="reference")
    same(device, pages)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("size", "read_size"), [(16, 16), (8, 64), (64, 8)])
def test_blocks_of_another_arena(dtype, shift, size, read_size) -> None:
    pages, apart = arena(12, size, 128, dtype), arena(12, read_size, 128, dtype, shift=shift)
    copies = random_copies(12, min(size, read_size), [0, 1, -900, 5000])
    # What is read there may be written here.
    copies[:, 2] = copies[:, 0]
    rope = rope_table(LAYERS, 128)
    device, source = on_device(pages), on_device(apart, shift)
    ops.copy_rerotate(device, copies, rope, kv_heads=KV_HEADS, source=source)
    ops.copy_rerotate(
        pages, copies, rope, kv_heads=KV_HEADS, source=apart.clone(), backend="reference"
    )
    same(device, pages)
    assert torch.equal(source.cpu(), apart)


def test_another_arena_is_of_the_caches_device() -> None:
    pages, none = arena(4, 16, 64, torch.float32), np.zeros((0, 6), np.int32)
    rope = rope_table(LAYERS, 64)
    with pytest.raises(InvalidArgument, match="source: expected a tensor on cuda:0, got cpu"):
        ops.copy_rerotate(on_device(pages), none, rope, kv_heads=KV_HEADS, source=pages)
    with pytest.raises(InvalidArgument, match="source: expected"):
        ops.copy_rerotate(pages, none, rope, kv_heads=KV_HEADS, source=on_device(pages))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("delta", [0, 1_000_000, -1_000_000, 2**29 - 1])
def test_huge_deltas_lose_nothing(dtype, delta) -> None:
    pages = arena(2, 16, 128, dtype)
    block = LAYERS * KV_HEADS
    copies = np.array([[block, 0, 2 * block, 0, 16, delta]], np.int32)
    rope = rope_table(LAYERS, 128)
    device = on_device(pages)
    ops.copy_rerotate(device, copies, rope, kv_heads=KV_HEADS)
    got = device.cpu()[2 * block : 3 * block]
    source = pages[block : 2 * block]
    assert torch.equal(got[:, 1], source[:, 1])
    steps = torch.full((16,), delta)
    wanted = rotated(source[:, 0].transpose(0, 1), torch.from_numpy(rope.inv_freq[0]), steps)
    apart = (got[:, 0].transpose(0, 1).double() - wanted).abs()
    size = source[:, 0].transpose(0, 1).double().abs().amax(-1, keepdim=True)
    assert float((apart / size).max()) <= ULP[dtype]


def test_infinities_and_nan_are_copied_as_they_are_with_delta_0() -> None:
    pages = arena(2, 16, 64, torch.bfloat16)
    block = LAYERS * KV_HEADS
    pages[block : 2 * block, :, ::2] = torch.inf
    pages[block : 2 * block, :, 1::4] = torch.nan
    copies = np.array([[block, 0, 2 * block, 0, 16, 0]], np.int32)
    device = on_device(pages)
    ops.copy_rerotate(device, copies, rope_table(LAYERS, 64), kv_heads=KV_HEADS)
    got = device.cpu()
    view = torch.int16
    assert torch.equal(got[2 * block :].view(view), pages[block : 2 * block].view(view))


def test_nothing_to_copy() -> None:
    pages = arena(2, 16, 64, torch.float32)
    device, none = on_device(pages), np.zeros((0, 6), np.int32)
    ops.copy_rerotate(device, none, rope_table(LAYERS, 64), kv_heads=KV_HEADS)
    table = torch.zeros(0, 6, dtype=torch.int32, device=DEVICE)
    ops.copy_rerotate(device, table, rope_table(LAYERS, 64), kv_heads=KV_HEADS)
    assert torch.equal(device.cpu(), pages)


def test_many_copies_in_one_launch() -> None:
    pages = arena(4000, 8, 8, torch.bfloat16)
    copies = random_copies(4000, 8, list(range(-50, 50)))
    rope = rope_table(LAYERS, 8)
    device = on_device(pages)
    ops.copy_rerotate(device, copies, rope, kv_heads=KV_HEADS)
    ops.copy_rerotate(pages, copies, rope, kv_heads=KV_HEADS)
    same(device, pages)


def test_a_table_on_the_host_is_checked_and_nothing_is_written() -> None:
    pages = arena(4, 16, 64, torch.float32)
    device, block = on_device(pages), LAYERS * KV_HEADS
    for row, words in [
        ([block, 0, 10**6, 0, 16, 1], "expected a block within the cache"),
        ([block, 8, 2 * block, 0, 16, 1], "copy slots: expected"),
        ([block, 0, block, 0, 16, 1], "both read and written"),
        ([-1, 0, block, 0, 16, 1], "copy blocks: expected"),
    ]:
        copies = torch.tensor([row], dtype=torch.int32)
        with pytest.raises(InvalidArgument, match=words):
            ops.copy_rerotate(device, copies, rope_table(LAYERS, 64), kv_heads=KV_HEADS)
    assert torch.equal(device.cpu(), pages)


def test_a_table_on_the_device_never_writes_outside() -> None:
    pages = arena(4, 16, 64, torch.float32)
    device, block = on_device(pages), LAYERS * KV_HEADS
    huge = 2**31 - 1
    rows = [
        [block, 0, huge, 0, 16, 1],
        [huge, 0, block, 0, 16, 1],
        [block, 8, 2 * block, 0, 16, 1],
        [block, 0, 2 * block, -1, 4, 1],
        [-block, 0, 2 * block, 0, 4, 1],
        [block, 0, 0, 0, 4, 1],
        [block, 0, 2 * block, 0, -4, 1],
        [block, huge, 2 * block, 0, 4, 1],
        [block, 0, len(pages) - block + 1, 0, 16, 1],
    ]
    table = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    ops.copy_rerotate(device, table, rope_table(LAYERS, 64), kv_heads=KV_HEADS)
    torch.cuda.synchronize()
    assert torch.equal(device.cpu(), pages)
    # Blocks that the cache has, but not the smaller arena that is read, nor its smaller pages.
    rows += [[3 * block, 0, block, 0, 4, 1], [block, 6, block, 0, 4, 1]]
    table = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    small = torch.full((3 * block, 2, 8, 64), 9.0, device=DEVICE)
    rope = rope_table(LAYERS, 64)
    ops.copy_rerotate(device, table, rope, kv_heads=KV_HEADS, source=small)
    torch.cuda.synchronize()
    assert torch.equal(device.cpu(), pages)


def test_it_runs_on_the_current_stream() -> None:
    pages = arena(200, 16, 128, torch.bfloat16)
    copies = random_copies(200, 16, [3])
    rope = rope_table(LAYERS, 128)
    device = torch.zeros(pages.shape, dtype=pages.dtype, device=DEVICE)
    table = torch.from_numpy(copies).to(DEVICE)
    pinned = pages.pin_memory()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        device.copy_(pinned, non_blocking=True)
        ops.copy_rerotate(device, table, rope, kv_heads=KV_HEADS)
        result = device.to("cpu", non_blocking=True)
    stream.synchronize()
    ops.copy_rerotate(pages, copies, rope, kv_heads=KV_HEADS, backend="reference")
    same(result, pages)


def test_it_is_captured_in_a_graph() -> None:
    pages = arena(12, 16, 128, torch.bfloat16)
    rope, device = rope_table(LAYERS, 128), on_device(pages)
    table = torch.zeros(6, 6, dtype=torch.int32, device=DEVICE)
    ops.copy_rerotate(device, table, rope, kv_heads=KV_HEADS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.copy_rerotate(device, table, rope, kv_heads=KV_HEADS)
    for seed in range(3):
        copies = random_copies(12, 16, [5, -3], seed)
        device.copy_(pages)
        table.copy_(torch.from_numpy(copies))
        graph.replay()
        torch.cuda.synchronize()
        wanted = pages.clone()
        ops.copy_rerotate(wanted, copies, rope, kv_heads=KV_HEADS, backend="reference")
        same(device, wanted)


def test_what_is_refused_says_so() -> None:
    pages = on_device(arena(2, 16, 64, torch.float32))
    rope = rope_table(LAYERS, 64)
    table = torch.zeros(1, 6, dtype=torch.int64, device=DEVICE)
    with pytest.raises(InvalidArgument, match="copies: expected int32, got int64"):
        ops.copy_rerotate(pages, table, rope, kv_heads=KV_HEADS)
    none = np.zeros((0, 6), np.int32)
    with pytest.raises(InvalidArgument, match="expected a tensor on cpu, got cuda:0"):
        ops.copy_rerotate(pages, none, rope, kv_heads=KV_HEADS, backend="reference")


def test_a_cache_over_device_memory() -> None:
    shape = kvweave.KvShape(LAYERS, KV_HEADS, 64, 16, "bf16")
    pages = torch.zeros(16 * LAYERS * KV_HEADS, 2, 16, 64, dtype=torch.bfloat16, device=DEVICE)
    cache = kvweave.KvCache(shape, external=pages)
    assert cache.arena is pages
    tokens = np.arange(40, dtype=np.int32)
    with cache.admit(tokens) as request:
        request.commit(40, 40)
    moved = np.concatenate((tokens[:3] + 500, tokens, tokens[:1]))
    with cache.admit(moved, segments=[(3, 43, "")]) as request:
        copies = request.take_copies()
        assert copies[:, 4].sum() == 40
        ops.copy_rerotate(pages, copies, rope_table(LAYERS, 64), kv_heads=KV_HEADS)
        request.finish_copies()
    cache.check()
