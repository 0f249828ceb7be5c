"""Host memory that is reserved as it is needed: addresses stay, chunks come, refusals are typed."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import subprocess
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from families import random_tokens, tiny
from host_memory import both, host_runner, nothing_is_held, spills
from kvweave import InvalidArgument, OutOfMemory
from kvweave.runner.kv import host_arena, near_device, pinned
from kvweave.runner.kv.host_arena import HostArena
from kvweave.runner.kv.host_pool import HostPool
from kvweave.runner.kv.near_device import cpus_near, do_on, parse_cpus
from ranked_pages import FULL, logits_of_steps, stepping_as_on_a_gpu, top_k

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
PAGE_BYTES = 1000
CHUNK = mmap.PAGESIZE


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "CHUNK_BYTES", 1)


def arena_of(pages: int, device: torch.device = CPU) -> HostArena:
    return HostArena((pages, PAGE_BYTES), torch.uint8, device)


# ---- chunks ---------------------------------------------------------------------------------


@given(data=st.data())
def test_chunks_are_those_of_the_pages_that_were_asked_for(data: st.DataObject) -> None:
    pages, count = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 9))
    count = min(count, pages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_arena, "CHUNK_BYTES", 1)
        arena = arena_of(pages)
    size, at = pages * PAGE_BYTES, arena.pages.data_ptr()
    there = {0}
    for _ in range(4):
        first = data.draw(st.lists(st.integers(0, pages - count), max_size=6))
        arena.reserve(np.asarray(first, np.int32), count)
        for page in first:
            begin, end = page * PAGE_BYTES, (page + count) * PAGE_BYTES
            there |= set(range(begin // CHUNK, -(-end // CHUNK)))
        assert arena.reserved == sum(min(CHUNK, size - chunk * CHUNK) for chunk in there)
        assert not arena.pages.any()
    arena.pages.fill_(7)
    assert arena.pages.data_ptr() == at
    assert not arena.pinned


def test_pages_of_any_dtype_are_zero_and_outlive_their_arena() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pages = HostArena((5, 2, 4, 8), dtype, CPU).pages
        assert pages.dtype == dtype
        assert not pages.any()
        pages[3] = 2.0
        assert float(pages.sum()) == 2 * 64


class Chunks:
    """In place of `host_arena._advise`: there is memory for `left` chunks only."""

    def __init__(self, left: int, error: int = errno.ENOMEM) -> None:
        self.left, self.error = left, error

    def __call__(self, *_given: int) -> int:
        self.left -= 1
        return 0 if self.left >= 0 else self.error


@pytest.mark.usefixtures("small_chunks")
def test_memory_that_is_refused_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = Chunks(2)
    monkeypatch.setattr(host_arena, "_advise", chunks)
    arena = arena_of(50)
    arena.reserve(np.asarray([9], np.int32), 1)
    for _ in range(2):
        with pytest.raises(OutOfMemory, match="host memory: expected 4096 bytes more of the host"):
            arena.reserve(np.asarray([21], np.int32), 1)
    assert arena.reserved == 2 * CHUNK
    chunks.left = 1
    arena.reserve(np.asarray([21], np.int32), 1)
    assert arena.reserved == 3 * CHUNK


@pytest.mark.usefixtures("small_chunks")
def test_a_system_that_touches_no_memory_before_is_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "_advise", Chunks(0, errno.EINVAL))
    arena = arena_of(50)
    arena.reserve(np.asarray([21], np.int32), 1)
    assert arena.reserved == 2 * CHUNK


def test_memory_is_touched_when_it_is_reserved() -> None:
    """A page is nobody's before, and is there behind it, without having been written."""
    memory = host_arena._addresses(2 * CHUNK)
    held = np.frombuffer(memory, np.uint8)
    assert host_arena._advise(held.ctypes.data, CHUNK, host_arena._POPULATE_WRITE) in (
        0,
        errno.EINVAL,
    )
    assert host_arena._advise(held.ctypes.data + 1, CHUNK, 0) == errno.EINVAL
    assert host_arena._advise(0, CHUNK, host_arena._POPULATE_WRITE) in (errno.ENOMEM, errno.EINVAL)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux says what is there")
def test_what_is_reserved_is_there() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before, size = resident(), host_arena.CHUNK_BYTES
    arena = HostArena((8, size), torch.uint8, CPU)
    one = resident() - before
    arena.reserve(np.asarray([3], np.int32), 2)
    more = resident() - before - one
    assert one > size // 2
    assert more > 3 * size // 2


