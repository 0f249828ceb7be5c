"""`Engine`: many requests on one runner; each step computes what the scheduler plans for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvweave.arguments import flag, whole
from kvweave.errors import AlreadyStepping, InvalidArgument, KvweaveError, PoolFull, Unsupported
from kvweave.policies import Policy, is_exact
from kvweave.runner.answers.answering import Answer, Answering, Ask
from kvweave.runner.answers.stop import Stops
from kvweave.runner.decode.decoding import Decoding, by_regime
from kvweave.runner.decode.sampling import Sampling
from kvweave.runner.engine_request import EngineRequest
from kvweave.runner.prefill.prefill import Lookup, Prefill
from kvweave.runner.prefill.prefill_job import PrefillJob
from kvweave.runner.prompt import Prompt, TokenizedPrompt
from kvweave.scheduler import Scheduler, StepPlan


@dataclass(eq=False)
class _Live:
    """A request that has not ended: what it holds and how far its answer is.

    `job` while it is prefilled, `done` while it decodes; neither while it waits. `answer` from its
    first token on, also while it waits for room to go on.
    """

    handle: EngineRequest
    prompt: TokenizedPrompt
    ask: Ask
    job: PrefillJob | None = None
    done: Prefill | None = None
    answer: Answer | None = None

    @property
    def said(self) -> list[int]:
        return [] if self.answer is None else self.answer.sequence.tokens

    @property
    def holds(self) -> bool:
        return self.job is not None or self.done is not None

    @property
    def resumed_as(self) -> TokenizedPrompt:
        """The prompt to prefill: what was said stands behind it where that changes nothing else."""
        if not self.said or not is_exact(self.ask.policy):
            return self.prompt
        tokens = np.concatenate((self.prompt.tokens, np.asarray(self.said, np.int32)))
        return replace(self.prompt, tokens=tokens)


class Engine:
    """Answers requests that come and go, in steps: chunks of prompts beside one decode step.

    `submit`, `cancel` and the handles are for any thread. `step` is for one thread at a time, and
    for no other that uses the same runner meanwhile: a runner's own calls may come between steps.
    A step prefills at most `token_budget` tokens less those that decode, `chunk_tokens` of a prompt
    at once; policies that measure are prefilled in one piece. At most `max_running` requests run;
    `order` as for `kvweave.scheduler`, which says which requests a step computes.

    A request for which there is no room any more gives its blocks back and is computed again later,
    with what it has said: no token is said twice. What it says then is what it would have said, as
    far as arithmetic is the same: its KV may differ in the last bits; by a policy that approximates
    it is that of its prompt with what the cache has then; where RoPE's frequencies change with the
    length, those of the longer prompt are used.

    A request that raises ends alone; what goes wrong in a decode step and is nobody's own ends all
    that took part in it. `clock` says nanoseconds that never go back.

    # Errors
    `Unsupported` for a runner with a canary, which looks at prompts one by one.
    """

    def __init__(
        self,
        answering: Answering,
        *,
        token_budget: int = 8192,
        chunk_tokens: int = 2048,
        max_running: int = 256,
        order: str = "arrival",
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if answering.lossy.canary is not None:
            raise Unsupported("engine: expected a runner without a canary, got one with it")
        self._answering = answering
        self._prefiller = answering.prefiller
        self._decoder = answering.decoder
        self._clock = clock
        self._chunk_tokens = whole("chunk_tokens", chunk_tokens, 1)
        self._scheduler = Scheduler(
            self._prefiller.cache,
            token_budget=token_budget,
            chunk_tokens=chunk_tokens,
            max_running=max_running,
            order=order,
        )
        # Held by whoever steps or releases; the other lock guards what follows it, and is short.
        self._stepping = threading.Lock()
        self._lock = threading.Lock()
        self._live: dict[int, _Live] = {}
        self._leaving: list[_Live] = []
        self._kinds: dict[int, int] = {}
        self._submitted = 0
        # What the next plan is told of the last.
        self._answered: list[int] = []
        self._finished: list[int] = []

    # ---- from any thread ------------------------------------------------------------------

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
        priority: int = 0,
        streamed: bool = False,
    ) -> EngineRequest:
        """A request that waits from now on; the arguments of `Runner.generate` mean the same.

        `priority`: more is sooner. `streamed`: text is wanted token by token. From any thread.

        # Errors
        `InvalidArgument` as for `generate`; `PoolFull` for a prompt that the empty arena could not
        hold. Nothing waits then.
        """
        lookup = Lookup(namespace, discover, remember)
        ask = self._answering.ask(
            policy, lookup, max_new_tokens, sampling, stop, streamed=flag("streamed", streamed)
        )
        tokenized = self._answering.prompts.tokenize(prompt)
        length = len(tokenized.tokens)
        self._prefiller.warn_of_length(length + ask.max_new_tokens)
        regime = self._prefiller.rotary.table(length).regime
        whole("priority", priority, -(2**31), 2**31 - 1)
        with self._lock:
            live = _Live(EngineRequest(self._submitted), tokenized, ask)
            self._scheduler.arrive(
                self._submitted,
                length,
                self._clock(),
                cached=self._cached(live, regime),
                priority=priority,
                namespace=namespace,
                kind=self._kinds.setdefault(regime, len(self._kinds)),
                whole=ask.policy.measures,
            )
            self._live[self._submitted] = live
            self._submitted += 1
        return live.handle

    def cancel(self, request: EngineRequest) -> bool:
        """Ends a request in whatever state it is; whether it had not ended yet. From any thread.

        Its blocks are given back at once, or at the end of the step that is going on; no token
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
        self._release_leaving()
        return True

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

    # ---- one thread -----------------------------------------------------------------------

    def step(self) -> bool:
        """Carries out one plan; False if there was nothing to do.

        # Errors
        `AlreadyStepping` while a step goes on, in this thread or another; nothing is done then.
        """
        if not self._stepping.acquire(blocking=False):
            raise AlreadyStepping("step: expected an engine between two steps, got one in a step")
        try:
            with self._lock:
                plan = self._plan()
            with torch.inference_mode():
                self._carry_out(plan)
            return not plan.is_idle
        finally:
            self._stepping.release()
            self._release_leaving()

    def run(self) -> None:
        """Steps until every request has ended.

        # Errors
        As `step`; `PoolFull` when nothing can be done because others hold the arena.
        """
        while self._live:
            if not self.step() and self._live:
                raise PoolFull(f"engine: expected room for {self.live} requests, got none")

    def close(self) -> None:
        """Cancels whatever has not ended. From any thread; safe to call twice."""
        with self._lock:
            left = [live.handle for live in self._live.values()]
        for handle in left:
            self.cancel(handle)

    def _plan(self) -> StepPlan:
        answered, finished = self._answered, self._finished
        self._answered, self._finished = [], []
        return self._scheduler.plan(self._clock(), answered=answered, finished=finished)

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
        going = [self._live[n] for n in plan.decode.tolist() if n in self._live]
        self._decode([live for live in going if not live.handle.ended])

    # ---- prompts --------------------------------------------------------------------------

    def _prefill(self, live: _Live, to: int, last: bool) -> None:
        try:
            if live.job is None:
                self._let_go(live)
                live.job = PrefillJob(
                    self._prefiller,
                    live.resumed_as,
                    live.ask.policy,
                    live.ask.lookup,
                    self._chunk_tokens,
                )
            live.job.advance(min(to, live.job.tokens))
            if last:
                self._begin(live, live.job)
        except PoolFull as error:
            self._no_room([live], error, 0)
        except Exception as error:
            self._fail(live, error)
        except BaseException as error:
            self._fail(live, error)
            raise

    def _begin(self, live: _Live, job: PrefillJob) -> None:
        """Chooses the token behind a prompt that is done, and behind what was said before."""
        live.done, live.job = job.finish(), None
        said = len(live.prompt.tokens) + len(live.said) - live.done.request.length
        if said:
            self._prefiller.extend(live.done, np.asarray(live.said[-said:], np.int32))
        if live.answer is None:
            live.answer = self._answering.begin(live.done, live.ask)
        else:
            sequence = live.answer.sequence
            sequence.request, sequence.positions = live.done.request, live.done.positions
            sequence.choose(live.done.logits[-1])
            live.answer.hear()
        self._check_token(live.said[-1])
        self._said(live, live.answer)

    # ---- decoding -------------------------------------------------------------------------

    def _decode(self, going: Sequence[_Live]) -> None:
        """One more token for each, in one step for those that can share it: all or none."""
        answering = {live.answer.sequence: live for live in going if live.answer is not None}
        for group in by_regime(list(answering)):
            lives = [answering[sequence] for sequence in group]
            choice = _Choice(self._check_token)
            try:
                self._decoder.step(group, choose=choice)
            except PoolFull as error:
                self._no_room(lives, error, error.request)
                continue
            except Exception as error:
                for live in lives:
                    self._fail(live, error)
                continue
            except BaseException as error:
                for live in lives:
                    self._fail(live, error)
                raise
            for sequence, live in zip(group, lives, strict=True):
                self._hear(live, choice.failed.get(sequence))

    def _hear(self, live: _Live, failure: Exception | None) -> None:
        answer = live.answer
        assert answer is not None
        try:
            if failure is not None:
                raise failure
            answer.hear()
            self._said(live, answer)
        except Exception as error:
            self._fail(live, error)

    def _check_token(self, token: int) -> None:
        """Raises InvalidArgument for a token that is none: it would fail the step of all."""
        most = self._prefiller.spec.vocabulary
        if not 0 <= token < most:
            raise InvalidArgument(f"sampling: expected a token below {most}, got {token}")

    def _said(self, live: _Live, answer: Answer) -> None:
        """Delivers the newest token; the last one ends the request."""
        assert live.done is not None
        number = live.handle.number
        if not live.handle.deliver(answer.streamed):
            return
        with self._lock:
            self._answered.append(number)
        if not answer.sequence.done:
            return
        live.done.commit()
        generation = self._answering.finished(answer)
        self._let_go(live)
        with self._lock:
            self._finished.append(number)
            del self._live[number]
        live.handle.end("finished", generation)

    # ---- room -----------------------------------------------------------------------------

    def _cached(self, live: _Live, regime: int) -> int:
        """How many tokens of what is to be prefilled the cache has now, as a beginning."""
        if live.ask.policy.reuse == "none":
            return 0
        tokens = live.resumed_as.tokens
        found = self._prefiller.cache.match_prefix(tokens, live.ask.lookup.namespace, regime=regime)
        return min(found, len(tokens) - 1)

    def _give_way(self, live: _Live) -> None:
        """Gives a request's blocks back; what it has KV of may be found again, if it may be."""
        if live.done is not None:
            live.done.commit()
        self._let_go(live)
        regime = self._prefiller.rotary.table(len(live.resumed_as.tokens)).regime
        cached = self._cached(live, regime)
        self._scheduler.expect(live.handle.number, cached=cached)

    def _no_room(self, lives: Sequence[_Live], error: PoolFull, who: int | None) -> None:
        """The step of these found no room for one of them: it is planned again.

        Where nobody else of the engine holds anything there is nobody to wait for.
        """
        others = [live for live in self._live.values() if live.holds and live not in lives]
        if not others and len(lives) == 1:
            self._fail(lives[0], error)
            return
        for place, live in enumerate(lives):
            lacks = who is None or place == who
            if live.job is not None:
                self._let_go(live)
            self._scheduler.not_done(live.handle.number, no_room=lacks)

    def _let_go(self, live: _Live) -> None:
        """Gives back all that a request holds."""
        if live.job is not None:
            live.job.release()
        if live.done is not None:
            self._decoder.forget(live.done.request)
            live.done.release()
        live.job = live.done = None

    # ---- ends -----------------------------------------------------------------------------

    def _fail(self, live: _Live, error: BaseException) -> None:
        """Ends a request by what it raised."""
        self._let_go(live)
        if live.handle.end("failed", error):
            self._leave(live)

    def _leave(self, live: _Live) -> None:
        self._scheduler.cancel(live.handle.number)
        with self._lock:
            self._live.pop(live.handle.number, None)
            self._leaving.append(live)

    def _release_leaving(self) -> None:
        """Gives back what cancelled requests hold, unless a step goes on: its end does so then."""
        while self._leaving and self._stepping.acquire(blocking=False):
            try:
                with self._lock:
                    leaving, self._leaving = self._leaving, []
                for live in leaving:
                    self._let_go(live)
            finally:
                self._stepping.release()


