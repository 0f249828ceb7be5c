"""Heads that read chosen pages, in plain torch: transformers' own decoding under the definition."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from cache_names import by_name, cache_of
from decode_batches import decoding
from fp8_bounds import fp8_bounds
from kvweave.cache import HeadClassMap
from kvweave.ops import RopeTable
from kvweave.runner import Runner
from kvweave.runner.decode.chosen_texts import Listed
from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.decode.graph import StepGraphs, StepSize
from kvweave.runner.decode.step import forward
from kvweave.runner.model.model_spec import ModelSpec

FULL = {"kind": "full"}
WINDOW = {"kind": "window", "sink": 4, "recent": 16}
SINK, RECENT = 1, 2
NAME = "ranked_pages"


def top_k(pages: int, every: int = 1, **more: Any) -> dict[str, Any]:
    """The class of a head; `more` are its `score` and `estimate`."""
    return {"kind": "top_k", "pages": pages, "rerank_every": every, **more}


def kinds_map(spec: ModelSpec, kinds: list[dict[str, Any]]) -> HeadClassMap:
    """A map whose classes are dealt out by (layer, KV head)."""
    layers, heads = len(spec.layers), spec.kv_heads
    entries = [
        {
            "layer": at // heads,
            "head": at % heads,
            "class": kinds[at % len(kinds)],
            "reach": "local" if kinds[at % len(kinds)]["kind"] == "window" else "global",
            "stability": "stable",
        }
        for at in range(layers * heads)
    ]
    return HeadClassMap.from_json(
        json.dumps(
            {
                "schema_version": 1,
                "model_fingerprint": spec.fingerprint,
                "layers": layers,
                "kv_heads": heads,
                "heads": entries,
            }
        )
    )


def ranked_runner(model: Any, kinds: list[dict[str, Any]], **settings: Any) -> Runner:
    """A runner of a tiny model whose heads have these classes, in turn."""
    settings = {"max_tokens": 2048, "page_tokens": 4, "progress": False, "check": False, **settings}
    plain = Runner(model, **{**settings, "max_tokens": 64, "speculate": None, "bounds_dtype": None})
    return Runner(model, heads=kinds_map(plain.spec, kinds), **settings)


class _LaunchedGraphs(StepGraphs):
    """What is captured, on a CPU: ops look there whether entries end where their offsets do."""

    def _forward(self, size: StepSize, rope: RopeTable) -> torch.Tensor:
        tables = size.tables()
        if (packed := tables.packed) is not None:
            aside = None if packed.aside is None else _without_room(packed.aside)
            packed = replace(packed, packed=_without_room(packed.packed), aside=aside)
            tables = replace(tables, packed=packed)
        return forward(self.spec, self.pages, tables, rope, self.workspace, size.queries)


def _without_room(listed: Listed) -> Listed:
    entries, offsets = listed
    return entries[: int(offsets[-1])], offsets


def stepping_as_on_a_gpu(runner: Runner) -> Runner:
    """A runner on the CPU whose steps are what is captured on a GPU, launch by launch."""
    decoder = runner._decoder
    decoder.graphs = _LaunchedGraphs(decoder.heads, decoder.rotary, decoder.pages, None)
    decoder.graphs.capturable = False
    return runner


def best_pages(scores: list[float], most: int) -> list[int]:
    """The first page, the last two, and of the others the best: an explicit sort."""
    count = len(scores)
    always = [*range(SINK), *range(count - RECENT, count)]
    others = sorted(range(SINK, count - RECENT), key=lambda page: (-scores[page], page))
    return sorted(always + others[: most - len(always)])


def page_score(
    queries: torch.Tensor, keys: torch.Tensor, score: str = "min-max", *, fp8: bool = False
) -> float:
    """What the query heads [n, D] may find among keys [T, D]: the most that any of them may.

    `fp8`: by bounds in e4m3.
    """
    if fp8:
        bounds, _ = fp8_bounds(keys, score)
    elif score == "mean":
        bounds = keys.double().mean(0)[None]
    else:
        bounds = torch.stack((keys.double().amin(0), keys.double().amax(0)))
    if score == "mean":
        return float((queries.double() @ bounds[0]).max())
    least, most = bounds
    return float(torch.maximum(queries.double() * least, queries.double() * most).sum(-1).max())


class PlainDecoding:
    """A model's own decoding of one prompt, every head under its class, pages of `page` tokens.

    `paced`: heads choose anew when a page begins, however often their class says. `fp8`: by bounds
    in e4m3.
    """

    def __init__(
        self,
        model: Any,
        kinds: list[dict[str, Any]],
        page: int,
        *,
        paced: bool = False,
        fp8: bool = False,
    ) -> None:
        self.model, self.kinds, self.page, self.paced = model, kinds, page, paced
        self.fp8 = fp8
        self.chosen: dict[tuple[int, int], tuple[int, int, list[int]]] = {}
        self.cache: Any = None

    def feed(self, tokens: list[int]) -> torch.Tensor:
        """Logits [V] behind more tokens: the first time a prompt, then one by one."""
        AttentionInterface.register(NAME, self._attend)
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(NAME)
        try:
            out = self.model(
                torch.tensor([tokens]), **by_name(self.model, self.cache), use_cache=True
            )
        finally:
            self.model.set_attn_implementation(before)
        self.cache = cache_of(out)
        return out.logits[0, -1].float()

    def _attend(
        self, module: Any, query: Any, key: Any, value: Any, _mask: Any, **named: Any
    ) -> tuple[torch.Tensor, None]:
        heads, rows, total = key.shape[1], query.shape[2], key.shape[2]
        group = query.shape[1] // heads
        seen = torch.stack(
            [
                self._seen(
                    module.layer_idx,
                    head,
                    query[0, head * group : (head + 1) * group],
                    key[0, head],
                    rows,
                    total,
                )
                for head in range(heads)
            ]
        ).repeat_interleave(group, 0)
        keys, values = (x.repeat_interleave(group, 1) for x in (key, value))
        logits = query @ keys.transpose(2, 3) * named["scaling"]
        if (cap := named.get("softcap")) is not None:
            logits = cap * torch.tanh(logits / cap)
        logits = logits.masked_fill(~seen, -torch.inf)
        out = logits.softmax(-1) @ values
        for head in range(heads if rows == 1 else 0):
            own = slice(head * group, (head + 1) * group)
            left = self._left(module.layer_idx, head, key[0, head], value[0, head])
            mean_keys, mean_values = (
                (torch.stack(means) for means in left) if left else (None, None)
            )
            if mean_keys is None:
                continue
            estimated = query[0, own, 0] @ mean_keys.mT * named["scaling"]
            if cap is not None:
                estimated = cap * torch.tanh(estimated / cap)
            terms = torch.cat((logits[0, own, 0], estimated + math.log(self.page)), 1)
            of_all = torch.cat((value[0, head], mean_values))
            out[0, own, 0] = terms.softmax(-1) @ of_all
        return out.transpose(1, 2).contiguous(), None

    def _left(self, layer: int, head: int, key: Any, value: Any) -> Any:
        """Mean keys and mean values of the pages that a head estimates; None where of none."""
        kind = self._kind(layer, head)
        if not kind.get("estimate") or math.ceil(len(key) / self.page) <= kind["pages"]:
            return None
        _, listed, best = self.chosen[layer, head]
        # Whatever is left out is full: the newest pages are always read.
        pages = [page for page in range(listed) if page not in best]
        return [[x.split(self.page)[page].mean(0) for page in pages] for x in (key, value)]

    def _kind(self, layer: int, head: int) -> dict[str, Any]:
        config = self.model.config
        return self.kinds[(layer * config.num_key_value_heads + head) % len(self.kinds)]

    def _seen(
        self, layer: int, head: int, query: Any, key: Any, rows: int, total: int
    ) -> torch.Tensor:
        """What rows of a head see, bool [rows, total]."""
        kind = self._kind(layer, head)
        row, at = torch.arange(total - rows, total)[:, None], torch.arange(total)
        causal = at <= row
        if kind["kind"] == "window":
            return causal & ((at > row - kind["recent"]) | (at < kind["sink"]))
        if kind["kind"] == "full" or rows > 1:
            return causal
        count = math.ceil(total / self.page)
        if count <= kind["pages"]:
            return causal
        since, listed, best = self.chosen.get((layer, head), (-math.inf, 0, []))
        due = total - since >= kind["rerank_every"]
        if self.paced:
            due = not best or total % self.page == 1
        if due:
            pages = key.split(self.page)
            score = kind.get("score", "min-max")
            scores = [page_score(query[:, 0], page, score, fp8=self.fp8) for page in pages]
            best = best_pages(scores, kind["pages"])
            since, listed = total, count
        self.chosen[layer, head] = since, listed, best
        return causal & torch.isin(at // self.page, torch.tensor([*best, *range(listed, count)]))


# ---- what a runner chose, against what lies in its pages ------------------------------------


def stored_tokens(runner: Runner, entry: list[int], rank: int) -> torch.Tensor:
    """The keys and values of an entry as they are stored, f64 [2, n, D]."""
    block, begin, end, _, _ = entry
    return runner._decoder.pages[block + rank, :, begin:end].double()


def expect_means(room: Any, budget: Any, ranked: torch.Tensor, rank: int, stored: Any) -> None:
    """Compares the means that are kept of entries i32 [n, 5] with those of what lies in them."""
    if not budget.estimate:
        return
    for row, pages in zip(ranked.tolist(), stored, strict=True):
        kept = room.means[row[0] + rank].double()
        slack = 1e-5 if room.means.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(kept, pages.mean(1), atol=slack, rtol=slack)


def turned_back(runner: Runner, q: torch.Tensor, delta: int) -> torch.Tensor:
    """Queries [n, D] turned back by delta: pairs of halves, in f64."""
    angle = -delta * runner.spec.rotary.inv_freq.double()
    half = len(angle)
    one, other, rest = q[:, :half], q[:, half : 2 * half], q[:, 2 * half :]
    turned = (one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos())
    return torch.cat((*turned, rest), 1)


def expect_chosen(runner: Runner, sequence: Decoding, queries: torch.Tensor) -> int:
    """Compares what a request's heads have chosen, by queries [L, H, D], with the definition.

    Returns how many heads chose.
    """
    slots = next(s for s in runner._decoder._slots if sequence in s.members)
    heads, checked = slots.heads, 0
    for layer in range(len(heads.spec.layers)):
        of_kv = queries[layer].double().view(heads.spec.kv_heads, -1, queries.shape[-1])
        for budget, some, ranks in heads.ranked(layer):
            table = sequence.request.entries(budget.group).tolist()
            if len(table) <= budget.pages:
                continue
            group = slots.chosen.groups[heads.budgets.index(budget)]
            room, row = group.room, slots.members[sequence]
            chosen = room.chosen[row, :, : budget.pages].tolist()
            # The newest entry, which is always read, has no means.
            ranked = room.ranked[group.lies[row, 0] :][: len(table) - 1]
            for head, rank in zip(some, ranks, strict=True):
                stored = [stored_tokens(runner, entry, rank) for entry in table]
                expect_means(room, budget, ranked, rank, stored[:-1])
                scores = [
                    page_score(
                        turned_back(runner, of_kv[head], entry[4]),
                        kv[0],
                        budget.score,
                        fp8=budget.fp8,
                    )
                    for entry, kv in zip(table, stored, strict=True)
                ]
                best = best_pages(scores, budget.pages)
                assert chosen[rank] == [table[page] for page in best]
                checked += 1
    return checked


def every_place_came_back(runner: Runner) -> bool:
    """Whether no bounds are kept for anybody."""
    for slots in runner._decoder._slots:
        assert slots.chosen is not None
        for group in slots.chosen.groups:
            free = sorted(group.bounds.free.tolist())
            if free != list(range(len(group.bounds.values))) or (group.places >= 0).any():
                return False
    return True


@contextmanager
def checked_choices(runner: Runner) -> Iterator[list[int]]:
    """While entered, each step's choices are compared with the definition; how many heads chose.

    For maps that are ranked at every step.
    """
    decoder, counted = runner._decoder, list[int]()
    step = decoder.step

    def checked(batch: Any, **named: Any) -> Any:
        said = step(batch, **{**named, "watched": True})
        queries = decoder.queries
        for number, sequence in enumerate(batch):
            counted.append(expect_chosen(runner, sequence, queries[:, number]))
        return said

    decoder.step = checked  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        del decoder.step  # type: ignore[method-assign]


def logits_of_steps(runner: Runner, tokens: Any, steps: int) -> tuple[list[int], list[Any]]:
    """Greedy tokens behind a prompt and the logits of each, by the runner's own decode steps."""
    seen: list[torch.Tensor] = []

    def choose(batch: Any, logits: torch.Tensor, _greedy: bool) -> Any:
        seen.append(logits.clone())
        return np.array([s.choose(row) for s, row in zip(batch, logits, strict=True)])

    with runner.prefill(tokens, "full", remember=False, reserve_tokens=steps) as done:
        seen.append(done.logits[-1:].clone())
        sequence = decoding(runner, done, steps + 1)
        with torch.inference_mode():
            for _ in range(steps):
                runner._decoder.step([sequence], choose=choose)
        runner._decoder.forget(sequence.request)
        return sequence.tokens, [logits[0] for logits in seen]
