"""The border to Rust: memory shared both ways, and every bad argument refused by name."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

import kvweave
from kvweave import InvalidArgument, ops
from kvweave.ops.reading import Reading
from paged import NAMES, Paged, paged, reads, rope_table

DTYPES = list(NAMES)


def small_cache(dtype: torch.dtype = torch.float32) -> kvweave.KvCache:
    return kvweave.KvCache(kvweave.KvShape(1, 2, 8, 4, NAMES[dtype]), blocks=6)


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, kvweave; kvweave.KvShape(1, 1, 8); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_cuda_status_says_what_there_is() -> None:
    text = kvweave.cuda_status()
    if text.startswith("available: "):
        assert "cuda:0" in text
    else:
        assert text.startswith("unavailable: ")
        assert len(text) > len("unavailable: ")


# ---- the arena goes out -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_arena_is_one_memory(dtype) -> None:
    cache = small_cache(dtype)
    first, second = torch.from_dlpack(cache.arena), torch.from_dlpack(cache.arena)
    assert first.dtype == dtype
    assert first.shape == cache.arena.shape
    assert first.is_contiguous()
    assert first.data_ptr() % 64 == 0
    assert (first == 0).all()
    first[3, 1, 2] = 5
    assert (second[3, 1, 2] == 5).all()
    assert cache.arena.nbytes == first.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_numpy_sees_the_same_memory(dtype) -> None:
    cache = small_cache(dtype)
    array, tensor = np.from_dlpack(cache.arena), torch.from_dlpack(cache.arena)
    tensor[1, 0, 0, 0] = 3
    assert array[1, 0, 0, 0] == 3
    assert array.ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 3), (2, 0)])
def test_capsules_of_both_kinds_live_and_die(max_version) -> None:
    cache = small_cache()
    for _ in range(50):
        unconsumed = cache.arena.__dlpack__(max_version=max_version)
        name = "dltensor" if max_version in (None, (0, 8)) else "dltensor_versioned"
        assert f'"{name}"' in repr(unconsumed)
        del unconsumed
    tensor = torch.utils.dlpack.from_dlpack(cache.arena.__dlpack__(max_version=max_version))
    tensor.fill_(2)
    assert (torch.from_dlpack(cache.arena) == 2).all()


def test_unconsumed_capsules_free_what_they_hold() -> None:
    shape = kvweave.KvShape(1, 1, 64, 64)
    before = resident_mib()
    for _ in range(100):
        cache = kvweave.KvCache(shape, arena_bytes=64 << 20)
        torch.from_dlpack(cache.arena).fill_(1)
        for version in (None, (1, 0)):
            cache.arena.__dlpack__(max_version=version)
            cache.arena.__dlpack__(max_version=version, copy=True)
    assert resident_mib() - before < 1000


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def test_memory_outlives_its_cache() -> None:
    cache = small_cache()
    tensor = torch.from_dlpack(cache.arena)
    alive = weakref.ref(tensor)
    del cache
    gc.collect()
    tensor.fill_(7)
    assert (tensor == 7).all()
    del tensor
    assert alive() is None


def test_a_copy_is_a_copy() -> None:
    cache = small_cache()
    tensor = torch.from_dlpack(cache.arena)
    tensor.fill_(1)
    twin = torch.from_dlpack(cache.arena, copy=True)
    tensor.fill_(2)
    assert (twin == 1).all()


def test_the_arena_refuses_what_it_cannot_give() -> None:
    arena = small_cache().arena
    assert arena.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError, match="expected .*, got"):
        arena.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="expected None"):
        arena.__dlpack__(stream=1)


def test_an_arena_beyond_the_hosts_memory_is_refused() -> None:
    shape = kvweave.KvShape(64, 64, 256, 256, "f32")
    with pytest.raises(kvweave.OutOfMemory, match=r"arena: expected \d+ bytes") as refused:
        kvweave.KvCache(shape, arena_bytes=1 << 49)
    assert refused.value.expected == f"{1 << 49} bytes"
    assert refused.value.got == "fewer on this machine"


# ---- tensors come in ----------------------------------------------------------------------


class Wrapped:
    """A producer that only speaks `__dlpack__`; `legacy` ones know no version."""

    def __init__(self, tensor: torch.Tensor, legacy: bool) -> None:
        self.tensor = tensor
        self.legacy = legacy

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **wanted: object) -> object:
        if self.legacy and wanted:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        return self.tensor.__dlpack__(**wanted)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_producer_is_read(generator, dtype, legacy) -> None:
    case = paged(generator, 8, layers=1, dtype=dtype)
    k, v = torch.randn(2, 8, 2, 64, generator=generator).to(dtype)
    slots = torch.from_numpy(case.request.slots(np.arange(8, dtype=np.int32)))
    wrap = [Wrapped(x, legacy) for x in (k, v, slots)]
    kvweave._native.write_pages(case.pages, 0, *wrap, None, None, None, False)
    page, slot = slots.long().T
    assert torch.equal(case.pages[page, 0, slot], k[:, 0])
    assert torch.equal(case.pages[page + 1, 1, slot], v[:, 1])
    del wrap
    gc.collect()
    assert torch.isfinite(k).all()


class Lender:
    """A producer whose memory nobody but the capsule keeps alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **wanted: object) -> object:
        return self.tensor.clone().__dlpack__(**wanted)