@pytest.mark.parametrize("size", [1 << 60, 1 << 63])
def test_more_addresses_than_there_are(size: int) -> None:
    with pytest.raises(OutOfMemory, match=f"host memory: expected {size} bytes more"):
        HostArena((size,), torch.uint8, CPU)


LIMITED = """
import resource, torch
from families import tiny
from host_memory import host_runner
from kvweave import OutOfMemory
from ranked_pages import top_k
model = tiny("llama", num_hidden_layers=2)
host_runner(model, [top_k(4, 4)], 1 << 24)
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28),) * 2)
try:
    host_runner(model, [top_k(4, 4)], 1 << 30)
except OutOfMemory as error:
    assert "host memory: expected 1073" in str(error), error
    host_runner(model, [top_k(4, 4)], 1 << 24)
    print("typed")
"""


def test_a_process_that_may_not_have_the_addresses_is_told_so() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    made = subprocess.run(
        [sys.executable, "-c", LIMITED], env=env, capture_output=True, text=True, check=False
    )
    assert made.stdout.strip() == "typed", made.stderr


# ---- pinned ---------------------------------------------------------------------------------


class Driver:
    """What registers memory, up to so many bytes."""

    def __init__(self, most: int) -> None:
        self.left = most
        self.known: dict[int, int] = {}

    def register(self, address: int, size: int, *_others: Any) -> bool:
        if size > self.left:
            return False
        self.left -= size
        assert not any(address < at + of and at < address + size for at, of in self.known.items())
        self.known[address] = size
        return True

    def unregister(self, addresses: list[int]) -> None:
        for address in addresses:
            del self.known[address]


@pytest.mark.usefixtures("small_chunks")
def test_each_chunk_is_pinned_until_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(3 * CHUNK)
    monkeypatch.setattr(host_arena, "register", driver.register)
    monkeypatch.setattr(host_arena, "unregister", driver.unregister)
    arena = arena_of(60, GPU)
    at = arena.pages.data_ptr()
    for count, page in enumerate([0, 5, 10], 1):
        arena.reserve(np.asarray([page], np.int32), 1)
        assert arena.pinned
        assert sorted(driver.known) == [at + n * CHUNK for n in range(count)]
    for page in (30, 50):
        arena.reserve(np.asarray([page], np.int32), 1)
        assert not arena.pinned
    assert len(driver.known) == 3
    assert arena.reserved == 5 * CHUNK
    pages = arena.pages
    del arena
    assert len(driver.known) == 3
    del pages
    assert not driver.known


def test_a_driver_that_refuses_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Cudart:
        def cudaHostRegister(self, *_given: int) -> int:  # noqa: N802
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    with caplog.at_level(logging.WARNING):
        assert not pinned.register(4096, 4096, GPU)
        assert not pinned.pin(torch.zeros(8), GPU)
    told = [record.message for record in caplog.records]
    assert told[0].startswith(
        "host memory: expected 4096 bytes to be pinned, got error 2: the host"
    )
    assert "expected 32 bytes" in told[1]


# ---- ahead of who needs it ------------------------------------------------------------------


@pytest.mark.usefixtures("small_chunks")
def test_a_thread_reserves_so_much_ahead_of_what_was_needed() -> None:
    arena = HostArena((40, PAGE_BYTES), torch.uint8, CPU, ahead=3 * CHUNK)
    arena.wait()
    assert arena.reserved == 4 * CHUNK
    arena.reserve(np.asarray([18], np.int32), 1)
    arena.wait()
    # The page lies in chunk 4.
    assert arena.reserved == (5 + 3) * CHUNK
    arena.reserve(np.asarray([39], np.int32), 1)
    arena.wait()
    assert arena.reserved == arena.pages.nbytes
    assert not arena.pages.any()


@pytest.mark.usefixtures("small_chunks")
def test_all_of_it_comes_while_others_ask_for_some() -> None:
    arena = HostArena((400, PAGE_BYTES), torch.uint8, CPU, ahead=400 * PAGE_BYTES)
    for page in (7, 399, 200, 3):
        arena.reserve(np.asarray([page], np.int32), 1)
        arena.pages[page] = 1
    arena.wait()
    assert arena.reserved == arena.pages.nbytes
    assert int(arena.pages.sum()) == 4 * PAGE_BYTES


