"""What reading few pages costs in quality: `python -m benchmarks.quality.page_budgets MODEL`.

Stable heads read the best pages of each budget, ranked every 16 decode steps; unstable ones read
everything ("full"), as many pages ranked at every step ("ranked"), or are treated as stable ones
("as stable"). Stability is measured on the half of each text that prompts are not taken from. KL
and agreement are to the whole model over the answers that it drew: see `DecodeMeter`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report.record import machine
from kvweave import models
from kvweave.cache import HeadClassMap
from kvweave.lab.profile import held_out, measure_stability, text_tasks
from kvweave.lab.profile.decode_effect import TEMPERATURE, DecodeMeter
from kvweave.lab.profile.head_profile import Flags, head_map
from kvweave.lab.profile.ranked_heads import RERANK_EVERY, with_ranked_pages
from kvweave.runner import Runner

TEXTS = ("sotu", "python")
BUDGETS = (8, 16, 32)
SINK, RECENT = 16, 256


def maps_of(fingerprint: str, unstable: Flags, pages: int) -> dict[str, HeadClassMap]:
    """Maps of one budget, by what unstable heads do."""

    def of(flags: Flags, unstable_too: bool = False) -> HeadClassMap:
        every = np.ones_like(flags)
        whole = head_map(fingerprint, every, ~flags, SINK, RECENT, evidence={})
        return with_ranked_pages(whole, pages, unstable_too=unstable_too)

    return {
        "full": of(unstable),
        "ranked": of(unstable, unstable_too=True),
        "as stable": of(np.zeros_like(unstable)),
    }


class Bench:
    """A model in float32, which of its heads are unstable, and the effect of maps on decoding."""

    def __init__(self, name: str, length: int, steps: int, texts: tuple[str, ...]) -> None:
        loaded = models.load(name, torch.float32)

        def make_runner(heads: HeadClassMap | None) -> Runner:
            room = len(texts) * 2 * (length + steps + 32)
            return Runner(
                *loaded, max_tokens=room, heads=heads, check=heads is None, progress=False
            )

        whole = make_runner(None)
        self.page_tokens = whole.cache.shape.page_tokens
        self.fingerprint = whole.spec.fingerprint
        window = {"sink": SINK, "recent": RECENT}
        tasks = text_tasks(whole, texts, length, **window)
        self.stability = measure_stability(whole, tasks, pages=16, steps=64)
        prompts = [
            text.tokens.tolist() for text in held_out(whole, texts, length, **window, seed=0)
        ]
        del whole
        self.meter = DecodeMeter(make_runner, prompts, steps)

    def rows(self, budgets: tuple[int, ...]) -> Iterator[dict[str, Any]]:
        """The effect of each budget and way, one after the other."""
        unstable = self.stability.unstable()
        for pages in budgets:
            for way, heads in maps_of(self.fingerprint, unstable, pages).items():
                effect = self.meter.measure(heads)
                words = (f"{effect.kl:.4f}", f"{effect.worst:.4f}", f"{effect.agreement:.1%}")
                print(f"| {pages} | {way} | {' | '.join(words)} |", flush=True)
                yield {"pages": pages, "unstable": way, **asdict(effect)}


def main() -> None:
    """Prints a table, and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--steps", type=int, default=256, help="decode steps compared a prompt")
    parser.add_argument("--text", action="append", default=[], help="sotu, kjv, python or a path")
    parser.add_argument("--pages", action="append", type=int, default=[])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    texts = tuple(asked.text) or TEXTS
    bench = Bench(asked.model, asked.length, asked.steps, texts)
    record: dict[str, Any] = {
        "model": asked.model,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "texts": texts,
        "prompts": len(bench.meter.prompts),
        "length": asked.length,
        "steps": asked.steps,
        "temperature": TEMPERATURE,
        "page_tokens": bench.page_tokens,
        "rerank_every": RERANK_EVERY,
        "stability": bench.stability.to_dict(),
        "rows": [],
    }
    for row in bench.rows(tuple(asked.pages) or BUDGETS):
        record["rows"].append(row)
        if asked.out is not None:
            # What is measured is kept, should a long run be broken off.
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
