"""Refusals and answers in the shape of OpenAI's API."""

from __future__ import annotations

import json
from typing import Any

from kvweave.errors import (
    DeviceUnavailable,
    InvalidArgument,
    KvweaveError,
    OutOfMemory,
    PoolFull,
    StoreUnavailable,
    UnknownSegment,
    Unsupported,
)

STATUS: tuple[tuple[type[KvweaveError], int], ...] = (
    (UnknownSegment, 404),
    (PoolFull, 507),
    (OutOfMemory, 507),
    (InvalidArgument, 400),
    (Unsupported, 501),
    (DeviceUnavailable, 503),
    (StoreUnavailable, 503),
)
KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    501: "UnsupportedError",
    503: "ServiceUnavailableError",
    507: "InsufficientStorageError",
}


class BadRequest(InvalidArgument):
    """A field of a request that can never be right; the server answers 400."""

    def __init__(self, where: str, expected: str, got: Any) -> None:
        shown = repr(got)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        super().__init__(f"{where}: expected {expected}, got {shown}", expected=expected, got=shown)
        self.where = where


def refusal(error: KvweaveError) -> tuple[int, dict[str, Any]]:
    """Status and body for an error of ours."""
    status = next((code for kind, code in STATUS if isinstance(error, kind)), 500)
    return status, body(status, str(error), getattr(error, "where", None))


def body(status: int, text: str, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's API has them."""
    kind = KINDS.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": text, "type": kind, "param": param, "code": status}}


async def send_json(send: Any, status: int, value: Any) -> None:
    """Answers an ASGI request."""
    data = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
