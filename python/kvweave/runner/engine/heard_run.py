"""What a request of an engine says in a round, token by token."""

from __future__ import annotations

from kvweave.runner.decode.rounds import Run
from kvweave.runner.engine.live_request import LiveRequest


def say(live: LiveRequest, run: Run) -> int:
    """Delivers the tokens of a run up to the end of the answer: how many were said.

    What stands behind that end, which a string may be, is taken back, and so is what comes too late
    for a request that was cancelled.
    """
    answer, request = live.answering, live.answering.sequence.request
    said = 0
    try:
        for token in run.tokens:
            answer.sequence.tokens.append(token)
            said += 1
            answer.hear()
            text = None if answer.text is None else answer.text.newest
            if not live.handle.deliver(token, text) or answer.sequence.done:
                break
    finally:
        request.truncate(request.length - (len(run.tokens) - said))
    return said
