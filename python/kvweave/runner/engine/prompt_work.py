"""`PromptWork`: what an engine computes of prompts, chunk by chunk, until their answers begin."""

from __future__ import annotations

import numpy as np

from kvweave.policies import Policy
from kvweave.runner.answers.answering import Answer, Answering, Ask
from kvweave.runner.decode.sampling import check_token
from kvweave.runner.engine.live_request import LiveRequest
from kvweave.runner.prefill.parted_job import PartedJob
from kvweave.runner.prefill.prefill_job import PrefillJob
from kvweave.runner.prefill.prefilled import live_prefill
from kvweave.runner.prompt import TokenizedPrompt
from kvweave.runner.tiers.expected import Expected
from kvweave.runner.tiers.loads import NEEDED, PREFETCHED

_MOMENT_S = 0.01
"""How soon a step is planned again for prompts that wait for documents alone."""


class PromptWork:
    """Prefills prompts of live requests, in spans of at most `chunk_tokens` (0: at once).

    `part_tokens`: spans of those whose pages go to the host's memory behind each. `alone`: they are
    of one caller, who waits for all: documents may be read while their prompt is computed, which
    waits for them layer by layer.
    """

    def __init__(
        self, answering: Answering, chunk_tokens: int, part_tokens: int, *, alone: bool = False
    ) -> None:
        self._answering = answering
        self._chunk = chunk_tokens
        self._part = part_tokens
        self._alone = alone
        # Documents that a prompt of the step waits for, and whether it computed anything.
        self._awaited: Expected | None = None
        self._computed = False

    def expect(self, prompt: TokenizedPrompt, ask: Ask, priority: int) -> Expected | None:
        """Has the documents read of a prompt that is to wait. From any thread."""
        prefiller = self._answering.prefiller
        return prefiller.expect(prompt, ask.policy, ask.lookup, PREFETCHED, priority)

    def is_ready(self, live: LiveRequest) -> bool:
        """Whether the documents of a prompt are there that it waits for, if any."""
        if live.job is not None or live.given:
            return True
        if live.expected is None:
            how = live.ask.policy, live.ask.lookup, NEEDED, 0
            live.expected = self._answering.prefiller.expect(live.prompt, *how)
        if live.expected is None:
            return True
        if live.expected.is_begun if self._alone else live.expected.is_ready:
            return True
        self._awaited = live.expected
        return False

    def _take_bounds(self, live: LiveRequest) -> None:
        """Takes room for the bounds of all that a request will have said, before it has any KV."""
        if live.bounds is None:
            tokens = len(live.prompt.tokens) + live.ask.max_new_tokens
            live.bounds = self._answering.decoder.promise(tokens)

    def let_go(self, live: LiveRequest) -> None:
        """Gives back what a prompt holds that is being computed, and the room for its bounds."""
        if live.job is not None:
            live.job.release()
            live.job = None
        if live.bounds is not None:
            live.bounds.release()
            live.bounds = None

    def leave(self, live: LiveRequest) -> None:
        """Gives back what was read for a prompt that will not be begun; safe to call twice."""
        if live.expected is not None:
            live.expected.release()

    def end_step(self, *, waits: bool) -> None:
        """Notes that a step has ended.

        `waits`: nobody decoded in it. Where its prompts all waited for documents, it waits too, a
        moment.
        """
        tiers = self._answering.prefiller.tiers
        if tiers is not None:
            tiers.end_step()
        awaited, computed = self._awaited, self._computed
        self._awaited, self._computed = None, False
        if waits and awaited is not None and not computed:
            awaited.wait(_MOMENT_S)

    def advance(self, live: LiveRequest, to: int, *, parted: bool = False) -> None:
        """Computes the rows before a position; the first time the prompt is admitted.

        `parted`: in parts, then.

        # Errors
        As `PrefillJob`, and `Decoder.promise`.
        """
        self._computed = True
        if live.job is None:
            if live.policy is None:
                live.policy, live.off = self._answering.lossy.chosen(live.ask.policy)
            self._take_bounds(live)
            live.job = self._job(live, live.policy, parted=parted)
            live.expected = None
        live.job.advance(min(to, live.job.tokens))

    def _job(self, live: LiveRequest, policy: Policy, *, parted: bool) -> PrefillJob:
        prefiller, prompt = self._answering.prefiller, live.resumed_as
        if parted:
            return PartedJob(prefiller, prompt, policy, live.ask.lookup, self._part)
        return PrefillJob(
            prefiller,
            prompt,
            policy,
            live.ask.lookup,
            self._chunk,
            reserve_tokens=max(0, live.room - len(prompt.tokens)),
            expected=live.expected,
            # What lies in the host's memory is copied while the first chunk is computed. What
            # a store gives has been read by now, or its caller waits for it alone.
            at_once=True,
        )

    def begin(self, live: LiveRequest) -> Answer:
        """Chooses the token behind a prompt that is done, and behind what was said before.

        # Errors
        `InvalidArgument` for a token that is none, or a prompt that its caller has released;
        `PoolFull` where what was said before finds no room; what a canary or a sampling raises.
        """
        answering, prefiller = self._answering, self._answering.prefiller
        if live.job is not None:
            live.done, live.job = live.job.finish(), None
            if live.answer is None:
                answering.lossy.look_after(
                    live.prompt, live.ask.policy, live.ask.lookup, live.done, live.off
                )
        done = live_prefill("decode", live.done)
        self._take_bounds(live)
        live.settle_pending()
        if done.pending:
            prefiller.extend(done, np.zeros(0, np.int32))
        if live.answer is None:
            live.answer = answering.begin(done, live.ask)
        else:
            answering.go_on(live.answer, done)
        check_token(live.said[-1], prefiller.spec.vocabulary)
        return live.answer
