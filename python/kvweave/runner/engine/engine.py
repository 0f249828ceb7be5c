"""`Engine`: many requests on one runner; each step computes what the scheduler plans for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from kvweave.arguments import whole
from kvweave.errors import AlreadyStepping, InvalidArgument, PoolFull
from kvweave.runner.answers.answering import Answering, Ask
from kvweave.runner.decode.rounds import Run
from kvweave.runner.decode.sampling import Int64
from kvweave.runner.engine.checked_choice import CheckedChoice
from kvweave.runner.engine.decode_groups import DecodeGroup, DecodeGroups
from kvweave.runner.engine.engine_request import EngineRequest, Outcome
from kvweave.runner.engine.engine_room import EngineRoom
from kvweave.runner.engine.heard_run import say
from kvweave.runner.engine.live_request import LiveRequest
from kvweave.runner.engine.metrics import engine_text
from kvweave.runner.engine.prompt_work import PromptWork
from kvweave.runner.engine.submissions import Submissions
from kvweave.runner.prefill.parted_job import part_tokens
from kvweave.runner.prefill.prefilled import Prefill, live_prefill
from kvweave.runner.prompt import TokenizedPrompt
from kvweave.runner.tiers.expected import releasing_on_error
from kvweave.scheduler import StepPlan


class Engine(Submissions):
    """Answers requests that come and go, in steps: chunks of prompts beside one decode step.

    `submit`, `cancel` and the handles are for any thread. `step` is for one thread at a time; while
    it computes, no other thread computes with the same runner: `AlreadyStepping` there or here. A
    runner's own calls may come between two steps.

    A step prefills at most `token_budget` tokens less those that decode, `chunk_tokens` of a prompt
    at once; policies that measure are prefilled in one piece. At most `max_running` requests run;
    None is no limit, for each of them. `order` as for `kvweave.scheduler`, which says which
    requests a step computes.

    A request for which there is no room any more gives its blocks back and is computed again later,
    with what it has said: no token is said twice. What it says then is what it would have said, as
    far as arithmetic is the same: its KV may differ in the last bits; by a policy that approximates
    it is that of its prompt with what the cache has then; where RoPE's frequencies change with the
    length, those of the longer prompt are used.

    A request that raises ends alone; what goes wrong in a decode step and is nobody's own ends all
    that took part in it. A runner's canary looks at prompts once they are prefilled, in the same
    step. `clock` says nanoseconds that never go back. `alone`: all requests are of one caller, who
    waits for all, so that a step may wait for documents that are being read.
    """

    def __init__(
        self,
        answering: Answering,
        *,
        token_budget: int | None = 8192,
        chunk_tokens: int | None = 2048,
        max_running: int | None = 256,
        order: str = "arrival",
        clock: Callable[[], int] = time.monotonic_ns,
        alone: bool = False,
    ) -> None:
        self._answering = answering
        self._prefiller = answering.prefiller
        self._decoder = answering.decoder
        self._clock = clock
        own = None if chunk_tokens is None else whole("chunk_tokens", chunk_tokens, 1)
        # Whoever made the runner may have wanted shorter ones.
        chunk = min((c for c in (own, self._prefiller.chunk_tokens) if c), default=0)
        part = part_tokens(self._prefiller, chunk)
        self._prompts = PromptWork(answering, chunk, part, alone=alone)
        self._room = EngineRoom(
            self._prefiller,
            part,
            token_budget=token_budget,
            chunk_tokens=own,
            max_running=max_running,
            order=order,
            span_tokens=chunk or None,
        )
        self._scheduler = self._room.scheduler
        self._groups = DecodeGroups()
        # Tables that do not change are made here, and not by a thread that submits.
        self._prefiller.rotary.regime(1)
        self._in_step = False
        # Guards what follows it, and is short.
        self._lock = threading.Lock()
        self._live: dict[int, LiveRequest] = {}
        self._leaving: list[LiveRequest] = []
        self._kinds: dict[int, int] = {}
        self._submitted = 0
        # What the next plan is told of the last.
        self._answered: list[int] = []
        self._finished: list[int] = []

    def __repr__(self) -> str:
        return f"Engine(live={self.live})"

    # ---- from any thread ------------------------------------------------------------------

    def enter(
        self,
        prompt: TokenizedPrompt | None,
        ask: Ask,
        done: Prefill | None = None,
        *,
        priority: int = 0,
        unread: int | None = None,
    ) -> EngineRequest:
        """Like `submit`, for what was tokenized, or prefilled, and asked before."""
        whole("priority", priority, -(2**31), 2**31 - 1)
        if unread is not None:
            whole("unread", unread, 1)
        if done is not None:
            known = np.concatenate((done.request.tokens, np.asarray(done.pending, np.int32)))
            prompt = TokenizedPrompt(known.astype(np.int32), ())
        assert prompt is not None
        length = len(prompt.tokens)
        if done is None:
            self._prefiller.warn_of_length(length + ask.max_new_tokens - 1)
            regime = self._prefiller.rotary.regime(length)
        else:
            regime = done.positions.regime
        expected = None if done else self._prompts.expect(prompt, ask, priority)
        with releasing_on_error(expected), self._lock:
            if done is not None and any(live.done is done for live in self._live.values()):
                raise InvalidArgument("submit: expected a prompt that nobody decodes from")
            handle = EngineRequest(self._submitted, unread)
            live = LiveRequest(handle, prompt, ask, done is not None, expected, done=done)
            self._scheduler.arrive(
                self._submitted,
                length,
                self._clock(),
                **self._room.of_arrival(live, regime),
                priority=priority,
                namespace=ask.lookup.namespace,
                kind=self._kinds.setdefault(regime, len(self._kinds)),
                whole=ask.policy.measures,
            )
            self._live[self._submitted] = live
            self._submitted += 1
        return handle

    def cancel(self, request: EngineRequest) -> bool:
        """Ends a request in whatever state it is; whether it had not ended yet. From any thread.

        Its blocks are given back at once, or when whoever computes is done with its step; no token
        comes after this returns.

        # Errors
        `InvalidArgument` for what is no request of this engine.
        """
        number = getattr(request, "number", None)
        with self._lock:
            live = self._live.get(number) if isinstance(number, int) else None
        if not isinstance(request, EngineRequest) or (live and live.handle is not request):
            raise InvalidArgument("cancel: expected a request of this engine, got another")
        if live is None or not request.end("cancelled"):
            return False
        self._leave(live)
        self._prefiller.computing.soon(self._let_leaving_go)
        return True

    def _all_live(self) -> list[LiveRequest]:
        """Requests that have not ended; others may come and go while somebody looks at them."""
        with self._lock:
            return list(self._live.values())

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def state(self, request: EngineRequest) -> str:
        """Where a request stands: "waiting", "prefilling", "decoding", or how it has ended."""
        return request.outcome or self._scheduler.state(request.number) or "ending"

    def metrics(self) -> dict[str, int]:
        """The scheduler's counts: queue depths, waits, preemptions."""
        return self._scheduler.metrics()

    def metrics_text(self) -> str:
        """What the cache, the tiers and the scheduler count, in the text format of Prometheus."""
        cache, tiers = self._prefiller.cache.stats(), self._prefiller.tiers
        return engine_text(cache, self.metrics(), None if tiers is None else tiers.stats())

    # ---- one thread -----------------------------------------------------------------------

    def step(self) -> bool:
        """Carries out one plan; False if there was nothing to do.

        # Errors
        `AlreadyStepping` while a step goes on, or another thread computes with the same runner;
        nothing is done then.
        """
        with self._prefiller.computing:
            if self._in_step:
                raise AlreadyStepping("step: expected an engine between two steps, got one in one")
            self._in_step = True
            try:
                with self._lock:
                    plan = self._plan()
                with torch.inference_mode():
                    self._carry_out(plan)
            finally:
                self._in_step = False
                self._let_leaving_go()
        return not plan.is_idle

    def run(self) -> None:
        """Steps until every request has ended.

        # Errors
        As `step`; `PoolFull` when nothing can be done because others hold the arena.
        """
        while self._live:
            self.must_step()

    def must_step(self) -> None:
        """A step that has something to do, or is the last.

        # Errors
        As `run`.
        """
        # Room that a plan was short of may have been given back behind it: the next one knows.
        if not self.step() and self._live and not self.step() and self._live:
            raise PoolFull(f"engine: expected room for {self.live} requests, got none")

    def close(self, error: BaseException | None = None) -> None:
        """Cancels whatever has not ended, or has it fail. From any thread; safe to call twice."""
        for live in self._all_live():
            if live.handle.end("failed" if error else "cancelled", error):
                self._leave(live)
        self._prefiller.computing.soon(self._let_leaving_go)

    def _plan(self) -> StepPlan:
        answered, finished = self._answered, self._finished
        self._answered, self._finished = [], []
        self._room.tell_held()
        return self._scheduler.plan(self._clock(), answered=answered, finished=finished)

    def _tell_ends(self) -> None:
        """Tells the scheduler of those who have finished, where no plan may come that is told."""
        finished, self._finished = self._finished, []
        for number in finished:
            self._scheduler.finish(number)

    def _carry_out(self, plan: StepPlan) -> None:
        for number, why in plan.refused:
            if live := self._live.get(number):
                self._fail(live, PoolFull(why))
        for number, _ in plan.preempted.tolist():
            if live := self._live.get(number):
                self._give_way(live)
        for number, first, count, last in plan.prefill.tolist():
            if (live := self._live.get(number)) and not live.handle.ended:
                self._prefill(live, first + count, bool(last))
        found = self._groups.of(plan.decode, self._live)
        if [live for live in found.given if not self._is_there(live)]:
            found = self._groups.of(plan.decode, self._live)
        for group in found.groups:
            sits = self._decoder.sits_out(group.sequences)
            self._decode(self._groups.going_on(group, sits, self._scheduler.not_done))
        if not found.groups:
            # Choosing tokens waits for the device. Chunks alone do not, and plans that run ahead of
            # it would have whoever comes meanwhile wait for all of them.
            self._prefiller.clock.wait()
        self._prompts.end_step(waits=not found.groups)

    # ---- prompts --------------------------------------------------------------------------

    def _prefill(self, live: LiveRequest, to: int, last: bool) -> None:
        try:
            if not live.given:
                if not self._prompts.is_ready(live):
                    self._scheduler.not_done(live.handle.number)
                    return
                begins = live.job is None
                if begins:
                    self._let_go(live)
                self._prompts.advance(live, to, parted=begins and self._room.in_parts(live))
            if last:
                self._prompts.begin(live)
                self._said(live)
        except PoolFull as error:
            self._no_room_to_prefill(live, error)
        except Exception as error:
            self._fail(live, error)
        except BaseException as error:
            self._fail(live, error)
            raise

    # ---- decoding -------------------------------------------------------------------------

    def _decode(self, group: DecodeGroup) -> None:
        """One more token for each, or some in a round, in one step: all or none."""
        try:
            deliver = self._computed(group)
        except PoolFull as error:
            self._no_room_to_decode(group.lives, error)
            return
        except Exception as error:
            for live in group.lives:
                self._fail(live, error)
            return
        except BaseException as error:
            for live in group.lives:
                self._fail(live, error)
            raise
        deliver()

    def _computed(self, group: DecodeGroup) -> Callable[[], None]:
        """Computes a round of a group, or a step: what delivers it."""
        if runs := self._decoder.round(group.sequences):
            return partial(self._hear_runs, group, runs)
        choice = CheckedChoice(self._prefiller.spec.vocabulary)
        watched = any(live.answering.is_watched for _, live in group.heard)
        chosen = self._decoder.step(
            group.sequences,
            watched=watched,
            choose=choice,
            failed=choice.failed,
            sitting_out=group.sitting_out,
        )
        queries = self._decoder.queries if watched else None
        return partial(
            self._deliver, group, choice, chosen, None if queries is None else queries.clone()
        )

    def _deliver(
        self,
        group: DecodeGroup,
        choice: CheckedChoice,
        chosen: Int64,
        queries: torch.Tensor | None,
    ) -> None:
        for row, failure in choice.failed.items():
            self._fail(group.lives[row], failure)
        said, done = group.deliver(chosen)
        self._answered += said
        for live in done:
            self._finish(live)
        for row, live in group.heard:
            if row not in choice.failed:
                self._hear(live, None if queries is None else queries[:, row])

    def _is_there(self, live: LiveRequest) -> bool:
        """Ends a request whose prompt its caller has released: it would fail the step of all."""
        try:
            live_prefill("decode", live.done)
        except InvalidArgument as error:
            self._fail(live, error)
            return False
        return True

    def _hear(self, live: LiveRequest, queries: torch.Tensor | None) -> None:
        """What a request has said, where more is done with it than to deliver it."""
        answer = live.answering
        try:
            if answer.text is not None:
                answer.hear()
            if queries is not None and answer.is_watched:
                self._answering.look(answer, queries)
        except Exception as error:
            self._fail(live, error)
        else:
            self._said(live)

    def _hear_runs(self, group: DecodeGroup, runs: Sequence[Run]) -> None:
        """What each of a group has said in a round."""
        group.note(np.asarray([len(run.tokens) for run in runs], np.int64))
        for live, run in zip(group.lives, runs, strict=True):
            try:
                said = say(live, run)
            except Exception as error:
                self._fail(live, error)
                continue
            if live.handle.ended:
                continue
            if said:
                self._scheduler.produced(live.handle.number, said)
            if live.answering.sequence.done:
                self._finish(live)
            elif run.failure is not None:
                self._fail(live, run.failure)
            elif (behind := live.handle.behind) is not None:
                self._fail(live, behind, "cancelled")

    def _said(self, live: LiveRequest) -> None:
        """Delivers the newest token; the last one ends the request."""
        answer, handle = live.answering, live.handle
        text = None if answer.text is None else answer.text.newest
        if not handle.deliver(answer.sequence.tokens[-1], text):
            return
        self._answered.append(handle.number)
        if answer.sequence.done:
            self._finish(live)
        elif (behind := handle.behind) is not None:
            self._fail(live, behind, "cancelled")

    def _finish(self, live: LiveRequest) -> None:
        """Ends a request that has said all."""
        assert live.done is not None
        try:
            # What a conversation, which keeps its prompt, is remembered by it says itself.
            if not (live.given and live.done.lookup.late):
                live.done.commit()
            generation = self._answering.finished(live.answering)
        except Exception as error:
            self._fail(live, error)
            return
        self._part(live)
        self._finished.append(live.handle.number)
        with self._lock:
            # Who was cancelled at this moment has left already.
            self._live.pop(live.handle.number, None)
        live.handle.end("finished", generation)

    # ---- room -----------------------------------------------------------------------------

    def _give_way(self, live: LiveRequest) -> None:
        """Gives a request's blocks back; what it has KV of may be found again, if it may be."""
        if live.done is not None and not live.given and not live.done.request.released:
            live.done.commit()
        self._let_go(live)
        self._room.expect(live)

    def _no_room_to_prefill(self, live: LiveRequest, error: PoolFull) -> None:
        """A prompt found no room that was promised: it waits again, and holds nothing.

        Where nobody else of the engine computes anything there is nobody to wait for.
        """
        self._let_go(live)
        if not self._room.anybody_besides([live], self._all_live()):
            self._fail(live, error)
            return
        self._scheduler.not_done(live.handle.number, no_room=True)
        self._room.expect(live)

    def _no_room_to_decode(self, lives: Sequence[LiveRequest], error: PoolFull) -> None:
        """A step found no room for one of these: it is planned again, and room is made."""
        if self._decoder.spill([live.answering.sequence for live in lives]):
            for live in lives:
                self._scheduler.not_done(live.handle.number)
            return
        if len(lives) == 1 and not self._room.anybody_besides(lives, self._all_live()):
            self._fail(lives[0], error)
            return
        for place, live in enumerate(lives):
            lacks = error.request is None or place == error.request
            self._scheduler.not_done(live.handle.number, no_room=lacks)

    def _let_go(self, live: LiveRequest) -> None:
        """Gives back all that a request holds, but for a prompt that is its caller's."""
        self._prompts.let_go(live)
        if live.done is None:
            return
        self._decoder.forget(live.done.request)
        if live.given:
            live.settle_pending()
        else:
            live.done.release()
            live.done = None

    def _part(self, live: LiveRequest) -> None:
        """Gives all back for good; what is its caller's is no longer looked at."""
        self._groups.forget()
        self._let_go(live)
        live.done = None
        self._prompts.leave(live)

    # ---- ends -----------------------------------------------------------------------------

    def _fail(self, live: LiveRequest, error: BaseException, outcome: Outcome = "failed") -> None:
        """Ends a request by what it raised."""
        self._part(live)
        if live.handle.end(outcome, error):
            self._leave(live)

    def _leave(self, live: LiveRequest) -> None:
        self._scheduler.cancel(live.handle.number)
        self._groups.forget()
        with self._lock:
            self._live.pop(live.handle.number, None)
            self._leaving.append(live)

    def _let_leaving_go(self) -> None:
        """Gives back what cancelled requests hold. For whoever computes, between two steps."""
        with self._lock:
            leaving, self._leaving = self._leaving, []
        for live in leaving:
            self._part(live)
        if not self._live:
            self._tell_ends()
