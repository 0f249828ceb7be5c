"""Documents that are still read while their prompt is prefilled: as if they had been there."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from families import random_tokens, tiny
from kvweave import InvalidArgument, Runner, Store, StoreDegraded
from kvweave.payload.arriving import ArrivingPayload
from tiered_runners import answer, evict, prompt_of, sources, tiered
from versions import needs_cuda

LETTER, MANUAL = random_tokens(90, 5).tolist(), random_tokens(70, 8).tolist()
LAYERS = 4
POLICIES = ("naive", "cacheblend", "sparsex")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer of the tiny models is a piece of its own."""
    monkeypatch.setattr("kvweave.runner.tiers.loads.PIECE_BYTES", 1)


def stored(folder: Path, model: Any, local: int = 0) -> Path:
    runner = tiered(model, local, store=folder)
    for text in (LETTER, MANUAL):
        runner.insert(text, f"{len(text)}")
    runner.close()
    return folder


class Stepwise:
    """Reads of a runner that go on by a layer when somebody says so, and may go wrong in one.

    Without `wrong` they go on by themselves, and `seen` has how many layers there were when.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, wrong: int | None = None, error: Any = None
    ) -> None:
        read_to, self.seen = ArrivingPayload.read_to, list[int]()
        self.stopped, self.go_on = threading.Event(), threading.Event()
        only = 4 * len(LETTER)

        def stepped(arriving: ArrivingPayload, layers: int) -> None:
            if layers == wrong and arriving.payload.tokens.nbytes == only:
                self.stopped.set()
                if error is None:
                    self.go_on.wait(20)
                else:
                    raise error
            read_to(arriving, layers)
            self.seen.append(layers)

        patch.setattr(ArrivingPayload, "read_to", stepped)


def logits_of(runner: Runner, *documents: list[int], policy: str = "naive") -> tuple[Any, Any]:
    """The last logits of a prompt, and its report."""
    with runner.prefill(prompt_of(*documents), policy, remember=False) as done:
        return done.logits.clone(), done.report


def nothing_is_held(runner: Runner) -> bool:
    assert runner.tiers is not None
    runner.tiers.reads["disk"].worker.wait()
    runner.cache.check()
    return runner.tiers.stats()["reading_bytes"] == runner.cache.stats()["held"] == 0


@pytest.mark.parametrize("local", [0, 1])
@pytest.mark.parametrize("mode", ["materialise", "share"])
@pytest.mark.parametrize("family", ["llama", "qwen2-sliding"])
def test_what_comes_layer_by_layer_is_what_comes_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, mode: str, local: int
) -> None:
    model = tiny(family)
    stored(tmp_path, model, local)
    steps = Stepwise(monkeypatch)
    for policy in POLICIES:
        runner = tiered(model, local, mode=mode, store=tmp_path, document_bytes=1 << 22)
        assert runner.tiers is not None
        found = []
        for overlaps in (False, True):
            evict(runner)
            runner.tiers.host = None if overlaps else runner.tiers.host
            runner.tiers.overlaps = overlaps
            steps.seen.clear()
            logits, report = logits_of(runner, LETTER, MANUAL, policy=policy)
            assert [one.source for one in report.documents[1:-1]] == ["disk", "disk"]
            assert steps.seen == [layer for layer in range(1, LAYERS + 1) for _ in range(2)]
            found.append((logits, report.plan.to_dict(), report.flops, report.rows_per_layer))
            assert nothing_is_held(runner)
        assert torch.equal(found[0][0], found[1][0])
        assert found[0][1:] == found[1][1:]
        # The documents are cached as if they had come whole.
        assert torch.equal(logits_of(runner, LETTER, MANUAL, policy=policy)[0], found[0][0])
        assert sources(answer(runner, MANUAL, LETTER)) == ["device", "device"]


def test_the_prefill_begins_before_all_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    runner = tiered(model, store=stored(tmp_path, model), document_bytes=1 << 22)
    steps, began = Stepwise(monkeypatch, wrong=3), []
    write = runner._prefiller.executor.spec.layers[1]

    def watch(*_: Any) -> None:
        began.append(list(steps.seen))
        steps.go_on.set()

    hook = write.out.register_forward_hook(watch)
    logits, report = logits_of(runner, LETTER, MANUAL)
    hook.remove()
    # The second layer was computed while the third one of the letter was not there.
    assert began[0].count(3) == 0
    assert report.timings.load_s > 0
    assert torch.equal(logits_of(runner, LETTER, MANUAL)[0], logits)
    evict(runner)
    again = logits_of(runner, LETTER, MANUAL)
    assert [one.source for one in again[1].documents[1:-1]] == ["host", "host"]
    assert torch.equal(again[0], logits)


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_begins_before_all_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """Its caller waits for nobody else: an engine that others use would have it wait before."""
    model = tiny("llama")
    plain = tiered(model)
    for text in (LETTER, MANUAL):
        plain.insert(text, f"{len(text)}")
    wanted = answer(plain, LETTER, MANUAL).tokens
    runner = tiered(model, store=stored(tmp_path, model))
    steps, began = Stepwise(monkeypatch, wrong=3), []

    def watch(*_: Any) -> None:
        began.append(list(steps.seen))
        steps.go_on.set()

    hook = runner._prefiller.executor.spec.layers[1].out.register_forward_hook(watch)
    if streams:
        told = runner.stream(
            prompt_of(LETTER, MANUAL), "naive", max_new_tokens=8, stop=(), remember=False
        )
        said = [token.token for token in told]
    else:
        said = answer(runner, LETTER, MANUAL).tokens
    hook.remove()
    assert began[0].count(3) == 0
    assert said == wanted
    assert nothing_is_held(runner)


@pytest.mark.parametrize("layer", [1, LAYERS])
@pytest.mark.parametrize("fails", [False, True])
def test_an_answer_whose_documents_do_not_come_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int, fails: bool
) -> None:
    """They fail in the middle, or are late; several prompts of one call, one after the other."""
    model = tiny("llama")
    runner = tiered(model, store=stored(tmp_path, model))
    prompts = [prompt_of(LETTER), prompt_of(MANUAL)]
    how: dict[str, Any] = {"max_new_tokens": 8, "stop": (), "remember": False}
    plain = tiered(model)
    plain.insert(MANUAL, "manual")
    wanted = [done.tokens for done in plain.generate_batch(prompts, "naive", **how)]
    runner.tiers.patience_s = 10.0 if fails else 0.3
    error = OSError("no more of it") if fails else None
    steps = Stepwise(monkeypatch, wrong=layer, error=error)
    with pytest.warns(StoreDegraded, match="no more of it" if fails else "did not answer"):
        said = runner.generate_batch(prompts, "naive", **how)
    steps.go_on.set()
    assert sources_of(said[0].report) == ["computed"]
    if fails:
        assert sources_of(said[1].report) == ["disk"]
        assert [done.tokens for done in said] == wanted
    else:
        assert said[0].tokens == wanted[0]
    assert nothing_is_held(runner)


@pytest.mark.parametrize("layer", range(1, LAYERS + 1))
@pytest.mark.parametrize("chunk", [None, 64])
def test_what_does_not_come_is_computed_and_the_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int, chunk: int | None
) -> None:
    model = tiny("llama")
    runner = tiered(model, store=stored(tmp_path, model), chunk_tokens=chunk)
    plain = tiered(model, chunk_tokens=chunk)
    plain.insert(MANUAL, "manual")
    wanted = logits_of(plain, LETTER, MANUAL)[0]
    Stepwise(monkeypatch, wrong=layer, error=OSError("no more of it"))
    with pytest.warns(StoreDegraded, match="no more of it"):
        logits, report = logits_of(runner, LETTER, MANUAL)
    assert torch.equal(logits, wanted)
    assert [one.source for one in report.documents[1:-1]] == ["computed", "disk"]
    assert "no more of it" in report.documents[1].why
    assert nothing_is_held(runner)
    counts = runner.tiers.stats()["documents"]
    assert (counts["disk"], counts["computed"]) == (1, 3)
    monkeypatch.undo()
    # Nobody has found what was half there.
    assert sources(answer(runner, LETTER, MANUAL)) == ["disk", "device"]


def test_what_comes_too_late_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    runner = tiered(model, store=stored(tmp_path, model))
    runner.tiers.patience_s = 0.3
    steps = Stepwise(monkeypatch, wrong=3)
    with pytest.warns(StoreDegraded, match="did not answer"):
        logits, report = logits_of(runner, LETTER)
    assert torch.equal(logits, logits_of(tiered(model), LETTER)[0])
    assert sources_of(report) == ["computed"]
    steps.go_on.set()
    assert nothing_is_held(runner)


def sources_of(report: Any) -> list[str]:
    return [one.source for one in report.documents[1:-1]]


@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
def test_who_stops_in_the_middle_gives_all_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    """As who is interrupted does, or whose policy fails; the documents are found by nobody."""
    model = tiny("llama")
    runner = tiered(model, store=stored(tmp_path, model))
    of = runner._prefiller.executor.spec.layers[layer]
    whole = layer == LAYERS - 1
    steps = Stepwise(monkeypatch, wrong=None if whole else layer + 2)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = of.out.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        logits_of(runner, LETTER, MANUAL)
    hook.remove()
    steps.go_on.set()
    assert nothing_is_held(runner)
    # Before the last layer all of it had come.
    assert sources(answer(runner, LETTER)) == ["device" if whole else "disk"]


def test_parts_are_read_in_whole_chunks(tmp_path: Path) -> None:
    model = tiny("llama")
    store = Store(stored(tmp_path, model))
    shard = store.shard(store.list()[0].name)
    (part,) = (name for name in shard.parts if name.startswith("group"))
    size = shard.parts[part]
    memory = torch.empty(size, dtype=torch.uint8)
    with pytest.raises(InvalidArgument, match="whole chunks"):
        shard.read_some(part, 0, memory[:100])
    with pytest.raises(InvalidArgument, match="whole chunks"):
        shard.read_some(part, 5, memory[5:])
    hashes = shard.read_some(part, 0, memory)
    shard.check(part, hashes)
    assert memory.numpy().tobytes() == shard.read(part)
    with pytest.raises(Exception, match="checksum"):
        shard.check(part, [hashes[0] ^ 1, *hashes[1:]])


@needs_cuda
@pytest.mark.parametrize("mode", ["materialise", "share"])
def test_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    model = tiny("llama").to("cuda")
    stored(tmp_path, model)
    Stepwise(monkeypatch)
    for policy in POLICIES:
        runner = tiered(model, mode=mode, store=tmp_path, document_bytes=1 << 22)
        found = {}
        for overlaps in (False, True):
            runner.tiers.overlaps = overlaps
            runner.tiers.host.cache.forget()
            evict(runner)
            for source in ("disk", "device", "host"):
                if source == "host":
                    evict(runner)
                logits, report = logits_of(runner, LETTER, MANUAL, policy=policy)
                assert sources_of(report) == [source] * 2
                found[source, overlaps] = logits
        first = found["disk", False]
        assert all(torch.equal(one, first) for one in found.values())
        assert nothing_is_held(runner)
