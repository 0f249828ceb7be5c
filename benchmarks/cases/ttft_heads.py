"""Time to first token and FLOPs under a head map on a GPU: random weights, 97 % reused.

One KV head of each layer stays whole, the others keep 16 first and 256 latest tokens: an eighth of
the heads at eight a layer, as RedKnot finds for its models. Random weights have no profile, so any
map of that share costs the same. Their attention is near uniform, so mass_thresh means nothing:
`ffn_share` says how many rows run the feed-forward, and no head is restored, since every one would
be. "balanced" and "speed" are schedules of the authors' code: a dense feed-forward in the first 20,
or 3, layers. `foresight` and `weave` compute a tenth of the reused tokens after a draft. `full`
without a map reads densely. FLOPs are the report's: of what was run.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import kvweave
from benchmarks.cases.ttft_cuda import SEGMENTS, SHARE
from benchmarks.device.models import LARGE, bytes_of, random_model
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import Timing, summarise, turns
from kvweave.lab.profile.head_profile import head_map
from kvweave.policies import Foresight, Full, Naive, Policy, RedKnot, SparseX, Weave
from kvweave.runner.model.model_spec import describe

LENGTHS = (16384, 32768)
SINK, RECENT = 16, 256
FFN_SHARE = 0.1
"""Rows that run the feed-forward where it is sparse: the fresh and recent ones among them."""
LOOKED_AT = Foresight(share=0.1)
WITHOUT_MAP: dict[str, Policy] = {
    "full": Full(),
    "naive": Naive(),
    "sparsex": SparseX(),
    "foresight": LOOKED_AT,
}


def under_map(layers: int) -> dict[str, Policy]:
    """The policies by the name that the rows show."""
    balanced, speed = (
        RedKnot(dense, recent_n=recent, ffn_share=FFN_SHARE, restore_edge=1.0)
        for dense, recent in ((min(20 / layers, 1.0), 128), (min(3 / layers, 1.0), 64))
    )
    return {
        "full": Full(),
        "sparsex": SparseX(),
        "foresight": LOOKED_AT,
        "redknot, dense feed-forward": RedKnot(dense_until=1.0, restore_edge=1.0),
        "redknot, balanced": balanced,
        "redknot, speed": speed,
        "weave": Weave(LOOKED_AT, speed),
    }


def one_head_a_layer(spec: Any) -> kvweave.HeadClassMap:
    """A map in which another KV head is whole in each layer, all others local."""
    layers = np.arange(len(spec.layers))
    whole = np.zeros((len(layers), spec.kv_heads), bool)
    whole[layers, layers % spec.kv_heads] = True
    evidence = {"measured_by": "nobody: random weights have no profile"}
    stable = np.ones_like(whole)
    return head_map(spec.fingerprint, whole, stable, SINK, RECENT, evidence)


@dataclass
class Measured:
    """One policy in one mode: its times, its report, and the allocator's peak in bytes."""

    timing: Timing
    report: kvweave.Report
    peak: int