def test_borrowed_memory_lives_through_the_call(generator) -> None:
    """Every argument of an op, the written ones too, may be held by its capsule alone."""
    case = paged(generator, 800, layers=1)
    rows = np.arange(800, dtype=np.int32)
    q = torch.randn(800, 4, 64, generator=generator)
    call = {
        "q": q,
        "positions": torch.from_numpy(rows),
        "entries": torch.from_numpy(case.entries),
        "cache": case.pages,
        "layer": 0,
        "kv_heads": 2,
        "scale": 0.125,
        "rope": rope_table(1, 64),
        "window": None,
        "softcap": None,
        "reach": None,
    }
    wanted, lse = torch.empty(800, 4, 64), torch.empty(800, 4)
    kvweave._native.attend_prefill(Reading(**call), None, None, wanted, lse, False)
    lent = {
        name: Lender(value) if isinstance(value, torch.Tensor) else value
        for name, value in call.items()
    }
    out = torch.empty(800, 4, 64)
    kvweave._native.attend_prefill(Reading(**lent), None, None, out, Lender(lse), False)
    assert torch.equal(out, wanted)
    slots = torch.from_numpy(case.request.slots(rows))
    given = [Lender(x) for x in (case.k[0], case.v[0], slots)]
    kvweave._native.write_pages(Lender(case.pages), 0, *given, None, None, None, False)


def test_read_only_arrays_are_read_and_never_written(generator) -> None:
    case = paged(generator, 8, layers=1)
    rows = np.arange(8, dtype=np.int32)
    rows.flags.writeable = False
    slots = case.request.slots(rows)
    slots.flags.writeable = False
    ops.write_pages(case.pages, 0, case.k[0], case.v[0], slots)
    frozen = np.zeros((8, 2, 64), np.float32)
    frozen.flags.writeable = False
    kvweave._native.write_pages(case.pages, 0, frozen, frozen, slots, None, None, None, False)
    arena = np.from_dlpack(case.cache.arena)
    arena.flags.writeable = False
    with pytest.raises(InvalidArgument, match="cache: expected a writable tensor"):
        kvweave._native.write_pages(arena, 0, frozen, frozen, slots, None, None, None, False)


def test_the_arena_object_itself_is_a_cache(generator) -> None:
    case = paged(generator, 8, layers=1)
    slots = case.request.slots(np.arange(8, dtype=np.int32))
    ops.write_pages(case.cache.arena, 0, case.v[0], case.k[0], slots)
    page, slot = torch.from_numpy(slots).long().T
    assert torch.equal(case.pages[page, 0, slot], case.v[0][:, 0])


def test_a_callers_arena_is_used_in_place() -> None:
    shape = kvweave.KvShape(1, 2, 8, 4, torch.bfloat16)
    mine = torch.zeros(20, 2, 4, 8, dtype=torch.bfloat16)
    cache = kvweave.KvCache(shape, external=mine)
    assert cache.arena is mine
    assert cache.stats()["arena_pages"] == 20
    request = cache.admit(np.arange(4, dtype=np.int32))
    k = torch.ones(4, 2, 8, dtype=torch.bfloat16)
    ops.write_pages(mine, 0, k, k, request.slots(np.arange(4, dtype=np.int32)))
    assert mine.sum() == 2 * k.sum()


