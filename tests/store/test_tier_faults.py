"""A store that fails in every way: answers are those without one, and somebody is told."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from families import random_tokens, tiny
from kvweave import Cancelled, Runner, Store, StoreDegraded, StoreFull
from kvweave.runner.tiers.disk_tier import DiskTier
from kvweave.runner.tiers.document import Document
from tiered_runners import FIRST, answer, evict, prompt_of, sources, tiered

LETTER, MANUAL = random_tokens(90, 5).tolist(), random_tokens(70, 8).tolist()


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A store that has the letter, of the tiny llama."""
    runner = tiered(tiny("llama"), store=tmp_path / "store")
    runner.insert(LETTER, "letter")
    runner.close()
    return tmp_path / "store"


def shard_of(folder: Path) -> Path:
    (file,) = (folder / "shards").iterdir()
    return file


def flip(folder: Path) -> None:
    whole = bytearray(shard_of(folder).read_bytes())
    whole[-5000] ^= 1
    shard_of(folder).write_bytes(bytes(whole))


def cut(folder: Path) -> None:
    shard_of(folder).write_bytes(shard_of(folder).read_bytes()[:7000])


def empty(folder: Path) -> None:
    shard_of(folder).write_bytes(b"")


def foreign(model: Any, local: int = 0) -> Callable[[Path], None]:
    """A shard of the same text and another model or head map, under this one's name."""

    def put(folder: Path) -> None:
        other = folder.parent / "other"
        runner = tiered(model, local, store=other)
        runner.insert(LETTER, "letter")
        runner.close()
        shutil.copyfile(shard_of(other), shard_of(folder))

    return put


def gone(folder: Path) -> None:
    shutil.rmtree(folder)


