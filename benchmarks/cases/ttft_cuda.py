"""Time to first token on a GPU: random weights at the shapes of known models, 97 % reused.

The prompt is eight cached segments with fresh text between them, before and behind. transformers'
own forward (SDPA, the last token's logits) runs in the same process. Beside each time: what its
FLOPs would take at the rate of a large bf16 product measured here, the peak of torch's allocator
over the figure of the report, and where the device's time goes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import kvweave
from benchmarks.device.models import LARGE, bytes_of, random_model
from benchmarks.device.profile import profile
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import Timing, summarise, turns
from kvweave.plan import Draft, Plans, PlanStep, Probe, PromptView
from kvweave.policies import CacheBlend, Epic, Foresight, Full, Naive, Policy, SparseX

TOKENS = 32768
SEGMENTS = 8
SHARE = 0.97
DEEP = 0.12
"""ℓ* of the hybrid, as a share of the layers."""
FEW = 1024
"""Tokens that the sparse policy recomputes by score: 3 % of the prompt. Its default is 10 %."""
LIMITS = {
    "sparsex, 1024 by score": {"Llama-3.1-8B": 0.10, "Qwen3-32B": 0.42},
    "sparsex, 1024 by score, ℓ* 12 %": {"Llama-3.1-8B": 0.24, "Qwen3-32B": 1.0},
}
"""Seconds that the design asks for."""
ROUNDING = 0.1
"""Largest difference of a logit from transformers', as a share of the largest logit."""


def policies(layers: int) -> dict[str, Policy]:
    """The contenders by the name that the rows show."""
    deep = round(DEEP * layers)
    return {
        "full": Full(),
        "naive": Naive(),
        "epic": Epic(),
        "cacheblend": CacheBlend(),
        "sparsex, 1024 by score": SparseX(boundary=0, top_k=FEW),
        "sparsex, 10 % by score": SparseX(boundary=0),
        "sparsex, 1024 by score, ℓ* 12 %": SparseX(boundary=deep, top_k=FEW),
        "foresight, 10 %, no draft": Foresight(share=0.1, draft=0),
        "foresight, 10 %, draft of 8": Foresight(share=0.1, draft=8, drafts=1),
        "foresight, 10 %, 4 drafts of 2": Foresight(share=0.1, draft=2, drafts=4),
    }


@dataclass
class Watched:
    """A policy whose plans are remembered."""

    policy: Policy
    plans: list[PlanStep] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def plan(self, prompt: PromptView) -> Plans:
        self.plans.clear()
        steps = self.policy.plan(prompt)
        plan = next(steps)
        while True:
            self.plans.append(plan)
            try:
                plan = steps.send((yield plan))
            except StopIteration:
                return


def flops(model: Any, plans: list[PlanStep], tokens: int) -> float:
    """Multiplications and additions of a prefill's products and attention, masked keys left out.

    The second plan of layer 0 counts its further rows alone, a deviation probe its projections,
    and the last layer the rest of its last row. Drafts count as rows behind the prompt's `tokens`,
    each with its logits.
    """
    config = model.config
    width, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    projections = width * dim * (heads + 2 * config.num_key_value_heads)
    rest = width * dim * heads + 3 * width * config.intermediate_size
    total, before = 2.0 * width * config.vocab_size, None
    for plan in plans:
        if isinstance(plan, Draft):
            keys = float((np.arange(tokens, tokens + plan.tokens) + 1).sum())
            once = 2.0 * (projections + rest) * plan.tokens + 4.0 * heads * dim * keys
            total += config.num_hidden_layers * once * plan.drafts
            total += 2.0 * width * config.vocab_size * (plan.tokens * plan.drafts + 1)
            before = None
            continue
        rows = plan.rows
        if before is not None and before.layer == plan.layer == 0:
            rows = np.setdiff1d(rows, before.rows)
        probed = before is not None and before.probe is Probe.DEVIATION
        if not probed:
            total += 2.0 * projections * len(rows)
        if plan.layer + 1 == config.num_hidden_layers:
            rows = rows[-1:]
        if plan.probe is not Probe.DEVIATION:
            keys = float((rows.astype(np.int64) + 1).sum())
            total += 2.0 * rest * len(rows) + 4.0 * heads * dim * keys
        before = plan
    return total


