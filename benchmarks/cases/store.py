"""The store on disk: reading shards beside plain direct reads of the same files, and opening it.

A store of real shards is read in turns by `Store.get` (head, token ids and checksums compared) and
by plain reads past the page cache, of the same blocks by as many threads, in the same process; fio
reads the same files, and foyer as many values of its own, each in a process of its own. The files
lie in the folder that `KVWEAVE_BENCH_DISK` names, else where temporary files do.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.cases.store_peers import fio_seconds, foyer_seconds
from kvweave import Provenance, Store
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import compare

THREADS = 4
CHUNK = 1 << 20
TOKENS = 2048
PEER_ROUNDS = 5
# What the design asks for: the store's share of the plain reads' speed, and milliseconds.
LEAST_SHARE = 0.8
LIMIT_MS_PER_1000 = 10.0
OF = Provenance("bench", dtype="bf16", layout="bytes", layers=32, kv_heads=8, head_dim=128)


def run(quick: bool) -> list[Row]:
    with _folder() as folder:
        rows = reading(folder, quick)
    for count in (100,) if quick else (1_000, 10_000):
        with _folder() as folder:
            rows.append(opening(folder, count, quick))
    return rows


def reading(folder: Path, quick: bool) -> list[Row]:
    """Shards of 64 MB, as 512 tokens of Llama-3.1-8B have: written, then read."""
    count, size = (2, 4 * CHUNK) if quick else (8, 64 * CHUNK)
    store = Store(folder, threads=THREADS)
    kv = np.random.default_rng(0).integers(0, 2**32, size // 4, dtype=np.uint32)
    texts = [np.arange(TOKENS, dtype=np.int32) + text for text in range(count)]
    later = iter(range(1_000_000))

    def put() -> None:
        number = next(later)
        _, written = store.put(OF, np.asarray([number], np.int32), {"kv": kv})
        expect(written, f"put {number}: expected it to be new")

    writes = compare({"put": put}, rounds=3 if quick else 8, warm_up=1)["put"]
    names = [store.put(OF, text, {"kv": kv})[0] for text in texts]
    files = [folder / "shards" / f"{name}.kv" for name in names]
    out = _aligned(size)
    held = np.frombuffer(out, np.uint32)
    paths = set()

    def get() -> None:
        for text in texts:
            shard = store.get(OF, text)
            assert shard is not None
            paths.add(shard.read_into("kv", held))

    with ThreadPoolExecutor(THREADS) as pool:

        def plain() -> None:
            for file in files:
                _read(pool, file, out, size)

        get()
        expect(bool((held == kv).all()), "get: expected the bytes that were put")
        timed = compare({"get": get, "plain": plain}, rounds=3 if quick else 12, warm_up=1)
    gigabytes = count * size / 1e9
    ours, theirs = (gigabytes / timed[name].median_s for name in ("get", "plain"))
    written = size / 1e9 / writes.median_s
    speeds = {} if quick else peers_of(folder, files, size)
    shares = {f"of {name.split(',')[0]}": ours / speed for name, speed in speeds.items()}
    beside = {"of plain": ours / theirs, **shares, "limit": LEAST_SHARE}
    return [
        Row("get, checked", ours, "GB/s", None, {**beside, "path": ", ".join(sorted(paths))}),
        Row("plain direct reads of the same files", theirs, "GB/s", None, {}),
        *(Row(name, speed, "GB/s", None, {}) for name, speed in speeds.items()),
        Row("put, synced", written, "GB/s", None, {}),
    ]


def peers_of(folder: Path, files: list[Path], size: int) -> dict[str, float]:
    """GB/s of others that are here: the same files, or as many values of as many bytes."""
    found = {
        "fio, direct reads of the same files": fio_seconds(files, CHUNK, THREADS, PEER_ROUNDS),
        "foyer, as many values": foyer_seconds(
            folder / "foyer", len(files), size, THREADS, PEER_ROUNDS
        ),
    }
    gigabytes = len(files) * size / 1e9
    return {name: gigabytes / seconds for name, seconds in found.items() if seconds is not None}


def opening(folder: Path, count: int, quick: bool) -> Row:
    """A store of so many shards, their heads in the page cache, opened by a new process's books."""
    store = Store(folder)
    name, _ = store.put(OF, np.arange(70, dtype=np.int32), {"kv": bytes(4096)})
    file = folder / "shards" / f"{name}.kv"
    for number in range(count - 1):
        shutil.copyfile(file, folder / "shards" / f"{number:032x}.kv")
    opened: list[Store] = []
    timed = compare(
        {"open": lambda: opened.append(Store(folder, create=False, threads=THREADS))},
        rounds=3 if quick else 10,
        warm_up=1,
    )["open"]
    expect(len(opened[-1].list()) == count, f"open: expected {count} shards")
    milliseconds = timed.median_s * 1e3
    beside = {"ms per 1000": milliseconds * 1000 / count, "limit": LIMIT_MS_PER_1000}
    return Row(f"open, {count} shards", milliseconds, "ms", timed.p95_s * 1e3, beside)


@contextmanager
def _folder() -> Iterator[Path]:
    """A new folder on the disk that is measured."""
    place = os.environ.get("KVWEAVE_BENCH_DISK")
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder) / "store"


def _aligned(size: int) -> memoryview:
    """Memory that direct reads may go to."""
    return memoryview(mmap.mmap(-1, size))


def _read(pool: ThreadPoolExecutor, file: Path, out: memoryview, size: int) -> None:
    """Fills memory with the blocks of a file's last part, past the page cache."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        # A file system without direct reads: then the store's path is "refused", too.
        handle = os.open(file, os.O_RDONLY)
    begin = os.fstat(handle).st_size - size

    def chunk(at: int) -> None:
        got = os.preadv(handle, [out[at : at + CHUNK]], begin + at)
        expect(got == CHUNK, f"plain: expected {CHUNK} bytes, got {got}")

    try:
        for _ in pool.map(chunk, range(0, size, CHUNK)):
            pass
    finally:
        os.close(handle)
