"""What a head map does to decode steps: each next token against that of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvweave.arguments import whole
from kvweave.cache import HeadClassMap
from kvweave.errors import InvalidArgument
from kvweave.lab.profile.effect import MakeRunner
from kvweave.runner import Runner, Sampling

TEMPERATURE = 0.8
"""The whole model's answers are drawn, for greedy ones of small models soon repeat themselves."""


@dataclass(frozen=True)
class DecodeEffect:
    """Decode steps under a map beside the whole model's, both following its answers.

    `tokens`: steps that were compared. `kl`: mean KL to the whole model, nats a token; `worst`: the
    mean over the tenth of the steps where it is highest. `agreement`: the share of steps whose
    likeliest token is the whole model's. `kl_by_answer`: `kl` of each answer alone, in the order of
    the prompts: steps of one answer are not independent of each other, answers are.
    """

    tokens: int
    kl: float
    worst: float
    agreement: float
    kl_by_answer: tuple[float, ...]


@dataclass(frozen=True)
class _Drawn(Sampling):
    """Draws an answer and keeps the log-probabilities [V] that each token was drawn by."""

    heard: list[torch.Tensor] = field(default_factory=list)

    def pick(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """As `Sampling`."""
        self.heard.append(logits.float().log_softmax(-1).cpu())
        return super().pick(logits, generator)


@dataclass(frozen=True)
class _Following(Sampling):
    """Says what was said, and compares what would be said instead: rows of (KL, agrees)."""

    said: tuple[int, ...] = ()
    expected: Sequence[torch.Tensor] = ()
    found: list[tuple[float, float]] = field(default_factory=list)

    def pick(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The token that was said."""
        step = len(self.found)
        wanted, got = self.expected[step], logits.float().log_softmax(-1).cpu()
        kl = float((wanted.exp() * (wanted - got)).sum())
        self.found.append((kl, float(wanted.argmax() == got.argmax())))
        return torch.tensor(self.said[step], device=logits.device)


class DecodeMeter:
    """Compares decode steps under maps with the whole model's behind the same prompts.

    The whole model draws an answer of `steps` tokens behind each prompt, which every map then
    follows. The first token of an answer is the prompt's own, and is not compared.

    # Errors
    `InvalidArgument` for no prompts; as the runner's for them.
    """

    def __init__(
        self, make_runner: MakeRunner, prompts: Sequence[Sequence[int]], steps: int, seed: int = 0
    ) -> None:
        if not prompts:
            raise InvalidArgument("prompts: expected at least one, got none")
        self.make_runner = make_runner
        self.prompts = [list(prompt) for prompt in prompts]
        self.steps = whole("steps", steps, 1) + 1
        drawn = [_Drawn(TEMPERATURE, seed=seed + number) for number in range(len(prompts))]
        self._said = self._answers(make_runner(None), drawn)
        self._expected = [one.heard for one in drawn]

    def measure(self, heads: HeadClassMap) -> DecodeEffect:
        """The effect of one map; errors as the runner's for it."""
        following = [
            _Following(TEMPERATURE, said=tuple(said), expected=expected)
            for said, expected in zip(self._said, self._expected, strict=True)
        ]
        self._answers(self.make_runner(heads), following)
        rows: npt.NDArray[np.float64] = np.concatenate([one.found[1:] for one in following])
        kl = np.sort(rows[:, 0])
        worst = kl[-max(1, len(kl) // 10) :]
        return DecodeEffect(
            tokens=len(kl),
            kl=float(kl.mean()),
            worst=float(worst.mean()),
            agreement=float(rows[:, 1].mean()),
            kl_by_answer=tuple(float(np.mean(one.found[1:], axis=0)[0]) for one in following),
        )

    def _answers(self, runner: Runner, settings: Sequence[Sampling]) -> list[list[int]]:
        engine = runner.engine()
        asked = [
            engine.submit(
                prompt,
                "full",
                max_new_tokens=self.steps,
                sampling=some,
                stop=(),
                remember=False,
                reserve=True,
            )
            for prompt, some in zip(self.prompts, settings, strict=True)
        ]
        engine.run()
        return [list(request.result().tokens) for request in asked]
