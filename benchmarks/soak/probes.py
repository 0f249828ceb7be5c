"""Questions that are asked again and again of a runner in quiet: each answer has to be the first.

The first is that of a twin, a runner without tiers that has never been loaded. Documents of the
questions are dropped and inserted again each time, from wherever they are nearest, so that it is
also the bits that went through the tiers which are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.soak.asked import Asked, text
from benchmarks.soak.prompts import how_of, policy_of, prompt_of
from benchmarks.soak.served import ENGINE, Served
from benchmarks.soak.tally import Tally
from benchmarks.soak.words import words_of
from kvweave import Runner, Sampling, Segment
from kvweave.errors import UnknownSegment
from kvweave.runner import Engine

SPACE = "asked in quiet"
DOCUMENTS, DOCUMENT, ANSWER = 3, 70, 12
POLICIES = ("full", "prefix", "naive", "foresight", "sparsex")
GAP = 1e-3
"""Logits of two tokens that are no further apart are a tie: rounding may say either."""


@dataclass(frozen=True)
class Question:
    """A prompt about fixed documents, by a policy."""

    policy: str
    documents: tuple[int, ...]
    sampling: Sampling | None = None

    @property
    def prompt(self) -> list[Any]:
        """Its parts."""
        number = sum(self.documents)
        told = [Segment(tokens=_tokens(one), namespace=SPACE) for one in self.documents]
        return [words_of(text(6, 21, number)), *told, words_of(text(15, 22, number))]


class Heard(Sampling):
    """The likeliest tokens, with the logits that each was chosen by."""

    def __init__(self) -> None:
        super().__init__()
        # What is asked for is frozen; what is heard comes later.
        object.__setattr__(self, "logits", [])

    def pick(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """As `Sampling.pick`."""
        heard: list[torch.Tensor] = vars(self)["logits"]
        heard.append(logits.clone())
        return super().pick(logits, generator)

    def apart(self, said: Sequence[int], alone: Sequence[int]) -> float:
        """How far the logits of both tokens are from each other where two answers part.

        `alone` is what was heard; infinite where one of the answers only ends sooner.
        """
        pairs = list(zip(said, alone, strict=False))
        place = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        if place is None:
            return float("inf")
        logits = vars(self)["logits"][place]
        return abs(float(logits[alone[place]] - logits[said[place]]))


QUESTIONS = [
    *(Question(policy, told) for policy in POLICIES for told in ((0, 1), (2, 0))),
    Question("naive", (1, 2), Sampling(temperature=0.8, seed=3)),
    Question("full", (1,), Sampling(temperature=0.8, seed=4)),
]


class Probes:
    """The questions of one runner, and what its twin says to them."""

    def __init__(self, served: Served, tally: Tally) -> None:
        self.served, self.tally = served, tally
        self.ties = self.compared = 0
        for number in range(DOCUMENTS):
            served.twin.insert(_tokens(number), _name(number), SPACE)
        with closing(served.twin.engine(**ENGINE)) as engine:
            self.first = [_answer(engine, question)[0] for question in QUESTIONS]

    def ask(self, runner: Runner, *, drops: bool) -> None:
        """Asks a runner that is quiet. `drops`: its documents leave the device first."""
        if drops:
            for number in range(DOCUMENTS):
                try:
                    runner.delete(_name(number), SPACE)
                except UnknownSegment:
                    continue
            runner.forget(SPACE)
        for number in range(DOCUMENTS):
            runner.insert(_tokens(number), _name(number), SPACE)
        with closing(runner.engine(**ENGINE)) as engine:
            for question, first in zip(QUESTIONS, self.first, strict=True):
                said, sources = _answer(engine, question)
                if set(sources) - {"device"}:
                    self.tally.complain(f"{question}: documents came from {sources}")
                alike = question.policy in self.served.kind.alike.policies
                self.compared += alike
                if alike and said != first:
                    self.tally.complain(f"{question}: said {said}, at first {first}")

    def compare(self, kept: Sequence[tuple[Asked, list[int]]]) -> None:
        """What exact requests of a load were answered, beside what the twin says."""
        with closing(self.served.twin.engine(**ENGINE)) as engine:
            for asked, said in kept:
                heard = Heard()
                how = {**how_of(asked), "remember": False, "sampling": heard}
                request = engine.submit(prompt_of(asked), policy_of(asked), **how)
                engine.run()
                alone = request.result().tokens
                self.compared += 1
                if alone == said:
                    continue
                apart = heard.apart(said, alone)
                if apart <= GAP:
                    self.ties += 1
                else:
                    what = f"{asked.name} ({asked.kind}, {len(asked.tokens)} tokens)"
                    how = f"logits {apart:.2g} apart"
                    self.tally.complain(f"{what}: said {said} under load, {alone} alone, {how}")


def _tokens(number: int) -> list[int]:
    return text(DOCUMENT, 23, number)


def _name(number: int) -> str:
    return f"fixed {number}"


def _answer(engine: Engine, question: Question) -> tuple[list[int], list[str]]:
    """What is said to a question, and where its documents came from."""
    how: dict[str, Any] = {"max_new_tokens": ANSWER, "stop": (), "remember": False}
    request = engine.submit(
        question.prompt, question.policy, sampling=question.sampling, namespace=SPACE, **how
    )
    engine.run()
    done = request.result()
    return done.tokens, [document.source for document in done.report.documents]
