"""Answers of tasks by few pages: `python -m benchmarks.quality.page_tasks MODEL [--record]`.

What `benchmarks.quality.page_budgets` measures on running text, on tasks: heads read the best pages
of each budget in each of its ways, and each way is compared with the whole model. A prompt of a
task (hidden numbers, a table to look up in, a chain of variables) asks first for a long answer, of
which the whole model draws `--steps` tokens; every way says the same tokens, and KL and agreement
are of these. Then comes the task's question, by decode steps too, and each answers it greedily by
itself: its score is the share of right answers in that. So a score is of what is read behind as
many generated tokens, as FlexiCache's Table 3 has it for long answers, in other words.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quality.late_questions import LateQuestion, late_questions
from benchmarks.quality.measured_file import write
from benchmarks.quality.page_budgets import (
    RECENT,
    SINK,
    Way,
    add_ways,
    asked_for,
)
from benchmarks.quality.sampled import show
from benchmarks.report import record
from kvweave import models
from kvweave.lab.bench.rows import Row
from kvweave.lab.eval import bootstrap, task_of
from kvweave.lab.eval.statistics import difference
from kvweave.lab.profile import Stability, measure_stability, text_tasks
from kvweave.lab.profile.decode_effect import TEMPERATURE
from kvweave.runner import Runner, Sampling

CASE, PERIODS = "page_tasks", "page_tasks_periods"
"""What a run is called, and one that compares how often pages are ranked."""
SEED = 3
BUDGETS = (8, 16)
ANSWER_TOKENS = 40
TASKS: dict[str, str | None] = {"needle": "kjv", "lookup": None, "chain": "kjv"}
"""By name the text that a task is asked on."""


@dataclass(frozen=True, kw_only=True)
class _Drawn(Sampling):
    """Draws `steps` tokens and keeps the log-probabilities [V] of each, then says and answers.

    `stops`: tokens that end an answer, which are not drawn. `question`: what is said behind them.
    Both are on the device, which then waits for no token of the host's.
    """

    stops: torch.Tensor
    question: torch.Tensor
    steps: int = 0
    said: list[torch.Tensor] = field(default_factory=list)
    heard: list[torch.Tensor] = field(default_factory=list)

    def pick(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """A draw, then the question's tokens, then the likeliest."""
        at = len(self.said)
        if at < self.steps:
            self.heard.append(logits.float().log_softmax(-1))
            going_on = logits.float().index_fill(0, self.stops, -torch.inf)
            token = super().pick(going_on, generator)
        else:
            token = _behind(self.question, at - self.steps, logits)
        self.said.append(token)
        return token


