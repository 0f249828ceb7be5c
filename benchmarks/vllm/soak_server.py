"""The soak of a server: `python -m benchmarks.vllm.soak --mode server`.

Marked chats over HTTP of several clients at once, streams that are left, several answers, stop
strings, grammars; beside them documents of two namespaces come and go by the routes of knowledge
bases, caches are reset, the engine sleeps, and a stranger asks about all documents in a namespace
of his own, who must find none. Pages of the store are packed in INT4, with a folder. In the end
nothing may be held. A server that is asked one chat at a time has to answer the same.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from benchmarks.soak.asked import CHOICE, NAMESPACES, Asked, Author, Library
from benchmarks.soak.memory import MIB, Memory, resident_bytes
from benchmarks.soak.words import word_tokenizer
from benchmarks.vllm.device import prepare
from benchmarks.vllm.server import MIDDLEWARE, free_port, running, samples, words_of
from benchmarks.vllm.soak_chats import CHATS, KNOWLEDGE, NAME, TEMPLATE, Caller, body_of, said_of
from benchmarks.vllm.soak_compare import Comparison
from benchmarks.vllm.soak_engine import ALLOWED, VOCABULARY, Served, lines_of, server_options

SERVED = Served(24 << 20, heads=False, dtype="int4", tolerance=0.02)
WEIGHTS = {"plain": 3, "many": 1, "stop": 1, CHOICE: 1, "naive": 4, "foresight": 2, "full": 1}
COMPARED = ("plain", "many", "stop", CHOICE, "full", "naive")
"""Kinds that are answered alike however their prompts are cut: nobody says how over HTTP."""
CLIENTS, DOCUMENTS = 3, 12
LIBRARY = Library(shortest=130, spread=60, marked=2)
"""Documents of two packed pages and more: what requests leave of one has a whole page."""
LEAVE, SPY = 0.15, 0.1
"""Chances of a request: its client leaves the stream, or it is a stranger's."""
PAUSE_S, RESET, SLEEP = 1.0, 0.1, 0.05
"""Between changes of documents; chances of a change: caches are reset, the engine sleeps."""
START_S = 3000
MOST_GROWTH = 32
"""MiB that a server may seem to gain over the second half of a load."""
EVENTS = ("put", "dropped", "left", "spied", "slept", "answers")
"""What must have happened in a soak."""
RESETS = ("reset", "reset refused")
"""One of these too: clients hold blocks nearly all the time, and vLLM refuses then."""


@contextmanager
def server(folder: Path, kept: str) -> Iterator[tuple[Caller, Path]]:
    """A server over a folder of documents, and its log."""
    tokenizer = word_tokenizer(VOCABULARY)
    tokenizer.chat_template = TEMPLATE
    model, log = folder / "model", folder / f"{kept}.log"
    tokenizer.save_pretrained(model)
    given = {**server_options(model, folder / kept, SERVED), "served_model_name": NAME}
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.vllm.vllm_command", "server", "--model"]
    words = [str(model), *words_of(given), *MIDDLEWARE, "--port", str(port)]
    env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    with running([*command, *words], port, START_S, log, env):
        yield Caller(port), log


def inserted(caller: Caller, number: int) -> tuple[int, Any]:
    """Puts a document, as chats have it: the blank before its first word is no part of a text."""
    space, name, tokens = LIBRARY.document(number)
    value = {"name": name, "tokens": tokens[1:], "namespace": space}
    return caller.call("POST", KNOWLEDGE, value)


