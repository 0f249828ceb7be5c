"""The example of one request that uses content, heads, tokens, channels and place at once."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from all_five import recomputed_rows
from byte_tokenizer import Bytes
from chosen_documents import ReadingChosen, left_out
from decode_batches import decoding
from examples import example
from families import tiny
from kvweave.runner import Runner, Segment
from packed_choosing import expect_packed_choice
from packed_decoding import PackedDecoding, apart
from page_meaning import PAGE, Meaning, of_format

SENTENCES = 9
ROOM = {"max_tokens": 65536}
STEPS = 24


@pytest.fixture(name="example", scope="module")
def example_module() -> Any:
    return example("all_five")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", head_dim=64, num_hidden_layers=4, max_position_embeddings=8192)


@pytest.mark.filterwarnings("ignore::kvweave.UncertifiedPolicy")
def test_each_dimension_saves(example: Any, model: Any, capsys: Any) -> None:
    saved = {one.what: one for one in example.print_saved(model, Bytes(), SENTENCES, **ROOM)}
    assert list(saved) == ["content", "heads", "tokens", "channels", "place"]
    for one in saved.values():
        assert 0 < one.have < one.instead
    # f32 in exact pages; packed ones have 52 bytes a token and three f32 rows of bounds a page.
    packed = 52 + 3 * 4 * 64 / PAGE
    assert saved["channels"].instead / saved["channels"].have == pytest.approx(4 * 128 / packed)
    # Of eight heads three see windows, two read all, and three 4 pages each at most.
    reused = saved["tokens"].instead
    assert saved["heads"].instead == reused * 8 * 52
    assert saved["heads"].have == pytest.approx((2 * reused + 3 * 4 * PAGE) * 52)
    assert saved["place"].instead - saved["place"].have >= reused
    text = capsys.readouterr().out
    assert "disk 2" in text
    assert all(str(one) in text for one in saved.values())


@dataclass
class Definition:
    """A plain decoding of the prompt, with what it has said so far and which part it leaves out."""

    without: str
    double: ReadingChosen
    logits: list[torch.Tensor]

    def step(self, token: int, left: Any, windows: Any) -> None:
        """One more token, which heads with `windows` [L, G] and those that choose leave some of."""
        if self.without == "windows":
            left = left & ~windows[..., None]
        self.double.left = None if self.without == "choice" else left
        self.logits.append(self.double.step(token))


@pytest.mark.filterwarnings("ignore::kvweave.UncertifiedPolicy")
def test_it_says_what_the_definition_says(
    example: Any, model: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Against transformers' own forward over what pages stand for, and without any one part.

    That has the rows which the policy recomputes and the pages that heads choose, the latter by an
    explicit sort, told; all else is computed.
    """
    known = {"heads": example.classes_in_turn(model, Bytes()), "progress": False, "check": False}
    example.insert(model, Bytes(), tmp_path, SENTENCES, **known, **ROOM)
    rows = recomputed_rows(monkeypatch)
    prompt, how = example.prompt_of(SENTENCES), {"remember": False, "watched": False}
    with closing(example.reader(model, Bytes(), tmp_path, **known, **ROOM)) as runner:
        with runner.prefill(prompt, example.POLICY, reserve_tokens=STEPS, **how) as done:
            assert [one.source for one in done.report.documents] == ["disk", "disk"]
            made = definitions(model, runner, done, parts_of(prompt), rows[-1])
            logits = compared_steps(runner, done, made, example.CLASSES[1]["rerank_every"])
        answer = runner.generate(prompt, example.POLICY, max_new_tokens=STEPS, stop=[])
    assert answer.tokens == [int(row.argmax()) for row in logits]
    wanted, *others = made
    effects = {each.without: apart(each.logits, wanted.logits) for each in others}
    assert min(effects.values()) > 1e-4, effects
    assert apart(logits, wanted.logits) < 0.02 * min(effects.values())