class Bench:
    """One model; a prompt of some length whose segments any of its runners may hold."""

    def __init__(self, name: str, device: str = "cuda") -> None:
        self.name = name
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = random_model(name, device, dtype)
        self.heads = one_head_a_layer(describe(self.model))

    def prompt(self, tokens: int) -> list[kvweave.Segment]:
        """Eight segments with fresh tokens before, between and behind them."""
        rng = np.random.default_rng(tokens)
        each = int(tokens * SHARE / SEGMENTS)
        fresh = np.diff(np.linspace(0, tokens - each * SEGMENTS, SEGMENTS + 2).astype(int))

        def draw(count: int, namespace: str = "") -> kvweave.Segment:
            ids = rng.integers(0, self.model.config.vocab_size, count).tolist()
            return kvweave.Segment(tokens=ids, namespace=namespace)

        parts = [part for count in fresh[:-1] for part in (draw(int(count)), draw(each, "kb"))]
        return [*parts, draw(int(fresh[-1]))]

    def opened(self, parts: Sequence[kvweave.Segment], **how: Any) -> kvweave.Runner:
        """A runner that has the segments of a prompt as documents; `how`: what it is asked for."""
        tokens = sum(len(part.tokens or ()) for part in parts)
        known = {"max_tokens": 2 * tokens + 4096, "frozen_share": 0.6, "progress": False}
        runner = kvweave.Runner(self.model, **known | {"check": how.get("heads") is None} | how)
        for index, part in enumerate(p for p in parts if p.namespace):
            runner.insert(list(part.tokens or ()), f"segment {index}", "kb")
        runner.flush()
        return runner

    def measure(
        self,
        parts: Sequence[kvweave.Segment],
        policies: Mapping[str, Policy],
        rounds: int,
        **how: Any,
    ) -> Iterator[tuple[str, Measured]]:
        """The policies in turns, in a cache of their own that is gone afterwards.

        `how`: what its runner is asked for.
        """
        runner = self.opened(parts, **how)
        # The first prefill of each warms up what the others are timed with.
        firsts = {name: self._peak(runner, parts, policy) for name, policy in policies.items()}
        samples: dict[str, list[float]] = {name: [] for name in policies}
        for name in turns(list(policies), rounds):
            samples[name].append(self.prefilled(runner, parts, policies[name]).ttft_s)
        for name, spent in samples.items():
            yield name, Measured(summarise(spent), *firsts[name])

    @staticmethod
    def prefilled(
        runner: kvweave.Runner, parts: Sequence[kvweave.Segment], policy: Policy
    ) -> kvweave.Report:
        """What one prefill reports, whose logits are looked at."""
        with runner.prefill(list(parts), policy, remember=False, watched=False) as done:
            expect(bool(done.logits.isfinite().all()), f"{policy.name}: a logit is not finite")
            report = done.report
        if policy.reuse == "segments":
            share = report.reused_segment / report.tokens
            expect(share >= 0.96, f"{policy.name}: expected 96 % reused, got {share:.1%}")
        return report

    def _peak(
        self, runner: kvweave.Runner, parts: Sequence[kvweave.Segment], policy: Policy
    ) -> tuple[kvweave.Report, int]:
        """The report, and the allocator's peak beside weights and pages in bytes (0 on a CPU)."""
        if runner.spec.device.type != "cuda":
            return self.prefilled(runner, parts, policy), 0
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        report = self.prefilled(runner, parts, policy)
        return report, torch.cuda.max_memory_allocated() - before

    def rows(
        self, tokens: int, rounds: int, modes: Sequence[str] = ("materialise", "share")
    ) -> Iterator[Row]:
        """A row for each policy: without a map, and with it in some modes, as they come."""
        parts, whole = self.prompt(tokens), None
        policies = under_map(self.model.config.num_hidden_layers)
        groups: list[tuple[kvweave.HeadClassMap | None, str, dict[str, Policy]]] = [
            (None, "materialise", WITHOUT_MAP),
            *((self.heads, mode, policies) for mode in modes),
        ]
        for heads, mode, chosen in groups:
            how = {"mode": mode, "heads": heads}
            for name, found in self.measure(parts, chosen, rounds, **how):
                whole = whole or found
                named = name if heads is None else f"{name}, map, {mode}"
                yield Row(
                    f"{self.name}, {tokens} tokens: {named}",
                    found.timing.median_s,
                    "s",
                    found.timing.p95_s,
                    beside(found, whole),
                )
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def beside(found: Measured, whole: Measured) -> dict[str, Any]:
    """What a row tells beside its time; `whole` is full without a map."""
    report = found.report
    ours, theirs = (sum(r.flops.values()) for r in (report, whole.report))
    return {
        "÷ full": found.timing.median_s / whole.timing.median_s,
        "TFLOPs": ours / 1e12,
        "full's FLOPs ÷": theirs / ours,
        "rows": round(report.row_share, 4),
        "select ms": report.timings.select_s * 1e3,
        "copy ms": report.timings.copy_s * 1e3,
        "working GiB": found.peak / 2**30,
        "KV GiB": report.kv_bytes / 2**30,
        "shared KV GiB": report.shared_kv_bytes / 2**30,
        "mode": report.mode,
        **{f"{part} TFLOPs": count / 1e12 for part, count in report.flops.items()},
    }


def run(quick: bool) -> list[Row]:
    if quick:
        return list(Bench("small Llama").rows(4096, 2))
    room = torch.cuda.get_device_properties(0).total_memory
    names = [name for name in LARGE if 1.7 * bytes_of(name) < room]
    rows = []
    for name in names:
        bench = Bench(name)
        rows += [row for tokens in LENGTHS for row in bench.rows(tokens, 5)]
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    return rows
