"""Head maps with windows beside documents of several formats: these heads read none of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decode_batches import decoding
from document_decoding import DocumentDecoding, documents, fresh
from head_maps import class_map
from kvweave.runner import Runner, Strategy
from packed_decoding import apart, steps_of
from page_meaning import Layer, int4, random_packing
from strategy_runners import (
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    LONG,
    all_is_back,
    held_back,
    meaning_of,
    runner_of,
    text_of,
    uneven_model,
)

MIXED = np.array([[[128, 64], [0, 0]], [[0, 0], [17, 1]]], np.int32)
LOCAL = np.array([[[100, 20], [16, 0]], [[0, 0], [0, 0]]], np.int32)
ASKED: dict[str, Any] = {"reserve_tokens": 20, "remember": False, "watched": False}


@pytest.fixture(scope="module")
def model() -> Any:
    return uneven_model()


def seeing(model: Any, sights: Any, bound: float = 0.8, **settings: Any) -> Runner:
    """A runner whose heads have these windows, and whose documents a strategy."""
    plain = Runner(model, max_tokens=64, check=False, progress=False)
    heads = class_map(np.asarray(sights, np.int32), plain.spec.fingerprint)
    return runner_of(model, bound, heads=heads, **settings)


@pytest.mark.parametrize("sights", [MIXED, LOCAL])
def test_it_is_the_definition(model: Any, sights: Any) -> None:
    """Behind text and before it; long enough that what is decoded is read packed as well."""
    docs = documents([LONG, 40])
    prompt = [fresh(70, 1), docs[0], fresh(30, 2), docs[1], fresh(3, 4)]
    packing, shared = random_packing("quarter-bf16", LAYERS * HEADS, DIM)
    runner = seeing(model, sights, kv_dtype=replace(packing, strategy=Strategy(0.13)))
    report = runner.encode(docs[0].tokens, "long").packing
    runner.insert(docs[1].tokens, "short")
    runner.flush()
    assert len(report.formats) > 1
    texts = runner.packed.final.texts
    meanings = dict(zip((LONG, 40), map(meaning_of, texts), strict=True))
    with runner.prefill(prompt, "naive", **{**ASKED, "reserve_tokens": 140}) as done:
        sequence = decoding(runner, done, 140)
        logits = [done.logits[-1], *steps_of(runner, sequence, 139)]
        said = sequence.tokens

    def own(layer: int, of: Layer) -> Layer:
        return meanings[of[0].shape[1]](layer, of)

    ways = (own, sights), (shared, sights), (own, None)
    doubles = [DocumentDecoding(model, 400, 16, shared, of, seen, 1) for of, seen in ways]
    wanted, first, dense = (
        [each.prefill(prompt), *(each.step(token) for token in said[:-1])] for each in doubles
    )
    least = min(apart(first, wanted), apart(dense, wanted))
    assert least > 1e-4
    assert apart(logits, wanted) < 0.05 * least
    for name in ("long", "short"):
        runner.delete(name)
    assert all_is_back(runner)


@pytest.mark.parametrize("sights", [MIXED, LOCAL])
def test_steps_read_no_page_of_a_head_with_a_window(model: Any, sights: Any) -> None:
    """Whatever lies in these changes no bit; a page of any other head is missed."""
    doc = documents([LONG])[0]
    prompt = [fresh(70, 1), doc, fresh(150, 2)]
    runner = seeing(model, sights)
    runner.insert(doc.tokens, "long")
    runner.flush()
    parts = text_of(runner).parts
    spoiled = {
        "none": np.zeros(LAYERS * HEADS, bool),
        "windows": sights[:, :, 0].reshape(-1) > 0,
        **{f"rank {at}": np.arange(LAYERS * HEADS) == at for at in range(LAYERS * HEADS)},
    }
    said = {}
    for what, ranks in spoiled.items():
        kept = [part.pages.data.clone() for part in parts]
        with runner.prefill(prompt, "naive", **ASKED) as done:
            sequence = decoding(runner, done, 10)
            for part in parts:
                pages = part.pages.data.view(1 + BLOCKS, len(part.ranks), -1)
                pages[1:, torch.from_numpy(ranks[part.ranks])] = 255
            said[what] = torch.stack(steps_of(runner, sequence, 8))
        for part, data in zip(parts, kept, strict=True):
            part.pages.data.copy_(data)
    assert torch.equal(said["windows"], said["none"])
    for at, windowed in enumerate(spoiled["windows"].tolist()):
        assert torch.equal(said[f"rank {at}"], said["none"]) == windowed
    runner.delete("long")
    assert all_is_back(runner)


def test_windows_that_hold_all_say_what_no_windows_say(model: Any) -> None:
    doc = documents([40])[0]
    prompt = [fresh(70, 1), doc, fresh(5, 2)]
    packing, _ = random_packing("quarter-bf16", LAYERS * HEADS, DIM)
    given = {"kv_dtype": replace(packing, strategy=Strategy(0.13))}
    windows = np.full((LAYERS, HEADS, 2), [128, 64])
    logits = []
    for runner in (seeing(model, windows, **given), runner_of(model, 0.13, **given)):
        runner.insert(doc.tokens, "short")
        runner.flush()
        assert text_of(runner).parts
        with runner.prefill(prompt, "naive", **ASKED) as done:
            seen = [done.logits[-1], *steps_of(runner, decoding(runner, done, 12), 12)]
        logits.append(seen)
        runner.delete("short")
        assert all_is_back(runner)
    assert apart(*logits) < 1e-4


def test_who_decodes_meanwhile_is_switched_between_two_steps(model: Any, monkeypatch: Any) -> None:
    doc = documents([LONG])[0]
    prompt = [fresh(70, 1), doc, fresh(150, 2)]
    runner = seeing(model, MIXED)
    with held_back(monkeypatch) as go:
        runner.insert(doc.tokens, "long")
        with runner.prefill(prompt, "naive", **ASKED) as done:
            sequence = decoding(runner, done, 20)
            logits = [done.logits[-1], *steps_of(runner, sequence, 5)]
            go.set()
            runner.flush()
            logits += steps_of(runner, sequence, 5)
            said = sequence.tokens
    before = DocumentDecoding(model, 400, 16, int4(), sights=MIXED, exact_first=1)
    after = DocumentDecoding(model, 400, 16, int4(), meaning_of(text_of(runner)), MIXED, 1)
    wanted = [before.prefill(prompt), *(before.step(token) for token in said[:5])]
    assert apart(logits[:6], wanted) < 1e-4
    after.prefill(prompt)
    for kept, now in zip(before.layers, after.layers, strict=True):
        for side in (0, 1):
            kept[side][:, 70 : 70 + LONG] = now[side][:, 70 : 70 + LONG]
    assert apart(logits[6:], [before.step(token) for token in said[5:10]]) < 1e-4


def test_batches_say_what_each_says_alone(model: Any) -> None:
    docs = documents([LONG, 300])
    runner = seeing(model, MIXED, chunk_tokens=4096, max_tokens=1 << 15)
    for number, doc in enumerate(docs):
        runner.insert(doc.tokens, str(number))
    runner.flush()
    prompts = [[fresh(70, 1), *docs], [fresh(9, 2), docs[1], fresh(30, 3)], [fresh(5, 4)]]
    how = {"max_new_tokens": 70, "remember": False, "stop": []}
    for policy in ("naive", "foresight"):
        alone = [runner.generate(prompt, policy, **how).tokens for prompt in prompts]
        answers = runner.generate_batch(prompts, policy, **how)
        assert [answer.tokens for answer in answers] == alone
    for number in range(2):
        runner.delete(str(number))
    assert all_is_back(runner)
