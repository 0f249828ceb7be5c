"""Documents on another machine, through real servers: found there; nobody waits for a bad one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from families import random_tokens, tiny
from kvweave import (
    InvalidArgument,
    RemoteStore,
    Segment,
    Store,
    StoreDegraded,
    StoreFull,
    StoreUnavailable,
)
from kvweave.runner.tiers.choice import Speeds, choose
from remote_servers import SERVICES, LyingS3, redis_server, service_of
from tiered_runners import FAST, SLOW, Stated, answer, evict, prompt_of, sources, tiered

pytest.importorskip("opendal", reason="the extra kvweave[remote] is not installed")

LETTER, MANUAL = random_tokens(90, 5).tolist(), random_tokens(70, 8).tolist()


def remote_runner(remote: RemoteStore, local: int = 0, **more: Any) -> Any:
    runner = tiered(tiny("llama"), local, remote=remote, **more)
    runner.tiers.measured = Stated(Speeds(FAST, FAST, SLOW, FAST))
    return runner


@pytest.fixture(params=SERVICES)
def service(request: Any, tmp_path: Path) -> Iterator[Callable[..., RemoteStore]]:
    (tmp_path / "remote").mkdir()
    with service_of(request.param, tmp_path / "remote") as opened:
        yield opened


@pytest.mark.parametrize("local", [0, 1])
def test_another_machine_finds_what_one_has_frozen(
    service: Callable[..., RemoteStore], tmp_path: Path, local: int
) -> None:
    first = remote_runner(service(), local)
    first.insert(LETTER, "letter", "tenant")
    first.insert(MANUAL, "manual", "tenant")
    first.flush()
    assert first.tiers.stats()["remote"]["written"] == 2
    how: dict[str, Any] = {"of": "tenant", "namespace": "tenant"}
    said = answer(first, LETTER, MANUAL, **how)
    other = remote_runner(service(), local, store=tmp_path / "disk", document_bytes=1 << 22)
    done = answer(other, LETTER, MANUAL, **how)
    assert (done.tokens, sources(done)) == (said.tokens, ["remote", "remote"])
    # It is nearer from now on: in the host's memory, and on this machine's disk for the next.
    evict(other)
    assert sources(answer(other, LETTER, MANUAL, **how)) == ["host", "host"]
    other.flush()
    third = remote_runner(service(), local, store=tmp_path / "disk")
    again = answer(third, MANUAL, LETTER, **how)
    assert sources(again) == ["disk", "disk"]
    assert other.tiers.stats()["troubles"] == third.tiers.stats()["troubles"] == {}
    # Another namespace finds none of it, in any tier.
    assert sources(answer(third, LETTER, of="other", namespace="other")) == ["computed"]
    # `insert` computes nothing that another machine has.
    fourth = remote_runner(service(), local)
    fourth.insert(LETTER, "letter", "tenant")
    assert fourth.tiers.stats()["remote"]["reading_bytes"] == 0
    assert not fourth.tiers.measured._durations["compute"]


def test_a_document_that_is_not_there_is_computed(service: Callable[..., RemoteStore]) -> None:
    runner = remote_runner(service())
    done = answer(runner, LETTER)
    assert sources(done) == ["computed"]
    assert done.tokens == answer(tiered(tiny("llama")), LETTER).tokens
    assert runner.tiers.stats()["troubles"] == {}


def test_a_remote_is_read_only_where_that_beats_computing() -> None:
    known = Speeds(host=1e9, disk=1e8, remote=1e7, compute=1e12)
    # 1e8 bytes: 1 s from disk, 10 s from the remote store.
    assert choose(["disk", "remote"], 10**8, 10**13, known).source == "disk"
    assert choose(["remote"], 10**8, 10 * 10**12, known).source == "remote"
    slower = choose(["remote"], 10**8, 9 * 10**12, known)
    assert slower.source == "computed"
    assert "remote" in slower.why
    assert choose(["remote"], 1, 1, Speeds(compute=1e12)).source == "remote"


# ---- what goes wrong ---------------------------------------------------------------------------


@pytest.fixture
def liar(tmp_path: Path) -> Iterator[LyingS3]:
    """A server that has the letter of the tiny llama."""
    runner = remote_runner(RemoteStore("fs", {"root": str(tmp_path / "made")}))
    runner.insert(LETTER, "letter")
    runner.flush()
    (held,) = (tmp_path / "made" / "shards").iterdir()
    server = LyingS3({f"shards/{held.name}": held.read_bytes()})
    yield server
    server.close()


@pytest.mark.parametrize(
    ("lie", "kind"),
    [
        ("denied", "remote unread"),
        ("stuck", "remote unread"),
        ("died", "remote unread"),
        ("huge", "remote refused"),
    ],
)
def test_a_remote_that_lies_or_is_dead_changes_no_answer(
    liar: LyingS3, lie: str, kind: str
) -> None:
    runner = remote_runner(liar.store(timeout_s=0.5))
    assert sources(answer(runner, LETTER)) == ["remote"]
    expected = answer(tiered(tiny("llama")), LETTER)
    liar.lie = lie
    runner = remote_runner(liar.store(timeout_s=0.5))
    with pytest.warns(StoreDegraded, match="remote store"):
        done = answer(runner, LETTER)
    assert (done.tokens, sources(done)) == (expected.tokens, ["computed"])
    assert set(runner.tiers.stats()["troubles"]) == {kind}
    # One that has failed is not asked again at once.
    asked, begun = liar.asked, time.monotonic()
    assert sources(answer(runner, LETTER)) == ["computed"]
    if kind == "remote unread":
        assert runner.tiers.stats()["remote"]["resting"]
        assert liar.asked == asked
        assert time.monotonic() - begun < 5
    runner.tiers.remote.rest_s = runner.tiers.remote._until = 0
    liar.lie = ""
    assert sources(answer(runner, LETTER)) == ["remote"]


def test_a_spoiled_object_is_refused_computed_and_replaced(tmp_path: Path) -> None:
    store = RemoteStore("fs", {"root": str(tmp_path)})
    first = remote_runner(store)
    first.insert(LETTER, "letter")
    first.flush()
    (held,) = (tmp_path / "shards").iterdir()
    spoiled = bytearray(held.read_bytes())
    spoiled[-5000] ^= 1
    held.write_bytes(bytes(spoiled))
    runner = remote_runner(RemoteStore("fs", {"root": str(tmp_path)}))
    with pytest.warns(StoreDegraded, match="refused"):
        done = answer(runner, LETTER)
    assert sources(done) == ["computed"]
    runner.insert(LETTER, "letter")
    runner.flush()
    other = remote_runner(RemoteStore("fs", {"root": str(tmp_path)}))
    assert sources(answer(other, LETTER)) == ["remote"]


def test_others_decode_while_a_slow_remote_is_waited_for(liar: LyingS3) -> None:
    runner = remote_runner(liar.store(timeout_s=20.0))
    liar.lie = "stuck"
    engine = runner.engine()
    how: dict[str, Any] = {"stop": (), "remember": False}
    waits = engine.submit(prompt_of(LETTER), "naive", max_new_tokens=8, **how)
    decodes = engine.submit(MANUAL, "naive", max_new_tokens=12, **how)
    while not decodes.ended:
        engine.must_step()
    assert (waits.tokens, engine.state(waits)) == ([], "prefilling")
    liar.lie = ""
    liar.free.set()
    engine.run()
    assert sources(waits.result()) == ["remote"]
    assert runner.tiers.stats()["reading_bytes"] == 0


def test_a_slow_remote_keeps_nobody_from_the_disk(liar: LyingS3, tmp_path: Path) -> None:
    here = tiered(tiny("llama"), store=tmp_path / "disk")
    here.insert(MANUAL, "manual")
    here.close()
    runner = remote_runner(liar.store(timeout_s=20.0), store=tmp_path / "disk")
    liar.lie = "stuck"
    engine = runner.engine()
    how: dict[str, Any] = {"stop": (), "remember": False, "max_new_tokens": 4}
    waits = engine.submit(prompt_of(LETTER), "naive", **how)
    # Its fresh text is asked of the remote store too: it is a document without anything around.
    marked = [Segment(tokens=MANUAL)]
    reads = engine.submit([*marked, Segment(tokens=LETTER[:3])], "naive", **how)
    runner.tiers.patience_s = 1.0
    while not reads.ended:
        engine.must_step()
    assert reads.result().report.documents[0].source == "disk"
    engine.cancel(waits)
    liar.free.set()
    engine.run()
    engine.close()


def test_who_is_cancelled_gives_all_back(liar: LyingS3) -> None:
    runner = remote_runner(liar.store(timeout_s=20.0))
    liar.lie = "stuck"
    engine = runner.engine()
    waits = engine.submit(prompt_of(LETTER), "naive", max_new_tokens=4, stop=())
    engine.step()
    engine.cancel(waits)
    liar.free.set()
    runner.tiers.reads["remote"].worker.wait()
    assert runner.tiers.stats()["reading_bytes"] == 0
    assert runner.cache.stats()["held"] == 0
    engine.close()


def test_a_redis_that_is_killed_while_it_serves(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        first = remote_runner(server.store())
        first.insert(LETTER, "letter")
        first.flush()
        runner = remote_runner(server.store(timeout_s=0.5))
        killed = threading.Timer(0.05, server.kill)
        killed.start()
        # Whenever it dies, answers are those of one that has the document, or has computed it.
        with_it, without = (
            answer(first, LETTER).tokens,
            answer(tiered(tiny("llama")), LETTER).tokens,
        )
        with pytest.warns(StoreDegraded, match="remote store"):
            said = answers_until_trouble(runner)
        killed.join()
        assert all(tokens == (with_it if found else without) for tokens, found in said)
        # What is frozen now stays here, and whoever asks for more than that is told.
        runner.insert(MANUAL, "manual")
        with pytest.raises(StoreUnavailable):
            runner.flush()
        assert sources(answer(runner, MANUAL)) == ["device"]
        assert runner.tiers.stats()["troubles"]["remote unwritten"] == 1


def answers_until_trouble(runner: Any) -> list[tuple[list[int], bool]]:
    """What it says, and whether it had the letter, until something has gone wrong."""
    said = []
    while not runner.tiers.stats()["troubles"]:
        done = answer(runner, LETTER)
        said.append((done.tokens, sources(done)[0] != "computed"))
        evict(runner)
    return said


def test_wrong_credentials_degrade_the_service_and_say_so(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        runner = remote_runner(server.store(password="wrong", timeout_s=0.5))
        with pytest.warns(StoreDegraded, match="remote store"):
            done = answer(runner, LETTER)
        assert done.tokens == answer(tiered(tiny("llama")), LETTER).tokens
        assert set(runner.tiers.stats()["troubles"]) == {"remote unread"}


def test_whoever_freezes_does_not_wait_for_a_remote_that_is_behind(liar: LyingS3) -> None:
    runner = remote_runner(liar.store(timeout_s=20.0))
    runner.tiers._sending._most = 1
    runner.tiers.patience_s = 0.05
    liar.lie = "stuck"
    with pytest.warns(StoreDegraded, match="wait to be written"):
        insert_all(runner, [random_tokens(40, number).tolist() for number in range(3)])
    # One is being written, the others are left out.
    assert runner.tiers.stats()["troubles"]["remote unwritten"] == 2
    liar.free.set()
    with pytest.raises(StoreFull):
        runner.flush()


def insert_all(runner: Any, texts: list[list[int]]) -> None:
    for number, text in enumerate(texts):
        runner.insert(text, f"{number}")


def test_a_sealed_remote_believes_nobody_else(tmp_path: Path) -> None:
    options, secret = {"root": str(tmp_path)}, bytes(range(32))
    first = remote_runner(RemoteStore("fs", options, secret=secret))
    first.insert(LETTER, "letter")
    first.flush()
    assert sources(answer(remote_runner(RemoteStore("fs", options, secret=secret)), LETTER)) == [
        "remote"
    ]
    other = remote_runner(RemoteStore("fs", options, secret=bytes(32)))
    with pytest.warns(StoreDegraded, match="seal"):
        assert sources(answer(other, LETTER)) == ["computed"]


def test_counts_of_a_remote_are_scraped(tmp_path: Path) -> None:
    runner = remote_runner(RemoteStore("fs", {"root": str(tmp_path)}))
    with runner.serve() as server:
        server.call(lambda: runner.insert(LETTER, "letter"))
        runner.tiers.flush()
        text = server.metrics_text()
    assert 'kvweave_documents_total{source="remote"} 0' in text
    assert "kvweave_remote_written_total 1" in text
    assert "kvweave_remote_resting 0" in text


@pytest.mark.parametrize("remote", ["s3://bucket", 7, Store])
def test_what_is_no_remote_store_is_refused(remote: Any) -> None:
    with pytest.raises(InvalidArgument, match="remote"):
        tiered(tiny("llama"), remote=remote)


def test_what_comes_back_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    first = remote_runner(RemoteStore("fs", {"root": str(tmp_path)}))
    first.insert(LETTER, "letter")
    first.flush()
    other = remote_runner(RemoteStore("fs", {"root": str(tmp_path)}))
    other.insert(LETTER, "letter")
    parts = []
    for runner in (first, other):
        with runner.prefill([*LETTER, 1], "prefix", remember=False) as done:
            parts.append(runner.export(done).parts["group.0"].numpy())
    assert np.array_equal(*parts)
