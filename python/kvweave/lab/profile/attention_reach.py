"""Where heads look: attention mass outside a local window and on chosen spans, pages kept.

Mass comes from `score_tokens` and its edge mass, so a model's own window and soft cap count, and
the score matrix is never stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from kvweave import ops
from kvweave.lab.profile.page_overlap import STEPS, page_overlap
from kvweave.lab.profile.scores import Scores
from kvweave.lab.profile.tap import Tap
from kvweave.plan import Rows
from kvweave.runner import Prefill, Runner


@dataclass(frozen=True)
class Reading:
    """Attention of one prompt; mass per (layer, query head), f64 [L, H].

    `edge`: mean over the sampled rows of the mass outside sink and window. `target`: mean over the
    pairs (row, span) of the mass on the span; None where the prompt has none. `overlap` f64 [L, G]:
    how much of a KV head's important pages the last rows share.
    """

    edge: Scores
    target: Scores | None
    overlap: Scores


def pages_of(runner: Runner) -> torch.Tensor:
    """All pages of a runner, [pages, 2, P, D]."""
    arena = runner.cache.arena
    return arena if isinstance(arena, torch.Tensor) else from_dlpack(arena)


def read_attention(
    runner: Runner,
    tokens: Rows,
    rows: Rows,
    targets: tuple[tuple[int, int, int], ...],
    *,
    sink: int,
    recent: int,
) -> Reading:
    """Prefills a prompt with every head whole and measures where its rows look.

    tokens i32 [T]; rows i32 [R], sorted. `targets`: (row, first, end), a row and the span [first,
    end) before it whose mass is wanted.

    # Errors
    `PoolFull` when the prompt does not fit the arena.
    """
    last = np.arange(max(0, len(tokens) - STEPS), len(tokens), dtype=np.int32)
    wanted = [row for row, _, _ in targets]
    asked = np.unique(np.concatenate((rows, last, wanted))).astype(np.int32)
    at = {int(row): index for index, row in enumerate(asked)}
    spec = runner.spec
    edge, target = np.zeros((2, len(spec.layers), spec.query_heads))
    overlap = np.zeros((len(spec.layers), spec.kv_heads))
    tap = Tap(spec, {"q_proj": asked})
    prompt = tokens.tolist()
    with torch.inference_mode(), tap, runner.prefill(prompt, "full", remember=False) as done:
        pages = _Pages(runner, done)
        sampled = [at[row] for row in rows.tolist()]
        for layer in range(len(spec.layers)):
            q = tap.queries(layer, done.positions)
            edge[layer] = pages.outside(layer, q[sampled], rows, sink, recent).mean(0)
            for row, first, end in targets:
                one = slice(at[row], at[row] + 1)
                # What is outside `first` tokens of sink and a window that begins at `end`.
                on_span = pages.outside(layer, q[one], asked[one], first, row - end + 1)
                target[layer] += on_span[0] / len(targets)
            overlap[layer] = pages.overlap(layer, q[-len(last) :], last)
    return Reading(edge, target if targets else None, overlap)


class _Pages:
    """A prompt whose KV is in the pages, with no head cut short."""

    def __init__(self, runner: Runner, done: Prefill) -> None:
        self.spec = runner.spec
        self.pages = pages_of(runner)
        self.entries = done.request.entries()
        self.rope = done.positions.rope
        length = done.request.length
        slots = done.request.slots(np.arange(length, dtype=np.int32))
        self.block, self.slot = torch.from_numpy(slots).long().to(self.pages.device).unbind(1)

    def outside(self, layer: int, q: torch.Tensor, rows: Rows, sink: int, recent: int) -> Scores:
        """Mass of each row and query head on keys outside sink and window: f64 [R, H]."""
        spec = self.spec.layers[layer]
        share = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        ops.score_tokens(
            q,
            rows,
            self.entries,
            ops.PagedKv(
                self.pages,
                layer,
                self.spec.kv_heads,
                spec.scale,
                self.rope,
                spec.window,
                spec.softcap,
            ),
            edge=ops.EdgeMass(share, recent, sink),
        )
        return share.cpu().double().numpy()

    def overlap(self, layer: int, q: torch.Tensor, rows: Rows) -> Scores:
        """See `page_overlap`: f64 [G]."""
        spec, count = self.spec.layers[layer], self.spec.kv_heads
        heads = torch.arange(layer * count, (layer + 1) * count, device=self.pages.device)
        return page_overlap(
            q,
            rows,
            self.pages[self.block[:, None] + heads, 0, self.slot[:, None]],
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            page_tokens=self.pages.shape[2],
        )
