"""The routes of vLLM's server whose requests are read, and as requests of which kind.

| route | read as |
|---|---|
| those of `chat_apis`, and `/v1/completions` | what they are |
| the same and `/render`, which makes of a request what another server computes | the same |
| `/invocations`, where SageMaker has a request of either kind | a chat where it has `messages` |
"""

from __future__ import annotations

from typing import Any

from kvweave.adapters.vllm.server.arguments import COMPLETIONS
from kvweave.adapters.vllm.server.chat_apis import APIS, BATCH, CHAT, COHERE, ChatApi

INVOCATIONS = "/invocations"
RENDER = "/render"
_COMPUTED: dict[str, ChatApi | None] = {**APIS, COHERE.path: COHERE, COMPLETIONS: None}
_RENDERED = {f"{path}{RENDER}": api for path, api in _COMPUTED.items()}
_READ = {**_COMPUTED, **_RENDERED, BATCH.path: BATCH}


def is_read(path: str) -> bool:
    """Whether requests to a route are read."""
    return path in _READ or path == INVOCATIONS


def is_guarded(path: str) -> bool:
    """Whether vLLM wants one of the server's keys for a route that is read."""
    return path != INVOCATIONS


def is_computed(path: str) -> bool:
    """Whether a request to a route is computed, so that something becomes of its marks."""
    return path not in _RENDERED


def api_of(path: str, body: dict[str, Any]) -> ChatApi | None:
    """Where the texts of a request to a route are; None: a client that counts tokens itself."""
    if path == INVOCATIONS:
        return CHAT if CHAT.messages in body else None
    return _READ[path]