@dataclass(frozen=True, kw_only=True)
class _Following(Sampling):
    """Says what was drawn, and keeps what would be said instead; then the same question.

    `found`: of each drawn token KL and whether the likeliest one is the whole model's. All of it is
    on the device.
    """

    drawn: torch.Tensor
    question: torch.Tensor
    expected: Sequence[torch.Tensor] = ()
    found: list[torch.Tensor] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)

    def pick(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The token that was drawn, then the question's, then the likeliest."""
        at = len(self.found)
        if at < len(self.drawn):
            wanted, got = self.expected[at], logits.float().log_softmax(-1)
            kl = (wanted.exp() * (wanted - got)).sum()
            same = (wanted.argmax() == got.argmax()).to(kl.dtype)
            self.found.append(torch.stack((kl, same)))
            return self.drawn[at]
        token = _behind(self.question, len(self.answered), logits)
        self.answered.append(at)
        return token


def _behind(question: torch.Tensor, at: int, logits: torch.Tensor) -> torch.Tensor:
    """Token `at` of a question, or of the answer behind it."""
    return question[at] if at < len(question) else logits.argmax()


@dataclass(frozen=True)
class Answered:
    """One sample under one way: mean KL and agreement of its drawn tokens, and its score."""

    kl: float
    agreement: float
    score: float


def stability_of(loaded: tuple[Any, Any], length: int) -> Stability:
    """Which heads go on needing the same pages, behind prompts of real text of a length."""
    runner = Runner(*loaded, max_tokens=length + 256, progress=False, check=False)
    texts = tuple(dict.fromkeys(filter(None, TASKS.values())))
    tasks = text_tasks(runner, texts, length, sink=SINK, recent=RECENT)
    return measure_stability(runner, tasks, pages=16, steps=64)


def stops_of(model: Any) -> tuple[int, ...]:
    """The tokens that end an answer of a model."""
    found = model.generation_config.eos_token_id
    return () if found is None else tuple([found] if isinstance(found, int) else found)


@dataclass(frozen=True)
class Bench:
    """A model and its tokenizer, how stable its heads are, and its answers under maps.

    `steps`: drawn tokens that are compared. `stops`: those that end an answer.
    """

    loaded: tuple[Any, Any]
    stability: Stability
    steps: int
    stops: tuple[int, ...]

    def measure(
        self, questions: Sequence[LateQuestion], ways: Sequence[Way]
    ) -> dict[Way | None, list[Answered]]:
        """Answers of a batch: of the whole model, which is None, and in each way."""
        device = self.loaded[0].device
        stops = torch.tensor(self.stops, dtype=torch.long, device=device)
        asked = [torch.tensor(q.question, device=device) for q in questions]
        drawn = [
            _Drawn(TEMPERATURE, seed=i, steps=self.steps + 1, stops=stops, question=question)
            for i, question in enumerate(asked)
        ]
        said = self._answers(None, questions, drawn)
        found: dict[Way | None, list[Answered]] = {None: []}
        for question, tokens in zip(questions, said, strict=True):
            found[None].append(Answered(0.0, 1.0, self._score(question, tokens)))
        for way in ways:
            following = [
                _Following(
                    TEMPERATURE,
                    drawn=torch.tensor(tokens[: self.steps + 1], device=device),
                    question=one.question,
                    expected=one.heard,
                )
                for tokens, one in zip(said, drawn, strict=True)
            ]
            answers = self._answers(way, questions, following)
            found[way] = [
                # The first token is the prompt's own.
                Answered(*torch.stack(one.found[1:]).mean(0).tolist(), self._score(q, tokens))
                for q, tokens, one in zip(questions, answers, following, strict=True)
            ]
        return found

    def _answers(
        self, way: Way | None, questions: Sequence[LateQuestion], settings: Sequence[Sampling]
    ) -> list[list[int]]:
        room = sum(len(q.prompt) + len(q.question) for q in questions)
        room += len(questions) * (self.steps + ANSWER_TOKENS + 64)
        heads = None if way is None else way.heads(self.stability, self.steps)
        how = {"max_tokens": room, "progress": False, "check": False}
        how |= {} if way is None else way.runner_settings()
        engine = Runner(*self.loaded, heads=heads, **how).engine()
        asked = [
            engine.submit(
                list(question.prompt),
                "full",
                max_new_tokens=self.steps + 1 + len(question.question) + ANSWER_TOKENS,
                sampling=some,
                stop=(),
                remember=False,
                reserve=True,
            )
            for question, some in zip(questions, settings, strict=True)
        ]
        engine.run()
        return [list(request.result().tokens) for request in asked]

    def _score(self, question: LateQuestion, said: Sequence[int]) -> float:
        answer = list(said[self.steps + 1 + len(question.question) :])
        ends = [at for at, token in enumerate(answer) if token in self.stops]
        text = self.loaded[1].decode(answer[: min(ends, default=len(answer))])
        return question.recall(text)


def rows_of(job: str, found: dict[Way | None, list[Answered]]) -> Iterator[Row]:
    """A row a way: KL to the whole model, agreement, the score and how much it is less than its."""
    dense = [answer.score for answer in found[None]]
    for way, answers in found.items():
        kl, score = (bootstrap([getattr(a, name) for a in answers]) for name in ("kl", "score"))
        less = bootstrap(np.array([[a.score for a in answers], dense]).T, difference)
        yield Row(
            f"{job}: {words_of(way)}",
            kl.value,
            "",
            None,
            {
                "95 %": [kl.low, kl.high],
                "same token": float(np.mean([answer.agreement for answer in answers])),
                "score": score.value,
                "95 % of it": [score.low, score.high],
                "more than the whole model's": less.value,
                "95 % of that": [less.low, less.high],
                "n": len(answers),
            },
        )


def words_of(way: Way | None) -> str:
    """A way in words, parted by commas; what it reads comes first."""
    if way is None:
        return "all pages"
    pages, unstable, share, every, score, estimate, host = way.words()
    parts = [f"{pages} pages", f"unstable {share} {unstable}", f"ranked {every}", score]
    parts += ["estimated"] if estimate == "on" else []
    return ", ".join(parts if host == "no" else [*parts, f"host {host}"])


def job_of(name: str, asked: argparse.Namespace) -> str:
    """A task of a model in words, as rows have it."""
    model = asked.model.rpartition("/")[2]
    texts = [TASKS[name]] if TASKS[name] else []
    numbers = [asked.dtype] if asked.dtype != "f32" else []
    return ", ".join([model, *numbers, name, *texts, f"{asked.length} + {asked.steps}"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.quality.page_tasks", description=__doc__)
    parser.add_argument("model", help="a packaged model, or a local folder")
    parser.add_argument("--length", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--steps", type=int, default=256, help="tokens before the question")
    parser.add_argument("--samples", type=int, default=200, help="of each task")
    parser.add_argument("--batch", type=int, default=8, help="samples that decode together")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="f32", choices=["f32", "bf16"])
    parser.add_argument("--task", action="append", choices=[*TASKS], default=[])
    parser.add_argument("--record", action="store_true", help="append to benchmarks/records")
    add_ways(parser)
    parser.add_argument("--json", type=Path, help="written behind each batch, for a lent machine")
    asked = parser.parse_args()
    dtype = torch.float32 if asked.dtype == "f32" else torch.bfloat16
    loaded = models.load(asked.model, dtype, device=asked.device)
    bench = Bench(loaded, stability_of(loaded, asked.length), asked.steps, stops_of(loaded[0]))
    ways = [way for pages in asked.pages or BUDGETS for way in asked_for(pages, asked)]
    run_of = record.here if asked.device == "cpu" else record.of_device
    case = PERIODS if asked.every else CASE
    done: list[Row] = []
    for name in asked.task or TASKS:
        task = task_of(name, asked.length, TASKS[name])
        questions = late_questions(task, loaded[1], asked.samples, SEED)
        found: dict[Way | None, list[Answered]] = {}
        for first in range(0, len(questions), asked.batch):
            some = questions[first : first + asked.batch]
            for way, answers in bench.measure(some, ways).items():
                found.setdefault(way, []).extend(answers)
            print(f"{name}: {first + len(some)} of {len(questions)}", flush=True)
            rows = [*done, *rows_of(job_of(name, asked), found)]
            if asked.json is not None:
                write(asked.json, run_of(case, rows))
        show(case, rows[len(done) :], False)
        done = rows
    if asked.record:
        print(f"recorded in {record.keep(run_of(case, done))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
