"""What the ops on CUDA refuse, skip and survive: devices, dtypes, alignment, hostile tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvweave
from cuda_steps import NAMES, steps
from kvweave import InvalidArgument, ops
from paged import paged, reads, rope_table
from scarce_memory import no_room_on_gpu
from versions import needs_cuda

pytestmark = needs_cuda

HUGE = 2**31 - 1
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def world(generator, dtype=torch.float32, rows=5, **shape) -> dict:
    """Arguments of `attend_prefill` on the device, tables too."""
    case = paged(generator, 60, layers=1, dtype=dtype, **shape)
    head_dim = case.k.shape[-1]
    return {
        "q": torch.randn(rows, 4, head_dim, generator=generator).to(dtype).cuda(),
        "positions": torch.arange(60 - rows, 60, dtype=torch.int32).cuda(),
        "entries": torch.from_numpy(case.entries).cuda(),
        "cache": case.pages.cuda(),
        "layer": 0,
        "kv_heads": 2,
        "scale": head_dim**-0.5,
        "rope": rope_table(1, head_dim),
    }


def on_host(call: dict) -> dict:
    return {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in call.items()}


BAD: list[tuple[str, object, str]] = [
    ("q", lambda c: c["q"].cpu(), "q: expected a tensor on cuda:0, got cpu"),
    ("q", lambda c: c["q"].half(), "q: expected float32, got float16"),
    ("q", lambda c: c["q"].transpose(1, 2), "q: expected"),
    ("q", lambda c: c["q"][:, :3], "query heads: expected a positive multiple of 2"),
    ("positions", lambda c: c["positions"].long(), "positions: expected int32, got int64"),
    ("positions", lambda c: c["positions"][:-1], "positions: expected 5 elements, got 4"),
    ("positions", lambda c: -c["positions"].cpu(), "positions: expected at least 0"),
    ("positions", lambda c: c["positions"].cpu().long(), "positions: expected int32, got int64"),
    ("positions", lambda c: 7, "positions: expected a tensor, got an object of type int"),
    ("entries", lambda c: c["entries"][:, :4], r"entries: expected shape \[N, columns=5\]"),
    ("entries", lambda c: c["entries"].T.contiguous().T, "entries: expected C-contiguous"),
    ("entries", lambda c: c["entries"].cpu() + 9999, "expected"),
    ("layer", lambda c: 1, "layer: expected a layer below 1, got 1"),
    ("layer", lambda c: -1, "layer: expected at least 0, got -1"),
    ("window", lambda c: 0, "window: expected at least 1, got 0"),
    ("softcap", lambda c: -1.0, "softcap: expected above 0"),
    ("scale", lambda c: float("nan"), "scale: expected a finite number"),
    ("rope", lambda c: rope_table(1, 128), "rotary_dim: expected at most the head dim 64"),
    ("cache", lambda c: c["cache"].cpu(), "expected a tensor on cpu, got cuda:0"),
    ("cache", lambda c: c["cache"][::2], "cache: expected C-contiguous"),
    ("out", lambda c: c["q"], "out: expected memory of its own, apart from q"),
    ("out", lambda c: torch.zeros(5, 4, 64), "out: expected a tensor on cuda:0, got cpu"),
    ("out", lambda c: torch.zeros(5, 4, 32).cuda(), "out: expected shape"),
    ("row_offsets", lambda c: torch.zeros(3).int().cuda(), "row_offsets: expected 2 elements"),
    ("row_offsets", lambda c: np.array([0, 4], np.int32), "row_offsets: expected offsets from"),
    ("entry_offsets", lambda c: torch.zeros(0).int().cuda(), "entry_offsets: expected"),
]


@pytest.mark.parametrize(("name", "value", "words"), BAD)
def test_attention_refuses(generator, name, value, words) -> None:
    call = world(generator)
    with pytest.raises(InvalidArgument, match=words) as told:
        reads(ops.attend_prefill, **{**call, name: value(call)})
    assert told.value.expected


def test_host_tables_are_checked_like_those_of_the_cpu(generator) -> None:
    call = world(generator)
    host = call["entries"].cpu().numpy()
    for column, number in [(0, 10**6), (0, -1), (1, -1), (2, 17), (3, -5)]:
        bad = host.copy()
        bad[1, column] = number
        with pytest.raises(InvalidArgument) as there:
            reads(ops.attend_prefill, **{**call, "entries": bad})
        with pytest.raises(InvalidArgument) as here:
            reads(ops.attend_prefill, **{**on_host(call), "entries": bad})
        assert str(there.value) == str(here.value)


def test_head_dims_beyond_the_kernels_are_named(generator) -> None:
    call = world(generator, head_dim=264)
    with pytest.raises(kvweave.Unsupported, match="head_dim: expected a multiple of 8 up to 256"):
        reads(ops.attend_prefill, **call)


HOSTILE = [
    [HUGE, 0, 16, 0, 0],
    [-1, 0, 16, 0, 0],
    [-HUGE - 1, 0, 16, 0, 0],
    [2, -1, 16, 0, 0],
    [2, 8, 4, 0, 0],
    [2, 0, 17, 0, 0],
    [2, HUGE, HUGE, 0, 0],
    [2, 0, HUGE, 0, 0],
    [10**6, 0, 16, 0, 0],
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decode", [False, True])
def test_entries_outside_the_cache_hold_no_token(generator, dtype, decode) -> None:
    call = world(generator, dtype, rows=1)
    entries = call["entries"].cpu()
    hostile = torch.tensor(HOSTILE, dtype=torch.int32)
    hostile[:, 3] = entries[0, 3]
    # Sorted by position as the ops demand, so that only what they point at is wrong.
    mixed = torch.cat((hostile, entries[1:])).cuda()
    offsets = torch.tensor([0, len(mixed)], dtype=torch.int32, device="cuda")
    op = ops.attend_decode if decode else ops.attend_prefill
    got = reads(op, **{**call, "entries": mixed, "entry_offsets": offsets})
    torch.cuda.synchronize()
    wanted = reads(ops.attend_prefill, **{**on_host(call), "entries": entries[1:]})
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_entries_outside_the_cache_are_0(generator, dtype) -> None:
    call = world(generator, dtype)
    entries = call["entries"].cpu()
    bad = entries.clone()
    bad[1, 0] = HUGE
    mass = reads(ops.score_tokens, **{**call, "entries": bad.cuda()}, tokens=60).cpu()
    kept = torch.cat((entries[:1], entries[2:]))
    wanted = reads(ops.score_tokens, **{**on_host(call), "entries": kept})
    torch.testing.assert_close(mass, wanted, rtol=2e-2, atol=1e-3)
    assert (mass[16:32] == 0).all()


def test_the_length_of_scores_is_asked_for(generator) -> None:
    call = world(generator)
    with pytest.raises(InvalidArgument, match="tokens: expected the largest end of an entry"):
        reads(ops.score_tokens, **call)
    host = {**call, "entries": call["entries"].cpu()}
    with pytest.raises(InvalidArgument, match=r"mass: expected shape \[T=60\], got \[59\]"):
        reads(ops.score_tokens, **host, tokens=59)
    assert reads(ops.score_tokens, **host).shape == (60,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_outside_the_cache_are_skipped(generator, dtype) -> None:
    pages = torch.randn(30, 2, 16, 64, generator=generator).to(dtype).cuda()
    before, values = pages.clone(), torch.full((30, 3, 64), -7.0, device="cuda")
    slots = [[HUGE, 0], [-2, 0], [0, 3], [2, -1], [2, 16], [2, HUGE], [30, 0], [28, -HUGE]]
    k = torch.ones(len(slots), 2, 64, dtype=dtype, device="cuda")
    held = [[HUGE, 0, 1], [-2, 0, 1], [0, 0, 1], [2, -1, 1], [2, 0, 17], [2, 3, 3], [29, 0, 1]]
    table = torch.tensor(slots, dtype=torch.int32, device="cuda")
    bounds = ops.PageBounds(values, torch.tensor(held, dtype=torch.int32, device="cuda"))
    ops.write_pages(pages, 0, k, k, table, bounds=bounds)
    torch.cuda.synchronize()
    assert torch.equal(pages, before)
    assert (values == -7).all()
    short = ops.PageBounds(values[:4], torch.tensor([[3, 0, 1]], dtype=torch.int32).cuda())
    ops.write_pages(pages, 0, k[:0], k[:0], table[:0], bounds=short)
    torch.cuda.synchronize()
    assert (values == -7).all()


BAD_WRITES = [
    ("k", lambda c: c["k"].cpu(), "k: expected a tensor on cuda:0, got cpu"),
    ("v", lambda c: c["v"].half(), "v: expected float32, got float16"),
    ("v", lambda c: c["v"][:1], "slots: expected 1 elements, got 2"),
    ("slots", lambda c: torch.zeros(2, 2).cuda(), "slots: expected int32, got float32"),
    ("slots", lambda c: np.array([[4, 0], [4, 0]], np.int32), "slots: expected every slot once"),
    ("slots", lambda c: np.array([[0, 0], [4, 0]], np.int32), "null block"),
    ("slots", lambda c: np.array([[4, 0], [999, 0]], np.int32), "a block within the cache"),
    ("k", lambda c: c["cache"][:4, 0].transpose(0, 1)[:2, :2], "memory of its own, apart from k"),
    ("cache", lambda c: c["cache"].cpu(), "expected a tensor on cpu, got cuda:0"),
]


@pytest.mark.parametrize(("name", "value", "words"), BAD_WRITES)
def test_write_pages_refuses(name, value, words) -> None:
    k, v = torch.ones(2, 2, 2, 64, device="cuda")
    cache = torch.zeros(20, 2, 16, 64, device="cuda")
    slots = np.array([[4, 0], [4, 1]], np.int32)
    call = {"cache": cache, "layer": 0, "k": k, "v": v, "slots": slots}
    with pytest.raises(InvalidArgument, match=words):
        ops.write_pages(**{**call, name: value(call)})
    assert (cache == 0).all()


def test_merge_states_refuses() -> None:
    outs, lses = torch.zeros(2, 3, 4, 8, device="cuda"), torch.zeros(2, 3, 4, device="cuda")
    for given, words in [
        ((outs, lses.cpu()), "lses: expected a tensor on cuda:0, got cpu"),
        ((outs, lses[:, :2]), r"lses: expected shape \[S=2, R=3, H=4\]"),
        ((outs.transpose(1, 2), lses), "outs: expected C-contiguous"),
        ((outs, lses.double()), "lses: expected float32, got float64"),
        ((outs[:0], lses[:0]), "splits: expected at least 1, got 0"),
        ((outs.double(), lses), "outs: expected float32, bfloat16 or float16, got float64"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            ops.merge_states(*given)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_in_nothing_out(generator, dtype) -> None:
    call = world(generator, dtype, rows=0)
    out, lse = reads(ops.attend_prefill, **call)
    assert (out.shape, lse.shape) == ((0, 4, 64), (0, 4))
    none = torch.zeros(1, dtype=torch.int32, device="cuda")
    out, lse = reads(
        ops.attend_decode, **{**call, "entries": call["entries"][:0]}, entry_offsets=none
    )
    assert len(out) == 0
    share = torch.full((0, 4), torch.nan, device="cuda")
    mass = reads(ops.score_tokens, **call, edge=ops.EdgeMass(share, 4), tokens=60)
    assert mass.shape == (60,)
    assert (mass == 0).all()
    pages = call["cache"].clone()
    k = torch.zeros(0, 2, 64, dtype=dtype, device="cuda")
    ops.write_pages(call["cache"], 0, k, k, np.zeros((0, 2), np.int32))
    assert torch.equal(pages.view(torch.uint8), call["cache"].view(torch.uint8))
    out, lse = ops.merge_states(k[None], torch.zeros(1, 0, 2, device="cuda"))
    assert (out.shape, lse.shape) == ((0, 2, 64), (0, 2))
    ops.rotate_rows(k, None, *torch.zeros(2, 0, 64, dtype=dtype, device="cuda"))
    alone = {**world(generator, dtype, rows=2), "entries": torch.zeros(0, 5).int().cuda()}
    share = torch.full((2, 4), torch.nan, device="cuda")
    assert reads(ops.score_tokens, **alone, edge=ops.EdgeMass(share, 4), tokens=0).shape == (0,)
    assert (share == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_odd_addresses(generator, dtype, shift) -> None:
    """Pages, rows and results off the boundaries that vector loads want."""

    def shifted(x: torch.Tensor) -> torch.Tensor:
        room = torch.zeros(x.numel() + shift, dtype=x.dtype, device="cuda")[shift:]
        return room.view(x.shape).copy_(x)

    call = world(generator, dtype)
    moved = {k: shifted(v) if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    wanted = reads(ops.attend_prefill, **on_host(call))
    for a, b in zip(reads(ops.attend_prefill, **moved), wanted, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=2e-2, atol=2e-2)
    mass = reads(ops.score_tokens, **moved, tokens=60).cpu()
    torch.testing.assert_close(mass, reads(ops.score_tokens, **on_host(call)), rtol=2e-2, atol=1e-3)
    k, v = torch.randn(2, 9, 2, 64, generator=generator).to(dtype)
    slots = torch.stack((torch.full((9,), 4), torch.arange(9)), 1).int()
    ops.write_pages(moved["cache"], 0, shifted(k), shifted(v), shifted(slots))
    host = call["cache"].cpu()
    ops.write_pages(host, 0, k, v, slots)
    assert torch.equal(moved["cache"].cpu().view(torch.uint8), host.view(torch.uint8))
    outs = torch.randn(3, 5, 2, 64, generator=generator).to(dtype)
    lses = torch.randn(3, 5, 2, generator=generator)
    merged = ops.merge_states(shifted(outs), shifted(lses))
    for a, b in zip(merged, ops.merge_states(outs, lses), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_what_memory_held(generator, dtype) -> None:
    """torch hands out memory as it was left: every number of a result is written."""
    call = world(generator, dtype, rows=7)
    call["positions"][0] = 0
    call["entries"] = call["entries"][1:]
    results = []
    for poison in (torch.nan, 1e4):
        rooms = [torch.full((n,), poison, device="cuda") for n in (28, 60, 7 * 4 * 64, 2**16)]
        rooms += [torch.full((7, 4, 64), poison, dtype=dtype, device="cuda")]
        del rooms
        out, lse = reads(ops.attend_prefill, **call)
        mass = reads(ops.score_tokens, **call, tokens=60)
        results.append((out.cpu(), lse.cpu(), mass.cpu()))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert (results[0][0][0] == 0).all()
    assert torch.isneginf(results[0][1][0]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ops_share_a_workspace(generator, dtype) -> None:
    """What one of them leaves there is no matter to the next; where it is too small it grows."""
    call, space = world(generator, dtype, rows=7), ops.Workspace("cuda")
    alone = [reads(ops.score_tokens, **call, tokens=60), *reads(ops.attend_prefill, **call)]
    for _ in range(2):
        mass = reads(ops.score_tokens, **call, tokens=60, workspace=space)
        assert space.held is not None
        space.held[0].fill_(torch.nan)
        together = [mass, *reads(ops.attend_prefill, **call, workspace=space)]
        for a, b in zip(together, alone, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "rotate_rows"])
def test_an_op_without_room_says_so_and_runs_later(name) -> None:
    """All but `rotate_rows`, which has neither results of its own nor tables."""
    step = steps(torch.bfloat16)[name]
    numbers = step.renew(torch.Generator().manual_seed(1))
    step.place(numbers)
    # What allocates nothing does with tables of the host.
    tables = {"copies", "slots", "held", "packs", "moves"} & numbers.keys()
    inputs = {**step.inputs, **{table: numbers[table] for table in tables}}
    said = {"step_tables": "StepTables.empty", "move_fp8_pages": "move_pages"}
    what = said.get(name, name)
    with no_room_on_gpu(), pytest.raises(kvweave.OutOfMemory, match=what) as refused:
        step.call(inputs)
    assert refused.value.expected == "memory for it"
    assert "Tried to allocate" in refused.value.got
    for got, wanted in zip(step.call(inputs), step.wanted(numbers), strict=True):
        torch.testing.assert_close(got.cpu(), wanted, rtol=2e-2, atol=1e-2, equal_nan=True)