def matmul_rate() -> float:
    """FLOP/s of the best of a few large bf16 products."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    best = np.inf
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.matmul(a, b)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return 2.0 * 8192**3 / best


class Bench:
    """One model, one prompt whose segments are cached, and the calls that are timed."""

    def __init__(self, name: str, tokens: int) -> None:
        self.name, self.tokens = name, tokens
        self.model = random_model(name)
        self.runner = kvweave.Runner(
            self.model,
            max_tokens=2 * tokens + 4096,
            frozen_share=0.6,
            # `check` holds the whole prompt to transformers' own forward.
            check=False,
            progress=False,
        )
        rng = np.random.default_rng(tokens)
        each = int(tokens * SHARE / SEGMENTS)
        fresh = np.diff(np.linspace(0, tokens - each * SEGMENTS, SEGMENTS + 2).astype(int))

        def draw(count: int) -> list[int]:
            return rng.integers(0, self.model.config.vocab_size, count).tolist()

        self.parts: list[kvweave.Segment] = []
        for index in range(SEGMENTS):
            segment = draw(each)
            self.runner.insert(segment, f"segment {index}", "kb")
            self.parts.append(kvweave.Segment(tokens=draw(int(fresh[index]))))
            self.parts.append(kvweave.Segment(tokens=segment, namespace="kb"))
        self.parts.append(kvweave.Segment(tokens=draw(int(fresh[-1]))))
        prompt = self.runner.tokenize(self.parts)
        expect(len(prompt.tokens) == tokens, f"{len(prompt.tokens)} tokens, wanted {tokens}")
        self.ids = torch.from_numpy(prompt.tokens).long().cuda()[None]
        layers = self.model.config.num_hidden_layers
        self.policies = {name: Watched(policy) for name, policy in policies(layers).items()}

    def forward(self) -> torch.Tensor:
        """transformers' own: logits f32 [V] of the last token."""
        with torch.inference_mode():
            out = self.model(self.ids, use_cache=True, logits_to_keep=1)
            return out.logits[0, -1].float()

    def prefill(self, policy: str) -> tuple[torch.Tensor, kvweave.Report]:
        """Ours: logits f32 [V] of the last token, and the report."""
        chosen = self.policies[policy]
        with self.runner.prefill(self.parts, chosen, remember=False, watched=False) as done:
            return done.logits[-1], done.report

    def check(self) -> None:
        """Full is transformers' within rounding; nothing is off the plan."""
        theirs, (ours, _) = self.forward(), self.prefill("full")
        apart = float((theirs - ours).abs().max() / theirs.abs().max())
        expect(apart <= ROUNDING, f"full: expected logits within {ROUNDING}, got {apart:.3g}")
        for policy in self.policies:
            logits, report = self.prefill(policy)
            expect(bool(logits.isfinite().all()), f"{policy}: a logit is not finite")
            if policy != "full":
                share = report.reused_segment / report.tokens
                expect(share >= 0.96, f"{policy}: expected 96 % reused, got {share:.1%}")

    def timed(self, rounds: int) -> dict[str, Timing]:
        """Seconds to the last token's logits, contenders in turns."""
        samples: dict[str, list[float]] = {name: [] for name in ("transformers", *self.policies)}
        for name in turns(list(samples), rounds):
            samples[name].append(self._seconds(name))
        return {name: summarise(values) for name, values in samples.items()}

    def _seconds(self, name: str) -> float:
        if name != "transformers":
            return self.prefill(name)[1].ttft_s
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.forward()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def peak(self, policy: str) -> tuple[int, kvweave.Report]:
        """The allocator's peak of a prefill, in bytes, and its report."""
        torch.cuda.synchronize()
        weights, pages = self.runner.spec.weight_bytes, self.runner.cache.arena.nbytes
        others = torch.cuda.memory_allocated() - weights - pages
        torch.cuda.reset_peak_memory_stats()
        _, report = self.prefill(policy)
        return torch.cuda.max_memory_allocated() - others, report

    def rows(self, rounds: int) -> list[Row]:
        """A row for each contender."""
        self.check()
        timed, rate = self.timed(rounds), matmul_rate()
        whole = timed["full"].median_s
        return [
            Row(
                f"{self.name}, {self.tokens} tokens: {name}",
                spent.median_s,
                "s",
                spent.p95_s,
                {"÷ full": spent.median_s / whole, **self._beside(name, spent.median_s, rate)},
            )
            for name, spent in timed.items()
        ]

    def _beside(self, name: str, median_s: float, rate: float) -> dict[str, Any]:
        call: Callable[[], object] = self.forward
        beside: dict[str, Any] = {}
        if name in self.policies:
            call = lambda: self.prefill(name)  # noqa: E731
            taken, report = self.peak(name)
            bound = flops(self.model, self.policies[name].plans, self.tokens) / rate
            limit = LIMITS.get(name, {}).get(self.name)
            beside = {
                "rows": round(report.row_share, 4),
                "bound s": bound,
                "of bound": bound / median_s,
                "peak GiB": taken / 2**30,
                "÷ planned": round(taken / report.device_bytes, 4),
                "look-up ms": report.timings.lookup_s * 1e3,
                "select ms": report.timings.select_s * 1e3,
                **({} if limit is None else {"limit s": limit}),
            }
        spent, kernels = profile(call)
        shown = {f"{kind} ms": round(ms, 2) for kind, ms in sorted(spent.items())}
        return {**beside, "kernels": kernels, **shown}


def run_model(name: str, tokens: int, rounds: int) -> list[Row]:
    """The rows of one model."""
    bench = Bench(name, tokens)
    try:
        return bench.rows(rounds)
    finally:
        del bench
        gc.collect()
        torch.cuda.empty_cache()


def run(quick: bool) -> list[Row]:
    if quick:
        return run_model("small Llama", 4096, 2)
    room = torch.cuda.get_device_properties(0).total_memory
    names = [name for name in LARGE if 1.5 * bytes_of(name) < room]
    return [row for name in names for row in run_model(name, TOKENS, 5)]