@pytest.mark.parametrize(
    ("external", "words"),
    [
        (torch.zeros(20, 2, 4, 8, dtype=torch.float64), "expected float32, got float64"),
        (torch.zeros(20, 2, 4, 16), r"expected shape \[pages, 2=2, P=4, D=8\], got"),
        (torch.zeros(20, 4, 2, 8).transpose(1, 2), "expected C-contiguous strides"),
        (torch.zeros(20 * 64 + 1)[1:].view(20, 2, 4, 8), "16-byte alignment"),
        ("text", "expected a tensor, got an object of type str"),
    ],
)
def test_a_callers_arena_must_fit(external, words) -> None:
    with pytest.raises(InvalidArgument, match=words):
        kvweave.KvCache(kvweave.KvShape(1, 2, 8, 4), external=external)


# ---- bad arguments of ops -----------------------------------------------------------------


@pytest.fixture
def case(generator) -> Paged:
    return paged(generator, 20, layers=2)


def arguments(case: Paged) -> dict:
    """A call of attend_prefill that is right."""
    return {
        "q": torch.zeros(3, 4, 64),
        "positions": np.array([0, 5, 19], np.int32),
        "entries": case.entries,
        "cache": case.pages,
        "layer": 0,
        "kv_heads": 2,
        "scale": 0.125,
        "rope": rope_table(2, 64),
    }


def with_entry(case: Paged, column: int, value: int) -> np.ndarray:
    entries = case.entries.copy()
    entries[0, column] = value
    return entries


BAD_ATTENTION: list[tuple[str, Callable[[Paged], object], str]] = [
    ("q", lambda c: torch.zeros(3, 4, 64, dtype=torch.float64), "q: expected float32, got float64"),
    ("q", lambda c: torch.zeros(3, 4, 64, dtype=torch.bfloat16), "expected float32, got bfloat16"),
    ("q", lambda c: torch.zeros(3, 4, 32), "head_dim of q: expected 64 elements, got 32"),
    ("q", lambda c: torch.zeros(3, 5, 64), "expected a positive multiple of 2 KV heads, got 5"),
    ("q", lambda c: torch.zeros(12, 64), r"q: expected shape \[R, heads, D\], got \[12, 64\]"),
    ("q", lambda c: torch.zeros(2, 4, 64), "positions: expected 2 elements, got 3"),
    ("q", lambda c: torch.zeros(3, 4, 128)[..., ::2], "q: expected a contiguous last axis, got"),
    (
        "q",
        lambda c: torch.zeros(3, 4, 64, device="meta"),
        "q: expected .* can be shared, got .*meta",
    ),
    ("q", lambda c: torch.zeros(3, 64).to_sparse(), "q: expected .* can be shared, got "),
    ("q", lambda c: torch.zeros(3, 4, 64).bool(), "q: expected a tensor, got bool"),
    ("q", lambda c: torch.zeros(3, 4, 64, requires_grad=True), "not differentiable"),
    ("positions", lambda c: np.array([0, 5, 19]), "positions: expected int32, got int64"),
    ("positions", lambda c: np.array([0, 5, -1], np.int32), "positions: expected at least 0"),
    ("positions", lambda c: np.zeros(6, np.int32)[::2], "positions: expected C-contiguous"),
    ("positions", lambda c: [0, 5, 19], "positions: expected a tensor, got an object of type list"),
    ("positions", lambda c: np.zeros(3, ">i4"), "positions: expected a tensor, got .* byte order"),
    ("entries", lambda c: c.entries[:, :4], r"entries: expected shape \[N, columns=5\], got"),
    ("entries", lambda c: np.asfortranarray(c.entries), "entries: expected C-contiguous strides"),
    ("entries", lambda c: c.entries.astype(np.int64), "entries: expected int32, got int64"),
    ("entries", lambda c: with_entry(c, 0, 10**6), "expected a block within the cache"),
    ("entries", lambda c: with_entry(c, 0, -1), "entry block: expected at least 0, got -1"),
    ("entries", lambda c: with_entry(c, 2, 17), "entry slots: expected"),
    ("entries", lambda c: with_entry(c, 1, 16), "entry slots: expected"),
    ("entries", lambda c: with_entry(c, 3, 3), "entry position: expected at least"),
    ("cache", lambda c: c.pages[:, :, :, ::2], "cache: expected C-contiguous strides"),
    ("cache", lambda c: c.pages[0], r"cache: expected shape \[pages, 2=2, P, D\], got"),
    ("cache", lambda c: c.pages.int(), "cache: expected .* or float8_e4m3fn, got int32"),
    ("cache", lambda c: c.pages.flatten()[:-1], "cache: expected shape"),
    ("layer", lambda c: 2, "layer: expected a layer below 2, got 2"),
    ("layer", lambda c: -1, "layer: expected at least 0, got -1"),
    ("kv_heads", lambda c: 0, "expected .* ≥ 1"),
    ("scale", lambda c: float("nan"), "scale: expected a finite number"),
    ("rope", lambda c: rope_table(2, 128), "rotary_dim: expected at most the head dim 64, got 128"),
    ("window", lambda c: 0, "window: expected at least 1, got 0"),
    ("window", lambda c: -4, "window: expected at least 0, got -4"),
    ("softcap", lambda c: 0.0, "softcap: expected above 0"),
    ("row_offsets", lambda c: np.array([0, 2], np.int32), "row_offsets: expected offsets from 0"),
    ("entry_offsets", lambda c: np.array([0, 1, 2], np.int32), "row_offsets: expected 3"),
    ("out", lambda c: torch.zeros(3, 4, 32), r"out: expected shape \[R=3, H=4, D=64\], got"),
    ("out", lambda c: torch.zeros(3, 4, 128)[..., ::2], "out: expected C-contiguous strides"),
    ("out", lambda c: torch.zeros(3, 4, 64).half(), "out: expected float32, got float16"),
    ("out", lambda c: c.pages.flatten()[:768].view(3, 4, 64), "out: expected memory of its own"),
    ("backend", lambda c: "gpu", "backend: expected cpu, cuda, reference or None, got 'gpu'"),
]


