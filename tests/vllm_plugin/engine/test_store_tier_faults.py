"""Our store as a tier of vLLM's own manager: what goes wrong on disk is not served, and told."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import vllm_tiers
from kvweave.errors import ForeignStore, InvalidArgument
from kvweave.store import Store
from vllm_tiers import ORIGIN, keys, tiers, write_for_ever

NAMES = keys(20)


# The writer has what is imported here: starting Python anew would take longer than all it does.
FORKED = multiprocessing.get_context("fork")


def fill_a_disk(folder: Path) -> None:
    """Stores chunks, and others where no file may grow any more."""
    with tiers(folder) as made:
        made.store(keys(2))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        made.store(keys(2, seed=1))
        told = made.manager.get_stats().reduce()
    assert any("StoreFull" in name for name in told), told


def files(folder: Path) -> list[Path]:
    return sorted((folder / "shards").iterdir())


def test_chunks_come_back_bit_for_bit(tmp_path: Path) -> None:
    """More than the host's memory has room for, and in another engine."""
    with tiers(tmp_path, chunks=4) as made:
        for name in NAMES:
            made.store([name])
        assert made.found(NAMES) == [True] * 20
    assert len(files(tmp_path)) == 20
    with tiers(tmp_path) as made:
        assert made.found([*NAMES, *keys(3, seed=1)]) == [True] * 20 + [False] * 3
        reads = made.manager.get_stats().reduce()
        came = [v for k, v in reads.items() if k.startswith("vllm:kv_offload_kvweave_reads")]
        assert sum(came) == 20


