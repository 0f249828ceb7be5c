"""Answers: prefilled prompts that are decoded from, together, watched where that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvweave.device_memory import needs_memory
from kvweave.errors import InvalidArgument
from kvweave.policies import Policy
from kvweave.runner.decode import Decoder
from kvweave.runner.decode.decoding import Decoding, by_regime
from kvweave.runner.decode.sampling import Sampling
from kvweave.runner.healing import Healer, Healing, Watch
from kvweave.runner.lossy import LossyPrefiller
from kvweave.runner.prefill import Lookup, Prefill, Prefiller
from kvweave.runner.prompt import PromptTokenizer, TokenizedPrompt
from kvweave.runner.report import Generation


@dataclass(frozen=True)
class Ask:
    """How one prompt is to be answered."""

    policy: Policy
    lookup: Lookup
    max_new_tokens: int
    sampling: Sampling
    stop: frozenset[int]
    healing: Healing | None = None


@dataclass(frozen=True)
class Answer:
    """A prefilled prompt and what is decoded from it."""

    done: Prefill
    sequence: Decoding
    watch: Watch | None = None

    @property
    def spoken(self) -> list[int]:
        """The tokens to show: all but a closing stop token."""
        tokens = self.sequence.tokens
        ended = bool(tokens) and tokens[-1] in self.sequence.stop
        return tokens[:-1] if ended else tokens


class Answering:
    """Answers prompts of one model in one cache."""

    def __init__(
        self,
        lossy: LossyPrefiller,
        prefiller: Prefiller,
        decoder: Decoder,
        prompts: PromptTokenizer,
    ) -> None:
        self.lossy = lossy
        self.prefiller = prefiller
        self.decoder = decoder
        self.prompts = prompts
        self.healer = Healer(prefiller)

    def ask(
        self,
        policy: str | Policy | None,
        lookup: Lookup,
        max_new_tokens: int,
        sampling: Sampling | None,
        stop: Sequence[int] | None,
        healing: Healing | None = None,
    ) -> Ask:
        """How a prompt is to be answered; `stop` None: at the tokenizer's end of sequence."""
        if max_new_tokens < 1:
            raise InvalidArgument(f"max_new_tokens: expected >= 1, got {max_new_tokens}")
        given: Any = healing
        if given is not None and not isinstance(given, Healing):
            raise InvalidArgument(f"healing: expected a Healing or None, got {given!r}")
        if stop is None:
            end = getattr(self.prompts.tokenizer, "eos_token_id", None)
            stop = [] if end is None else [int(end)]
        chosen = sampling or Sampling()
        wanted = self.lossy.policy_of(policy)
        return Ask(wanted, lookup, max_new_tokens, chosen, frozenset(stop), healing)

    def start(self, prompt: TokenizedPrompt, ask: Ask) -> Answer:
        """Prefills a prompt and chooses the first token of its answer."""
        done = self.lossy.prefill(
            prompt, ask.policy, ask.lookup, reserve_tokens=ask.max_new_tokens - 1
        )
        try:
            return self.begin(done, ask)
        except BaseException:
            done.release()
            raise

    @needs_memory("sampling")
    def begin(self, done: Prefill, ask: Ask) -> Answer:
        """Chooses the first token of the answer to a prompt that was prefilled."""
        sequence = Decoding(
            request=done.request,
            positions=done.positions,
            sampling=ask.sampling,
            limit=ask.max_new_tokens,
            device=self.prefiller.spec.device,
            stop=ask.stop,
            timings=done.report.timings,
        )
        watch = None if ask.healing is None else Watch(done, sequence, ask.healing)
        sequence.choose(done.logits[-1])
        return Answer(done, sequence, watch)

    @torch.inference_mode()
    def step(self, answers: Sequence[Answer]) -> None:
        """One more token for each answer; those that are watched may be healed behind it."""
        by_sequence = {answer.sequence: answer for answer in answers}
        for group in by_regime(list(by_sequence)):
            watches = [by_sequence[sequence].watch for sequence in group]
            watched = {
                column: watch
                for column, watch in enumerate(watches)
                if watch is not None and watch.goes_on
            }
            self.decoder.step(group, watched=bool(watched))
            if watched:
                assert self.decoder.queries is not None
                queries = self.decoder.queries.clone()
                for column, watch in watched.items():
                    if watch.keep(queries[:, column]):
                        self.healer.look(watch)

    def run(self, answers: Sequence[Answer]) -> None:
        """Decodes all answers to their ends, together."""
        while active := [answer for answer in answers if not answer.sequence.done]:
            self.step(active)

    def finished(self, answer: Answer) -> Generation:
        """An answer that was decoded to its end."""
        text = self.prompts.decode(answer.spoken)
        return Generation(text, answer.sequence.tokens, answer.done.report)
