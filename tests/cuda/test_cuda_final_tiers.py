"""Documents of several formats leave a GPU and come back to the bit; heads choose among them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from decode_batches import decoding
from document_decoding import documents, fresh
from kvweave import Store, ops
from kvweave.payload import KvPayload
from kvweave.runner import Packing, Runner, Strategy
from kvweave.runner.hand_off import take_over
from kvweave.runner.tiers.choice import Speeds
from packed_decoding import packed_runner, steps_of
from ranked_pages import FULL, kinds_map, top_k
from strategy_runners import all_is_back, uneven_model
from tiered_runners import FAST, SLOW, Stated
from versions import needs_cuda

pytestmark = needs_cuda

STEPS, LONG = 150, 4200
NARROW = {"kind": "window", "sink": 4, "recent": 100}
KINDS: dict[str, list[dict[str, Any]]] = {
    "full": [FULL],
    "windows": [NARROW, FULL, FULL],
    "choosing": [top_k(6), NARROW, FULL],
}
ASKED: dict[str, Any] = {"reserve_tokens": STEPS, "remember": False, "watched": False}
DOCS = documents([LONG, 300])
PROMPT = [fresh(70, 1), DOCS[0], fresh(30, 2), DOCS[1], fresh(50, 3)]


def runner_of(of: str | list[dict[str, Any]], place: str = "cuda", **more: Any) -> Runner:
    """A runner in bf16, of whose bound some heads have a top-r format and others INT4."""
    model = uneven_model(64).to(place, torch.bfloat16)
    plain = Runner(model, max_tokens=64, check=False, progress=False)
    strategy = Strategy(0.05, ops.top_r_candidates(64, numbers="bf16"))
    given = {"kv_dtype": Packing("int4", strategy=strategy), "max_tokens": 16384, **more}
    heads = kinds_map(plain.spec, KINDS[of] if isinstance(of, str) else of)
    runner = packed_runner(model, chunk_tokens=600, heads=heads, **given)
    if runner.tiers is not None:
        runner.tiers.measured = Stated(Speeds(host=FAST, disk=FAST, compute=SLOW))
    return runner


def put(runner: Runner) -> None:
    for number, doc in enumerate(DOCS):
        runner.insert(doc.tokens, str(number))
    runner.flush()
    assert len(runner.packed.final.texts[0].parts) > 1


def leave(runner: Runner) -> None:
    """Has all documents go, and the pool's memory spoiled."""
    for segment in runner.segments():
        runner.delete(segment.name)
    runner.packed.documents.forget_cached("")
    known = runner.packed.stats()
    room = (known["total"] - known["held"]) * 64
    runner.packed.cache.admit(np.zeros(room, np.int32), reuse="none").release()
    assert all_is_back(runner)
    runner.packed.pages.data.fill_(0xA5)


def said_by(runner: Runner) -> tuple[torch.Tensor, list[str]]:
    with runner.prefill(PROMPT, "naive", **ASKED) as done:
        found = [one.source for one in done.report.documents or () if one.namespace == ""]
        first = done.logits[-1].float()
        seen = steps_of(runner, decoding(runner, done, STEPS + 1), STEPS)
        return torch.stack([first, *seen]).cpu(), found


@pytest.mark.parametrize("of", KINDS)
def test_they_come_back_from_the_host_and_from_a_store(of: str, tmp_path: Any) -> None:
    """The host's memory is pinned, and a store gives what the host has not."""
    given: dict[str, Any] = {"document_bytes": 1 << 26, "store": Store(tmp_path)}
    runner = runner_of(of, **given)
    assert runner.tiers.stats()["host"]["pinned"]
    put(runner)
    wanted, _ = said_by(runner)
    assert wanted.isfinite().all()
    leave(runner)
    got, found = said_by(runner)
    assert found == ["host", "host"]
    assert torch.equal(got, wanted)
    leave(runner)
    again = runner_of(of, store=Store(tmp_path))
    got, found = said_by(again)
    assert found == ["disk", "disk"]
    # Bounds are of the keys that pages stand for, so another page may be chosen.
    assert got.isfinite().all()
    if of != "choosing":
        assert torch.equal(got, wanted)
    leave(again)


@pytest.mark.parametrize("of", KINDS)
def test_decoding_goes_on_elsewhere(of: str) -> None:
    here, there = runner_of(of), runner_of(of)
    put(here)
    with here.prefill(PROMPT, "naive", **ASKED) as done:
        payload = KvPayload.from_bytes(here.export(done).to_bytes())
        wanted = steps_of(here, decoding(here, done, STEPS + 1), STEPS)
    with take_over(there._prefiller, payload, None, STEPS) as done:
        got = steps_of(there, decoding(there, done, STEPS + 1), STEPS)
    assert torch.stack(got).isfinite().all()
    assert torch.equal(torch.stack(got), torch.stack(wanted))
    with there._prefiller.computing:
        pass
    assert all_is_back(there)


def test_heads_that_choose_all_are_dense() -> None:
    logits = []
    for kinds in ([top_k(256, 16), FULL], [FULL]):
        runner = runner_of(kinds)
        put(runner)
        logits.append(said_by(runner)[0])
    assert logits[0].isfinite().all()
    assert torch.equal(*logits)


def test_heads_choose_as_on_the_cpu() -> None:
    """A page of two that score alike may be another one there."""
    said, logits = None, []
    for place in ("cpu", "cuda"):
        runner = runner_of("choosing", place)
        put(runner)
        with runner.prefill(PROMPT, "naive", **ASKED) as done:
            sequence = decoding(runner, done, STEPS + 1)
            if said is not None:
                sequence.tokens[-1] = said[0]
            seen = steps_of(runner, sequence, STEPS, None if said is None else said[1:])
            said = said or list(sequence.tokens)
            logits.append(torch.stack([each.cpu() for each in seen]))
    wanted, got = logits
    near = (got - wanted).abs().amax(-1) / wanted.abs().max()
    assert float(near.median()) < 0.06