@pytest.mark.parametrize(("name", "value", "words"), BAD_ATTENTION)
def test_attention_refuses(case, name, value, words) -> None:
    before = case.pages.clone()
    with torch.enable_grad(), pytest.raises(InvalidArgument, match=words) as told:
        reads(ops.attend_prefill, **{**arguments(case), name: value(case)})
    assert told.value.expected
    assert told.value.got
    assert torch.equal(case.pages, before)
    case.cache.check()


def test_overlapping_results_are_refused(case) -> None:
    call = arguments(case)
    room = call["q"]
    with pytest.raises(InvalidArgument, match="out: expected memory of its own, apart from q"):
        reads(ops.attend_prefill, **call, out=room)


BAD_WRITES: list[tuple[str, object, str]] = [
    ("k", torch.zeros(2, 2, 64).double(), "k: expected float32, got float64"),
    ("k", torch.zeros(3, 2, 64), "slots: expected 3 elements, got 2"),
    ("v", torch.zeros(2, 1, 64), "heads of k and v: expected 2 elements, got 1"),
    ("v", torch.zeros(2, 2, 32), "head_dim of k and v: expected 64 elements, got 32"),
    ("slots", np.array([[4, 0], [4, 0]], np.int32), "slots: expected every slot once"),
    ("slots", np.array([[4, 0], [4, 16]], np.int32), "slot: expected a slot from 0 to 15, got 16"),
    ("slots", np.array([[0, 0], [4, 1]], np.int32), "null block"),
    ("slots", np.array([[4, 0], [9999, 1]], np.int32), "expected a block within the cache"),
    ("slots", np.array([[4, 0], [4, 1]]), "slots: expected int32, got int64"),
    ("slots", np.array([4, 0], np.int32), r"slots: expected shape \[N, columns=2\], got \[2\]"),
    ("layer", 10**6, "expected a block within the cache"),
    ("layer", -1, "layer: expected at least 0"),
    ("cache", None, "cache: expected a tensor, got an object of type NoneType"),
]


@pytest.mark.parametrize(("name", "value", "words"), BAD_WRITES)
def test_write_pages_refuses(case, name, value, words) -> None:
    call = {
        "cache": case.pages,
        "layer": 0,
        "k": torch.ones(2, 2, 64),
        "v": torch.ones(2, 2, 64),
        "slots": np.array([[4, 0], [4, 1]], np.int32),
    }
    before = case.pages.clone()
    with pytest.raises(InvalidArgument, match=words):
        ops.write_pages(**{**call, name: value})
    assert torch.equal(case.pages, before)