SPOILED = {
    "flipped": flip,
    "cut": cut,
    "empty": empty,
    "model": foreign(tiny("qwen2")),
    "dtype": foreign(tiny("llama").bfloat16()),
    "regime": foreign(tiny("llama-yarn")),
    "head map": foreign(tiny("llama"), 1),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_spoiled_or_foreign_shard_is_refused_computed_and_replaced(
    stored: Path, what: str
) -> None:
    model = tiny("llama")
    SPOILED[what](stored)
    plain, runner = tiered(model), tiered(model, store=Store(stored))
    with pytest.warns(StoreDegraded, match="refused") as told:
        done = answer(runner, LETTER)
    assert len(told) == 1
    assert told[0].filename.endswith("tiered_runners.py")
    assert (done.tokens, sources(done)) == (answer(plain, LETTER).tokens, ["computed"])
    assert "refused" in done.report.documents[1].why
    # Said once, counted each time.
    answer(runner, LETTER)
    assert runner.tiers.stats()["troubles"] == {"refused": 2}
    runner.insert(LETTER, "letter")
    runner.flush()
    assert sources(answer(tiered(model, store=stored), LETTER)) == ["disk"]


@contextmanager
def warned(kind: str) -> Iterator[None]:
    with pytest.warns(StoreDegraded, match=kind):
        yield


def test_a_folder_that_is_gone_stops_nobody(stored: Path) -> None:
    model = tiny("llama")
    plain, runner = tiered(model), tiered(model, store=stored)
    gone(stored)
    done = answer(runner, LETTER)
    assert (done.tokens, sources(done)) == (answer(plain, LETTER).tokens, ["computed"])
    with warned("not kept"):
        runner.insert(MANUAL, "manual")
        with pytest.raises(Exception, match="expected"):
            runner.flush()
    plain.insert(MANUAL, "manual")
    assert answer(runner, MANUAL).tokens == answer(plain, MANUAL).tokens
    assert runner.tiers.stats()["troubles"] == {"unwritten": 1}
    runner.flush()
    runner.close()


def test_a_folder_that_is_a_file_stops_nobody(stored: Path) -> None:
    model = tiny("llama")
    runner = tiered(model, store=stored)
    shutil.rmtree(stored / "shards")
    (stored / "shards").write_bytes(b"")
    with warned("cannot be read"):
        done = answer(runner, LETTER)
    assert done.tokens == answer(tiered(model), LETTER).tokens
    # Each of the three parts was asked for.
    assert runner.tiers.stats()["troubles"] == {"unread": 3}


@pytest.mark.parametrize("limit", ["capacity_bytes", "quota_bytes"])
def test_a_full_store_says_so_and_the_document_stays_here(tmp_path: Path, limit: str) -> None:
    model = tiny("llama")
    runner = tiered(model, store=Store(tmp_path, **{limit: 4096}))
    plain = tiered(model)
    for each in (plain, runner):
        each.insert(LETTER, "letter")
    with warned("not kept"), pytest.raises(Exception, match="expected") as raised:
        runner.flush()
    assert isinstance(raised.value, StoreFull) == (limit == "capacity_bytes")
    assert answer(runner, LETTER).tokens == answer(plain, LETTER).tokens
    assert sources(answer(runner, LETTER)) == ["device"]
    assert Store(tmp_path).documents() == []


def test_a_shard_that_goes_before_it_is_named_is_not_kept_and_said_so(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that nobody has named yet goes where others want its room."""
    runner, has = tiered(tiny("llama"), store=stored), DiskTier.has
    store = runner.tiers.disk.store

    def gone_behind(tier: DiskTier, document: Document) -> bool:
        there = has(tier, document)
        for namespace, name, _ in store.documents():
            store.forget(name, namespace)
        for shard in store.list():
            store.delete(shard.name)
        return there

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "has", gone_behind)
        runner.insert(LETTER, "another")
        with warned("until it is named"), pytest.raises(StoreFull, match="until it is named"):
            runner.flush()
    assert sources(answer(runner, LETTER)) == ["device"]
    # Whoever inserts it again has it kept.
    runner.insert(LETTER, "another")
    runner.flush()
    assert [name for _, name, _ in store.documents()].count("another") == 1


def test_a_reader_that_dies_is_replaced(stored: Path) -> None:
    model = tiny("llama")
    runner = tiered(model, store=stored)
    read = runner.tiers.disk.read

    def dies(*_: Any) -> Any:
        raise SystemExit("no more")

    runner.tiers.disk.read = dies
    with warned("no more"):
        done = answer(runner, LETTER)
    assert (done.tokens, sources(done)) == (answer(tiered(model), LETTER).tokens, ["computed"])
    runner.tiers.disk.read = read
    assert sources(answer(runner, LETTER)) == ["disk"]
    assert runner.tiers.stats()["reading_bytes"] == 0


def test_a_writer_that_dies_is_replaced(tmp_path: Path) -> None:
    runner = tiered(tiny("llama"), store=tmp_path)
    write = runner.tiers.disk.write

    def dies(*_: Any) -> Any:
        raise SystemExit("no more")

    runner.tiers.disk.write = dies
    runner.insert(LETTER, "letter")
    with warned("no more"), pytest.raises(Exception, match="no more"):
        runner.flush()
    runner.tiers.disk.write = write
    runner.insert(MANUAL, "manual")
    runner.flush()
    assert [name for _, name, _ in Store(tmp_path).documents()] == ["manual"]


class Held:
    """Reads that wait until somebody lets them go on."""

    def __init__(self, runner: Runner) -> None:
        self._read = runner.tiers.disk.read
        self.begun, self.go_on = threading.Event(), threading.Event()
        runner.tiers.disk.read = self

    def __call__(self, *asked: Any) -> Any:
        self.begun.set()
        self.go_on.wait()
        return self._read(*asked)


def test_others_decode_while_one_waits_for_its_document(stored: Path) -> None:
    model = tiny("llama")
    runner = tiered(model, store=stored)
    held = Held(runner)
    engine = runner.engine()
    how: dict[str, Any] = {"stop": (), "remember": False}
    waits = engine.submit(prompt_of(LETTER), "naive", max_new_tokens=8, **how)
    decodes = engine.submit(MANUAL, "naive", max_new_tokens=12, **how)
    while not decodes.ended:
        engine.must_step()
    assert held.begun.wait(10)
    assert (waits.tokens, engine.state(waits)) == ([], "prefilling")
    held.go_on.set()
    engine.run()
    done = waits.result()
    assert sources(done) == ["disk"]
    with_it = tiered(model)
    with_it.insert(LETTER, "letter")
    assert done.tokens == answer(with_it, LETTER).tokens
    assert runner.tiers.stats()["reading_bytes"] == 0


@pytest.mark.parametrize("begun", [True, False])
def test_who_is_cancelled_gives_all_back(stored: Path, begun: bool) -> None:
    runner = tiered(tiny("llama"), store=stored)
    held = Held(runner)
    engine = runner.engine()
    first = engine.submit(prompt_of(LETTER), "naive", max_new_tokens=4, stop=())
    assert held.begun.wait(10)
    second = engine.submit(prompt_of(LETTER), "naive", max_new_tokens=4, stop=())
    engine.step()
    assert runner.tiers.stats()["reading_bytes"] > 0
    engine.cancel(first if begun else second)
    if begun:
        engine.cancel(second)
        held.go_on.set()
    else:
        held.go_on.set()
        engine.run()
        assert sources(first.result()) == ["disk"]
    runner.tiers.reads["disk"].worker.wait()
    assert runner.tiers.stats()["reading_bytes"] == 0
    assert runner.cache.stats()["held"] == 0
    engine.close()


def test_a_store_that_does_not_answer_is_waited_for_once(stored: Path) -> None:
    model = tiny("llama")
    runner = tiered(model, store=stored)
    runner.tiers.patience_s = 0.05
    held = Held(runner)
    with warned("did not answer"):
        done = answer(runner, LETTER)
    assert (done.tokens, sources(done)) == (answer(tiered(model), LETTER).tokens, ["computed"])
    again = answer(runner, LETTER)
    assert again.report.documents[1].why == "no tier has it"
    assert runner.tiers.stats()["troubles"] == {"late": 1}
    held.go_on.set()
    runner.tiers.reads["disk"].worker.wait()
    assert runner.tiers.stats()["reading_bytes"] == 0


def test_bytes_in_flight_are_bounded(stored: Path) -> None:
    runner = tiered(tiny("llama"), store=stored)
    runner.insert(MANUAL, "manual")
    runner.flush()
    other = tiered(tiny("llama"), store=stored)
    token = other.cache.shape.token_bytes
    # What one prompt wants is more than may be in flight: it is read for alone.
    other.tiers.reads["disk"].flight.most = 30 * token
    seen = []
    other.tiers.disk.read = lambda *asked, read=other.tiers.disk.read: (
        seen.append(other.tiers.stats()["reading_bytes"]) or read(*asked)
    )
    prompts = [prompt_of(LETTER, MANUAL), prompt_of(MANUAL), prompt_of(LETTER)]
    for done in other.generate_batch(prompts, "naive", max_new_tokens=4, stop=(), remember=False):
        assert set(sources(done)) <= {"disk", "device"}
    # The text before them is asked for too.
    sizes = [len(LETTER) + len(MANUAL), len(MANUAL), len(LETTER)]
    assert seen
    assert set(seen) <= {(30 + size) * token for size in sizes}
    # Many prompts that together want more than may be in flight are all answered.
    third = tiered(tiny("llama"), store=stored)
    third.tiers.reads["disk"].flight.most = (90 + 30) * token
    prompts = [prompt_of(each) for each in (LETTER, MANUAL) * 3]
    said = third.generate_batch(prompts, "naive", max_new_tokens=4, stop=(), remember=False)
    assert {sources(one)[0] for one in said} == {"disk", "device"}
    assert third.tiers.stats()["reading_bytes"] == 0


def reused(done: Any) -> list[tuple[int, int, bool]]:
    """What was reused of a prompt, span by span: [start, end), and whether it was read alone."""
    return [
        (span.start, span.end, bool(span.own))
        for span in done.report.plan.spans
        if span.kind != "recompute"
    ]


@pytest.mark.parametrize("levels", [1, 3])
def test_requests_that_come_and_are_cancelled_give_all_back(tmp_path: Path, levels: int) -> None:
    """Little room everywhere, a third of all cancelled at some moment, some of higher priority."""
    model, random = tiny("llama"), np.random.default_rng(4)
    texts = [random_tokens(40 + 17 * seed, seed).tolist() for seed in range(4)]
    first = tiered(model, store=tmp_path)
    for text in texts:
        first.insert(text, f"{len(text)}")
    first.close()
    runner = tiered(model, store=tmp_path, max_tokens=640, document_bytes=1 << 18)
    token = runner.cache.shape.token_bytes
    runner.tiers.reads["disk"].flight.most = 200 * token
    with runner.serve(chunk_tokens=64) as server:
        submitted = []
        for number in range(40):
            chosen = [texts[which] for which in random.choice(4, 2, replace=False)]
            how: dict[str, Any] = {"max_new_tokens": 4, "stop": (), "remember": False}
            how |= {"priority": int(random.integers(levels)), "reserve": True}
            submitted.append((chosen, server.submit(prompt_of(*chosen), "naive", **how)))
            if number % 3 == 0:
                server.cancel(submitted[int(random.integers(len(submitted)))][1])
            if number % 10 == 5:
                server.call(lambda: evict(runner))
        said = []
        for chosen, request in submitted:
            with suppress(Cancelled):
                said.append((chosen, request.result(60)))
    assert len(said) > 20
    assert {source for _, done in said for source in sources(done)} >= {"device", "disk"}
    compared = 0
    for chosen, done in said:
        plain, start = tiered(model), len(FIRST)
        for text in chosen:
            # Of a document that has left the device its first blocks may be there yet.
            there = [end for begin, end, _ in reused(done) if start <= begin < start + len(text)]
            if there:
                plain.insert(text[: there[-1] - start], f"{len(text)}")
            start += len(text)
        expected = answer(plain, *chosen, max_new_tokens=4)
        # Who gave way after its first token went on by what there was then.
        if not done.report.resumed and all(alone for _, _, alone in reused(done)):
            assert reused(done) == reused(expected)
            assert done.tokens == expected.tokens
            compared += 1
    assert compared > len(said) // 2
    assert runner.tiers.stats()["troubles"] == {}
    runner.tiers.reads["disk"].worker.wait()
    assert runner.tiers.stats()["reading_bytes"] == 0
    assert runner.cache.stats()["held"] == runner.tiers.host.cache.stats()["held"] == 0
    runner.cache.check()
    runner.tiers.host.cache.check()
