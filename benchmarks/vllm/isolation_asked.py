"""Trials of two tenants of a vLLM: the one computes a text, and the other asks for it."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from http.client import HTTPConnection, HTTPResponse
from typing import Any, NamedTuple

import numpy as np

from benchmarks.classifier import Trials
from benchmarks.soak.asked import VOCABULARY
from kvweave.lab.bench.rows import expect

TIERS = ("host", "disk")
"""Kinds of texts that have left the device."""
BEFORE = 16
"""Tokens of fresh text before a document."""
WARM = 20
PATIENCE_S = 30.0
"""For what is cached to leave."""


class Prompt(NamedTuple):
    """What a tenant asks: a text whose tokens are `marked`, where it is a document."""

    tokens: list[int]
    tenant: str
    marked: tuple[int, int] | None

    @property
    def answer(self) -> int:
        """Tokens of an answer: vLLM says nothing of documents with the first."""
        return 1 if self.marked is None else 2

    @property
    def marks(self) -> dict[str, Any]:
        """Of a document."""
        return {"segments": [self.marked], "namespace": self.tenant, "policy": "naive"}


class Answered(NamedTuple):
    """How many tokens of a prompt were known, and the seconds to the first token."""

    found: int
    seconds: float


class Asked(ABC):
    """A vLLM whose tenant A computes and whose tenant B asks, texts of one kind and length."""

    def __init__(self, kind: str, length: int) -> None:
        self.kind, self.length = kind, length
        self.random = np.random.default_rng(7)
        self.missed = 0

    def trials(self, count: int, owner: str) -> Trials:
        """Trials in which the texts were cached by `owner`."""
        cached = self.random.permutation(np.arange(count) % 2 == 0)
        for _ in range(min(WARM, count)):
            self.seconds(True, owner)
        seconds = np.asarray([self.seconds(bool(one), owner) for one in cached])
        # What is on its way to the disk at times is not there yet.
        few = count // 20 if self.kind == "disk" else 0
        expect(self.missed <= few, f"expected own texts, missed {self.missed} of {count}")
        return Trials(seconds, cached)

    def seconds(self, cached: bool, owner: str) -> float:
        """Seconds to B's first token of a text that was cached, or of one that nobody has seen."""
        text, other = self._text(), self._text()
        self.ask(self._prompt(text if cached else other, owner))
        if self.kind in TIERS:
            # What is being copied is held: that it can leave the device says it has been.
            self._leave(beyond=False)
        if self.kind == "disk":
            self._leave(beyond=True)
        found, taken = self.ask(self._prompt(text, "b"))
        own, known = cached and owner == "b", found > self.length // 2
        expect(own or not known, f"expected none of another's tokens, got {found}")
        self.missed += own and not known
        return taken

    @abstractmethod
    def ask(self, prompt: Prompt) -> Answered:
        """Has a prompt answered."""

    @abstractmethod
    def reset(self, *, beyond: bool) -> bool:
        """Has all that is cached leave the device, and `beyond` the host's memory; False: not yet.

        What is being written to the disk is waited for.
        """

    def _leave(self, *, beyond: bool) -> None:
        end = time.monotonic() + PATIENCE_S
        while not self.reset(beyond=beyond):
            expect(time.monotonic() < end, f"expected a reset within {PATIENCE_S} s")

    def _text(self, length: int | None = None) -> list[int]:
        drawn = self.random.integers(1, VOCABULARY, self.length if length is None else length)
        return [int(token) for token in drawn]

    def _prompt(self, text: list[int], tenant: str) -> Prompt:
        if self.kind != "documents":
            return Prompt([*text, 1], tenant, None)
        # Another text stands before a document: no prefix is found.
        return Prompt([*self._text(BEFORE), *text, 1], tenant, (BEFORE, BEFORE + self.length))


class EngineAsked(Asked):
    """An engine in this process."""

    def __init__(self, kind: str, length: int, llm: Any) -> None:
        super().__init__(kind, length)
        self.engine, self.asked = llm.llm_engine, 0

    def ask(self, prompt: Prompt) -> Answered:
        """Steps the engine until the answer is there."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=prompt.answer, ignore_eos=True, detokenize=False
        )
        if prompt.marked is not None:
            params.extra_args = {"kvweave": prompt.marks}
        begun, taken = time.perf_counter(), 0.0
        self.asked += 1
        given = {"prompt_token_ids": prompt.tokens, "cache_salt": prompt.tenant}
        self.engine.add_request(str(self.asked), given, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                taken = taken or time.perf_counter() - begun
                last = output
        if prompt.marked is not None:
            return Answered(int(last.kv_transfer_params["kvweave"]["reused"]), taken)
        return Answered(int(last.num_cached_tokens or 0), taken)

    def reset(self, *, beyond: bool) -> bool:
        """Steps the engine, which has nothing to answer, until nothing more is carried."""
        core = self.engine.engine_core.engine_core
        while core.scheduler.connector.has_pending_push_work():
            core.step()
        return bool(self.engine.reset_prefix_cache(reset_connector=beyond))


class ServerAsked(Asked):
    """A server on a port of this machine, whose model has a name; its answers are streams."""

    def __init__(self, kind: str, length: int, model: str, port: int) -> None:
        super().__init__(kind, length)
        self.connection = HTTPConnection("127.0.0.1", port, timeout=60)
        self.model = model

    def ask(self, prompt: Prompt) -> Answered:
        """Reads a stream to its end."""
        body = {
            "model": self.model,
            "prompt": prompt.tokens,
            "cache_salt": prompt.tenant,
            "max_tokens": prompt.answer,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if prompt.marked is not None:
            body["vllm_xargs"] = {"kvweave": json.dumps(prompt.marks)}
        begun, taken, found = time.perf_counter(), 0.0, 0
        answer = self._said(body)
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            taken = taken or time.perf_counter() - begun
            found = max(found, _known(json.loads(line.removeprefix(b"data: "))))
        return Answered(found, taken)

    def reset(self, *, beyond: bool) -> bool:
        """By a route for development."""
        route = f"/reset_prefix_cache?reset_external={str(beyond).lower()}"
        return bool(json.load(self._said({}, route))["success"])

    def _said(self, body: dict[str, Any], route: str = "/v1/completions") -> HTTPResponse:
        sent = {"Content-Type": "application/json"}
        self.connection.request("POST", route, json.dumps(body), sent)
        answer = self.connection.getresponse()
        expect(answer.status == 200, f"expected an answer, got {answer.status}")
        return answer


def _known(piece: dict[str, Any]) -> int:
    """Tokens that one piece of a stream says were known, those of documents among them."""
    details = (piece.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)
