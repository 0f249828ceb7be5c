"""One sample under several policies, against full prefill of the same prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal

import torch

from kvweave.lab.eval.answers import Ask, NextTurn, forced_logits, greedy_tokens
from kvweave.lab.eval.encoded import Encoded
from kvweave.lab.eval.statistics import negative_log_likelihood
from kvweave.policies import Naive, Policy, policy_of
from kvweave.policies.policy_text import title_of
from kvweave.runner import Conversation, Prefill, Report, Runner
from kvweave.runner.lossy.divergence import kl_per_token

Role = Literal["full", "policy", "floor", "control"]
FLOOR = "chunked (floor)"
CONTROL = Naive(delta_rope=False)
MAX_NEW_TOKENS = 32
TURN_MARK = "\n---\n"
"""Stands between the answers of a sample's turns."""


@dataclass(frozen=True)
class Measurement:
    """What one policy did with one sample.

    `kl`: nats to full at each scored token, full's own greedy answer (or the real text) being
    forced. `top1`: the share of these where the most likely token is full's. `first_token`: the
    same for the first token to be generated, and `top10` the share of full's ten most likely that
    are among the policy's ten there. `score`: see the task's `score_name`. `flops`: of the whole
    prefill. `restored`: local heads made full. `kv_bytes`, `shared_kv_bytes`, `mode` and
    `mode_reason`: as in the runner's report. `same_answer`: whether every token of the answer is
    full's (of a text, every most likely token). `agreed`: how many leading tokens of what is
    generated are full's, of `compared`, which go on where full's answer ended. `encoding_flops`:
    of encoding the sample's segments alone, once. `peak_bytes`: the most that torch had allocated
    during the prefill; None off a GPU. `turns`: prompts that it is of; see `of_turns`.
    `settled_before`: tokens whose KV earlier turns of the same conversation left.
    """

    sample: int
    policy: str
    role: Role
    tokens: int
    reused_prefix: int
    reused_segment: int
    recomputed: int
    row_share: float
    ttft_s: float
    flops: int
    restored: int
    kv_bytes: int
    shared_kv_bytes: int
    score: float
    kl: tuple[float, ...]
    top1: float
    first_token: bool
    top10: float
    answer: str
    mode: str
    mode_reason: str
    same_answer: bool
    agreed: int
    compared: int
    encoding_flops: int
    peak_bytes: int | None
    turns: int = 1
    settled_before: int = 0

    @property
    def reused(self) -> int:
        """Tokens reused, by prefix or by segment."""
        return self.reused_prefix + self.reused_segment


def of_turns(turns: Sequence[Measurement]) -> Measurement:
    """One measurement of a sample from those of its turns, by one policy.

    Counts, times, FLOPs and tokens are sums, so that ratios to full's are those of the whole chat;
    scores and shares are means; `kl` has the tokens of all answers, and the bytes of KV and of the
    peak are the largest. An answer is the same when all are. Segments are encoded once, so the last
    turn's, which knows the most of them, count.
    """
    first, last = turns[0], turns[-1]
    if first is last:
        return first
    cached = ("reused_prefix", "reused_segment", "recomputed", "settled_before")
    summed = ("tokens", *cached, "ttft_s", "flops", "restored", "agreed", "compared")
    averaged = ("score", "top1", "top10")
    largest = ("kv_bytes", "shared_kv_bytes")
    tokens = sum(turn.tokens for turn in turns)
    peaks = [turn.peak_bytes for turn in turns if turn.peak_bytes is not None]
    numbers: dict[str, Any] = {name: sum(getattr(t, name) for t in turns) for name in summed}
    numbers |= {name: sum(getattr(t, name) for t in turns) / len(turns) for name in averaged}
    numbers |= {name: max(getattr(t, name) for t in turns) for name in largest}
    return replace(
        first,
        **numbers,
        row_share=sum(turn.row_share * turn.tokens for turn in turns) / tokens,
        kl=tuple(k for turn in turns for k in turn.kl),
        first_token=all(turn.first_token for turn in turns),
        answer=TURN_MARK.join(turn.answer for turn in turns),
        same_answer=all(turn.same_answer for turn in turns),
        encoding_flops=last.encoding_flops,
        peak_bytes=max(peaks, default=None),
        turns=len(turns),
    )


@dataclass(frozen=True)
class _Reference:
    """What full generates: at least its answer, which is the first `answer` tokens."""

    tokens: tuple[int, ...] = ()
    answer: int = 0


