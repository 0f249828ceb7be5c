"""An ASGI middleware for vLLM's server: marked chats, the knowledge base, names of documents."""

from __future__ import annotations

import hmac
import json
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from kvweave.adapters.vllm.segments.markers import SECTION, parse
from kvweave.adapters.vllm.server import (
    documents,
    knowledge,
    marks,
    openapi,
    outcomes,
    prompts,
    replies,
    routes,
)
from kvweave.adapters.vllm.server.arguments import (
    check_arguments,
    check_model,
    has_several,
    passed_on,
)
from kvweave.adapters.vllm.server.renderings import carrier
from kvweave.errors import KvweaveError

IDLE = "kvweave: expected a marked part or discover beside it, got neither: it has no effect"
MOST_BYTES = 256 * 2**20
"""Longest body that is read here."""
# A logger of vLLM's: nobody listens to others in its processes.
_log = logging.getLogger("vllm.kvweave.server")
Scope: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class SegmentMiddleware:
    """Reads requests before vLLM's app does; those that say nothing of segments pass unchanged."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        path = _path(scope)
        own = knowledge.is_ours(path) or documents.is_ours(path)
        ours = scope["type"] == "http" and (
            own or (routes.is_read(path) and scope["method"] == "POST")
        )
        if scope["type"] == "http" and path == getattr(scope["app"], "openapi_url", None):
            openapi.describe(scope["app"])
        # vLLM's own check of keys comes after us, and only for its own routes.
        guarded = own or routes.is_guarded(path)
        admitted = ours and scope["method"] != "OPTIONS" and (not guarded or _admitted(scope))
        if ours and own and scope["method"] != "OPTIONS" and not admitted:
            await replies.send_json(send, 401, replies.body(401, "expected an API key"))
            return
        if not admitted:
            await self.app(scope, receive, send)
            return
        data = await _body(receive)
        if data is None:
            text = f"body: expected up to {MOST_BYTES} bytes, all of them"
            await replies.send_json(send, 413, replies.body(413, text))
            return
        try:
            if own:
                await replies.send_json(send, *await _own(scope, path, data))
                return
            data, asks, warning = await _asked(scope["app"].state, path, data)
        except KvweaveError as error:
            await replies.send_json(send, *replies.refusal(error))
            return
        told = outcomes.Told(send, warning) if asks or warning is not None else send
        await self.app(_sized(scope, len(data)), _again(data, receive), told)


async def _own(scope: Scope, path: str, data: bytes) -> tuple[int, dict[str, Any]]:
    """Status and body of an answer of a route of ours.

    Errors: as `knowledge.call` and `documents.call`.
    """
    state, method = scope["app"].state, scope["method"]
    if documents.is_ours(path):
        return await documents.call(state, method, path, data)
    return await knowledge.call(state, method, path, scope.get("query_string", b""), data)


async def _asked(state: Any, path: str, data: bytes) -> tuple[bytes, bool, str | None]:
    """A request to a route that is read, with its marks turned into an argument of vLLM's.

    Whether the response is to say what became of them, and what of them has no effect.

    Errors: `BadRequest` naming the field, and as `check_arguments`.
    """
    if SECTION.encode() not in data and marks.CONTROL.encode() not in data:
        return data, False, None
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return data, False, None
    if not isinstance(given, dict):
        return data, False, None
    api, is_computed = routes.api_of(path, given), routes.is_computed(path)
    marked = None if api is None else marks.read(given, api)
    if marked is None or not marked.asks:
        body = given if marked is None else marked.body
        markers = await check_arguments(state, api, body)
        idle = markers is not None and markers.is_idle
        body = passed_on(body) if idle else body
        # Of several prompts vLLM says of the first what became of it, and their tokens together.
        asks = markers is not None and (api is not None or not has_several(body))
        data = json.dumps(body).encode() if body != given else data
        return data, asks and is_computed, _warned(idle)
    check_model(state, parse(marked.whole))
    spans = await prompts.segments(state, marked)
    # What vLLM refuses goes on without marks: it says best what is wrong.
    asked = marked.body if spans is None else marked.arguments(spans, carrier(marked.api))
    asks = spans is not None and is_computed
    return json.dumps(asked).encode(), asks, _warned(marked.is_idle)


def _warned(is_idle: bool) -> str | None:
    """What is said, here and in the log, of a request whose section has no effect."""
    if not is_idle:
        return None
    _log.warning("%s", IDLE)
    return IDLE


def _path(scope: Scope) -> str:
    """The path behind the server's root, percent-encoded."""
    raw = scope.get("raw_path") or b""
    path = raw.decode("latin-1").partition("?")[0] or str(scope.get("path", ""))
    return path.removeprefix(str(scope.get("root_path", "")))


def _admitted(scope: Scope) -> bool:
    """Whether the request has one of the server's keys, if it has any."""
    keys = getattr(scope["app"].state.args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    keys = [key.encode() for key in keys if key]
    given = dict(scope["headers"]).get(b"authorization", b"")
    scheme, _, token = given.partition(b" ")
    # All are compared: how long it takes says nothing.
    same = [hmac.compare_digest(token, key) for key in keys]
    return not keys or (scheme.lower() == b"bearer" and any(same))


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None when it is too long or its sender has gone."""
    parts, length, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        part = message.get("body", b"")
        length += len(part)
        if length > MOST_BYTES:
            return None
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


def _sized(scope: Scope, length: int) -> Scope:
    """The request with the length that its body has now."""
    others = [
        (name, value)
        for name, value in scope["headers"]
        if name not in (b"content-length", b"transfer-encoding")
    ]
    return {**scope, "headers": [*others, (b"content-length", b"%d" % length)]}


def _again(data: bytes, receive: Receive) -> Receive:
    """Gives the body once more, then whatever still comes (that the sender has gone)."""
    given = False

    async def once() -> dict[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": data, "more_body": False}

    return once