def parts_of(prompt: list[Any]) -> list[Segment]:
    """The tokens of a prompt, those of its own text found nowhere."""
    parts = []
    for part in prompt:
        text, namespace = (part, "fresh") if isinstance(part, str) else (part.text, "")
        parts.append(Segment(tokens=Bytes()(text).input_ids, namespace=namespace))
    return parts


def definitions(
    model: Any, runner: Runner, done: Any, parts: list[Segment], rows: Any
) -> list[Definition]:
    """What is defined, then the same without one part each, all with the prompt read."""
    pool, entries = runner.packed, done.kv.packed.entries()
    assert pool is not None
    bases = pool.bases.bases.data[np.unique(pool.bases.numbers(entries[:, 0]))]
    assert all(torch.equal(basis, bases[0]) for basis in bases)
    meaning, sights = of_format(pool.pages.format, bases[0]), pool.heads.sights
    asked = question_rows(parts)
    expect_means(runner, model, entries, parts, meaning)
    everything = [Segment(tokens=part.tokens, namespace="fresh") for part in parts]
    made = []
    for without in ("", "choice", "windows", "packing", "recomputing", "reuse"):
        of = None if without == "packing" else meaning
        seen = None if without == "windows" else sights
        double = ReadingChosen(model, 2048, 16, of, sights=seen, exact_first=pool.first_tokens)
        said = double.prefill(everything if without == "reuse" else parts)
        if without not in ("recomputing", "reuse"):
            said = double.recompute(np.union1d(rows, asked))
        made.append(Definition(without, double, [said]))
    return made


def question_rows(parts: list[Segment]) -> Any:
    ends = np.cumsum([len(part.tokens or ()) for part in parts])
    return np.arange(ends[-2], ends[-1])


def compared_steps(runner: Runner, done: Any, made: list[Definition], every: int) -> list[Any]:
    """Logits of an answer, which is fed to the definitions too; choices are compared as made."""
    assert runner.packed is not None
    sequence, checked = decoding(runner, done, STEPS + 1), 0
    windows = ~runner.packed.heads.reading
    logits = [done.logits[-1].float().clone()]

    def choose(_batch: Any, said: torch.Tensor, _greedy: bool) -> Any:
        logits.append(said[0].float().clone())
        return np.array([sequence.choose(said[0])])

    with torch.inference_mode():
        for step in range(STEPS - 1):
            token = sequence.tokens[-1]
            runner._decoder.step([sequence], choose=choose, watched=True)
            if step % every == 0:
                queries = runner._decoder.queries
                assert queries is not None
                checked += expect_packed_choice(runner, sequence, queries[:, 0])
            left = left_out(runner, sequence)
            for each in made:
                each.step(token, left, windows)
    runner._decoder.forget(sequence.request)
    assert checked == 3 * -(-(STEPS - 1) // every)
    return logits


def expect_means(
    runner: Runner, model: Any, entries: Any, parts: list[Segment], meaning: Meaning
) -> None:
    """That heads choose by the means of the keys that pages from the store stand for."""
    pool, start = runner.packed, 0
    assert pool is not None
    for part in parts:
        end = start + len(part.tokens or ())
        own = entries[(entries[:, 3] >= start) & (entries[:, 3] < end)]
        alone = PackedDecoding(model, 16, meaning, pool.heads.sights)
        for layer in range(len(runner.spec.layers) if not part.namespace else 0):
            if not layer:
                alone.prefill(part.tokens, 2048)
            cached = alone.cache.layers[layer]
            keys, _ = meaning(layer, (cached.keys[0].double(), cached.values[0].double()))
            for block, begin, _, position, _ in own.tolist():
                first = position - begin - start
                mean = keys[:, first : first + PAGE].mean(1).float()
                at = block + layer * pool.kv_heads
                got = pool.bounds[at : at + pool.kv_heads, 2]
                torch.testing.assert_close(got, mean, atol=1e-4, rtol=0)
        start = end
