"""What became of a marked prompt, in the response: an object of ours, OpenAI's cached tokens.

    "kvweave": {"tokens": 812, "cached": 16, "found": {"request": 640}, "missed": {"fresh": 172},
                "reused": 624, "recomputed": 98}

`cached` are those of its tokens that vLLM's own prefix cache had. `found` is what the store of
segments had, by kind, and `missed` the others, by reason. `reused` are those found that vLLM had
not cached, and `recomputed` those of these that the policy had computed again. What is not computed
is OpenAI's `usage.prompt_tokens_details.cached_tokens` (`input_tokens_details` in responses), and
Anthropic's `usage.cache_read_input_tokens`. vLLM carries the figures from its scheduler as
`kv_transfer_params`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from kvweave.adapters.vllm.segments.markers import SECTION

EVENT = b"data: "
BREAK = b"\n\n"
WARNING = b"kvweave-warning"


class Told:
    """Sends a response on, with what became of its prompt; a server's `send`.

    `warning`: what of the request had no effect, a header of the response.
    """

    def __init__(
        self, send: Callable[[dict[str, Any]], Awaitable[None]], warning: str | None = None
    ) -> None:
        self._send = send
        self._warning = warning
        self._start: dict[str, Any] | None = None
        self._held = b""
        self._streams = False
        self._said: dict[str, Any] | None = None

    async def __call__(self, message: dict[str, Any]) -> None:
        """Sends a message of ASGI on."""
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            if self._warning is not None:
                header = WARNING, self._warning.encode()
                message = {**message, "headers": [*message["headers"], header]}
            self._streams = kind.startswith(b"text/event-stream")
            if kind.startswith(b"application/json"):
                # How long it is depends on what is said.
                self._start = message
                return
        elif message["type"] == "http.response.body":
            self._held += message.get("body", b"")
            more = bool(message.get("more_body", False))
            message = {**message, "body": self._ready(more)}
            if self._start is not None:
                if more:
                    return
                await self._send(_sized(self._start, len(message["body"])))
        await self._send(message)

    def _ready(self, more: bool) -> bytes:
        """What of the body may go, as it is to be read."""
        if self._streams:
            *whole, rest = self._held.split(BREAK)
            self._held = rest if more else b""
            events = [self._event(event) for event in whole]
            return b"".join(event + BREAK for event in events) + (b"" if more else rest)
        if self._start is not None and more:
            return b""
        ready, self._held = self._held, b""
        return ready if self._start is None else self._told(ready)

    def _event(self, event: bytes) -> bytes:
        # Events of some routes have a line with their name before.
        before, found, data = event.rpartition(EVENT)
        if not found or (before and not before.endswith(b"\n")):
            return event
        return before + EVENT + self._told(data)

    def _told(self, data: bytes) -> bytes:
        """A response, or a piece of one, with what is known of the prompt; others as they are."""
        try:
            value = json.loads(data)
        except ValueError:
            return data
        return json.dumps(value).encode() if isinstance(value, dict) and self._tell(value) else data

    def _tell(self, value: dict[str, Any]) -> bool:
        """Puts it where it is read; whether there is anything to say."""
        inner = value.get("response")
        if isinstance(inner, dict):
            # The last event of `/v1/responses` has the whole response.
            return self._tell(inner)
        params = value.get("kv_transfer_params")
        if isinstance(params, dict) and SECTION in params:
            self._said = value[SECTION] = params[SECTION]
            others = {name: given for name, given in params.items() if name != SECTION}
            value["kv_transfer_params"] = others or None
        usage = value.get("usage")
        if self._said is not None and isinstance(usage, dict):
            spared = self._said["cached"] + self._said["reused"] - self._said["recomputed"]
            _count_spared(usage, spared)
        return self._said is not None


def _count_spared(usage: dict[str, Any], spared: int) -> None:
    """Says how many tokens of the prompt were not computed, as the route has it."""
    for tokens in ("prompt_tokens", "input_tokens"):
        if tokens in usage and (tokens == "prompt_tokens" or f"{tokens}_details" in usage):
            details = usage.get(f"{tokens}_details") or {}
            usage[f"{tokens}_details"] = {**details, "cached_tokens": spared}
            return
    if "input_tokens" in usage:
        # Anthropic counts what was read apart from what else came in.
        read = usage.get("cache_read_input_tokens") or 0
        usage["input_tokens"] = usage["input_tokens"] + read - spared
        usage["cache_read_input_tokens"] = spared


def _sized(start: dict[str, Any], length: int) -> dict[str, Any]:
    headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
    return {**start, "headers": [*headers, (b"content-length", b"%d" % length)]}
