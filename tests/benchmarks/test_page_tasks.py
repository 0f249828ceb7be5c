"""Answers of tasks by few pages: what every way says, and what is compared."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from benchmarks.quality.late_questions import OPENING, LateQuestion, late_questions
from benchmarks.quality.page_budgets import Way
from benchmarks.quality.page_tasks import ANSWER_TOKENS, Answered, Bench, rows_of, words_of
from benchmarks.report.results import COLUMNS
from byte_tokenizer import Bytes
from families import random_tokens, tiny
from kvweave.lab.eval import task_of
from kvweave.lab.eval.sample import Sample
from kvweave.lab.profile import Stability
from kvweave.lab.profile.stability import TaskStability
from kvweave.runner.model.model_spec import describe

STEPS = 20


class Words(Bytes):
    """Text that says each token."""

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return " ".join(f"t{int(i)}" for i in ids)


@pytest.fixture(scope="module")
def bench() -> Bench:
    model = tiny("llama")
    spec = describe(model)
    by_window = np.random.default_rng(1).random((3, len(spec.layers), spec.kv_heads))
    task = TaskStability("text", by_window.mean(0)[..., None], by_window)
    return Bench((model, Words()), Stability(spec.fingerprint, 8, 20, (task,), {}), STEPS, (3,))


def asked(count: int, answers: tuple[str, ...]) -> list[LateQuestion]:
    return [
        LateQuestion(tuple(random_tokens(150, n).tolist()), (5, 6, 7), Sample((), answers=answers))
        for n in range(count)
    ]


def test_all_pages_are_the_whole_model_and_few_are_not(bench: Bench) -> None:
    few, all_pages = Way(3, "as stable", every=4), Way(64)
    said = bench.measure(asked(2, ("t9999",)), [all_pages, few])
    for answer in said[all_pages]:
        assert answer.kl == pytest.approx(0.0, abs=1e-6)
        assert answer.agreement == 1.0
    assert min(answer.kl for answer in said[few]) > 1e-5
    assert [len(said[way]) for way in (None, all_pages, few)] == [2, 2, 2]
    assert all(a.score == 0.0 for way in said.values() for a in way)


def test_the_answer_is_what_comes_behind_the_question(bench: Bench) -> None:
    """Said tokens and the question count for no score; what the model goes on with does."""
    questions = asked(1, ())
    runner_said: list[list[int]] = []
    answers = Bench._answers

    def heard(self, *given):
        found = answers(self, *given)
        runner_said.extend(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bench, "_answers", heard)
        patch.setattr(Bench, "_score", lambda *_: 0.0)
        bench.measure(questions, [Way(3, "as stable")])
    whole, few = runner_said
    assert len(whole) == len(few) == STEPS + 1 + 3 + ANSWER_TOKENS
    # Every way says what the whole model drew, in which no answer ends, and asks the same.
    assert whole[: STEPS + 4] == few[: STEPS + 4]
    assert whole[STEPS + 1 : STEPS + 4] == [5, 6, 7]
    assert 3 not in whole[: STEPS + 1]
    for at, right in ((STEPS + 4, 1.0), (STEPS + 3, 0.0)):
        answer = [1] * at + [77] + [1] * 9
        answer[at] = 77
        (question,) = asked(1, ("t77",))
        assert bench._score(question, answer) == right
    (question,) = asked(1, ("t77",))
    assert bench._score(question, [1] * (STEPS + 4) + [3, 77]) == 0.0, "behind its end"


def test_questions_come_late(smollm2) -> None:
    """The prompt asks for something else; the question is a turn of its own, with its answer."""
    _, tokenizer = smollm2
    for name, corpus in (("needle", "kjv"), ("lookup", None), ("chain", "kjv")):
        task = task_of(name, 500, corpus)
        (one,), (again,) = (late_questions(task, tokenizer, 1, 3) for _ in range(2))
        assert one == again
        prompt, question = (tokenizer.decode(list(ids)) for ids in (one.prompt, one.question))
        assert OPENING in prompt
        assert len(one.prompt) <= 500
        assert "?" in question or "Answer" in question
        assert question.strip() not in prompt
        assert one.recall(" ".join(map(str, one.answers.answers))) == 1.0
        assert one.recall("nothing of it") == 0.0


def test_rows_say_how_much_a_score_is_less() -> None:
    found = {
        None: [Answered(0.0, 1.0, 1.0), Answered(0.0, 1.0, 0.0)],
        Way(8, "ranked", share=0.5, bounds="fp8"): [
            Answered(0.2, 0.5, 0.0),
            Answered(0.4, 1.0, 0.0),
        ],
    }
    whole, few = rows_of("m, needle", found)
    assert whole.name == "m, needle: all pages"
    assert few.name.endswith("8 pages, unstable 0.5 ranked, ranked 16, min-max in fp8")
    assert few.value == pytest.approx(0.3)
    assert few.of["same token"] == 0.75
    assert few.of["more than the whole model's"] == pytest.approx(-0.5)
    assert few.of["n"] == 2
    assert set(COLUMNS["page_tasks"]) <= set(few.of)
    assert json.dumps(few.of)
    assert words_of(Way(8, estimate=True, host="fp8")).endswith("estimated, host fp8")
    assert torch.tensor(few.value).isfinite()