class _Choice:
    """Chooses the tokens of a step; whose choice raises is in `failed`, and says nothing."""

    def __init__(self, check: Callable[[int], None]) -> None:
        self._check = check
        self.failed: dict[Decoding, Exception] = {}

    def __call__(self, batch: Sequence[Decoding], logits: torch.Tensor, greedy: bool) -> list[int]:
        picked = logits.argmax(-1) if greedy else self._picked(batch, logits)
        chosen: list[int] = picked.tolist()
        for sequence, token in zip(batch, chosen, strict=True):
            if sequence in self.failed:
                continue
            try:
                self._check(token)
            except KvweaveError as error:
                self.failed[sequence] = error
                continue
            sequence.tokens.append(token)
        return chosen

    def _picked(self, batch: Sequence[Decoding], logits: torch.Tensor) -> torch.Tensor:
        """The choice of each row, i64 [B]; −1 where it raised."""
        nothing = torch.full((), -1, dtype=torch.int64, device=logits.device)
        picked = []
        for sequence, row in zip(batch, logits, strict=True):
            try:
                token = sequence.sampling.pick(row, sequence.generator)
                picked.append(torch.as_tensor(token, device=logits.device).to(torch.int64).view(()))
            except Exception as error:
                self.failed[sequence] = error
                picked.append(nothing)
        return torch.stack(picked)
