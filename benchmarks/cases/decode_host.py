"""Host time of a decode step: what a batch costs beside its model.

The model has no layer, so that a step is all that is done around one: tokens appended in the cache,
tables brought up to date, a patch written and sent, tokens chosen. *steady*: the same batch in
every step. *joins*: in every step one request leaves and another joins (where there is one, it).
On a GPU what is launched is captured and replayed; on the CPU the same few operations on tables run
one by one, and count. *in the cache* is the one call of a step that goes there, without the rest.
*an engine's step* is one of the smallest model there is, whole: planned, decoded, delivered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from kvweave._native import DecodeRows
from kvweave.cache import HeadClassMap, KvCache, KvRequest, KvShape
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import Timing, summarise
from kvweave.runner import Runner
from kvweave.runner.decode import Decoder, Decoding, Sampling
from kvweave.runner.decode.graph import StepGraphs
from kvweave.runner.kv.heads import HeadReads
from kvweave.runner.model.model_spec import describe
from kvweave.runner.model.rope import Rotary

PAGE = 16
TOKENS = 1024
BATCHES = (1, 32, 256)
PROMOTED, SHARERS = 8, 32
# What the design asks for.
LIMIT_US = {256: 150.0}


def run(quick: bool) -> list[Row]:
    steps = 40 if quick else 400
    rows = []
    for count in BATCHES[:2] if quick else BATCHES:
        for name in ("steady", "joins"):
            batch = Batch.of(count, steps)
            rows.append(
                row(f"{count} requests, {name}", batch.timed(name == "joins", steps), count)
            )
        rows.append(row(f"{count} requests, in the cache", native(count, steps), None))
        rows.append(row(f"{count} requests, an engine's step", engine(count, steps), None))
    rows.append(row(f"{SHARERS} requests of unlike promotions, in the cache", shared(steps), None))
    return rows


def row(name: str, timed: Timing, batch: int | None) -> Row:
    limit = {"limit": LIMIT_US[batch]} if batch in LIMIT_US else {}
    return Row(name, timed.median_s * 1e6, "µs", timed.p95_s * 1e6, limit)


def times_of(call: Callable[[], object], steps: int) -> Timing:
    """Each call by itself, for no two are alike; the first ones are not counted."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return summarise(times[steps // 8 :])


@dataclass
class Batch:
    """Requests that decode, and twice as many that could."""

    decoder: Decoder
    seated: list[Decoding]
    waiting: list[Decoding]

    @staticmethod
    def of(count: int, steps: int) -> Batch:
        """Prompts of TOKENS tokens whose KV nobody has computed."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        blocks = 2 * count * ((TOKENS + steps) // PAGE + 2) + 1
        decoder = decoder_of(blocks, device)
        cache, positions = decoder.heads.cache, decoder.rotary.table(TOKENS)
        requests = admitted(cache, 2 * count)
        made = [
            Decoding(request, positions, Sampling(), 2 * steps, device, tokens=[1])
            for request in requests
        ]
        return Batch(decoder, made[:count], made[count:])

    def timed(self, joins: bool, steps: int) -> Timing:
        """Steps of the batch; with `joins` another one each time."""

        @torch.inference_mode()
        def step() -> None:
            self.decoder.step(self.seated)

        def change() -> None:
            step()
            if joins:
                self.waiting.append(self.seated.pop(0))
                self.seated.append(self.waiting.pop(0))

        timed = times_of(change, steps)
        said = sum(len(s.tokens) - 1 for s in (*self.seated, *self.waiting))
        expect(said == steps * len(self.seated), f"expected a token a step, got {said}")
        self.decoder.heads.cache.check()
        return timed


def smallest(device: torch.device) -> Any:
    """A model of one layer with one head."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config).to(device).eval()


