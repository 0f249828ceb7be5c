"""One sample under several policies, against full prefill of the same prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Literal

import torch

from kvweave.eval.sample import Sample
from kvweave.eval.statistics import kl_per_token, negative_log_likelihood
from kvweave.policies import Naive, Policy, policy_of
from kvweave.runner import Prompt, Report, Runner, Sampling, Segment

Role = Literal["full", "policy", "floor", "control"]
FLOOR = "chunked (floor)"
MAX_NEW_TOKENS = 32


@dataclass(frozen=True)
class Measurement:
    """What one policy did with one sample.

    `kl`: nats to full at each scored token, full's own greedy answer (or the real text) being
    forced. `top1`: the share of these where the most likely token is full's. `first_token`: the
    same for the first token to be generated, and `top10` the share of full's ten most likely that
    are among the policy's ten there. `score`: see the task's `score_name`. `flops`: of the whole
    prefill. `restored`: local heads made full. `kv_bytes`, `shared_kv_bytes`, `mode` and
    `mode_reason`: as in the runner's report.
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

    @property
    def reused(self) -> int:
        """Tokens reused, by prefix or by segment."""
        return self.reused_prefix + self.reused_segment


@dataclass(frozen=True)
class _Outcome:
    """Logits f32 [n, V] at the scored tokens, and what was generated (if anything)."""

    logits: torch.Tensor
    report: Report
    tokens: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class _Recorder(Sampling):
    """Keeps the logits of each step; takes the scripted tokens, or greedy ones."""

    script: tuple[int, ...] = ()
    seen: list[torch.Tensor] = field(default_factory=list)

    def pick(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The next token of the script, or the most likely one."""
        self.seen.append(logits.float().cpu().clone())
        if self.script:
            return torch.tensor(self.script[len(self.seen) - 1], device=logits.device)
        return super().pick(logits, generator)


class SampleMeasurer:
    """Full prefill of one sample, and any policy against it.

    The sample's segments must be in the runner's knowledge base (see `inserted`). No measured
    prompt is remembered, so no policy finds what another one left.
    """

    def __init__(
        self, runner: Runner, sample: Sample, index: int, namespace: str, max_new_tokens: int
    ) -> None:
        self._runner = runner
        self._sample = sample
        self._index = index
        self._namespace = namespace
        self._max_new_tokens = max_new_tokens
        self._tokens = runner.tokenize(sample.parts).tokens
        self._full = self._free(sample.parts, policy_of("full"), namespace)

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

    def policy(
        self, policy: str | Policy, role: Role = "policy", name: str | None = None
    ) -> Measurement:
        """One recovery policy, measured under a name (its own, unless given)."""
        chosen = policy_of(policy)
        outcome = self._against_full(self._sample.parts, chosen, self._namespace)
        return self._measured(outcome, chosen.name if name is None else name, role)

    def no_rope_control(self) -> Measurement:
        """Naive reuse with keys left at their old positions: what Δ-RoPE is worth."""
        return self.policy(Naive(delta_rope=False), "control")

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
        outcome = self._against_full(self._tokens.tolist(), policy_of("prefix"), namespace)
        return self._measured(outcome, FLOOR, "floor")

    def _against_full(self, prompt: Prompt, policy: Policy, namespace: str) -> _Outcome:
        """The policy's own answer, with the logits it gives to full's answer."""
        free = self._free(prompt, policy, namespace)
        forced = self._full.tokens
        # Logits up to and including the first difference were computed on full's answer already.
        if _agreed(free.tokens, forced) + 1 >= len(forced):
            return replace(free, logits=free.logits[: max(len(forced), self._sample.scored_tokens)])
        recorder = _Recorder(script=forced)
        self._runner.generate(
            prompt,
            policy,
            max_new_tokens=len(forced),
            sampling=recorder,
            stop=(),
            namespace=namespace,
            remember=False,
        )
        return replace(free, logits=torch.stack(recorder.seen))

    def _free(self, prompt: Prompt, policy: Policy, namespace: str) -> _Outcome:
        if not self._sample.answers:
            start = len(self._tokens) - self._sample.scored_tokens
            with self._runner.prefill(
                prompt, policy, logits_from=start, namespace=namespace, remember=False
            ) as done:
                return _Outcome(done.logits.float().cpu().clone(), done.report)
        recorder = _Recorder()
        made = self._runner.generate(
            prompt,
            policy,
            max_new_tokens=self._max_new_tokens,
            sampling=recorder,
            namespace=namespace,
            remember=False,
        )
        return _Outcome(torch.stack(recorder.seen), made.report, tuple(made.tokens), made.text)

    def _measured(self, outcome: _Outcome, name: str, role: Role) -> Measurement:
        report, reference = outcome.report, self._full.logits
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
            answer=outcome.text,
            mode=report.mode,
            mode_reason=report.mode_reason,
        )

    def _score(self, outcome: _Outcome) -> float:
        if self._sample.answers:
            return self._sample.recall(outcome.text)
        scored = self._tokens[len(self._tokens) - self._sample.scored_tokens :]
        return negative_log_likelihood(outcome.logits[:-1], scored[1:])


@contextmanager
def inserted(runner: Runner, sample: Sample, namespace: str) -> Iterator[Sample]:
    """The sample with its segments in the runner's knowledge base, under a namespace of its own.

    They are deleted again at the end, whatever happens.
    """
    names: list[str] = []
    try:
        for segment in dict.fromkeys(sample.segments):
            name = f"segment-{len(names)}"
            runner.insert(_content(segment), name, namespace)
            names.append(name)
        parts = tuple(
            replace(part, namespace=namespace) if isinstance(part, Segment) else part
            for part in sample.parts
        )
        yield replace(sample, parts=parts)
    finally:
        for name in names:
            runner.delete(name, namespace)


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


def _content(segment: Segment) -> str | Sequence[int]:
    if segment.tokens is not None:
        return segment.tokens
    return segment.text or ""
