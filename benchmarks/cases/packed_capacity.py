"""How long a request, and how many of 32K tokens, one GPU holds beside a model's weights.

Llama-3.1-8B's shape with all of its layers and random weights. A `Runner` is given all memory that
the weights leave but a spare part, for positions' tables, workspaces and graphs: the smallest of
`SPARES` that suffices. Requests are admitted until one is refused, moved through the pool chunk by
chunk as their prefill would, packed where pages are, and decoded for two steps; only the layers of
the prompts are not computed. So everything that is counted has been allocated, and read once.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cases.packed_decode import random_bases
from benchmarks.device.models import random_model
from benchmarks.device.placed_requests import admitted, placed
from kvweave import OutOfMemory, PoolFull, Runner, Sampling, ops
from kvweave.lab.bench.rows import Row, expect
from kvweave.packed_page import PAGE_TOKENS
from kvweave.runner import Packing
from kvweave.runner.decode import Decoding
from kvweave.runner.kv.request_kv import RequestKv

FORMATS = (None, "int4", "half-int4", "planes-3")
SPARES = tuple(gibibytes << 30 for gibibytes in (4, 8, 12, 16, 24))
STEPS = 2


@dataclass(frozen=True)
class Device:
    """So many `layers` of a model (0: all), and where they lie.

    Pages have `arena_bytes`, or what is free there; a batch is of requests of `batch_tokens`.
    """

    model: str
    name: str
    layers: int
    batch_tokens: int
    arena_bytes: int | None = None


ON_GPU = Device("Llama-3.1-8B", "cuda", 0, 32_768)
QUICK = Device("small Llama", "cpu", 2, 512, 16 << 20)


def run(quick: bool) -> list[Row]:
    on = ON_GPU if torch.cuda.is_available() and not quick else QUICK
    return held(on, random_model(on.model, on.name, layers=on.layers))


def held(on: Device, model: Any) -> list[Row]:
    """The longest request and the largest batch over pages of each format."""
    rows: list[Row] = []
    for what, fill in (("one request", longest), (f"requests of {on.batch_tokens}", batch)):
        for name in FORMATS:
            found = _largest(on, model, name, fill)
            unit = "tokens" if fill is longest else "requests"
            exact = rows[-FORMATS.index(name)].value if name else float(found.count)
            of = {"÷ exact": found.count / exact, **found.of}
            title = f"{on.model}, {what}: {name or 'exact'}"
            rows.append(Row(title, float(found.count), unit, None, of))
    return rows


@dataclass(frozen=True)
class Found:
    """So many tokens or requests, and what they took."""

    count: int
    of: dict[str, float]


Fill = Callable[[Runner, Device], tuple[int, list[RequestKv]]]


def longest(runner: Runner, on: Device) -> tuple[int, list[RequestKv]]:
    """Tokens of the longest request that is admitted, by bisection over whole pages, and it."""
    pool = runner.cache if runner.packed is None else runner.packed.cache
    room = pool.stats()["arena_pages"] // (pool.shape.layers * pool.shape.kv_heads)
    few, many = 1, room * pool.shape.page_tokens // PAGE_TOKENS + 1
    while many - few > 1:
        middle = (few + many) // 2
        try:
            admitted(runner, middle * PAGE_TOKENS, STEPS).release()
            few = middle
        except PoolFull:
            many = middle
    return few * PAGE_TOKENS, [placed(runner, few * PAGE_TOKENS, STEPS)]


def batch(runner: Runner, on: Device) -> tuple[int, list[RequestKv]]:
    """As many requests as are admitted, and they."""
    requests: list[RequestKv] = []
    with suppress(PoolFull):
        while True:
            requests.append(placed(runner, on.batch_tokens, STEPS))
    return len(requests), requests


def _largest(on: Device, model: Any, name: str | None, fill: Fill) -> Found:
    """What a runner holds that has all memory but the smallest spare part that suffices."""
    found: Found | str = ""
    for spare in SPARES:
        _clear()
        found = _beside(spare, on, model, name, fill)
        if isinstance(found, Found):
            return found
    raise RuntimeError(f"{name or 'exact'}: expected {SPARES[-1]} bytes to suffice, got {found}")


def _beside(spare: int, on: Device, model: Any, name: str | None, fill: Fill) -> Found | str:
    """What a runner holds beside so many bytes, or what was said where they did not suffice.

    Nothing that is returned refers to the runner: its memory is given back before the next one's.
    """
    try:
        with closing(_runner(on, model, name, spare)) as runner:
            return _stepped(runner, on, fill, spare)
    except (OutOfMemory, torch.OutOfMemoryError) as error:
        return str(error)


def _clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _runner(on: Device, model: Any, name: str | None, spare: int) -> Runner:
    room = on.arena_bytes or torch.cuda.mem_get_info()[0] - spare
    packing, config = None, model.config
    if name is not None:
        of = ops.packed_format(name, config.head_dim)  # type: ignore[arg-type]
        pages = config.num_hidden_layers * config.num_key_value_heads
        bases = random_bases(pages, of, torch.Generator(on.name).manual_seed(0))
        packing = Packing(name, None if bases is None else bases[0])
    known = {"arena_bytes": room, "check": False, "progress": False}
    return Runner(model, kv_dtype=packing, **known)


@torch.inference_mode()
def _stepped(runner: Runner, on: Device, fill: Fill, spare: int) -> Found:
    """What a runner is filled with, once it has been decoded."""
    count, held = fill(runner, on)
    expect(count > 0, f"expected a request that fits, got none in {on}")
    rotary, device = runner._prefiller.rotary, runner.spec.device
    sequences = [
        Decoding(
            kv.request,
            rotary.table(kv.request.length + STEPS),
            *(Sampling(), STEPS + 1, device),
            tokens=[1],
            packed=kv.packed,
        )
        for kv in held
    ]
    seconds = 0.0
    for _ in range(STEPS):
        start = time.perf_counter()
        said = runner._decoder.step(sequences)
        seconds = time.perf_counter() - start
        expect(len(said) == len(held), f"expected a token of each, got {len(said)}")
        for sequence, token in zip(sequences, said.tolist(), strict=True):
            sequence.tokens.append(token)
    of = {"step ms": 1e3 * seconds, "KV GB": _pool_bytes(runner) / 1e9, "spare GB": spare / 1e9}
    if torch.cuda.is_available():
        of["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    runner._decoder.forget()
    for kv in held:
        kv.release()
    return Found(count, of)


def _pool_bytes(runner: Runner) -> int:
    """Bytes of all pages, bases and bounds."""
    packed = 0 if runner.packed is None else runner.packed.nbytes
    return runner._decoder.pages.nbytes + packed