class ServerLoad:
    """What clients and a librarian do to a server; what ended is kept in `records`."""

    def __init__(self, caller: Caller, seed: int) -> None:
        self.caller, self.seed = caller, seed
        self.happened: Counter[str] = Counter()
        self.complaints: list[str] = []
        self.records: list[dict[str, Any]] = []
        self.there: list[int] = []
        self._lock = threading.Lock()
        self._documents = 0
        self._until = 0.0

    def run(self, seconds: float) -> None:
        """So many seconds of it; then all documents go."""
        for _ in range(DOCUMENTS):
            self._put()
        self._until = time.monotonic() + seconds
        threads = [threading.Thread(target=self._client, args=(n,)) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        numbers = np.random.default_rng([self.seed, 99])
        while time.monotonic() < self._until:
            time.sleep(PAUSE_S)
            self._change(numbers.random(2))
        for thread in threads:
            thread.join()
        for number in list(self.there):
            self._drop(number)
        # What calls changed is reported with the next step.
        self.caller.call("POST", CHATS, body_of(Asked("last", "plain", [5, 6, 7], 2)))

    # ---- clients ---------------------------------------------------------------------------

    def _client(self, number: int) -> None:
        try:
            self._ask(number)
        except Exception as error:  # a thread's end would be nobody's
            self.complaints.append(f"client {number}: {error!r}")

    def _ask(self, number: int) -> None:
        author = Author(self.seed * CLIENTS + number, LIBRARY, WEIGHTS)
        numbers = np.random.default_rng([self.seed, number])
        while time.monotonic() < self._until:
            with self._lock:
                author.there = list(self.there)
            asked, drawn = author.request(), numbers.random(2)
            asked.name = f"{number}.{asked.name}"
            if drawn[0] < SPY and asked.documents:
                self._spy(asked)
                continue
            if drawn[1] < LEAVE:
                self.caller.leave(body_of(asked), int(numbers.integers(0, 9)))
                self.happened["left"] += 1
                continue
            status, response = self.caller.call("POST", CHATS, body_of(asked))
            if status != 200:
                self.complaints.append(f"{asked.name}: status {status}, {str(response)[:200]}")
                continue
            said = said_of(response)
            if any(one["reason"] == "abort" for one in said["answers"]):
                self.happened["aborted by a sleep"] += 1
                continue
            self._answered(asked, said)
            author.answered(asked, said["answers"][0]["tokens"])

    def _answered(self, asked: Asked, said: dict[str, Any]) -> None:
        self.happened["answers"] += len(said["answers"])
        tokens = [token for one in said["answers"] for token in one["tokens"]]
        if asked.kind == CHOICE and not ALLOWED.issuperset(tokens):
            self.complaints.append(f"{asked.name}: an answer that its grammar does not allow")
        self.records.append({**asdict(asked), **said})

    def _spy(self, asked: Asked) -> None:
        """The same texts in a namespace that nobody had: nothing of others' may be told."""
        self.happened["spied"] += 1
        marks = {**(asked.marks or {}), "namespace": f"spy {asked.name}"}
        body = body_of(Asked(**{**asdict(asked), "marks": marks, "answer": 3}))
        status, response = self.caller.call("POST", CHATS, {**body, "cache_salt": asked.name})
        if status != 200:
            self.complaints.append(f"spy: status {status}, {str(response)[:200]}")
            return
        outcome = response.get("kvweave") or {}
        details = response["usage"].get("prompt_tokens_details") or {}
        told = outcome.get("found", {}), details.get("cached_tokens") or 0
        if told != ({}, 0) and response["choices"][0]["finish_reason"] != "abort":
            self.complaints.append(f"a stranger found {told}")

    # ---- documents -------------------------------------------------------------------------

    def _change(self, drawn: Any) -> None:
        if drawn[0] < SLEEP:
            self._sleep()
        elif drawn[0] < RESET:
            self._reset()
        elif self.there:
            with self._lock:
                number = self.there[int(drawn[1] * len(self.there))]
            self._drop(number)
            self._put()

    def _put(self) -> None:
        self._documents += 1
        status, said = inserted(self.caller, self._documents)
        if status != 200:
            self.complaints.append(f"document {self._documents}: status {status}, {said}")
            return
        self.happened["put"] += 1
        with self._lock:
            self.there.append(self._documents)

    def _drop(self, number: int) -> None:
        space, name, _ = LIBRARY.document(number)
        with self._lock:
            self.there.remove(number)
        path = f"{KNOWLEDGE}/{quote(name)}?namespace={space}"
        status, said = self.caller.call("DELETE", path)
        self.happened["dropped"] += 1
        again, _ = self.caller.call("DELETE", path)
        if (status, again) != (200, 404):
            self.complaints.append(f"{name} goes: status {status}, {said}; then {again}")
        for other in NAMESPACES:
            _, listed = self.caller.call("GET", f"{KNOWLEDGE}?namespace={other}")
            if any(entry["namespace"] != other for entry in listed["data"]):
                self.complaints.append(f"{other} sees documents of others")

    def _reset(self) -> None:
        """The connector's caches go in any case; vLLM refuses for its own while requests run."""
        status, said = self.caller.call("POST", "/reset_prefix_cache?reset_external=true")
        if status != 200:
            self.complaints.append(f"caches are reset: status {status}, {str(said)[:200]}")
            return
        self.happened["reset" if said["success"] else "reset refused"] += 1

    def _sleep(self) -> None:
        """While it sleeps, documents are refused by type."""
        self.caller.call("POST", "/sleep?level=1")
        status, _ = self.caller.call("GET", KNOWLEDGE)
        self.caller.call("POST", "/wake_up")
        self.happened["slept"] += 1
        if status != 503:
            self.complaints.append(f"documents of an engine that sleeps: status {status}")


def held(caller: Caller) -> list[str]:
    """What a server that nobody asks says that it holds."""
    found: Counter[str] = Counter()
    for sample in samples(caller.port):
        state = sample.labels.get("state")
        found[f"{sample.name}.{state}" if state else sample.name] += sample.value
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    names += ("kvweave_store_bytes.held", "kvweave_store_bytes.frozen")
    return [f"{found[name]:.0f} {name}" for name in names if found[name]]


def never(happened: Mapping[str, int]) -> list[str]:
    """Complaints of what a load should have done and has not."""
    missing = [what for what in EVENTS if not happened.get(what)]
    if not any(happened.get(what) for what in RESETS):
        missing.append("attempts to reset caches")
    return [f"never happened: {what}" for what in missing]


def look(memory: Memory, at: float) -> None:
    """What the processes of the servers hold together."""
    memory.seconds.append(at)
    memory.resident.append(sum(_resident_below(os.getpid())))


def _resident_below(parent: int) -> Iterator[int]:
    """Resident bytes of each process that a process has started, and that these have."""
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for child in children.read_text().split():
            # One that has just ended holds nothing.
            with suppress(OSError):
                yield resident_bytes(child)
                yield from _resident_below(int(child))


def load(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """The load on a server of its own; what happened, and what should not have."""
    prepare()
    memory = Memory()
    with server(folder, "kept") as (caller, log):
        begun = time.monotonic()
        made = ServerLoad(caller, seed)
        loading = threading.Thread(target=made.run, args=(seconds,))
        loading.start()
        while loading.is_alive():
            loading.join(5)
            look(memory, time.monotonic() - begun)
        past = time.monotonic() - begun
        made.complaints += [f"in the end: {what}" for what in held(caller)]
        errors = re.findall(r"^.*(?:ERROR|Traceback).*$", log.read_text(), re.MULTILINE)
    made.complaints += [line for line in errors if "triton" not in line.lower()]
    made.complaints += never(made.happened)
    grown = memory.growth(memory.resident) / MIB
    if grown > MOST_GROWTH:
        made.complaints.append(f"memory grew by {grown:.1f} MiB over the second half")
    with (folder / "records").open("w") as records:
        for record in made.records:
            print(json.dumps(record), file=records)
    return {
        "complaints": made.complaints,
        "seconds": past,
        "answers": made.happened["answers"],
        "happened": dict(made.happened),
        "MiB": [round(size / MIB, 1) for size in memory.resident],
        "growth MiB": round(grown, 2),
    }


def compare(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """How the answers of a load compare with those of a server that has nobody else to serve."""
    prepare()
    records = [one for one in lines_of(folder / "records") if one["kind"] in COMPARED]
    comparison, there = Comparison(records, SERVED), set[int]()
    with server(folder, "quiet") as (caller, _):
        until = time.monotonic() + seconds
        for number in np.random.default_rng(seed).permutation(len(records)).tolist():
            if time.monotonic() > until:
                break
            record = records[number]
            asked = Asked(**{name: record[name] for name in Asked.__dataclass_fields__})
            for wanted in set(asked.documents) - there:
                inserted(caller, wanted)
                there.add(wanted)
            _, response = caller.call("POST", CHATS, body_of(asked))
            comparison.add(record, said_of(response))
    return {"complaints": comparison.complaints(), **comparison.found()}