@pytest.mark.usefixtures("small_chunks")
def test_what_there_is_no_memory_for_ahead_is_left_to_who_needs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = Chunks(2)
    monkeypatch.setattr(host_arena, "_advise", chunks)
    with caplog.at_level(logging.WARNING):
        arena = HostArena((50, PAGE_BYTES), torch.uint8, CPU, ahead=50 * PAGE_BYTES)
        arena.wait()
    assert arena.reserved == 2 * CHUNK
    assert [r.message for r in caplog.records if "no more is reserved ahead" in r.message]
    with pytest.raises(OutOfMemory, match="host memory"):
        arena.reserve(np.asarray([21], np.int32), 1)
    chunks.left = 1
    arena.reserve(np.asarray([21], np.int32), 1)
    arena.wait()
    assert arena.reserved == 3 * CHUNK


@pytest.mark.usefixtures("small_chunks")
def test_what_is_not_pinned_ahead_is_pinned_or_not_for_who_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(3 * CHUNK)
    monkeypatch.setattr(host_arena, "register", driver.register)
    monkeypatch.setattr(host_arena, "unregister", driver.unregister)
    arena = HostArena((60, PAGE_BYTES), torch.uint8, GPU, ahead=60 * PAGE_BYTES)
    arena.wait()
    assert arena.pinned
    assert arena.reserved == len(driver.known) * CHUNK == 3 * CHUNK
    arena.reserve(np.asarray([50], np.int32), 1)
    assert not arena.pinned
    arena.wait()
    assert arena.reserved == 4 * CHUNK


@pytest.mark.usefixtures("small_chunks")
def test_what_fails_ahead_is_said_and_left_to_who_needs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = [0]

    def register(*_given: Any) -> bool:
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("the driver is gone")
        return True

    monkeypatch.setattr(host_arena, "register", register)
    monkeypatch.setattr(host_arena, "unregister", lambda _addresses: None)
    with caplog.at_level(logging.WARNING):
        arena = HostArena((60, PAGE_BYTES), torch.uint8, GPU, ahead=60 * PAGE_BYTES)
        arena.wait()
    assert [r.message for r in caplog.records] == [
        "host memory: no more is reserved ahead: the driver is gone"
    ]
    assert arena.pinned
    assert arena.reserved == 2 * CHUNK
    arena.reserve(np.asarray([10], np.int32), 1)
    arena.wait()
    assert arena.reserved == 3 * CHUNK


@pytest.mark.usefixtures("small_chunks")
def test_less_than_a_chunk_ahead_is_one() -> None:
    arena = HostArena((40, PAGE_BYTES), torch.uint8, CPU, ahead=1)
    arena.wait()
    assert arena.reserved == 2 * CHUNK


def test_an_arena_that_nobody_has_is_let_go_of_while_it_goes_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_arena, "CHUNK_BYTES", 1)
    arena = HostArena((4000, PAGE_BYTES), torch.uint8, CPU, ahead=4000 * PAGE_BYTES)
    gone, worker = weakref.ref(arena), arena._worker
    del arena
    worker.close(finish=True)
    assert gone() is None


# ---- near a GPU -----------------------------------------------------------------------------


def a_system(root: Path, nodes: int, node: str) -> Path:
    for number in range(nodes):
        of_node = root / f"devices/system/node/node{number}"
        of_node.mkdir(parents=True)
        (of_node / "cpulist").write_text(f"{4 * number}-{4 * number + 1},{4 * number + 3}\n")
    of_gpu = root / "bus/pci/devices/0000:3b:00.0"
    of_gpu.mkdir(parents=True)
    (of_gpu / "numa_node").write_text(f"{node}\n")
    return root


@pytest.mark.parametrize(
    ("device", "nodes", "node", "cpus"),
    [
        (GPU, 2, "1", {4, 5, 7}),
        (GPU, 2, "0", {0, 1, 3}),
        (GPU, 2, "-1", set()),
        (GPU, 2, "9", set()),
        (GPU, 2, "none", set()),
        (GPU, 1, "0", set()),
        (GPU, 0, "0", set()),
        (CPU, 2, "1", set()),
    ],
)
def test_the_cpus_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: Any, nodes: int, node: str, cpus: Any
) -> None:
    monkeypatch.setattr(near_device, "_address", lambda _device: "0000:3b:00.0")
    assert cpus_near(device, a_system(tmp_path, nodes, node)) == cpus