def test_what_is_stored_again_is_not_written_again(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        made.store(NAMES)
    stamps = [path.stat().st_ino for path in files(tmp_path)]
    with tiers(tmp_path) as made:
        made.store(NAMES)
    assert [path.stat().st_ino for path in files(tmp_path)] == stamps


@pytest.mark.parametrize(
    "field", ["model", "dtype", "layout", "layers", "kv_heads", "head_dim", "salt"]
)
def test_chunks_of_anything_else_are_none(tmp_path: Path, field: str) -> None:
    with tiers(tmp_path) as made:
        made.store(NAMES, "salt-a")
    others = {"model": "another", "dtype": "f16", "layout": "vllm-chunk-x", "layers": 5}
    others |= {"kv_heads": 4, "head_dim": 64}
    salt = "salt-b" if field == "salt" else "salt-a"
    origin = ORIGIN if field == "salt" else replace(ORIGIN, **{field: others[field]})
    if field == "model":
        with pytest.raises(ForeignStore, match="shared"), tiers(tmp_path, origin=origin):
            pass
    with tiers(tmp_path, origin=origin, shared=field == "model") as made:
        assert made.found(NAMES, salt) == [False] * 20
    with tiers(tmp_path) as made:
        assert made.found(NAMES, "salt-a") == [True] * 20


def test_what_is_spoiled_is_not_served(tmp_path: Path) -> None:
    """Torn, changed in any place, of another name, of nobody: all are computed, and put anew."""
    with tiers(tmp_path) as made:
        made.store(NAMES)
    paths = files(tmp_path)
    numbers = np.random.default_rng(0)
    for path in paths[:6]:
        data = bytearray(path.read_bytes())
        data[numbers.integers(8192, len(data))] ^= 1 << int(numbers.integers(8))
        path.write_bytes(data)
    for path in paths[6:9]:
        path.write_bytes(path.read_bytes()[: int(numbers.integers(1, path.stat().st_size))])
    paths[9].write_bytes(b"")
    paths[10].write_bytes(os.urandom(9000))
    paths[11].write_bytes(paths[12].read_bytes())
    paths[13].unlink()
    with tiers(tmp_path) as made:
        assert sum(made.found(NAMES)) == 20 - 13
        told = made.manager.get_stats().reduce()
        kinds = {name for name in told if "kvweave_refused" in name}
        assert any("CorruptShard" in name for name in kinds)
        assert any("ForeignShard" in name for name in kinds)
        made.store(NAMES)
    with tiers(tmp_path) as made:
        assert made.found(NAMES) == [True] * 20


def test_budgets_hold_and_the_oldest_goes(tmp_path: Path) -> None:
    size = 4096 * 5
    with tiers(tmp_path, capacity_bytes=10 * size, quota_bytes=6 * size) as made:
        for name in NAMES[:8]:
            made.store([name], "salt-a")
        made.store(NAMES[8:12], "salt-b")
    assert len(files(tmp_path)) == 10
    with tiers(tmp_path) as made:
        assert made.found(NAMES[:8], "salt-a") == [False] * 2 + [True] * 6
        assert made.found(NAMES[8:12], "salt-b") == [True] * 4


def test_a_chunk_without_room_is_computed_again(tmp_path: Path) -> None:
    """A store too small for any, and a disk that is full: the engine goes on and is told so."""
    with tiers(tmp_path / "small", capacity_bytes=4096) as made:
        made.store(NAMES)
        assert made.found(NAMES) == [True] * 20
        told = made.manager.get_stats().reduce()
        assert any("StoreFull" in name for name in told), told
        assert told["vllm:kv_offload_tiering_cascade_job_failures:('1:StoreTier',)"] == 1
    full = FORKED.Process(target=fill_a_disk, args=(tmp_path / "full",))
    full.start()
    full.join()
    assert full.exitcode == 0
    with tiers(tmp_path / "full") as made:
        assert (
            made.found(vllm_tiers.keys(2) + vllm_tiers.keys(2, seed=1)) == [True] * 2 + [False] * 2
        )


def test_what_has_expired_is_nobodys(tmp_path: Path) -> None:
    with tiers(tmp_path, ttl_s=0.2) as made:
        made.store(NAMES[:3])
    time.sleep(0.3)
    with tiers(tmp_path) as made:
        assert made.found(NAMES[:3]) == [False] * 3


def test_two_engines_on_one_folder(tmp_path: Path) -> None:
    """Both write and read at once; what one has stored the other finds."""
    with tiers(tmp_path) as one, tiers(tmp_path) as other:
        for place in range(0, 20, 2):
            one.store([NAMES[place]])
            other.store([NAMES[place + 1]])
        assert one.found(NAMES) == other.found(NAMES) == [True] * 20


def test_a_writer_that_is_killed_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    numbers = np.random.default_rng(1)
    acknowledged: list[int] = []
    for kill in range(8):
        heard, said = FORKED.Pipe(duplex=False)
        writer = FORKED.Process(target=write_for_ever, args=(tmp_path, kill * 1000, said))
        writer.start()
        said.close()
        acknowledged.append(heard.recv())
        time.sleep(float(numbers.uniform(0.01, 0.3)))
        writer.kill()
        writer.join()
        with contextlib.suppress(EOFError):
            while True:
                acknowledged.append(heard.recv())
    with tiers(tmp_path, chunks=256) as made:
        for run in acknowledged:
            assert made.found(keys(8, run)) == [True] * 8
    store = Store(tmp_path)
    for shard in store.list():
        store.verify(shard.name)


@pytest.mark.parametrize(
    "given",
    [
        {"folder": ""},
        {"folder": 3},
        {"quota": 1},
        {"capacity_bytes": 0},
        {"ttl_s": -1.0},
        {"read_threads": 0},
        {"write_threads": 1.5},
        {"quota_bytes": True},
        {"shared": 1},
        {"of": None},
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, given: dict) -> None:
    with pytest.raises(InvalidArgument, match="secondary_tiers"):
        vllm_tiers.Tiers(
            {
                "type": "StoreTier",
                "module_path": "kvweave.adapters.vllm.store_tier.tier",
                "folder": str(tmp_path),
                "of": vars(ORIGIN),
                **given,
            },
            4,
            {},
        )
