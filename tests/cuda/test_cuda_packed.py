"""INT4 and INT8 pages on CUDA: sizes and input that the tests on a host have not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import Unsupported, ops
from packed_texts import LARGEST, SCALES, check_attention, on_cuda, text_of
from paged import rope_table
from versions import CPU, RUNNABLE, needs_cuda

pytestmark = needs_cuda


@settings(max_examples=150)
@given(
    kind=st.sampled_from(list(LARGEST)),
    shape=st.sampled_from([(64, 2, 2), (64, 4, 1), (128, 2, 4), (128, 1, 9), (128, 3, 8)]),
    page_tokens=st.sampled_from([16, 32, 48, 64, 128, 256]),
    lengths=st.lists(st.integers(0, 900), min_size=1, max_size=5),
    scales=st.sampled_from(list(SCALES)),
    window=st.none() | st.integers(1, 200),
    softcap=st.none() | st.floats(0.5, 50),
    delta=st.integers(-40, 40),
    version=st.sampled_from([v for v in RUNNABLE if v.device != "cpu"] or [None]),
    seed=st.integers(0, 2**20),
)
def test_attending_on_cuda_is_unpacking_and_attending(
    kind, shape, page_tokens, lengths, scales, window, softcap, delta, version, seed
) -> None:
    head_dim, kv_heads, group = shape
    of = ops.PackedFormat(kind, head_dim, page_tokens, scales)
    check_attention(
        torch.Generator().manual_seed(seed),
        of,
        kv_heads,
        group,
        lengths,
        version,
        dtype=SCALES[scales],
        window=window,
        softcap=softcap,
        delta=delta,
    )


def tables(*rows: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(np.asarray(row, np.int32)).cuda() for row in rows]


@pytest.mark.parametrize("page_tokens", [16, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("kind", "scales"), [("int4", "bf16"), ("int4", "f16"), ("int8", "bf16")])
def test_long_text_is_shared_out_and_put_together(
    generator, head_dim, page_tokens, kind, scales
) -> None:
    """Enough pages that many thread blocks have parts of a head, and one more request beside."""
    of = ops.PackedFormat(kind, head_dim, page_tokens, scales)
    check_attention(
        generator,
        of,
        2,
        4,
        [30_011, 1, 700],
        next(version for version in RUNNABLE if version.device == "cuda"),
        dtype=SCALES[scales],
        window=None,
        softcap=None,
        delta=7,
    )


@pytest.mark.parametrize("requests", [64, 65, 200])
def test_more_requests_than_a_launch_lays_out(generator, requests) -> None:
    of = ops.PackedFormat("int4", 64, 16)
    text = text_of(generator, 40, kv_heads=8, dtype=torch.bfloat16, of=of, version=CPU)
    entries = np.tile(text.entries(), (requests, 1))
    offsets = 3 * np.arange(requests + 1)
    positions = 30 + np.arange(requests) % 10
    q = torch.randn(requests, 16, 64, generator=generator).bfloat16()
    rope = rope_table(1, 64)
    given = tables(positions, entries)
    kv = ops.PackedKv(on_cuda(text.packed), 0, 8, 0.125, rope)
    out, lse = ops.attend_packed(q.cuda(), *given, kv, entry_offsets=tables(offsets)[0])
    kv = ops.PackedKv(text.packed, 0, 8, 0.125, rope)
    given = [positions.astype(np.int32), entries]
    wanted = ops.attend_packed(q, *given, kv, entry_offsets=offsets.astype(np.int32))
    # Queries times a scale are rounded to bf16: of 200 000 elements a few are further off.
    torch.testing.assert_close(out.cpu(), wanted[0], rtol=2**-5, atol=2**-5)
    apart = (out.cpu().float() - wanted[0].float()).norm() / wanted[0].float().norm()
    assert float(apart) < 2**-7
    torch.testing.assert_close(lse.cpu(), wanted[1], rtol=2**-7, atol=2**-6)


def test_a_graph_attends_to_what_its_tables_say_then(generator) -> None:
    """Captured once; replayed over other pages, entries that point outside, and new positions."""
    of = ops.PackedFormat("int4", 128, 64)
    text = text_of(generator, 600, kv_heads=2, dtype=torch.bfloat16, of=of, version=CPU)
    pages, rope = on_cuda(text.packed), rope_table(1, 128)
    q = torch.randn(1, 8, 128, generator=generator).bfloat16()
    held = text.entries()
    entries, offsets, positions = tables(held, [0, len(held)], [599])
    kv = ops.PackedKv(pages, 0, 2, 0.1, rope)
    space, asked = ops.Workspace("cuda"), q.cuda()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        named = {"entry_offsets": offsets, "workspace": space}
        return ops.attend_packed(asked, positions, entries, kv, **named)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = call()
    for rows, position in ((held, 599), (held[::-1].copy(), 340), (held, 63)):
        rows[:, 3] = held[:, 3]
        changed = rows.copy()
        changed[3, 0] = 10_000
        entries.copy_(torch.from_numpy(changed))
        positions.fill_(position)
        graph.replay()
        left = np.delete(rows, 3, 0)
        ends = np.array([0, len(left)], np.int32)
        host = ops.PackedKv(text.packed, 0, 2, 0.1, rope)
        at = np.array([position], np.int32)
        wanted, _ = ops.attend_packed(q, at, left, host, entry_offsets=ends)
        torch.testing.assert_close(out.cpu(), wanted, rtol=2**-6, atol=2**-6)


def test_nothing_waits_and_the_stream_is_the_current_one(generator) -> None:
    """Behind a long kernel, packing and attending return at once, and come after it."""
    of = ops.PackedFormat("int4", 128, 64)
    text = text_of(generator, 256, kv_heads=2, dtype=torch.bfloat16, of=of, version=CPU)
    cache, packs = text.cache.cuda(), torch.from_numpy(text.packs).cuda()
    pages, rope = ops.PackedPages.zeros(len(text.packed.data), of, "cuda"), rope_table(1, 128)
    entries, offsets, positions = tables(text.entries(), [0, 4], [255])
    q = torch.randn(1, 8, 128, generator=generator).bfloat16()
    asked, kv, space = q.cuda(), ops.PackedKv(pages, 0, 2, 0.1, rope), ops.Workspace("cuda")

    def call() -> torch.Tensor:
        ops.pack_pages(cache, pages, packs, pages=2)
        named = {"entry_offsets": offsets, "workspace": space}
        return ops.attend_packed(asked, positions, entries, kv, **named)[0]

    call()
    pages.data.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
        marker = torch.cuda.Event()
        marker.record()
        out = call()
        assert not marker.query(), "the call has waited"
        result = out.to("cpu", non_blocking=True)
    stream.synchronize()
    host = ops.PackedKv(text.packed, 0, 2, 0.1, rope)
    ends, at = np.array([0, 4], np.int32), np.array([255], np.int32)
    wanted, _ = ops.attend_packed(q, at, text.entries(), host, entry_offsets=ends)
    torch.testing.assert_close(result, wanted, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("kind", list(LARGEST))
def test_a_call_has_the_same_bits_each_time(generator, kind) -> None:
    of = ops.PackedFormat(kind, 128, 64)
    text = text_of(generator, 20_000, kv_heads=2, dtype=torch.bfloat16, of=of, version=CPU)
    entries, offsets, positions = tables(text.entries(), [0, len(text.packs)], [19_999])
    q = torch.randn(1, 8, 128, generator=generator).bfloat16().cuda()
    kv = ops.PackedKv(on_cuda(text.packed), 0, 2, 0.1, rope_table(1, 128))
    results = [
        ops.attend_packed(q, positions, entries, kv, entry_offsets=offsets) for _ in range(20)
    ]
    assert all(torch.equal(out, results[0][0]) for out, _ in results)
    assert all(torch.equal(lse, results[0][1]) for _, lse in results)


@pytest.mark.parametrize(
    ("of", "dtype", "message"),
    [
        (("int4", 96, 64, "bf16"), torch.bfloat16, "head_dim: expected 64 or 128"),
        (("int4", 64, 64, "bf16"), torch.float16, "q: expected bf16, as scales are"),
        (("int4", 64, 64, "f16"), torch.float32, "q: expected f16, as scales are"),
        (("int8", 64, 64, "bf16"), torch.float16, "q: expected bf16, as scales are"),
    ],
)
def test_what_cuda_does_not_do_is_said(of, dtype, message) -> None:
    made = ops.PackedFormat(*of)
    kv = ops.PackedKv(
        ops.PackedPages.zeros(3, made, "cuda"), 0, 2, 1.0, rope_table(1, made.head_dim)
    )
    q = torch.zeros(1, 4, made.head_dim, dtype=dtype, device="cuda")
    entries = np.array([[1, 0, 64, 0, 0]], np.int32)
    with pytest.raises(Unsupported, match=message):
        ops.attend_packed(
            q, np.array([63], np.int32), entries, kv, entry_offsets=np.array([0, 1], np.int32)
        )
