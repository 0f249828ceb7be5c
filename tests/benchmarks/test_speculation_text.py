"""Self-speculation over real text: equal answers, and what is said of those that part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.cases import speculation_text
from benchmarks.cases.speculation_text import Answers, Way
from kvweave.lab.bench.rows import WrongAnswer
from kvweave.models import load_smollm2
from kvweave.runner import Runner


@pytest.mark.long
def test_accepted_drafts_are_counted_and_answers_are_those_of_dense_decoding() -> None:
    greedy, drafted, drawn, of_draws = speculation_text.run(quick=True)
    assert greedy.name == "SmolLM2, sotu, 1 × 100: dense"
    assert drafted.name == "SmolLM2, sotu, 1 × 100: 3 drafts by 4 pages, every 16"
    assert of_draws.name == "SmolLM2, python, 2 × 72, drawn at 0.8: 2 drafts by 3 pages, every 4"
    for dense, row, most in ((greedy, drafted, 3), (drawn, of_draws, 2)):
        assert row.unit == "ms"
        assert 0 < row.of["accepted"] <= most
        assert 0 < row.of["share"] <= 1
        assert row.of["dense ÷ this"] == dense.value / row.value
        assert (row.of["equal"], row.of["same until"]) == (1.0, 1.0)
    assert drafted.of["tie"] == 0.0
    assert "tie" not in of_draws.of


def test_loads_beyond_the_model_are_left_out() -> None:
    (task,) = speculation_text.QUICK[:1]
    task = replace(task, prompts=((1, 40), (1, 9000)), ways=(Way(4, 1),), steps=3)
    rows = speculation_text.rows_of("SmolLM2", load_smollm2(), [task])
    assert [row.name.split(": ")[0] for row in rows] == ["SmolLM2, sotu, 1 × 40"] * 2


def test_answers_that_part_are_refused_where_arithmetic_is_the_same() -> None:
    model, tokenizer = load_smollm2()
    runner = Runner(model, max_tokens=256, progress=False, check=False)
    prompt = np.asarray(tokenizer("The state of the union is")["input_ids"], np.int32)
    (said,) = runner.generate_batch([prompt], "full", max_new_tokens=4, stop=())
    other = replace(said, tokens=[*said.tokens[:2], said.tokens[2] + 1, said.tokens[3]])
    task = replace(speculation_text.QUICK[0], steps=4)
    given = runner, [prompt], Answers([said], 1.0), Answers([other], 1.0), task
    with pytest.raises(WrongAnswer, match=r"got others from \[2\] on"):
        speculation_text._agreement(*given)
    assert speculation_text._tie(runner, prompt, said.tokens, other.tokens, 2) > 0
    assert runner.cache.stats()["held"] == 0
