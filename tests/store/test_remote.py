"""Shards behind real servers, and behind one that lies: what was written comes back, or nothing."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvweave import (
    CorruptShard,
    ForeignShard,
    InvalidArgument,
    Provenance,
    RemoteStore,
    Store,
    StoreUnavailable,
)
from remote_servers import SERVICES, LyingS3, mooncake_store, redis_server, service_of

pytest.importorskip("opendal", reason="the extra kvweave[remote] is not installed")

TOKENS = np.arange(300, dtype=np.int32) * 7
PARTS = {"kv": bytes(range(256)) * 9000, "small": b"x", "none": b""}
SECRET = bytes(range(32))
MOONCAKE = {"local_hostname": "a", "metadata_server": "P2PHANDSHAKE", "master_server_addr": "b:1"}


def provenance(**more: Any) -> Provenance:
    of: dict[str, Any] = {"model": "model", "dtype": "bf16", "layout": "bytes", "layers": 2}
    return Provenance(**{**of, "kv_heads": 3, "head_dim": 8, "namespace": "tenant", **more})


@pytest.fixture(params=SERVICES)
def service(request: Any, tmp_path: Path) -> Iterator[Callable[..., RemoteStore]]:
    with service_of(request.param, tmp_path) as opened:
        yield opened


@pytest.mark.parametrize("secret", [None, SECRET])
def test_what_was_written_comes_back(
    service: Callable[..., RemoteStore], secret: bytes | None
) -> None:
    of = provenance()
    name, written = service(secret=secret).put(of, TOKENS, PARTS)
    assert written
    again = service(secret=secret)
    assert again.put(of, TOKENS, PARTS) == (name, False)
    shard = again.get(of, TOKENS)
    assert shard is not None
    assert {part: shard.read(part) for part in PARTS} == PARTS
    assert np.array_equal(shard.tokens(), TOKENS)
    assert shard.provenance == of
    assert again.contains(of, TOKENS)
    again.verify(name)
    for other in (provenance(namespace="other"), provenance(model="m2"), provenance(regime=3)):
        assert again.get(other, TOKENS) is None
    assert again.get(of, TOKENS[:-1]) is None
    again.delete(name)
    assert again.get(of, TOKENS) is None
    assert not again.contains(of, TOKENS)


def test_an_object_is_the_file_that_a_store_on_disk_has(tmp_path: Path) -> None:
    disk, remote = Store(tmp_path / "disk", hash="sha256"), tmp_path / "remote"
    of = provenance()
    there = RemoteStore("fs", {"root": str(remote)})
    assert disk.put(of, TOKENS, PARTS)[0] == there.put(of, TOKENS, PARTS)[0]
    (file,) = (tmp_path / "disk" / "shards").iterdir()
    (held,) = (remote / "shards").iterdir()
    assert file.read_bytes() == held.read_bytes()
    assert disk.import_shard(held)[0] == held.name


def test_what_has_expired_is_nobodys_hit_and_is_collected(tmp_path: Path) -> None:
    store = RemoteStore("fs", {"root": str(tmp_path)})
    lasting, passing = provenance(), provenance(namespace="passing")
    store.put(lasting, TOKENS, PARTS)
    name, _ = store.put(passing, TOKENS, PARTS, expires=1000)
    assert store.get(passing, TOKENS, now=999) is not None
    assert store.get(passing, TOKENS, now=1000) is None
    assert not store.contains(passing, TOKENS, now=1000)
    assert [one.name for one in store.list("passing")] == [name]
    size = store.list("passing")[0].file_bytes
    assert store.collect(now=1000) == {"expired": 1, "spoiled": 0, "bytes": size}
    assert len(store.list()) == 1


# ---- what is wrong -----------------------------------------------------------------------------


@pytest.fixture
def liar(tmp_path: Path) -> Iterator[LyingS3]:
    """A server that has one shard, which nobody has spoiled yet."""
    RemoteStore("fs", {"root": str(tmp_path)}).put(provenance(), TOKENS, PARTS)
    (held,) = (tmp_path / "shards").iterdir()
    server = LyingS3({f"shards/{held.name}": held.read_bytes()})
    yield server
    server.close()


def test_the_liars_truth_is_taken(liar: LyingS3) -> None:
    shard = liar.store().get(provenance(), TOKENS)
    assert shard is not None
    assert shard.read("kv") == PARTS["kv"]


@pytest.mark.parametrize(
    ("lie", "kind"),
    [
        ("denied", StoreUnavailable),
        ("stuck", StoreUnavailable),
        ("died", (StoreUnavailable, CorruptShard)),
        ("shorter", (StoreUnavailable, CorruptShard)),
        ("huge", CorruptShard),
    ],
)
def test_a_server_that_lies_is_refused(liar: LyingS3, lie: str, kind: Any) -> None:
    liar.lie = lie
    with pytest.raises(kind, match="expected"):
        liar.store(timeout_s=1.0).get(provenance(), TOKENS, most_bytes=1 << 24)
    if lie == "huge":
        assert liar.asked == 0


@pytest.mark.parametrize("lie", ["longer", "endless"])
def test_what_a_server_sends_beyond_a_shard_is_left(liar: LyingS3, lie: str) -> None:
    liar.lie = lie
    shard = liar.store(timeout_s=1.0).get(provenance(), TOKENS)
    assert shard is not None
    assert shard.read("kv") == PARTS["kv"]
    assert liar.sent < 1 << 26


def test_each_flipped_or_missing_byte_is_refused(liar: LyingS3) -> None:
    ((path, whole),) = liar.objects.items()
    random = np.random.default_rng(1)
    store = liar.store()
    places = [0, 9, 20, 40, 4095, 4096, 5300, len(whole) - 1, *random.integers(0, len(whole), 24)]
    for place in places:
        spoiled = bytearray(whole)
        spoiled[place] ^= 1 << int(random.integers(8))
        liar.objects[path] = bytes(spoiled)
        with pytest.raises((CorruptShard, ForeignShard)):
            store.get(provenance(), TOKENS)
    for length in (0, 1, 31, 4095, 4096, 8192, len(whole) - 4096, len(whole) - 1):
        liar.objects[path] = whole[:length]
        with pytest.raises(CorruptShard):
            store.get(provenance(), TOKENS)
    liar.objects[path] = whole + bytes(4096)
    with pytest.raises(CorruptShard):
        store.get(provenance(), TOKENS)


@pytest.mark.parametrize(
    "other",
    [
        {"namespace": "another"},
        {"model": "another"},
        {"dtype": "f16"},
        {"regime": 9},
        {"heads": "map"},
        {"layers": 4},
    ],
)
def test_anothers_shard_under_our_name_is_refused(
    tmp_path: Path, liar: LyingS3, other: dict[str, Any]
) -> None:
    ((path, _),) = liar.objects.items()
    there = RemoteStore("fs", {"root": str(tmp_path / "other")})
    name, _ = there.put(provenance(**other), TOKENS, PARTS)
    liar.objects[path] = (tmp_path / "other" / "shards" / name).read_bytes()
    with pytest.raises(ForeignShard) as raised:
        liar.store().get(provenance(), TOKENS)
    if "namespace" in other:
        assert "'another'" not in str(raised.value)


def test_other_tokens_under_our_name_are_refused_before_their_kv(
    tmp_path: Path, liar: LyingS3
) -> None:
    ((path, _),) = liar.objects.items()
    there = RemoteStore("fs", {"root": str(tmp_path / "other")})
    name, _ = there.put(provenance(), TOKENS + 1, PARTS)
    liar.objects[path] = (tmp_path / "other" / "shards" / name).read_bytes()
    with pytest.raises(ForeignShard, match="tokens"):
        liar.store().get(provenance(), TOKENS)


def test_what_was_refused_is_replaced(tmp_path: Path) -> None:
    store = RemoteStore("fs", {"root": str(tmp_path)})
    name, _ = store.put(provenance(), TOKENS, PARTS)
    file = tmp_path / "shards" / name
    spoiled = bytearray(file.read_bytes())
    spoiled[-9000] ^= 1
    file.write_bytes(bytes(spoiled))
    with pytest.raises(CorruptShard):
        store.verify(name)
    with pytest.raises(CorruptShard):
        store.get(provenance(), TOKENS)
    assert store.put(provenance(), TOKENS, PARTS) == (name, True)
    assert store.get(provenance(), TOKENS) is not None


@pytest.mark.parametrize("written", [None, b"another secret of 16 bytes"])
def test_without_the_secret_nobody_writes_what_is_believed(
    tmp_path: Path, written: bytes | None
) -> None:
    of = provenance()
    theirs = RemoteStore("fs", {"root": str(tmp_path)}, secret=written)
    name, _ = theirs.put(of, TOKENS, PARTS)
    ours = RemoteStore("fs", {"root": str(tmp_path)}, secret=SECRET)
    with pytest.raises(CorruptShard):
        ours.get(of, TOKENS)
    if written is not None:
        with pytest.raises(CorruptShard, match="seal"):
            ours.verify(name)
    # A sealed object goes nowhere else: its bytes are what it is of as well.
    ours.put(of, TOKENS, PARTS)
    sealed = (tmp_path / "shards" / name).read_bytes()
    for place in (5, 5000, len(sealed) - 33, len(sealed) - 1):
        spoiled = bytearray(sealed)
        spoiled[place] ^= 1
        (tmp_path / "shards" / name).write_bytes(bytes(spoiled))
        with pytest.raises((CorruptShard, ForeignShard)):
            ours.get(of, TOKENS)


def test_a_redis_that_is_gone_or_knows_another_password(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        server.store().put(provenance(), TOKENS, PARTS)
        with pytest.raises(StoreUnavailable) as raised:
            server.store(password="a wrong one", timeout_s=0.5).get(provenance(), TOKENS)
        assert "a wrong one" not in str(raised.value)
        with pytest.raises(StoreUnavailable, match="not supported"):
            server.store().list()
        store = server.store(timeout_s=0.5)
        assert store.get(provenance(), TOKENS) is not None
        server.kill()
        for call in (store.get, store.contains):
            with pytest.raises(StoreUnavailable):
                call(provenance(), TOKENS)
        with pytest.raises(StoreUnavailable):
            store.put(provenance(), TOKENS, PARTS)


def test_a_mooncake_store_that_hangs_or_is_gone() -> None:
    with mooncake_store() as server:
        store = server.store(timeout_s=1.0)
        store.put(provenance(), TOKENS, PARTS)
        with pytest.raises(StoreUnavailable, match="cannot list"):
            store.list()
        # Who lends the memory hangs: the read is given up, what comes next is refused at once.
        server.lender.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match="in time"):
                store.get(provenance(), TOKENS)
        assert time.monotonic() - begin < 2.5
        # It is back, and so is what it holds; the read that was late has spoiled nothing.
        server.lender.send_signal(signal.SIGCONT)
        end = time.monotonic() + 20
        while True:
            try:
                shard = store.get(provenance(), TOKENS)
                break
            except StoreUnavailable:
                assert time.monotonic() < end
                time.sleep(0.1)
        assert shard is not None
        assert shard.read("kv") == PARTS["kv"]
        server.master.kill()
        for call in (store.get, store.contains):
            with pytest.raises(StoreUnavailable):
                call(provenance(), TOKENS)
        with pytest.raises(StoreUnavailable):
            store.put(provenance(), TOKENS + 1, PARTS)


def test_what_a_mooncake_store_has_evicted_is_nobodys_hit() -> None:
    with mooncake_store() as server:
        store = server.store()
        # Four times what is lent: what was used least recently went.
        room = {"kv": bytes(64 << 20)}
        for number in range(16):
            with suppress(StoreUnavailable):
                store.put(provenance(), TOKENS + number, room)
        held = [store.get(provenance(), TOKENS + number) is not None for number in range(16)]
        assert 0 < sum(held) < 5


def test_who_no_longer_wants_a_shard_gets_none(liar: LyingS3) -> None:
    asked = iter([False, True])
    assert liar.store().get(provenance(), TOKENS, left=lambda: next(asked)) is None


def test_many_threads_write_and_read_one_store(tmp_path: Path) -> None:
    store, wrong = RemoteStore("fs", {"root": str(tmp_path)}), []

    def work(seed: int) -> None:
        for number in range(12):
            tokens = TOKENS + (seed + number) % 5
            store.put(provenance(), tokens, {"kv": tokens.tobytes()})
            shard = store.get(provenance(), tokens)
            if shard is None or shard.read("kv") != tokens.tobytes():
                wrong.append((seed, number))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("scheme", "options", "more"),
    [
        ("no such", {}, {}),
        ("mooncake", {}, {}),
        ("mooncake", {**MOONCAKE, "password": "x"}, {}),
        ("s3", {}, {}),
        (7, {}, {}),
        ("fs", {"root": 7}, {}),
        ("fs", {"root": "/tmp"}, {"secret": b"short"}),
        ("fs", {"root": "/tmp"}, {"secret": "a text of sixteen"}),
        ("fs", {"root": "/tmp"}, {"most_bytes": 0}),
        ("fs", {"root": "/tmp"}, {"timeout_s": float("nan")}),
        ("fs", {"root": "/tmp"}, {"timeout_s": 0}),
    ],
)
def test_options_that_cannot_be_are_refused(scheme: Any, options: Any, more: Any) -> None:
    with pytest.raises(InvalidArgument, match="expected"):
        RemoteStore(scheme, options, **more)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "A" * 64, "a" * 63, "a/" * 32, 7])
def test_a_name_that_is_none_reaches_no_server(tmp_path: Path, name: Any) -> None:
    store = RemoteStore("fs", {"root": str(tmp_path)})
    for call in (store.verify, store.delete):
        with pytest.raises(InvalidArgument):
            call(name)


def test_a_file_describes_a_store(tmp_path: Path) -> None:
    said = {"scheme": "fs", "options": {"root": str(tmp_path / "kv")}, "secret": SECRET.hex()}
    (tmp_path / "remote.json").write_text(json.dumps(said))
    RemoteStore.from_file(tmp_path / "remote.json").put(provenance(), TOKENS, PARTS)
    sealed = RemoteStore("fs", {"root": str(tmp_path / "kv")}, secret=SECRET)
    assert sealed.get(provenance(), TOKENS) is not None
    for wrong in ("", "[]", "{}", '{"scheme": "fs", "x": 1}', '{"scheme": "fs", "secret": "zz"}'):
        (tmp_path / "wrong.json").write_text(wrong)
        with pytest.raises(InvalidArgument, match="remote store"):
            RemoteStore.from_file(tmp_path / "wrong.json")
    with pytest.raises(InvalidArgument):
        RemoteStore.from_file(tmp_path / "none.json")
