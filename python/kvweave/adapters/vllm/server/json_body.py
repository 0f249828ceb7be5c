"""The body of a request as our own routes read it."""

from __future__ import annotations

import json
from typing import Any

from kvweave.adapters.vllm.server.replies import BadRequest


def json_object(data: bytes) -> dict[str, Any]:
    """A body's fields.

    Errors: `BadRequest` for anything but a JSON object.
    """
    try:
        given = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequest("body", "a JSON object", str(error)) from None
    if not isinstance(given, dict):
        raise BadRequest("body", "a JSON object", given)
    return given
