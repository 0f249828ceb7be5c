"""What became of a marked prompt, in the response: an object of ours, OpenAI's cached tokens.

    "kvweave": {"tokens": 812, "cached": 16, "found": {"request": 640}, "missed": {"fresh": 172},
                "reused": 624, "recomputed": 98}

`cached` are those of its tokens that vLLM's own prefix cache had. `found` is what the store of
segments had, by kind, and `missed` the others, by reason. `reused` are those found that vLLM had
not cached, and `recomputed` those of these that the policy had computed again. What is not computed
is OpenAI's `usage.prompt_tokens_details.cached_tokens`. vLLM carries the figures from its scheduler
as `kv_transfer_params`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from kvweave.adapters.vllm.segments.markers import SECTION

EVENT = b"data: "
BREAK = b"\n\n"


class Told:
    """Sends a response on, with what became of its prompt; a server's `send`."""

    def __init__(self, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        self._send = send
        self._start: dict[str, Any] | None = None
        self._held = b""
        self._streams = False
        self._said: dict[str, Any] | None = None

    async def __call__(self, message: dict[str, Any]) -> None:
        """Sends a message of ASGI on."""
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
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
        if not event.startswith(EVENT):
            return event
        return EVENT + self._told(event[len(EVENT) :])

    def _told(self, data: bytes) -> bytes:
        """A response, or a piece of one, with what is known of the prompt; others as they are."""
        try:
            value = json.loads(data)
        except ValueError:
            return data
        return json.dumps(value).encode() if isinstance(value, dict) and self._tell(value) else data

    def _tell(self, value: dict[str, Any]) -> bool:
        """Puts it where it is read; whether there is anything to say."""
        params = value.get("kv_transfer_params")
        if isinstance(params, dict) and SECTION in params:
            self._said = value[SECTION] = params[SECTION]
            others = {name: given for name, given in params.items() if name != SECTION}
            value["kv_transfer_params"] = others or None
        usage = value.get("usage")
        if self._said is not None and isinstance(usage, dict):
            spared = self._said["cached"] + self._said["reused"] - self._said["recomputed"]
            details = usage.get("prompt_tokens_details") or {}
            usage["prompt_tokens_details"] = {**details, "cached_tokens": spared}
        return self._said is not None


def _sized(start: dict[str, Any], length: int) -> dict[str, Any]:
    headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
    return {**start, "headers": [*headers, (b"content-length", b"%d" % length)]}
