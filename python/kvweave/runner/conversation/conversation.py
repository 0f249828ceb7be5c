"""`Conversation`: questions in a row over one live request."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import numpy as np

from kvweave.closing import Closing
from kvweave.errors import InvalidArgument, PoolFull
from kvweave.policies import Policy
from kvweave.runner.answers.answering import Answering, Ask
from kvweave.runner.answers.stop import Stops
from kvweave.runner.conversation.turns import follow
from kvweave.runner.decode.sampling import Sampling
from kvweave.runner.engine.calls import Calls
from kvweave.runner.healing import Healing
from kvweave.runner.prefill.lookup import Lookup, Room
from kvweave.runner.prefill.prefilled import Prefill
from kvweave.runner.prompt import Prompt, TokenizedPrompt
from kvweave.runner.report import Generation, Report


class Conversation(Closing):
    """Turns over one live request, made by `Runner.conversation`; a context manager.

    Every turn is computed by the policy over the whole conversation: its new text is fresh, new
    segments are reused, and what earlier turns computed is settled, fresh text and recomputed
    tokens alike. So a policy that measures looks with the new question, and recomputes only tokens
    that no turn did. Shared segments are never changed, and conversations over the same documents
    do not see each other's KV.

    Each turn that takes approximate KV is a request of the runner's canary, if it has one. Once
    that has switched the policy off, the next turn computes the conversation anew by full.

    A turn that fails, for want of room or otherwise, leaves the conversation as it was before.
    While one is computed the conversation's blocks are held twice as far as they are written: a
    turn with fresh text alone copies what it writes, one with segments copies all.
    """

    def __init__(
        self,
        answering: Answering,
        policy: Policy,
        lookup: Lookup,
        healing: Healing | None,
        watched: bool = True,
    ) -> None:
        self._answering = answering
        self._policy = policy
        self._lookup = lookup
        self._healing = healing
        self._watched = watched
        self._live: Prefill | None = None
        self._marks: tuple[tuple[int, int, str], ...] = ()
        self._closed = False
        self.reports: list[Report] = []

    @property
    def tokens(self) -> int:
        """Tokens so far, with those of the answers."""
        live = self._live
        return 0 if live is None else live.request.length + len(live.pending)

    @property
    def missed(self) -> dict[str, int]:
        """Tokens of all turns whose KV was not reused, by the reason: see `Report.missed`."""
        counts: Counter[str] = Counter()
        for report in self.reports:
            counts.update(report.missed)
        return dict(counts.most_common())

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"tokens={self.tokens}"
        return f"Conversation({self._policy.name}, turns={len(self.reports)}, {state})"

    def ask(
        self,
        parts: Prompt,
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: Stops | None = None,
    ) -> Generation:
        """Appends a turn and answers it: parts as for `Runner.generate`.

        What a turn says goes on where the last answer ended, the token left out by which it did:
        its stop token, or the last one of a stop string. See `chat_turn_parts` for the text that a
        chat template puts between. The report tells of this turn alone; `reports` has all of them.

        # Errors
        `InvalidArgument` for an empty turn, a closed conversation, or RoPE frequencies that change
        with the length; `Unsupported` after a turn in which the policy made local heads full, and
        for documents behind the first turn beside packed pages;
        `PoolFull` when the turn or its answer does not fit. The conversation is as before then.
        """
        named = (self._policy, self._lookup, max_new_tokens, sampling, stop, self._healing)
        ask = self._answering.ask(*named)
        with self._answering.prefiller.computing:
            done, marks = self._computed(parts, None, max_new_tokens - 1)
            try:
                generation = self._answered(done, ask)
            except BaseException:
                done.release()
                raise
            self._go_on(done, marks)
        return generation

    def prefill(
        self, parts: Prompt, *, logits_from: int | None = None, reserve_tokens: int = 0
    ) -> Prefill:
        """Appends a turn without answering it; what is said to it begins the next one's parts.

        The prompt that is returned is the conversation's own, with the logits of its positions from
        `logits_from` on (default: the last alone): decode from a fork of it.

        # Errors
        As for `ask`.
        """
        with self._answering.prefiller.computing:
            done, marks = self._computed(parts, logits_from, reserve_tokens)
            self._go_on(done, marks)
        return done

    def close(self) -> None:
        """Lets later prompts find the conversation where they may, and gives its blocks back.

        What lies in host memory is found by nobody, unless the device has room for it. Safe to call
        twice.
        """
        live, self._live, self._closed = self._live, None, True
        if live is not None:
            try:
                with suppress(PoolFull):
                    live.bring_back()
                live.commit()
            finally:
                live.release()

    def _computed(
        self, parts: Prompt, logits_from: int | None, reserve_tokens: int
    ) -> tuple[Prefill, tuple[tuple[int, int, str], ...]]:
        """The conversation with a turn more, and its marks; what was before is still there."""
        if self._closed:
            raise InvalidArgument("conversation: expected an open one, got one that was closed")
        prompts, policy, lookup = self._answering.prompts, self._policy, self._lookup
        lossy, prefiller = self._answering.lossy, self._answering.prefiller
        room = Room(logits_from=logits_from, reserve_tokens=reserve_tokens)
        live = self._live
        new = prompts.tokenize(parts, begins=live is None)
        if live is None:
            first = lossy if self._watched else prefiller
            return first.prefill(new, policy, lookup, **room), new.segments
        said = np.asarray(live.pending, np.int32)
        tokens = np.concatenate((live.request.tokens, said, new.tokens)).astype(np.int32)
        moved = len(tokens) - len(new.tokens)
        marks = (*self._marks, *((a + moved, b + moved, name) for a, b, name in new.segments))
        whole = TokenizedPrompt(tokens, marks)
        if self._watched:
            return lossy.follow(live, whole, policy, lookup, **room), marks
        return follow(prefiller, live, whole, policy, lookup, **room), marks

    def _answered(self, done: Prefill, ask: Ask) -> Generation:
        generation = Calls(self._answering).answer(done, ask)
        # The last token has no KV yet; one that ended the answer is none of the conversation's.
        if generation.stopped:
            done.pending = []
        return generation

    def _go_on(self, done: Prefill, marks: tuple[tuple[int, int, str], ...]) -> None:
        """From now on the conversation is what a turn made of it."""
        before, self._live, self._marks = self._live, done, marks
        self.reports.append(done.report)
        if before is not None:
            before.release()