def test_a_page_cannot_be_written_with_itself(case) -> None:
    k = case.pages[4:6, 0].transpose(0, 1)
    slots = np.stack([np.full(16, 8), np.arange(16)], 1).astype(np.int32)
    with pytest.raises(InvalidArgument, match="cache: expected memory of its own, apart from k"):
        ops.write_pages(case.pages, 0, k, k, slots)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([4, 0, 4, 8, 4, 1], "block 4 both read and written"),
        ([4, 0, 0, 0, 4, 1], "copy blocks: expected"),
        ([4, 14, 8, 0, 4, 1], "copy slots: expected"),
        ([4, 0, 8, 0, 0, 1], "copy slots: expected at least 1 token"),
        ([4, 0, 8, -1, 4, 1], "copy slots: expected"),
        ([4, 0, 999_999, 0, 4, 1], "expected a block within the cache"),
        ([4, 0, 6, 0, 4, 1], "do not overlap|whose pages"),
    ],
)
def test_copy_rerotate_refuses(case, row, words) -> None:
    before = case.pages.clone()
    copies = np.array([row], np.int32)
    with pytest.raises(InvalidArgument, match=words):
        ops.copy_rerotate(case.pages, copies, rope_table(2, 64), kv_heads=2)
    assert torch.equal(case.pages, before)


@pytest.mark.parametrize(
    ("source", "row", "words"),
    [
        (torch.zeros(8, 2, 16, 64).half(), [4, 0, 8, 0, 4, 1], "source: expected float32"),
        (torch.zeros(8, 2, 16, 32), [4, 0, 8, 0, 4, 1], r"source: expected shape .*D=64"),
        (torch.zeros(8, 16, 64), [4, 0, 8, 0, 4, 1], "source: expected shape"),
        (torch.zeros(8, 2, 64, 16).mT, [4, 0, 8, 0, 4, 1], "source: expected C-contiguous"),
        (torch.zeros(8, 2, 8, 64), [4, 6, 8, 0, 4, 1], r"slots \[0, 8\) and \[0, 16\)"),
        (
            torch.zeros(8, 2, 16, 64),
            [5, 0, 8, 0, 4, 1],
            "within the source of 16384 elements",
        ),
        (torch.zeros(8, 2, 16, 64), [4, 0, 999_999, 0, 4, 1], "expected a block within the cache"),
        (torch.zeros(8, 2, 16, 64), [-4, 0, 8, 0, 4, 1], "copy blocks: expected"),
        (None, [4, 0, 8, 0, 4, 1], "cache: expected memory of its own, apart from source"),
    ],
)
def test_copy_rerotate_from_another_arena_refuses(case, source, row, words) -> None:
    before, copies = case.pages.clone(), np.array([row], np.int32)
    given = case.pages[2:] if source is None else source
    with pytest.raises(InvalidArgument, match=words):
        ops.copy_rerotate(case.pages, copies, rope_table(2, 64), kv_heads=2, source=given)
    assert torch.equal(case.pages, before)


@pytest.mark.parametrize(
    ("inv_freq", "pairing", "words"),
    [
        (np.ones((2, 4)), "half", "inv_freq: expected float32, got float64"),
        (
            np.ones(4, np.float32),
            "half",
            r"shape \[L, rotary_dim/2\], got \[4\]",
        ),
        (np.full((2, 4), np.inf, np.float32), "half", "inv_freq: expected finite, got inf"),
        (np.ones((2, 4), np.float32), "quarter", "pairing: expected half or interleaved"),
        (np.ones((4, 2), np.float32).T, "half", "inv_freq: expected C-contiguous"),
        (np.ones((0, 4), np.float32), "half", "inv_freq: expected"),
    ],
)
def test_rope_tables_refuse(inv_freq, pairing, words) -> None:
    with pytest.raises(InvalidArgument, match=words):
        ops.RopeTable(inv_freq, pairing)


def test_cuda_is_refused_by_name_where_it_is_not(case) -> None:
    words = "cache: expected a tensor on cuda, got one on cpu"
    with pytest.raises(InvalidArgument, match=words):
        reads(ops.attend_prefill, **arguments(case), backend="cuda")
    copies = np.zeros((0, 6), np.int32)
    with pytest.raises(InvalidArgument, match=words):
        ops.copy_rerotate(case.pages, copies, rope_table(2, 64), kv_heads=2, backend="cuda")


def test_ops_let_other_threads_run(case) -> None:
    """While one call runs in a thread, this one gets many more turns than lock switches give."""
    q, rows = torch.zeros(8000, 4, 64), np.full(8000, 19, np.int32)
    call = {**arguments(case), "q": q, "positions": rows, "backend": "reference"}
    spans: list[float] = []

    def work() -> None:
        spans.append(time.perf_counter())
        reads(ops.attend_prefill, **call)
        spans.append(time.perf_counter())

    thread = threading.Thread(target=work)
    thread.start()
    turns = []
    while thread.is_alive():
        turns.append(time.perf_counter())
        time.sleep(0.001)
    thread.join()
    within = [turn for turn in turns if spans[0] <= turn <= spans[1]]
    assert len(within) > 20
