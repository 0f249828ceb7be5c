"""Answers: prefilled prompts that are decoded from, together, watched where that is asked for."""

from __future__ import annotations

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
from kvweave.runner.decode.sampling import Sampling
from kvweave.runner.healing import Healer, Healing, Watch, check_healing
from kvweave.runner.kv.beside_drafts import refuse_beside_drafts
from kvweave.runner.kv.beside_packed import refuse_beside_packed
from kvweave.runner.lossy.lossy import LossyPrefiller
from kvweave.runner.prefill.lookup import Lookup
from kvweave.runner.prefill.prefill import Prefiller
from kvweave.runner.prefill.prefilled import Prefill
from kvweave.runner.prompt import PromptTokenizer
from kvweave.runner.report import Generation


@dataclass(frozen=True)
class Ask:
    """How one prompt is to be answered.

    `streamed`: its text is wanted token by token. `reserve`: room for all of the answer is taken
    before its first token, instead of as it grows.
    """

    policy: Policy
    lookup: Lookup
    max_new_tokens: int
    sampling: Sampling
    stop: Stop
    healing: Healing | None = None
    streamed: bool = False
    reserve: bool = False


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
        return tokens[:-1] if self.stopped else tokens

    @property
    def stopped(self) -> bool:
        """Whether the newest token ends the answer, by its id or with a string."""
        return self._says_nothing or (self.text is not None and self.text.ended)

    @property
    def is_watched(self) -> bool:
        """Whether the queries of its next step are wanted."""
        return self.watch is not None and self.watch.goes_on

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
        *,
        streamed: bool = False,
        reserve: bool = False,
    ) -> Ask:
        """How a prompt is to be answered; see `Stop.of` for what ends the answer."""
        whole("max_new_tokens", max_new_tokens, 1)
        check_healing(healing)
        refuse_beside_packed(self.prefiller.packed, "healing", healing)
        refuse_beside_drafts(self.decoder.drafts, "healing", healing)
        chosen: Any = Sampling() if sampling is None else sampling
        if not isinstance(chosen, Sampling):
            raise InvalidArgument(f"sampling: expected a Sampling or None, got {shown(chosen)}")
        ends = Stop.of(stop, self.prompts.tokenizer, self.prompts.vocabulary)
        wanted = self.lossy.policy_of(policy)
        most = int(max_new_tokens)
        return Ask(wanted, lookup, most, chosen, ends, healing, streamed, reserve)

    @needs_memory("sampling")
    def begin(self, done: Prefill, ask: Ask) -> Answer:
        """Chooses the first token of the answer to a prompt that was prefilled."""
        sequence = self.sequence(done, ask)
        if self.decoder.drafts:
            done.report.speculation = sequence.speculation
        watch = None if ask.healing is None else Watch(done, sequence, ask.healing)
        sequence.choose(done.logits[-1])
        kept = ask.streamed or ask.stop.texts
        text = SpokenText(self.prompts.decode, ask.stop.texts) if kept else None
        answer = Answer(done, sequence, watch, text)
        answer.hear()
        return answer

    def sequence(self, done: Prefill, ask: Ask) -> Decoding:
        """A prompt that was prefilled as decode steps take it; it has said nothing yet."""
        return Decoding(
            request=done.request,
            positions=done.positions,
            sampling=ask.sampling,
            limit=ask.max_new_tokens,
            device=self.prefiller.spec.device,
            stop=ask.stop.ids,
            timings=done.report.timings,
            packed=done.kv.packed,
            host=done.kv.host,
        )

    def go_on(self, answer: Answer, done: Prefill) -> None:
        """Chooses what an answer says next, now that its KV is there again."""
        sequence = answer.sequence
        sequence.request, sequence.positions = done.request, done.positions
        sequence.packed, sequence.host = done.kv.packed, done.kv.host
        if answer.watch is not None:
            answer.watch.go_on(done)
        sequence.choose(done.logits[-1])
        answer.hear()
        answer.done.report.resumed += 1

    def look(self, answer: Answer, queries: torch.Tensor) -> None:
        """Keeps the queries [L, H, D] of a watched answer's step, and heals it if they say so."""
        watch = answer.watch
        # The blocks of what is healed may be others then.
        if watch is not None and watch.keep(queries) and self.healer.look(watch):
            self.decoder.forget(watch.done.request)

    def finished(self, answer: Answer) -> Generation:
        """An answer that was decoded to its end."""
        text = self.prompts.decode(answer.spoken) if answer.text is None else str(answer.text)
        return Generation(text, answer.sequence.tokens, answer.done.report, answer.stopped)
