"""`Canary`: a share of live requests is answered by `full` too, and a drifting policy is stopped.

A profile says what a policy lost on the texts it was certified on. What comes later may be other
text. So a request now and then, drawn by a seed and its number, is prefilled by `full` as well and
the two are compared; that prompt takes room as any other does. Where the mean KL of the latest of
them is surely above the bound, the policy is switched off for this runner.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvweave.arguments import real, whole
from kvweave.errors import InvalidArgument, OutOfMemory, PoolFull
from kvweave.policies import Policy
from kvweave.policies.policy_text import title_of
from kvweave.runner.lossy.divergence import kl_per_token
from kvweave.runner.lossy.mean_bound import mean_at_least, surely_above
from kvweave.runner.report import CanaryCheck

if TYPE_CHECKING:
    from kvweave.runner.prefill.prefill import Prefill


@dataclass(frozen=True)
class Canary:
    """Which requests are checked, and when a policy is stopped.

    `share` of the requests that reuse segments are checked. `bound`: nats of KL a token, in the
    mean over the latest `window` checked requests of one policy; None takes the profile's, which
    must be one of KL. `level`: how sure it must be that the mean is above the bound. `tokens`: of
    the answer that are compared, full's own being forced; 1 compares the first alone, and a prompt
    that cannot be forked is compared in the first alone. `seed` decides which requests are drawn.

    Raises InvalidArgument for a share or a level outside their range, a bound that is not above 0,
    an empty window, no tokens, or a seed below 0.
    """

    share: float = 0.01
    bound: float | None = None
    window: int = 64
    level: float = 0.99
    tokens: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        real("canary", self.share, 0.0, 1.0, name="share")
        if self.bound is not None and real("canary", self.bound, name="bound") <= 0.0:
            raise InvalidArgument(f"canary: expected a bound above 0, got {self.bound}")
        if not 0.0 < real("canary", self.level, name="level") < 1.0:
            raise InvalidArgument(f"canary: expected 0 < level < 1, got {self.level}")
        for name in ("window", "tokens"):
            whole("canary", getattr(self, name), 1, name=name)
        whole("canary", self.seed, 0, name="seed")

    def draws(self, request: int) -> bool:
        """Whether the request of that number is checked; the same for the same seed."""
        drawn = np.random.default_rng([self.seed, request]).random()
        return bool(drawn < self.share)


@dataclass(frozen=True)
class SeenKl:
    """One policy in its window: mean KL of `checked` requests, and what it is surely above.

    `drifted`: it was switched off, and these are the figures that it was switched off by.
    """

    checked: int
    mean: float
    low: float
    drifted: bool


@dataclass(frozen=True)
class CanaryState:
    """What a canary has seen and what that cost.

    `requests` that reused segments; of these `checked`, and `skipped` where there was no room to.
    `flops`: of full's prefills; `seconds`: of all checks. `policies`: by name with settings.
    """

    requests: int
    checked: int
    skipped: int
    flops: int
    seconds: float
    policies: dict[str, SeenKl]


@dataclass
class _Window:
    """The latest KLs of one policy; `reason` once it is switched off."""

    kls: deque[float]
    reason: str = ""


ByFull = Callable[[], "Prefill"]
"""Prefills the same prompt by `full`, held by nobody else."""


@dataclass
class CanaryWatch:
    """One runner's canary: draws requests, compares them, remembers.

    `continued(full, tokens)`: what full says next, so many tokens; the prompt is not changed.
    `extended(prompt, tokens)`: logits behind tokens that are appended to a prompt.
    """

    settings: Canary
    bound: float
    continued: Callable[[Prefill, int], list[int]]
    extended: Callable[[Prefill, list[int]], torch.Tensor]
    _requests: int = 0
    _checked: int = 0
    _skipped: int = 0
    _flops: int = 0
    _seconds: float = 0.0
    _windows: dict[str, _Window] = field(default_factory=dict)

    @property
    def state(self) -> CanaryState:
        """What was seen until now."""
        seen = {title: self._seen(window) for title, window in self._windows.items()}
        return CanaryState(
            self._requests, self._checked, self._skipped, self._flops, self._seconds, seen
        )

    def reason(self, policy: Policy) -> str:
        """Why a policy is switched off; empty while it is not."""
        window = self._windows.get(title_of(policy))
        return "" if window is None else window.reason

    def watch(self, policy: Policy, done: Prefill, by_full: ByFull) -> bool:
        """Compares a prompt that reused segments with full, if it is drawn.

        Says whether the policy is switched off by this. The prompt keeps its answer.
        """
        number, self._requests = self._requests, self._requests + 1
        if not self.settings.draws(number):
            return False
        start = time.perf_counter()
        kl: float | None = None
        flops = compared = 0
        try:
            with by_full() as full:
                flops = sum(full.report.flops.values())
                found = self._compared(done, full)
                kl, compared = float(np.mean(found)), len(found)
        except (PoolFull, OutOfMemory):
            self._skipped += 1
        else:
            self._checked += 1
        seconds = time.perf_counter() - start
        self._flops += flops
        self._seconds += seconds
        done.report.canary = CanaryCheck(kl, compared, flops, seconds)
        return kl is not None and self._keep(policy, kl)

    def _compared(self, done: Prefill, full: Prefill) -> list[float]:
        """KL to full at each compared token."""
        found = list(kl_per_token(full.logits[-1:], done.logits[-1:]))
        if self.settings.tokens == 1 or done.report.restored:
            return found
        forced = self.continued(full, self.settings.tokens)[:-1]
        if not forced:
            return found
        with done.fork() as fork:
            try:
                mine = self.extended(fork, forced)
            except InvalidArgument:
                # RoPE whose frequencies change with the length: nothing can be appended there.
                return found
            return found + list(kl_per_token(self.extended(full, forced), mine))

    def _keep(self, policy: Policy, kl: float) -> bool:
        title = title_of(policy)
        window = self._windows.setdefault(title, _Window(deque(maxlen=self.settings.window)))
        window.kls.append(kl)
        if window.reason or not surely_above(list(window.kls), self.bound, self.settings.level):
            return False
        seen = self._seen(window)
        window.reason = (
            f"canary: {title} drifted, mean KL to full {seen.mean:.3g} nats a token over "
            f"{seen.checked} requests, surely above {seen.low:.3g}, bound {self.bound:g}"
        )
        return True

    def _seen(self, window: _Window) -> SeenKl:
        kls = list(window.kls)
        mean = float(np.mean(kls)) if kls else 0.0
        return SeenKl(len(kls), mean, mean_at_least(kls, self.settings.level), bool(window.reason))
