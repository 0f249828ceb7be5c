"""`Calls`: a runner's own calls, each by an engine that is stepped until its answers are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from kvweave.runner.answers.answering import Answering, Ask
from kvweave.runner.engine.engine import Engine
from kvweave.runner.engine.engine_request import EngineRequest
from kvweave.runner.prefill.prefilled import Prefill
from kvweave.runner.progress import track
from kvweave.runner.prompt import TokenizedPrompt
from kvweave.runner.report import Generation, StreamedToken


class Calls:
    """Answers prompts while its caller waits, and computes nothing for anybody else.

    Prompts are prefilled one after the other in the first step, as far as there is room, and
    answers are decoded together. What was taken is given back at the end, whatever that is.
    """

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._computing = answering.prefiller.computing

    def answers(
        self, prompts: Sequence[TokenizedPrompt], ask: Ask, *, progress: bool = False
    ) -> list[Generation]:
        """The answers to some prompts; raises what ends the first that fails."""
        with self._computing, closing(self._engine()) as engine:
            requests = [engine.enter(prompt, ask) for prompt in prompts]
            for request in track(requests, "answers", progress):
                _finish(engine, request, requests)
            return [request.result() for request in requests]

    def answer(self, done: Prefill, ask: Ask) -> Generation:
        """The answer to a prompt that was prefilled, which stays its caller's."""
        with self._computing, closing(self._engine()) as engine:
            request = engine.enter(None, ask, done)
            _finish(engine, request, [request])
            return request.result()

    def streamed(self, prompt: TokenizedPrompt, ask: Ask) -> Iterator[StreamedToken]:
        """The tokens of one answer; between two of them others may compute in the same thread."""
        with closing(self._engine()) as engine:
            request = engine.enter(prompt, ask)
            while not request.ended:
                engine.must_step()
                yield from request.take()
            request.result()

    def _engine(self) -> Engine:
        unbounded: dict[str, Any] = dict.fromkeys(("token_budget", "chunk_tokens", "max_running"))
        return Engine(self._answering, alone=True, **unbounded)


def _finish(engine: Engine, request: EngineRequest, among: Sequence[EngineRequest]) -> None:
    while not request.ended:
        engine.must_step()
        for other in among:
            if other.outcome == "failed":
                other.result()
