"""Heads that choose packed pages, in plain torch, and what a runner's heads have chosen."""

from __future__ import annotations

from typing import Any

import torch

from kvweave.runner import Runner
from kvweave.runner.decode.decoding import Decoding
from packed_decoding import RECENT, SINK, PackedDecoding
from page_meaning import PAGE
from ranked_pages import page_score, turned_back

NEWEST = 2
"""Packed pages that are always read."""


def best_of(scores: list[float], most: int) -> list[int]:
    """The newest two, and of the others the best: an explicit sort."""
    others = sorted(range(len(scores) - NEWEST), key=lambda page: (-scores[page], page))
    return sorted([*others[: most - NEWEST], *range(len(scores) - NEWEST, len(scores))])


class ChoosingDecoding(PackedDecoding):
    """`PackedDecoding` whose steps read what heads choose, of classes dealt out as `kinds_map` has.

    Pages are scored by the exact keys that they were packed from. Those that were full before a
    step are packed then; the first of them is the sink.
    """

    def __init__(self, model: Any, kinds: list[dict[str, Any]], *given: Any) -> None:
        super().__init__(model, *given)
        self.kinds = kinds
        # Of each layer and head: when it was ranked, the pages there were, and those it chose.
        self.chosen: dict[tuple[int, int], tuple[int, int, list[int]]] = {}

    def _hidden(self, layer: int, query: Any, key: Any, rows: int, total: int) -> torch.Tensor:
        group = len(query) // len(key)
        hidden = super()._hidden(layer, query, key, rows, total).expand(len(query), rows, total)
        if rows > 1:
            return hidden
        of = [self._left(layer, head, query, key, total) for head in range(len(key))]
        return hidden | torch.stack(of).repeat_interleave(group, 0)[:, None]

    def _left(self, layer: int, head: int, query: Any, key: Any, total: int) -> torch.Tensor:
        """What a head leaves out at its newest row, bool [T]."""
        kind = self.kinds[(layer * len(key) + head) % len(self.kinds)]
        at, position, group = torch.arange(total), total - 1, len(query) // len(key)
        first = SINK // PAGE
        count = position // PAGE - first
        if kind["kind"] != "top_k" or count <= kind["pages"]:
            return torch.zeros(total, dtype=torch.bool)
        since, listed, best = self.chosen.get((layer, head), (-(10**9), 0, []))
        if position - since >= kind["rerank_every"]:
            pages = key[head, SINK : (first + count) * PAGE].split(PAGE)
            queries = query[head * group : (head + 1) * group, 0]
            scores = [page_score(queries, page, kind.get("score", "min-max")) for page in pages]
            since, listed, best = position, count, best_of(scores, kind["pages"])
        self.chosen[layer, head] = since, listed, best
        read = torch.tensor([*best, *range(listed, count)]) + first
        packed = (at >= SINK) & (at <= position - RECENT)
        return packed & ~torch.isin(at // PAGE, read)


def expect_packed_choice(runner: Runner, sequence: Decoding, queries: torch.Tensor) -> int:
    """Compares what a request's heads have chosen, by queries [L, H, D], with the definition.

    For maps that are ranked at every step. Returns how many heads chose.
    """
    slots = next(s for s in runner._decoder._slots if sequence in s.members)
    choice, pool, checked = slots.packed._choice, runner.packed, 0
    row, known = choice._rows[sequence], sequence.request.length - 1
    # Pages that the step itself has filled are packed behind it.
    listed = sequence.packed.entries().tolist()
    entries = [one for one in listed if one[3] + one[2] - one[1] <= known]
    heads = runner.spec.kv_heads
    for layer in range(len(runner.spec.layers)):
        of_kv = queries[layer].double().view(heads, -1, queries.shape[-1])
        for head in range(heads):
            number = pool.heads.budget_of[layer, head]
            if number < 0 or len(entries) <= pool.heads.budgets[number].pages:
                continue
            budget, scores = pool.heads.budgets[number], []
            for block, _, _, _, delta in entries:
                least, most, mean = pool.bounds[block + layer * heads + head].double()
                q = turned_back(runner, of_kv[head], delta)
                bound = torch.maximum(q * least, q * most).sum(-1)
                score = bound if budget.score == "min-max" else q @ mean
                scores.append(float(score.max()))
            count = int(choice.selected[row, layer, head])
            assert count == budget.pages
            got = choice.chosen[row, layer, head, :count].tolist()
            assert got == best_of(scores, budget.pages)
            checked += 1
    return checked