@dataclass(frozen=True)
class _Outcome:
    """Logits f32 [n, V] at the scored tokens, and what was generated (if anything).

    `agreed`: leading tokens of full's that the policy would have generated too. `text` is None
    where that was not generated.
    """

    logits: torch.Tensor
    report: Report
    peak_bytes: int | None
    agreed: int = 0
    text: str | None = ""


class SampleMeasurer:
    """Full prefill of one sample, and any policy against it.

    The sample's segments must be in the runner's knowledge base (see `inserted`). No measured
    prompt is remembered, so no policy finds what another one left. What is generated is compared
    with full's over `agreement_tokens` tokens, or over full's answer where that is longer. Without
    `own_answers` no policy generates what it would say otherwise than full, which is much of the
    time of short prompts: answers that differ are then "", and their score is NaN.

    A sample may be a turn of a conversation, `after` the one before, whose parts it begins with:
    the others are appended to the conversation (`talk`) of full, and to that of each policy.
    """

    def __init__(
        self,
        runner: Runner,
        ready: Encoded,
        index: int,
        namespace: str,
        max_new_tokens: int,
        agreement_tokens: int = 0,
        *,
        own_answers: bool = True,
        talk: Conversation | None = None,
        after: SampleMeasurer | None = None,
    ) -> None:
        self._runner = runner
        self._own_answers = own_answers
        self._after = after
        self._sample, self._encoding_flops = ready.sample, ready.flops
        self._index = index
        self._namespace = namespace
        self._max_new_tokens = max_new_tokens
        self._agreement_tokens = agreement_tokens
        self._tokens = runner.tokenize(self._sample.parts).tokens
        self._full, self._reference = self._outcome(self._ask("full", talk))

    def full(self) -> Measurement:
        """The reference itself."""
        return self._measured(self._full, "full", "full")

    def on(self, runner: Runner) -> SampleMeasurer:
        """The same sample against the same full prefill, by another runner of the same model.

        A runner with a head map is measured so against full without one: what the map costs, and
        what a policy costs under it. The segments must be in that runner's knowledge base too.
        """
        other = copy(self)
        other._runner = runner
        return other

    def beside(self, policy: str | Policy) -> SampleMeasurer:
        """The same sample against what a policy says here of full's answer, instead of full."""
        other = copy(self)
        other._full, _ = self._outcome(self._ask(policy, None), self._reference)
        return other

    def policy(
        self,
        policy: str | Policy,
        role: Role = "policy",
        name: str | None = None,
        talk: Conversation | None = None,
    ) -> Measurement:
        """One recovery policy, measured under a name (its own with its settings, unless given).

        `talk`: the policy's conversation, which goes on by this turn.
        """
        outcome, _ = self._outcome(self._ask(policy, talk), self._reference)
        return self._measured(outcome, title_of(policy) if name is None else name, role)

    def floor(self) -> Measurement:
        """Exact prefill in two chunks: how far apart two exact computations come out.

        The first half is prefilled and remembered in a namespace of its own; the whole prompt
        then takes it as its prefix.
        """
        namespace = f"{self._namespace}/floor"
        page = self._runner.cache.shape.page_tokens
        half = len(self._tokens) // 2 // page * page
        if half:
            self._runner.prefill(
                self._tokens[:half].tolist(), "full", namespace=namespace
            ).release()
        ask = Ask(self._tokens.tolist(), policy_of("prefix"), namespace)
        outcome, _ = self._outcome(ask, self._reference)
        return self._measured(outcome, FLOOR, "floor")

    def _ask(self, policy: str | Policy, talk: Conversation | None) -> Ask | NextTurn:
        sample = self._sample
        ask = Ask(sample.parts, policy_of(policy), self._namespace, sample.discover)
        if talk is None:
            return ask
        if self._after is None:
            return NextTurn(talk, sample.parts, ask, 0)
        behind = len(self._after._sample.parts)
        return NextTurn(talk, sample.parts[behind:], ask, len(self._after._tokens))

    def _stop(self) -> tuple[int, ...]:
        end = getattr(self._runner.prompts.tokenizer, "eos_token_id", None)
        return () if end is None else (int(end),)

    def _generated(self, done: Prefill, spoken_at_most: int) -> _Reference:
        """Full's answer, and what it would go on with if more is to be compared."""
        wanted = max(spoken_at_most, self._agreement_tokens)
        past_the_end = () if self._agreement_tokens else self._stop()
        tokens = greedy_tokens(self._runner, done, wanted, past_the_end)
        spoken = sum(1 for _ in takewhile(lambda token: token not in self._stop(), tokens))
        # The token that stops belongs to the answer: it is predicted too.
        answer = min(spoken + 1, spoken_at_most, len(tokens))
        return _Reference(tokens[: max(answer, self._agreement_tokens)], answer)

    def _outcome(
        self, ask: Ask | NextTurn, reference: _Reference | None = None
    ) -> tuple[_Outcome, _Reference]:
        """The policy's prefill, its logits on full's answer, and its own answer.

        Where full's tokens are the policy's most likely ones up to the end of full's answer, that
        is what the policy would generate: only other answers are generated. Without a reference
        the policy is full, and makes it.
        """
        answers = self._sample.answers
        spoken_at_most = self._max_new_tokens if answers else 0
        room = max(spoken_at_most, self._agreement_tokens)
        first = None if answers else len(self._tokens) - self._sample.scored_tokens
        device = self._runner.spec.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with ask.prefilled(self._runner, first, room) as done:
            peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
            logits, report = done.logits.float().clone(), done.report
            if not room:
                return _Outcome(logits, report, peak), _Reference()
            if reference is None:
                with ask.again(self._runner, done, room) as full:
                    reference = self._generated(full, spoken_at_most)
            with ExitStack() as stack:
                # What the answer is decoded from, for the prompt itself goes on with full's.
                needs = bool(answers) and self._own_answers
                other = stack.enter_context(ask.again(self._runner, done, room)) if needs else None
                forced, answer = reference.tokens, reference.answer
                following = forced_logits(self._runner, done, forced)
                agreed = _agreed(following.argmax(-1).tolist(), forced)
                if not answers:
                    return _Outcome(logits, report, peak, agreed), reference
                spoken: Sequence[int] = forced[:answer]
                if agreed < answer:
                    if other is None:
                        return _Outcome(following[:answer], report, peak, agreed, None), reference
                    spoken = greedy_tokens(self._runner, other, spoken_at_most, self._stop())
        ended = spoken[-1] in self._stop()
        text = self._runner.prompts.decode(list(spoken[:-1] if ended else spoken))
        return _Outcome(following[:answer], report, peak, agreed, text), reference

    def _measured(self, outcome: _Outcome, name: str, role: Role) -> Measurement:
        report, reference = outcome.report, self._full.logits.to(outcome.logits.device)
        agrees = outcome.logits.argmax(-1) == reference.argmax(-1)
        first = 0 if self._sample.answers else -1
        return Measurement(
            sample=self._index,
            policy=name,
            role=role,
            tokens=report.tokens,
            reused_prefix=report.reused_prefix,
            reused_segment=report.reused_segment,
            recomputed=report.recomputed,
            row_share=report.row_share,
            ttft_s=report.ttft_s,
            flops=sum(report.flops.values()),
            restored=len(report.restored),
            kv_bytes=report.kv_bytes,
            shared_kv_bytes=report.shared_kv_bytes,
            score=self._score(outcome),
            kl=tuple(float(k) for k in kl_per_token(reference, outcome.logits)),
            top1=float(agrees.float().mean()),
            first_token=bool(agrees[first]),
            top10=_shared_top(reference[first], outcome.logits[first], 10),
            answer=outcome.text or "",
            mode=report.mode,
            mode_reason=report.mode_reason,
            same_answer=(
                outcome.agreed >= self._reference.answer
                if self._sample.answers
                else bool(agrees.all())
            ),
            agreed=outcome.agreed,
            compared=len(self._reference.tokens),
            encoding_flops=self._encoding_flops,
            peak_bytes=outcome.peak_bytes,
            settled_before=report.settled_before,
        )

    def _score(self, outcome: _Outcome) -> float:
        if self._sample.answers:
            return math.nan if outcome.text is None else self._sample.recall(outcome.text)
        scored = self._tokens[len(self._tokens) - self._sample.scored_tokens :]
        return negative_log_likelihood(outcome.logits[:-1], scored[1:])


def _agreed(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two answers share."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _shared_top(reference: torch.Tensor, other: torch.Tensor, count: int) -> float:
    """The share of one distribution's most likely tokens that are among the other's; [V] each."""
    tops = [
        set(logits.topk(min(count, len(logits))).indices.tolist()) for logits in (reference, other)
    ]
    return len(tops[0] & tops[1]) / len(tops[0])
