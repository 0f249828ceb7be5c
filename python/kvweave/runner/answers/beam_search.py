"""Beam search: of all that may follow a prompt the likeliest, as far as so many are kept at once.

Each beam is a fork of the prompt: beams share its blocks, and those of what they have said alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvweave.arguments import real, whole
from kvweave.errors import InvalidArgument
from kvweave.runner.answers.answering import Answering, Ask
from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.decode.sampling import Int64
from kvweave.runner.prefill.prefilled import Prefill, live_prefill

_MOST_PENALTY = 10.0
"""Lengths to a higher power are beyond any likelihood."""


@dataclass(frozen=True)
class Beam:
    """What may follow a prompt.

    `score`: the sum of the tokens' log-probabilities, over their number to the power of the length
    penalty. `tokens` has the one that ends it, `text` has not; `stopped` as for `Generation`.
    """

    text: str
    tokens: list[int]
    score: float
    stopped: bool


@dataclass(frozen=True)
class Candidate:
    """A token behind a beam by its number, and the log-probability of all that beam says then."""

    parent: int
    token: int
    score: float


@dataclass(frozen=True)
class Breadth:
    """How many beams are kept, and how much longer ones are favoured: 0 not at all."""

    beams: int
    length_penalty: float

    def __post_init__(self) -> None:
        whole("beams", self.beams, 1)
        real("length_penalty", self.length_penalty, -_MOST_PENALTY, _MOST_PENALTY)

    def score(self, likelihood: float, length: int) -> float:
        """What beams of any length are compared by."""
        return float(likelihood / length**self.length_penalty)


class Hypotheses:
    """What beams have said, without their KV: which go on, and which are done.

    The search that transformers has under `num_beams`, with `early_stopping=False`: of the
    candidates those go on that do not end, as many as there are beams. One that ends is kept if
    as many others are no likelier. It is over when that many are done, and the likeliest that goes
    on would score less than all of them if it ended now.
    """

    def __init__(self, breadth: Breadth, limit: int, ends: frozenset[int]) -> None:
        self.breadth = breadth
        self._limit = limit
        self._ends = ends
        self.said: list[list[int]] = [[]]
        self.scores = [0.0]
        self.done: list[tuple[float, list[int]]] = []

    @property
    def wanted(self) -> int:
        """Candidates that say enough, whichever of them end."""
        return self.breadth.beams * max(2, 1 + len(self._ends))

    @property
    def is_over(self) -> bool:
        """Whether no beam goes on, or none that does is likelier than what is done."""
        if not self.said:
            return True
        if len(self.done) < self.breadth.beams:
            return False
        best = self.breadth.score(max(self.scores), len(self.said[0]))
        return best <= min(score for score, _ in self.done)

    def take_in(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Takes in candidates, the likeliest first: those that go on, as `said` has them then."""
        breadth, length = self.breadth, len(self.said[0]) + 1
        going = []
        for rank, one in enumerate(candidates):
            ends = length == self._limit or one.token in self._ends
            if not ends:
                going.append(one)
            elif rank < breadth.beams:
                tokens = [*self.said[one.parent], one.token]
                self.done.append((breadth.score(one.score, length), tokens))
        self.done = sorted(self.done, key=lambda found: -found[0])[: breadth.beams]
        going = going[: breadth.beams]
        self.said = [[*self.said[one.parent], one.token] for one in going]
        self.scores = [one.score for one in going]
        return going

    def candidates(self, logits: torch.Tensor) -> list[Candidate]:
        """The likeliest tokens behind the beams, by logits [B, V]; waits for the device once."""
        before = torch.tensor(self.scores, dtype=torch.float32, device=logits.device)
        known = (torch.log_softmax(logits.float(), -1) + before[:, None]).flatten()
        scores, places = known.topk(min(self.wanted, len(known)))
        both = torch.stack((scores.double(), places.double())).tolist()
        found = []
        for score, place in zip(*both, strict=True):
            parent, token = divmod(int(place), logits.shape[-1])
            found.append(Candidate(parent, token, score))
        return found


class _Beams:
    """The forks of a prompt that beams decode from."""

    def __init__(self, answering: Answering, ask: Ask) -> None:
        self._answering = answering
        self._ask = ask
        self._held: list[tuple[Prefill, Decoding]] = []

    def begin(self, done: Prefill, going: Sequence[Candidate]) -> None:
        """Forks a prompt for each of some first tokens."""
        for one in going:
            self._hold(done.fork(), [one.token])

    def logits(self) -> torch.Tensor:
        """Feeds what each beam said last: logits [B, V]."""
        found = []

        def choose(_: Sequence[Decoding], logits: torch.Tensor, greedy: bool) -> Int64:
            found.append(logits.clone())
            return np.full(len(logits), -1, np.int64)

        self._answering.decoder.step([sequence for _, sequence in self._held], choose=choose)
        return found[0]

    def go_on(self, going: Sequence[Candidate]) -> None:
        """Has beams go on with a token each, in forks where several have the same beam before."""
        held, self._held = self._held, []
        kept: set[int] = set()
        try:
            for one in going:
                before, sequence = held[one.parent]
                if one.parent in kept:
                    self._hold(before.fork(), [*sequence.tokens[:-1], one.token])
                else:
                    kept.add(one.parent)
                    sequence.tokens.append(one.token)
                    self._held.append((before, sequence))
        finally:
            self._release([some for at, some in enumerate(held) if at not in kept])

    def release(self) -> None:
        """Gives back what all of them hold; safe to call twice."""
        held, self._held = self._held, []
        self._release(held)

    def _hold(self, fork: Prefill, tokens: list[int]) -> None:
        sequence = self._answering.sequence(fork, self._ask)
        sequence.tokens += tokens
        self._held.append((fork, sequence))

    def _release(self, held: Sequence[tuple[Prefill, Decoding]]) -> None:
        for done, _ in held:
            self._answering.decoder.forget(done.request)
            done.release()


@torch.inference_mode()
def search(answering: Answering, done: Prefill, ask: Ask, breadth: Breadth) -> list[Beam]:
    """The likeliest answers to a prefilled prompt, the best first; the prompt stays as it is.

    # Errors
    `InvalidArgument` for a prompt that was released, or strings that end answers; `PoolFull` where
    beams find no room, when nothing of them is held.
    """
    if ask.stop.texts:
        raise InvalidArgument(f"stop: expected token ids beside beams, got {ask.stop.texts[0]!r}")
    live_prefill("search", done)
    found = Hypotheses(breadth, ask.max_new_tokens, ask.stop.ids)
    beams = _Beams(answering, ask)
    with done.fork() as fork:
        if done.pending:
            answering.prefiller.extend(fork, np.zeros(0, np.int32))
        logits = fork.logits[-1:]
        try:
            beams.begin(fork, found.take_in(found.candidates(logits)))
            while not found.is_over:
                beams.go_on(found.take_in(found.candidates(beams.logits())))
        finally:
            beams.release()
    return [_beam(answering, ask, *one) for one in found.done]


def _beam(answering: Answering, ask: Ask, score: float, tokens: list[int]) -> Beam:
    stopped = tokens[-1] in ask.stop.ids
    text = answering.prompts.decode(tokens[:-1] if stopped else tokens)
    return Beam(text, tokens, score, stopped)
