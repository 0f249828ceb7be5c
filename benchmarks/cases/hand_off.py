"""Prefill here, decode there: what it takes to hand a prompt over by NIXL, beside computing it.

Two processes, each with a model of the same weights: of the 8B shape on GPUs, two where there are
two, else SmolLM2. One prefills, exports and offers; the other takes the payload and says the first
token, its own prefill being what that is measured against. Parts travel through the memory of both
hosts, or between GPUs as they lie. `map`: one KV head of each layer is whole, the others have a
window. Sender: `export` gathers the KV, `offer` registers and digests it. Receiver: `take` reads
and digests, `resume` writes it into pages and decodes a token.
"""

from __future__ import annotations

import multiprocessing
import secrets
import time
from dataclasses import astuple, dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

import kvweave
from benchmarks.cases.ttft_heads import one_head_a_layer
from benchmarks.device.models import random_model
from kvweave.adapters.nixl import KvReceiver, KvSender
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import summarise
from kvweave.models import load_smollm2
from kvweave.runner.model.model_spec import describe

ON_DEVICE, ON_HOST = "Llama-3.1-8B", "SmolLM2-135M"
LENGTHS = {ON_DEVICE: (8192, 32768), ON_HOST: (1024, 4096)}
SAID = 8
"""Tokens that both say, to be the same."""
ROUNDS = 4
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Problem:
    """A model by name, where each process has it, and the length of a prompt."""

    model: str
    prefills: str
    decodes: str
    tokens: int

    def runner(self, device: str, mapped: bool) -> kvweave.Runner:
        """One on a device."""
        if device != "cpu":
            torch.cuda.set_device(device)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        smol = self.model == ON_HOST
        model = load_smollm2()[0] if smol else random_model(self.model, device, dtype)
        heads = one_head_a_layer(describe(model)) if mapped else None
        room = {"max_tokens": 2 * self.tokens + 1024, "check": False, "progress": False}
        return kvweave.Runner(model, heads=heads, **room)

    @property
    def prompt(self) -> list[int]:
        """Drawn tokens, the same for both."""
        drawn: list[int] = np.random.default_rng(0).integers(0, 512, self.tokens).tolist()
        return drawn


@dataclass(frozen=True)
class Took:
    """Seconds of each step of one hand-over."""

    export: float
    offer: float
    take: float
    resume: float


def run(quick: bool) -> list[Row]:
    count = torch.cuda.device_count()
    name = ON_DEVICE if count else ON_HOST
    devices = ("cuda:0", f"cuda:{count - 1}") if count else ("cpu", "cpu")
    lengths = (512,) if quick else LENGTHS[name]
    rows = []
    for tokens in lengths:
        for mapped in (False, True):
            rows += rows_of(Problem(name, *devices, tokens), mapped, 1 if quick else ROUNDS)
    return rows


def rows_of(problem: Problem, mapped: bool, rounds: int) -> list[Row]:
    """A row a way of the bytes."""
    spawning, secret = multiprocessing.get_context("spawn"), secrets.token_bytes(32)
    here, there = spawning.Pipe()
    other = spawning.Process(target=prefill_for, args=(there, problem, mapped, secret), daemon=True)
    other.start()
    # So that a process that dies is heard of.
    there.close()
    try:
        runner = problem.runner(problem.decodes, mapped)
        asked: dict[str, Any] = {"stop": (), "remember": False}
        alone = runner.generate(problem.prompt, "full", max_new_tokens=SAID, **asked)
        computed = [
            runner.generate(problem.prompt, "full", max_new_tokens=1, **asked).report.ttft_s
            for _ in range(rounds)
        ]
        prefill = summarise(computed).median_s
        ways = (False,) if problem.decodes == "cpu" else (False, True)
        with KvReceiver(secret, device=problem.decodes, timeout_s=PATIENCE_S) as receiver:
            rows = []
            for way in ways:
                handed = _handed(here, receiver, runner, way, alone, rounds)
                rows.append(_row(problem, mapped, way, prefill, handed))
            return rows
    finally:
        if other.is_alive():
            here.send(None)
            other.join(PATIENCE_S)


def prefill_for(asked: Connection, problem: Problem, mapped: bool, secret: bytes) -> None:
    """The process that prefills: offers the prompt each time that it is asked to."""
    runner = problem.runner(problem.prefills, mapped)
    with runner.prefill(problem.prompt, "full", remember=False) as done, KvSender(secret) as sender:
        while (on_device := asked.recv()) is not None:
            begun = time.perf_counter()
            payload = runner.export(done)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            exported = time.perf_counter()
            with sender.offer(payload, valid_s=PATIENCE_S, on_device=on_device) as offer:
                ready = time.perf_counter()
                sizes = payload.sizes()
                times = exported - begun, ready - exported
                asked.send((offer.ticket, times, sizes.total, sizes.dense))
                expect(offer.wait(PATIENCE_S), "expected the offer to be taken")


@dataclass(frozen=True)
class Handed:
    """Hand-overs of one kind: bytes that travelled, those of a dense payload, and times."""

    total: int
    dense: int
    took: list[Took]


def _handed(
    other: Connection,
    receiver: KvReceiver,
    runner: kvweave.Runner,
    on_device: bool,
    alone: kvweave.Generation,
    rounds: int,
) -> Handed:
    found, total, dense = [], 0, 0
    # The first time peers look for a way to each other.
    for number in range(rounds + 1):
        other.send(on_device)
        expect(other.poll(PATIENCE_S), "expected an offer")
        ticket, times, total, dense = other.recv()
        begun = time.perf_counter()
        payload = receiver.take(ticket)
        taken = time.perf_counter()
        said = runner.resume(payload, max_new_tokens=1, stop=())
        resumed = time.perf_counter()
        expect(said.tokens == alone.tokens[:1], f"expected {alone.tokens[:1]}, got {said.tokens}")
        if number:
            found.append(Took(*times, taken - begun, resumed - taken))
        else:
            longer = runner.resume(payload, max_new_tokens=SAID, stop=())
            expect(longer.tokens == alone.tokens, "expected the tokens of one that does both")
    return Handed(total, dense, found)


def _row(problem: Problem, mapped: bool, on_device: bool, prefill: float, handed: Handed) -> Row:
    steps = [float(np.median(step)) for step in zip(*map(astuple, handed.took), strict=True)]
    whole = summarise([sum(astuple(one)) for one in handed.took])
    names = ("export s", "offer s", "take s", "resume s")
    beside = {
        "÷ prefill": whole.median_s / prefill,
        **dict(zip(names, steps, strict=True)),
        "MB": handed.total / 1e6,
        "÷ dense": handed.total / handed.dense,
    }
    way = "GPU to GPU" if on_device else "by the hosts"
    kind = ", map" if mapped else ""
    name = f"{problem.model}, {problem.tokens} tokens{kind}, {way}"
    return Row(name, whole.median_s, "s", whole.p95_s, beside)
