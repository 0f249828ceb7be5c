"""`PromptWork`: what an engine computes of prompts, chunk by chunk, until their answers begin."""

from __future__ import annotations

import numpy as np

from kvweave.runner.answers.answering import Answer, Answering
from kvweave.runner.decode.sampling import check_token
from kvweave.runner.engine.live_request import LiveRequest
from kvweave.runner.prefill.prefill_job import PrefillJob
from kvweave.runner.prefill.prefilled import live_prefill


class PromptWork:
    """Prefills prompts of live requests, in spans of at most `chunk_tokens` (0: at once)."""

    def __init__(self, answering: Answering, chunk_tokens: int) -> None:
        self._answering = answering
        self._chunk = chunk_tokens

    def advance(self, live: LiveRequest, to: int) -> None:
        """Computes the rows before a position; the first time the prompt is admitted.

        # Errors
        As `PrefillJob`.
        """
        if live.job is None:
            if live.policy is None:
                live.policy, live.off = self._answering.lossy.chosen(live.ask.policy)
            prompt = live.resumed_as
            live.job = PrefillJob(
                self._answering.prefiller,
                prompt,
                live.policy,
                live.ask.lookup,
                self._chunk,
                reserve_tokens=max(0, live.room - len(prompt.tokens)),
            )
        live.job.advance(min(to, live.job.tokens))

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
        live.settle_pending()
        if done.pending:
            prefiller.extend(done, np.zeros(0, np.int32))
        if live.answer is None:
            live.answer = answering.begin(done, live.ask)
        else:
            answering.go_on(live.answer, done)
        check_token(live.said[-1], prefiller.spec.vocabulary)
        return live.answer
