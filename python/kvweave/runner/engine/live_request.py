"""`LiveRequest`: a request of an engine that has not ended, what it holds and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvweave.policies import Policy, is_exact
from kvweave.runner.answers.answering import Answer, Ask
from kvweave.runner.decode.promised_bounds import BoundsPromise
from kvweave.runner.engine.engine_request import EngineRequest
from kvweave.runner.kv.tables import Int32
from kvweave.runner.prefill.prefill_job import PrefillJob
from kvweave.runner.prefill.prefilled import Prefill
from kvweave.runner.prompt import TokenizedPrompt
from kvweave.runner.tiers.expected import Expected


@dataclass(eq=False)
class LiveRequest:
    """What an engine knows of a request.

    `job` while it is prefilled, `done` while it decodes; neither while it waits, but that `given`
    says of a prompt that its caller has prefilled, and keeps: `done` is there all the time then.
    `answer` from its first token on, also while it waits for room to go on. `policy` once it has
    begun: what was asked for, or full, and `off` says why. `expected`: the documents that its
    prompt waits for, until it is begun. `bounds`: room for those of its pages, from then on.
    """

    handle: EngineRequest
    prompt: TokenizedPrompt
    ask: Ask
    given: bool = False
    expected: Expected | None = None
    job: PrefillJob | None = None
    done: Prefill | None = None
    answer: Answer | None = None
    policy: Policy | None = None
    off: str = ""
    bounds: BoundsPromise | None = None

    @property
    def answering(self) -> Answer:
        """The answer of a request that has begun to decode."""
        assert self.answer is not None
        return self.answer

    @property
    def is_plain(self) -> bool:
        """Whether a token of its answer is delivered, and that is all."""
        answer = self.answering
        return answer.text is None and answer.watch is None and self.handle.most_unread is None

    @property
    def said(self) -> list[int]:
        """Its tokens so far."""
        return [] if self.answer is None else self.answer.sequence.tokens

    @property
    def known(self) -> Int32:
        """The tokens of its prompt and its answer so far."""
        if not self.said:
            return self.prompt.tokens
        return np.concatenate((self.prompt.tokens, np.asarray(self.said, np.int32)))

    @property
    def resumed_as(self) -> TokenizedPrompt:
        """The prompt to prefill: what was said stands behind it where that changes nothing else."""
        if not self.said or not is_exact(self.policy or self.ask.policy):
            return self.prompt
        return replace(self.prompt, tokens=self.known)

    @property
    def room(self) -> int:
        """Tokens that room is kept for from the start; 0 where it is taken as they come."""
        return len(self.prompt.tokens) + self.ask.max_new_tokens - 1 if self.ask.reserve else 0

    def settle_pending(self) -> None:
        """Tells the prefilled prompt which of the known tokens have no KV yet."""
        if self.done is not None and not self.done.request.released:
            self.done.pending = self.known[self.done.request.length :].tolist()
