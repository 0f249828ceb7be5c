"""Documents of several formats in payloads: what is decoded elsewhere has the bits of here."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_batches import decoding
from document_decoding import documents, fresh
from families import random_tokens
from final_tiers import SIGHTS
from head_maps import class_map
from kvweave import InvalidArgument, PoolFull, ops
from kvweave.payload import KvPayload
from kvweave.runner import Packing, Runner, Strategy
from kvweave.runner.hand_off import take_over
from kvweave.runner.kv.final_text import FormatData, FormatPages
from packed_decoding import packed_runner, steps_of
from page_meaning import random_packing
from payloads import refused, resealed, spoiled_bytes_are_refused
from strategy_runners import DIM, HEADS, LAYERS, LONG, all_is_back, runner_of, uneven_model

STEPS = 140
"""Enough to fill two pages, and to have what was prefilled last read packed."""
PAGES = LAYERS * HEADS


@pytest.fixture(scope="module")
def model() -> Any:
    return uneven_model()


def runner_with(
    model: Any, kind: str = "quarter-bf16", bound: float = 0.13, sights: Any = None, **more: Any
) -> Runner:
    packing, _ = random_packing(kind, PAGES, DIM)
    strategy = more.pop("strategy", Strategy(bound, final_share=more.pop("share", 0.5)))
    how: dict[str, Any] = {"kv_dtype": replace(packing, strategy=strategy), **more}
    if sights is not None:
        plain = Runner(model, max_tokens=64, check=False, progress=False)
        how["heads"] = class_map(sights, plain.spec.fingerprint)
    return runner_of(model, bound, **how)


def with_documents(runner: Runner, lengths: tuple[int, ...] = (LONG, 40)) -> list[Any]:
    """A prompt that has documents, which are inserted; what is long is packed finally."""
    docs = documents(list(lengths))
    for number, doc in enumerate(docs):
        runner.insert(doc.tokens, str(number))
    runner.flush()
    assert runner.packed.final.texts
    behind = [part for number, doc in enumerate(docs) for part in (doc, fresh(30 + number, 2))]
    return [fresh(70, 1), *behind, fresh(90, 5)]


def said_by(runner: Runner, done: Any, steps: int = STEPS) -> list[torch.Tensor]:
    sequence = decoding(runner, done, steps + 1)
    return [done.logits[-1].float().clone(), *steps_of(runner, sequence, steps)]


def handed_over(
    runner: Runner, prompt: Any, policy: str = "naive"
) -> tuple[KvPayload, list[torch.Tensor]]:
    asked: dict[str, Any] = {"reserve_tokens": STEPS, "remember": False, "watched": False}
    with runner.prefill(prompt, policy, **asked) as done:
        payload = KvPayload.from_bytes(runner.export(done).to_bytes())
        return payload, said_by(runner, done)


def taken(runner: Runner, payload: KvPayload) -> Any:
    return take_over(runner._prefiller, payload, None, STEPS)


def back(runner: Runner) -> bool:
    """Whether all has gone that came, once somebody has computed."""
    with runner._prefiller.computing:
        pass
    return all_is_back(runner)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(a.isfinite().all() and torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---- what is said -------------------------------------------------------------------------


@pytest.mark.parametrize("sights", [None, SIGHTS], ids=["all", "windows"])
@pytest.mark.parametrize("kind", ["int4", "int8", "quarter-bf16"])
def test_decoding_goes_on_elsewhere(model: Any, kind: str, sights: Any) -> None:
    """Of documents of several formats; what the receiver has itself stays as it is."""
    here, there = (runner_with(model, kind, sights=sights) for _ in range(2))
    prompt = with_documents(here)
    formats = {len(text.parts) for text in here.packed.final.texts}
    assert max(formats) > 1
    payload, wanted = handed_over(here, prompt)
    packed = payload.header.packed
    assert payload.header.to_json()["schema"] == 3
    assert packed.texts[0].blocks == -(-LONG // 64)
    # A short one may stay in the pool's format.
    assert packed.blocks + sum(text.blocks for text in packed.texts[1:]) == 1
    alone = None
    for _ in range(2):
        with taken(there, payload) as done:
            assert same(said_by(there, done), wanted)
        if alone is None:
            assert back(there)
            own = [fresh(70, 9), documents([300])[0], fresh(9, 8)]
            there.insert(own[1].tokens, "own")
            there.flush()
            with there.prefill(own, "naive", remember=False, watched=False) as done:
                alone = done.logits.clone()
        with there.prefill(own, "naive", remember=False, watched=False) as done:
            assert torch.equal(done.logits, alone)
    there.delete("own")
    assert back(there)


def test_who_goes_on_where_others_do(model: Any) -> None:
    """Batches, forks and turns; what one has stays while another ends, and goes with the last."""
    here, there = (runner_with(model, share=1.0, max_tokens=1 << 15) for _ in range(2))
    payload, wanted = handed_over(here, with_documents(here, (LONG,)), "foresight")
    first, second = taken(there, payload), taken(there, payload)
    assert there.packed.stats()["final_blocks"] == 2 * -(-LONG // 64)
    fork = first.fork()
    first.release()
    with second:
        assert same(said_by(there, second), wanted)
    assert same(said_by(there, fork), wanted)
    again = fork.fork()
    fork.release()
    more = there.extend(again, list(range(200, 230)))
    assert more.isfinite().all()
    again.release()
    assert back(there)


def test_answers_are_the_same_tokens(model: Any) -> None:
    """A document that is deleted, and a runner that has it itself."""
    here, there = runner_with(model), runner_with(model)
    prompt = with_documents(here, (LONG,))
    with_documents(there, (LONG,))
    how: dict[str, Any] = {"max_new_tokens": 90, "stop": ()}
    alone = here.generate(prompt, "naive", remember=False, **how).tokens
    with here.prefill(prompt, "naive", remember=False) as done:
        payload = here.export(done)
        assert here.export(done).to_bytes() == payload.to_bytes()
        here.delete("0")
        assert here.decode(done, **how).tokens == alone
    assert there.resume(payload, **how).tokens == alone
    assert there.packed.stats()["final_blocks"] == -(-LONG // 64)
    there.delete("0")
    for runner in (here, there):
        assert back(runner)


def test_prompts_without_such_documents_travel_as_ever(model: Any) -> None:
    """From a runner without a strategy to one with, and back."""
    plain = packed_runner(model, kv_dtype="int8", max_tokens=8192)
    other = runner_with(model, "int8")
    for here, there in ((plain, other), (other, plain)):
        payload, wanted = handed_over(here, random_tokens(700, 3), "full")
        assert payload.header.to_json()["schema"] == 2
        with taken(there, payload) as done:
            assert same(said_by(there, done), wanted)
    assert back(other)


# ---- what is not taken --------------------------------------------------------------------


def test_one_without_room_is_refused(model: Any) -> None:
    here = runner_with(model)
    payload, _ = handed_over(here, with_documents(here))
    small = runner_with(model, share=0.02)
    with pytest.raises(PoolFull, match="packed documents: expected room for"):
        small.resume(payload, max_new_tokens=2)
    assert back(small)
    # The first of two finds room; it goes all the same.
    size = min(text.nbytes for text in here.packed.final.texts)
    assert size < small.packed.final.memory.most_bytes


def test_another_strategys_formats_are_refused(model: Any) -> None:
    here = runner_with(model, "int4")
    payload, wanted = handed_over(here, with_documents(here))
    found = ops.top_r_candidates(DIM)
    used = {each.format.kept for each in payload.header.packed.texts[0].formats.formats}
    others = tuple(of for of in found if of.kept not in used)
    for strategy in (Strategy(0.13, others), Strategy(0.13, fallback="int8")):
        other = runner_with(model, "int4", strategy=strategy)
        with pytest.raises(InvalidArgument, match="payload format of a text: expected one of"):
            other.resume(payload, max_new_tokens=2)
        assert back(other)
    plain = packed_runner(model, kv_dtype=Packing("int4"), max_tokens=8192)
    with pytest.raises(InvalidArgument, match=r"of a text: expected one of \[\]"):
        plain.resume(payload, max_new_tokens=2)
    # A bound is the sender's affair.
    other = runner_with(model, "int4", 0.5)
    with taken(other, payload) as done:
        assert same(said_by(other, done), wanted)


@pytest.mark.parametrize("at", [1, 2])
def test_who_is_interrupted_midway_leaves_nothing(model: Any, monkeypatch: Any, at: int) -> None:
    here, there = runner_with(model), runner_with(model)
    payload, wanted = handed_over(here, with_documents(here))
    first = len(payload.header.packed.texts[0].formats.formats)
    fill, count = FormatPages.fill, 0

    def stops(self: FormatPages, made: FormatData) -> None:
        nonlocal count
        count += 1
        if count == (1 if at == 1 else first + 1):
            raise KeyboardInterrupt
        fill(self, made)

    with monkeypatch.context() as patched:
        patched.setattr(FormatPages, "fill", stops)
        with pytest.raises(KeyboardInterrupt):
            taken(there, payload)
    assert back(there)
    with taken(there, payload) as done:
        assert same(said_by(there, done), wanted)


# ---- bytes of any origin ------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample(model: Any) -> tuple[Runner, KvPayload]:
    here = runner_with(model, "int4", max_tokens=4096)
    return runner_with(model, "int4", max_tokens=4096), handed_over(
        here, with_documents(here, (LONG,))
    )[0]


def test_bytes_that_are_cut(sample: Any) -> None:
    data = sample[1].to_bytes()
    for end in [*range(0, len(data), 49_999), len(data) - 1]:
        refused(data[:end])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bytes_that_were_spoiled(sample: Any, data: st.DataObject) -> None:
    spoiled_bytes_are_refused(sample[1], data)


TEXT = "packed", "texts", 0
FORMATS = *TEXT, "formats"
RANKS = *FORMATS, "formats", 0


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (("packed", "texts"), [], "texts: expected one or more"),
        (("packed", "texts"), {}, "texts: expected a list"),
        (("packed", "texts"), [3], "packed text: expected a mapping"),
        ((*TEXT, "blocks"), 0, "packed text blocks: expected an integer from 1"),
        ((*TEXT, "blocks"), 41, "packed text blocks"),
        ((*TEXT, "blocks"), 2**70, "packed text blocks"),
        ((*TEXT, "blocks"), True, "packed text blocks"),
        ((*TEXT, "blocks"), 39, "part packed.text.0"),
        ((*TEXT, "more"), 1, "packed text: expected the fields"),
        ((*FORMATS, "most_lost"), -1, "most_lost: expected"),
        ((*FORMATS, "most_lost"), float("nan"), "most_lost: expected"),
        ((*FORMATS, "over_bound"), 5, "over_bound: expected an integer from 0 to 4"),
        ((*FORMATS, "formats"), [], "ranks: expected each of 4 pages once, got 0"),
        ((*RANKS, "ranks"), [9], "ranks: expected each of 4 pages once"),
        ((*RANKS, "ranks"), [0, 1, 2, 3], "ranks: expected each of 4 pages once"),
        ((*RANKS, "ranks"), ["0"], "ranks: expected sorted integers"),
        ((*RANKS, "format", "page_tokens"), 32, "packed text pages: expected 64 tokens"),
        ((*RANKS, "format", "kind"), "planes", "format"),
        ((*RANKS, "format", "kept"), 64, "format"),
    ],
)
def test_headers_that_cannot_be(sample: Any, at: Any, value: Any, says: str) -> None:
    payload = sample[1]
    header = json.loads(json.dumps(payload.header.to_json()))
    place = header
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = value
    refused(resealed(payload, header), says)


def test_parts_that_cannot_be(sample: Any) -> None:
    there, payload = sample
    basis = next(name for name in payload.parts if ".basis." in name)
    for value in (torch.nan, torch.inf):
        wrong = payload.parts[basis].clone()
        wrong[0, 0, 0, 0] = value
        refused(resealed(payload, **{basis: wrong}), f"{basis}: expected finite numbers")
    for name in (basis, "packed.text.0.pages.0"):
        short = payload.parts[name][..., 1:].contiguous()
        refused(resealed(payload, **{name: short}), f"part {name}")
        refused(resealed(payload, **{name: None}), f"part {name}: expected .*, got none")
    entries = payload.parts["packed.entries"].clone()
    entries[0, 0] = payload.header.packed.all_blocks
    refused(resealed(payload, **{"packed.entries": entries}), "slots of its blocks")
    entries[0, 0] = int(entries[1, 0])
    refused(resealed(payload, **{"packed.entries": entries}), "packed.entries: expected all of")
    assert back(there)


def test_pages_of_any_bytes_are_read(sample: Any) -> None:
    there, payload = sample
    generator = torch.Generator().manual_seed(4)
    changed = {
        name: torch.randint(0, 256, part.shape, dtype=torch.uint8, generator=generator)
        for name, part in payload.parts.items()
        if ".pages." in name
    }
    assert changed
    made = KvPayload.from_bytes(resealed(payload, **changed))
    there.resume(made, max_new_tokens=4, stop=())
    assert back(there)
    with taken(there, payload) as done:
        assert all(logits.isfinite().all() for logits in said_by(there, done, 4))
    assert back(there)