def engine(count: int, steps: int) -> Timing:
    """Steps of an engine in which all its requests decode."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runner = Runner(
        smallest(device),
        max_tokens=count * (steps + 3 * PAGE),
        page_tokens=PAGE,
        check=False,
        progress=False,
    )
    with closing(runner.engine(token_budget=None, max_running=count)) as made:
        for seed in range(count):
            made.submit([seed % 64] * (1 + seed % PAGE), "full", max_new_tokens=steps + 2)
        while made.metrics()["decoding"] < count:
            made.step()
        return times_of(made.step, steps - 1)


def decoder_of(blocks: int, device: torch.device) -> Decoder:
    """Steps of a model without layers over an arena of so many blocks."""
    whole = describe(smallest(device))
    shape = (blocks, 2, PAGE, whole.head_dim)
    pages = torch.zeros(shape, dtype=whole.dtype, device=device)
    cache = KvCache(KvShape(1, 1, whole.head_dim, PAGE), external=pages)
    spec = replace(whole, layers=(), final_norm=nn.Identity(), head=nn.Identity())
    decoder = Decoder(HeadReads(spec, cache), Rotary(whole), pages)
    if decoder.graphs is None:
        decoder.graphs = StepGraphs(decoder.heads, decoder.rotary, pages, None)
        decoder.graphs.capturable = False
    return decoder


def admitted(cache: KvCache, count: int) -> list[KvRequest]:
    """Prompts, the ends of whose last blocks lie in unlike steps."""
    lengths = TOKENS - np.arange(count) % PAGE
    return [cache.admit(np.zeros(length, np.int32), reuse="none") for length in lengths]


def native(count: int, steps: int) -> Timing:
    """The call of a step that appends and says what has changed."""
    cache = KvCache(
        KvShape(1, 1, 8, PAGE), blocks=count * ((TOKENS + steps) // PAGE + 2), memory=False
    )
    return stepped(cache, admitted(cache, count), [], steps)


def stepped(cache: KvCache, requests: list[KvRequest], heads: list[Any], steps: int) -> Timing:
    rows, tokens = DecodeRows(cache), np.ones(len(requests), np.int32)
    rows.set_heads(np.asarray(heads, np.int32).reshape(-1, 4))
    numbers = np.asarray([rows.join() for _ in requests], np.int32)
    timed = times_of(lambda: rows.step(requests, numbers, tokens), steps)
    grown = [request.length + i % PAGE for i, request in enumerate(requests)]
    expect(set(grown) == {TOKENS + steps}, f"expected a token a step, got lengths {set(grown)}")
    cache.check()
    return timed


def shared(steps: int) -> Timing:
    """A step of requests that have each promoted other heads of a window group."""
    layers, heads = 8, 8
    kept = {"kind": "window", "sink": PAGE, "recent": 256}
    labels = {"reach": "local", "stability": "stable"}
    places = [(layer, head) for layer in range(layers) for head in range(heads)]
    made = {
        "schema_version": 1,
        "model_fingerprint": "decode_host",
        "layers": layers,
        "kv_heads": heads,
        "heads": [{"layer": at, "head": h, "class": kept, **labels} for at, h in places],
    }
    heads_of = HeadClassMap.from_json(json.dumps(made))
    shape, blocks = KvShape(layers, heads, 8, PAGE), 3 * SHARERS * (TOKENS + steps) // PAGE
    cache = KvCache(shape, blocks=blocks, heads=heads_of, fingerprint="decode_host", memory=False)
    requests, draws = admitted(cache, SHARERS), np.random.default_rng(0)
    promoted: dict[tuple[int, int], None] = {}
    for request in requests:
        for at in draws.choice(len(places), PROMOTED, replace=False).tolist():
            request.promote(*places[at])
            promoted[places[at]] = None
        request.advance(request.length, request.length)
    sights = [(*place, 256, PAGE) for place in promoted]
    expect(len({tuple(r.promoted) for r in requests}) == SHARERS, "expected unlike promotions")
    return stepped(cache, requests, sights, steps)
