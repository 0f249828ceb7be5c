"""Whole decode steps over packed pages that are not all in one format, or not all read.

A model of Llama-3.1-8B's shape with random weights, some of its layers. Requests have random keys
and values, packed by a runner as their prefill would have them packed; only the layers of the
prompts are not computed. Beside exact pages, INT4 and half-int4:

- *a document that all share* is prefilled and packed once, and read by prompts that have it at
  unlike positions between text of their own;
- *a tenth chosen* is a head map of nothing but heads that read a tenth of the packed pages;
- *segments in bases of their own* are what `Packing(segment_tokens=…)` leaves of a request's text
  once the host has packed it finally: each block of a segment names the segment's basis;
- *segments in three formats* are what a strategy leaves: a request's segments lie beside the pool,
  of every three KV heads one in INT4 and two with the half and the quarter of their numbers in four
  bits, and each step reads all segments by a launch a format.

Bases and the numbers in pages are random: what a step reads lies where it would, and means nothing.
Steps are timed as in `packed_step`. They are replayed from graphs; what is launched *one kernel at
a time* stands beside them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.cases.packed_decode import random_bases
from benchmarks.cases.packed_step import is_captured, timed
from benchmarks.cases.top_k_step import EVERY, choosing
from benchmarks.device.models import random_model
from benchmarks.device.placed_requests import placed
from kvweave import Runner, Sampling, ops
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import summarise
from kvweave.ops.packed_kv import Preset
from kvweave.packed_page import PAGE_TOKENS
from kvweave.runner import Packing, Segment, Strategy
from kvweave.runner.decode import Decoding
from kvweave.runner.kv.final_text import FormatData
from kvweave.runner.kv.packed_pool import PackedPool
from kvweave.runner.kv.packed_prefix import PackedPrefix
from kvweave.runner.model.model_spec import describe

CHOSEN = 10
"""Of so many packed pages a head chooses one."""
WARM_STEPS = 40
"""Steps until those that choose every 16 steps are captured too."""
ROOM = 2
"""Times the tokens of all requests that a runner has room for: a document comes beside them."""


@dataclass(frozen=True)
class Load:
    """So many requests of so many tokens and a few more, in some layers of a model.

    `segment`: tokens of a segment that is packed finally. Of each kind so many `steps` are timed,
    behind `warm` others.
    """

    model: str
    layers: int
    requests: int
    tokens: int
    segment: int
    steps: int
    warm: int = WARM_STEPS

    @property
    def title(self) -> str:
        return f"{self.model}, {self.layers} layers, {self.requests} × {self.tokens}"

    def lengths(self) -> list[int]:
        """Tokens of each request: about a page's worth apart in all."""
        return [self.tokens + at * PAGE_TOKENS // self.requests for at in range(self.requests)]

    @property
    def limit(self) -> int:
        """Tokens that a request says at most."""
        return self.steps + self.warm + 8


@dataclass(frozen=True)
class Kind:
    """One way in which what is read lies: in pages of a format, exact ones for None.

    `document`: all read one. `every`: heads choose pages every so many steps. `segments`: these
    have bases of their own. `strategy`: or formats. `captured`: steps are replayed from a graph.
    """

    name: str
    format: Preset | None
    document: bool = False
    every: int | None = None
    segments: bool = False
    strategy: bool = False
    captured: bool = True


LAUNCHED = "one kernel at a time"
KINDS = (
    Kind("exact", None),
    Kind("INT4", "int4"),
    Kind(f"INT4, {LAUNCHED}", "int4", captured=False),
    Kind("INT4, a document that all share", "int4", document=True),
    Kind("INT4, a tenth chosen every 16 steps", "int4", every=EVERY),
    Kind(f"INT4, a tenth chosen every 16 steps, {LAUNCHED}", "int4", every=EVERY, captured=False),
    Kind("INT4, a tenth chosen at every step", "int4", every=1),
    Kind("half-int4", "half-int4"),
    Kind("half-int4, segments in bases of their own", "half-int4", segments=True),
    Kind("segments in three formats", "int4", strategy=True),
    Kind(f"segments in three formats, {LAUNCHED}", "int4", strategy=True, captured=False),
)

# A basis of half-int4 takes an eighth of a segment's bytes from 10 561 tokens on.
ON_GPU = tuple(
    Load("Llama-3.1-8B", 4, requests, tokens, 16_384, 64)
    for tokens in (16_384, 32_768)
    for requests in (1, 8, 16)
)
QUICK = (Load("Llama-3.1-8B", 2, 4, 16_384, 16_384, 8),)
ON_CPU = (Load("tiny Llama", 2, 2, 2560, 2560, 4, 4),)


def run(quick: bool) -> list[Row]:
    on_gpu = torch.cuda.is_available()
    loads = (QUICK if quick else ON_GPU) if on_gpu else ON_CPU
    first = loads[0]
    model = random_model(first.model, "cuda" if on_gpu else "cpu", layers=first.layers)
    return [row for load in loads for row in stepped(model, load)]


def stepped(model: Any, load: Load) -> list[Row]:
    """What steps of a load take over pages of each kind."""
    rows: list[Row] = []
    for kind in KINDS:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        rows.append(_row(model, load, kind))
    exact, packed = rows[0].value, rows[1].value
    for row in rows:
        row.of["exact ÷ this"], row.of["INT4 ÷ this"] = exact / row.value, packed / row.value
    return rows


@torch.inference_mode()
def _row(model: Any, load: Load, kind: Kind) -> Row:
    """What steps over pages of one kind take."""
    with closing(_runner(model, load, kind)) as runner:
        if not kind.captured:
            runner._decoder.graphs = None
        batch = list(_documents(runner, load) if kind.document else _texts(runner, load, kind))
        times = timed(runner, batch, load.steps, load.warm)
        if runner.spec.device.type == "cuda":
            said = f"{kind.name}: expected captured steps: {kind.captured}, got the opposite"
            expect(is_captured(runner) == kind.captured, said)
        timing, held = summarise(times), _held_bytes(runner, batch) / 1e9
    of = {"KV GB": held, "worst ms": 1e3 * max(times)}
    return Row(f"{load.title}: {kind.name}", 1e3 * timing.median_s, "ms", 1e3 * timing.p95_s, of)


def _runner(model: Any, load: Load, kind: Kind) -> Runner:
    """One that packs in a random basis, where its format has any."""
    heads, packing = None, None
    if kind.every is not None:
        pages = max(3, load.tokens // PAGE_TOKENS // CHOSEN)
        heads = choosing(describe(model), pages, unstable_every=1 if kind.every == 1 else 0)
    if kind.format is not None:
        of = ops.packed_format(kind.format, model.config.head_dim)
        basis = _random_basis(model.device, load.layers * model.config.num_key_value_heads, of)
        packing = Packing(kind.format, basis)
    if kind.strategy:
        _, *candidates = _mixed(model.config.head_dim)
        packing = Packing("int4", strategy=Strategy(0.0, tuple(candidates), final_share=1.0))
    if (kind.strategy or kind.segments) and packing is not None:
        packing = replace(packing, segment_tokens=load.segment)
    room = ROOM * load.requests * (load.tokens + load.limit + 4 * PAGE_TOKENS)
    settings = {"max_tokens": room, "heads": heads, "check": False, "progress": False}
    return Runner(model, kv_dtype=packing, **settings)


def _mixed(head_dim: int) -> tuple[ops.PackedFormat, ...]:
    """The formats of a strategy's segments, by KV heads in turn; it falls back to the first."""
    quarter = ops.PackedFormat("top-r", head_dim, kept=head_dim // 4, numbers="int4")
    named = (ops.packed_format(name, head_dim) for name in ("int4", "half-int4"))
    return (*named, quarter)


def _random_basis(
    device: torch.device, pages: int, of: ops.PackedFormat, seed: int = 0
) -> torch.Tensor | None:
    made = random_bases(pages, of, torch.Generator(device).manual_seed(seed))
    return None if made is None else made[0]


def _texts(runner: Runner, load: Load, kind: Kind) -> Iterator[Decoding]:
    """Requests of text of their own, whose segments are packed finally where they are to be."""
    runner._decoder.pages.normal_()
    rotary, pool = runner._prefiller.rotary, runner.packed
    for length in load.lengths():
        kv = placed(runner, length, load.limit)
        if kv.packed is not None and pool is not None:
            for at in range(load.tokens // load.segment if kind.segments or kind.strategy else 0):
                put = _in_formats if kind.strategy else _in_own_basis
                put(pool, kv.packed, at * load.segment, (at + 1) * load.segment)
        known = rotary.table(length + load.limit), Sampling(), load.limit, runner.spec.device
        yield Decoding(kv.request, *known, tokens=[1], packed=kv.packed)


def _in_own_basis(pool: PackedPool, packed: PackedPrefix, first: int, end: int) -> None:
    """Has the tokens [first, end) of a request be packed in a basis of their own."""
    assert pool.bases is not None
    number = pool.bases.free()
    assert number is not None, "there is room for a basis of each segment"
    basis = _random_basis(pool.device, pool.block_pages, pool.pages.format, number)
    assert basis is not None
    pool.bases.write(number, basis)
    pool.bases.assign(_blocks(packed, first, end), number)


def _in_formats(pool: PackedPool, packed: PackedPrefix, first: int, end: int) -> None:
    """Has the tokens [first, end) of a request lie beside the pool, in several formats."""
    final, blocks = pool.final, _blocks(packed, first, end)
    assert final is not None
    held = packed.request.fork()
    held.truncate(end)
    made = []
    formats = _mixed(pool.head_dim)
    for number, of in enumerate(formats):
        ranks = np.arange(number, pool.block_pages, len(formats))
        basis = _random_basis(pool.device, len(ranks), of)
        data = _random_pages(pool, of, basis, len(blocks), len(ranks))
        made.append(FormatData(of, ranks, data, basis))
    final.take(held, blocks, made, (0.0, 0))


def _random_pages(
    pool: PackedPool, of: ops.PackedFormat, basis: torch.Tensor | None, blocks: int, pages: int
) -> torch.Tensor:
    """Random numbers packed in a format: u8 [blocks, pages of each, bytes]."""
    shape = (pages * (1 + blocks), 2, PAGE_TOKENS, pool.head_dim)
    exact = torch.empty(shape, dtype=pool.exact.dtype, device=pool.device).normal_()
    known = None if basis is None else basis[None]
    made = ops.PackedPages.zeros(len(exact), of, pool.device, bases=known)
    at = pages * torch.arange(1, 1 + blocks, dtype=torch.int32, device=pool.device)
    packs = torch.stack((at, torch.full_like(at, PAGE_TOKENS), at), 1)
    ops.pack_pages(exact, made, packs if exact.is_cuda else packs.numpy(), pages=pages)
    return made.data[pages:].view(blocks, pages, -1)


def _blocks(packed: PackedPrefix, first: int, end: int) -> Any:
    """The packed blocks of a request's tokens [first, end)."""
    return packed.request.entries()[first // PAGE_TOKENS : end // PAGE_TOKENS, 0]


def _documents(runner: Runner, load: Load) -> Iterator[Decoding]:
    """Requests that read one document, between text of their own."""
    draws, words = np.random.default_rng(load.tokens), runner.spec.vocabulary
    document = draws.integers(0, words, load.tokens).tolist()
    runner.insert(document, "document")
    for at in range(load.requests):
        own = [
            Segment(tokens=draws.integers(0, words, count).tolist(), namespace="nobody's")
            for count in (PAGE_TOKENS + at, PAGE_TOKENS)
        ]
        prompt = [own[0], Segment(tokens=document), own[1]]
        asked = {"reserve_tokens": load.limit, "remember": False, "watched": False}
        done = runner.prefill(prompt, "naive", **asked)
        expect(done.report.reused_segment > 0, "expected a document that is found, got none")
        known = done.positions, Sampling(), load.limit, runner.spec.device
        yield Decoding(done.request, *known, tokens=[1], packed=done.kv.packed)


def _held_bytes(runner: Runner, batch: list[Decoding]) -> int:
    """Bytes of all blocks that are held, exact and packed, what is shared once."""
    exact = sum(sum(sequence.request.kv_bytes()) for sequence in batch)
    return exact + (0 if runner.packed is None else int(runner.packed.stats()["held_bytes"]))
