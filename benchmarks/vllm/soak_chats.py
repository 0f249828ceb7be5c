"""Requests of a soak as marked chats over HTTP, and their answers as a comparison reads them."""

from __future__ import annotations

import http.client
import json
from typing import Any

from benchmarks.soak.asked import CHOICE, Asked
from benchmarks.soak.words import words_of
from benchmarks.vllm.soak_engine import GRAMMAR

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
"""Of chats whose prompt is their text: tokens are words."""
CHATS, KNOWLEDGE = "/v1/chat/completions", "/kvweave/knowledge"
NAME = "soaked"
LIMIT_S = 120


def body_of(asked: Asked, **others: Any) -> dict[str, Any]:
    """A chat whose prompt has the request's tokens, its documents marked."""
    parts: list[dict[str, Any]] = []
    at, marks = 0, asked.marks or {}
    for start, end in [*marks.get("segments", ()), (len(asked.tokens),) * 2]:
        if at < start:
            parts.append({"type": "text", "text": words_of(asked.tokens[at:start])})
        if start < end:
            text = words_of(asked.tokens[start:end])
            mark = {"cache_control": {"type": "ephemeral"}}
            parts.append({"type": "text", "text": text, **mark})
        at = end
    body: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": asked.answer,
        "n": asked.n,
        "temperature": 1.0 if asked.n > 1 else 0.0,
        "logprobs": True,
        "top_logprobs": 2,
        "ignore_eos": asked.kind != CHOICE,
        **others,
    }
    body |= {"top_k": 1} if asked.n > 1 else {}
    body |= {"stop": asked.stop} if asked.stop else {}
    if asked.kind == CHOICE:
        body["structured_outputs"] = {"regex": GRAMMAR}
    if marks:
        body["kvweave"] = {name: marks[name] for name in ("namespace", "policy")}
    return body


def said_of(response: dict[str, Any]) -> dict[str, Any]:
    """What a chat was answered, as `soak_engine.said` has it; nobody says how it was cut."""
    answers = []
    for choice in response["choices"]:
        steps = choice["logprobs"]["content"]
        answers.append(
            {
                "tokens": [_token(step) for step in steps],
                "logprobs": [step["logprob"] for step in steps],
                "near": [[[_token(p), p["logprob"]] for p in s["top_logprobs"][:2]] for s in steps],
                "text": choice["message"]["content"],
                "reason": choice["finish_reason"],
            }
        )
    return {"answers": answers, "outcome": response.get("kvweave"), "chunks": [], "preempted": 0}


def _token(step: dict[str, Any]) -> int:
    """The number of a word."""
    return int(step["token"].strip().removeprefix("w"))


class Caller:
    """Calls a server, each time over a connection of its own: any number of threads may."""

    def __init__(self, port: int) -> None:
        self.port = port

    def call(self, method: str, path: str, value: Any = None) -> tuple[int, Any]:
        """Status and JSON body of an answer, or its text where it is none."""
        connection = self._sent(method, path, value)
        try:
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text

    def leave(self, value: dict[str, Any], chunks: int) -> None:
        """Asks for a stream, and goes once so many pieces of it have come."""
        connection = self._sent("POST", CHATS, {**value, "stream": True})
        try:
            answer = connection.getresponse()
            for _ in range(chunks):
                answer.readline()
        finally:
            connection.close()

    def _sent(self, method: str, path: str, value: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        data = None if value is None else json.dumps(value)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        return connection