def test_a_gpu_that_the_system_does_not_know(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(near_device, "_address", lambda _device: "0000:ff:00.0")
    assert cpus_near(GPU, a_system(tmp_path, 2, "1")) == frozenset()


def test_lists_of_cpus() -> None:
    assert parse_cpus("0-2,7,9-9\n") == {0, 1, 2, 7, 9}
    assert parse_cpus("\n") == frozenset()
    for listed in ("a", "-", "1,b"):
        with pytest.raises(ValueError, match="invalid literal"):
            parse_cpus(listed)


def test_work_runs_on_those_cpus_and_nothing_else_does() -> None:
    mine = os.sched_getaffinity(0)
    one = frozenset([min(mine)])
    assert do_on(one, lambda: os.sched_getaffinity(0)) == one
    assert do_on(frozenset([100_000]), lambda: os.sched_getaffinity(0)) == mine
    assert do_on(frozenset(), lambda: os.sched_getaffinity(0)) == mine
    assert os.sched_getaffinity(0) == mine
    with pytest.raises(OutOfMemory, match="none"):
        do_on(one, refuse)


def refuse() -> None:
    raise OutOfMemory("none")


# ---- runners --------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_chunks")
def test_a_runner_reserves_what_its_requests_come_to_need(llama: Any) -> None:
    resident, host = both(llama, [top_k(4, 5), FULL])
    (pool,) = host.host.values()
    first, bound = pool.stats()["reserved_bytes"], pool.pages.nbytes
    assert first == CHUNK
    reserved = []
    for length in (60, 200, 90, 400):
        tokens = random_tokens(length, 3)
        wanted = logits_of_steps(resident, tokens, 20)
        got = logits_of_steps(host, tokens, 20)
        assert wanted[0] == got[0]
        assert all(torch.equal(a, b) for a, b in zip(wanted[1], got[1], strict=True))
        reserved.append(pool.stats()["reserved_bytes"])
        need = (length + 20) // 4 * pool.block_bytes
        assert reserved[-1] >= need - pool.block_bytes
    # What a request has given back the next one takes, so that a shorter one needs no more.
    assert first < reserved[0] < reserved[1] == reserved[2] < reserved[3] < bound
    assert spills(host) == 4
    assert nothing_is_held(host)


@pytest.mark.usefixtures("small_chunks")
def test_a_runner_may_have_all_of_it_from_the_beginning(llama: Any) -> None:
    runner = host_runner(llama, [top_k(4, 5), FULL], host_ahead_bytes=1 << 40)
    (pool,) = runner.host.values()
    pool.home.wait()
    assert pool.stats()["reserved_bytes"] == pool.pages.nbytes


@pytest.mark.parametrize("ahead", [-1, True, "1G", 2.5])
def test_bytes_ahead_are_a_number_of_them(llama: Any, ahead: Any) -> None:
    with pytest.raises(InvalidArgument, match="^host_ahead_bytes: expected "):
        host_runner(llama, [top_k(4, 5), FULL], host_ahead_bytes=ahead)


def test_bytes_ahead_are_of_host_memory(llama: Any) -> None:
    with pytest.raises(InvalidArgument, match="^host_ahead_bytes: expected host_bytes beside 5"):
        host_runner(llama, [top_k(4, 5), FULL], None, host_ahead_bytes=5)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("chunks", [1, 5, 20, 60])
def test_memory_that_is_refused_while_requests_decode_stops_nobody(
    llama: Any, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What finds none stays on the device, and what has some lies there."""
    prompts = [random_tokens(60 + 30 * seed, seed) for seed in range(4)]
    ask: dict[str, Any] = {"max_new_tokens": 30, "stop": (), "remember": False}
    resident = host_runner(llama, [top_k(4, 4)], None)
    wanted = [resident.generate(p, "full", **ask).tokens for p in prompts]
    monkeypatch.setattr(host_arena, "_advise", Chunks(chunks))
    runner = host_runner(llama, [top_k(4, 4)])
    engine = runner.engine()
    asked = [engine.submit(p, "full", **ask) for p in prompts]
    engine.run()
    assert [request.result().tokens for request in asked] == wanted
    (pool,) = runner.host.values()
    assert pool.stats()["reserved_bytes"] <= chunks * CHUNK
    assert nothing_is_held(runner)


@pytest.mark.parametrize("step", [0, 3, 9, 17])
def test_steps_go_on_where_a_gpu_stops_reading_the_memory(llama: Any, step: int) -> None:
    """From captured steps to those that are launched one by one, in the middle of an answer."""
    resident, host = both(llama, [top_k(4, 5), FULL])
    stepping_as_on_a_gpu(host)
    tokens, looks = random_tokens(90, 3), [0]

    def waits(_pool: HostPool) -> bool:
        looks[0] += 1
        return looks[0] > step

    wanted = logits_of_steps(resident, tokens, 25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostPool, "waits", property(waits))
        got = logits_of_steps(host, tokens, 25)
    assert looks[0] >= 24
    assert wanted[0] == got[0]
    assert all(torch.equal(a, b) for a, b in zip(wanted[1], got[1], strict=True))
