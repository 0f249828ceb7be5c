"""`Submissions`: how callers have an engine answer prompts, whether these are prefilled or not."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvweave.arguments import flag
from kvweave.policies import Policy
from kvweave.runner.answers.answering import Answering, Ask
from kvweave.runner.answers.stop import Stops
from kvweave.runner.decode.sampling import Sampling
from kvweave.runner.engine.engine_request import EngineRequest
from kvweave.runner.healing import Healing
from kvweave.runner.prefill.lookup import Lookup
from kvweave.runner.prefill.prefilled import Prefill, live_prefill
from kvweave.runner.prompt import Prompt, TokenizedPrompt


class Submissions(ABC):
    """What an engine is asked, for `enter` to take in."""

    _answering: Answering

    def submit(
        self,
        prompt: Prompt,
        policy: str | Policy | None = None,
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: Stops | None = None,
        namespace: str = "",
        discover: bool = False,
        remember: bool = True,
        publish: bool = True,
        healing: Healing | None = None,
        priority: int = 0,
        streamed: bool = False,
        reserve: bool = False,
        unread: int | None = None,
    ) -> EngineRequest:
        """A request that waits from now on; the arguments of `Runner.generate` mean the same.

        `priority`: more is sooner. `streamed`: text is wanted token by token. `reserve`: room for
        the whole answer is taken with that of the prompt, so that it never gives way for want of
        it. `publish`: what is computed of a text that is marked in another namespace is found there
        by later prompts; else in the prompt's own alone. `unread`: tokens that may wait for their
        reader; who falls further behind is cancelled (None: all of the answer may). From any
        thread.

        # Errors
        `InvalidArgument` as for `generate`; `PoolFull` for a prompt, with `reserve` also for an
        answer, that the empty arena could not hold. Nothing waits then.
        """
        late = healing is not None
        lookup = Lookup(namespace, discover, remember, late=late, publish=publish)
        ask = self._answering.ask(
            policy,
            lookup,
            max_new_tokens,
            sampling,
            stop,
            healing,
            streamed=flag("streamed", streamed),
            reserve=flag("reserve", reserve),
        )
        tokenized = self._answering.prompts.tokenize(prompt)
        return self.enter(tokenized, ask, priority=priority, unread=unread)

    def submit_prefilled(
        self,
        done: Prefill,
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: Stops | None = None,
        healing: Healing | None = None,
        priority: int = 0,
        streamed: bool = False,
        unread: int | None = None,
    ) -> EngineRequest:
        """Decodes on from a prompt that `Runner.prefill` of the same runner has prefilled.

        It stays the caller's, who leaves it alone until the request has ended, and releases it: it
        holds its blocks and what was said then, and `Runner.decode` or another request may follow.
        Where room is short it pauses, and gives nothing back. From any thread.

        # Errors
        `InvalidArgument` for a prompt that was released, or is being decoded from; the request
        fails with it for one to be healed that others may find, or that is released meanwhile.
        """
        live_prefill("submit", done)
        ask = self._answering.ask(
            "full", done.lookup, max_new_tokens, sampling, stop, healing, streamed=streamed
        )
        return self.enter(None, ask, done, priority=priority, unread=unread)

    @abstractmethod
    def enter(
        self,
        prompt: TokenizedPrompt | None,
        ask: Ask,
        done: Prefill | None = None,
        *,
        priority: int = 0,
        unread: int | None = None,
    ) -> EngineRequest:
        """Takes in what was tokenized, or prefilled, and asked before."""
