"""Answers: prefilled prompts that are decoded from, together, watched where that is asked for."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from kvweave.arguments import shown, whole
from kvweave.device_memory import needs_memory
from kvweave.errors import InvalidArgument
from kvweave.policies import Policy
from kvweave.runner.answers.spoken_text import SpokenText
from kvweave.runner.answers.stop import Stop, Stops
from kvweave.runner.decode import Decoder
from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.decode.loop import decode_steps
from kvweave.runner.decode.sampling import Sampling
from kvweave.runner.healing import Healer, Healing, Watch, check_healing
from kvweave.runner.lossy.lossy import LossyPrefiller
from kvweave.runner.prefill.prefill import Lookup, Prefill, Prefiller
from kvweave.runner.prompt import PromptTokenizer, TokenizedPrompt
from kvweave.runner.report import Generation, StreamedToken


@dataclass(frozen=True)
class Ask:
    """How one prompt is to be answered; `streamed`: its text is wanted token by token."""

    policy: Policy
    lookup: Lookup
    max_new_tokens: int
    sampling: Sampling
    stop: Stop
    healing: Healing | None = None
    streamed: bool = False


@dataclass(frozen=True)
class Answer:
    """A prefilled prompt and what is decoded from it.

    `text`: kept while it is decoded, where strings may end it or it is streamed.
    """

    done: Prefill
    sequence: Decoding
    watch: Watch | None = None
    text: SpokenText | None = None

    @property
    def spoken(self) -> list[int]:
        """The tokens to show: all but one that ends the answer, by its id or with a string.

        Earlier tokens of such a string are among them, though their text is not shown.
        """
        tokens = self.sequence.tokens
        ended = self._says_nothing or (self.text is not None and self.text.ended)
        return tokens[:-1] if ended else tokens

    def hear(self) -> None:
        """Reads the newest token, where the text is kept; behind a string that ends it no more."""
        if self.text is None:
            return
        sequence = self.sequence
        token = None if self._says_nothing else sequence.tokens[-1]
        self.text.hear(token, sequence.done)
        if self.text.ended:
            sequence.limit = len(sequence.tokens)

    @property
    def streamed(self) -> StreamedToken:
        """The newest token with what it adds to the text."""
        return StreamedToken(
            self.sequence.tokens[-1], "" if self.text is None else self.text.newest
        )

    @property
    def _says_nothing(self) -> bool:
        """Whether the newest token ends the answer by its id."""
        tokens = self.sequence.tokens
        return bool(tokens) and tokens[-1] in self.sequence.stop


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
        stop: Stops | None,
        healing: Healing | None = None,
        streamed: bool = False,
    ) -> Ask:
        """How a prompt is to be answered; see `Stop.of` for what ends the answer."""
        whole("max_new_tokens", max_new_tokens, 1)
        check_healing(healing)
        chosen: Any = Sampling() if sampling is None else sampling
        if not isinstance(chosen, Sampling):
            raise InvalidArgument(f"sampling: expected a Sampling or None, got {shown(chosen)}")
        ends = Stop.of(stop, self.prompts.tokenizer, self.prompts.vocabulary)
        wanted = self.lossy.policy_of(policy)
        return Ask(wanted, lookup, int(max_new_tokens), chosen, ends, healing, streamed)

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
            stop=ask.stop.ids,
            timings=done.report.timings,
        )
        watch = None if ask.healing is None else Watch(done, sequence, ask.healing)
        sequence.choose(done.logits[-1])
        kept = ask.streamed or ask.stop.texts
        text = SpokenText(self.prompts.decode, ask.stop.texts) if kept else None
        answer = Answer(done, sequence, watch, text)
        answer.hear()
        return answer

    def steps(self, answers: Sequence[Answer]) -> Generator[None, None, None]:
        """One more token for each answer that is not done, again and again.

        Those that are watched may be healed behind a step.
        """
        by_sequence = {answer.sequence: answer for answer in answers}

        def watched(sequence: Decoding) -> bool:
            watch = by_sequence[sequence].watch
            return watch is not None and watch.goes_on

        with closing(decode_steps(self.decoder, list(by_sequence), watched)) as steps:
            for group, queries in steps:
                for column, sequence in enumerate(group):
                    answer = by_sequence[sequence]
                    answer.hear()
                    if queries is not None and watched(sequence):
                        self._look(answer.watch, queries[:, column])
                yield

    def run(self, answers: Sequence[Answer]) -> None:
        """Decodes all answers to their ends, together."""
        for _ in self.steps(answers):
            pass

    def finished(self, answer: Answer) -> Generation:
        """An answer that was decoded to its end."""
        text = self.prompts.decode(answer.spoken) if answer.text is None else str(answer.text)
        return Generation(text, answer.sequence.tokens, answer.done.report)

    @torch.inference_mode()
    def _look(self, watch: Watch | None, queries: torch.Tensor) -> None:
        """Keeps the queries of one step; the blocks of what is healed may be others then."""
        if watch is not None and watch.keep(queries) and self.healer.look(watch):
            self.decoder.forget()
