"""Which documents a request has, by the names that events have for them: routers ask for these.

    POST /kvweave/documents/v1/chat/completions    what a client sends to /v1/chat/completions

A name is made of tokens, which follow from the model's tokenizer and its chat template. Any engine
of the model has both, so whoever asks one needs neither.
"""

from __future__ import annotations

from typing import Any

from kvweave.adapters.vllm.segments.known_documents import document_hash
from kvweave.adapters.vllm.segments.markers import Markers, parse
from kvweave.adapters.vllm.server import marks, prompts
from kvweave.adapters.vllm.server.arguments import COMPLETIONS, check_arguments, prompts_of
from kvweave.adapters.vllm.server.chat_apis import APIS
from kvweave.adapters.vllm.server.json_body import json_object
from kvweave.adapters.vllm.server.replies import body

PATH = "/kvweave/documents"
ROUTES = (*APIS, COMPLETIONS)
Answer = tuple[int, dict[str, Any]]


def is_ours(path: str) -> bool:
    """Whether a path is one of these routes."""
    return path == PATH or path.startswith(f"{PATH}/")


async def call(state: Any, method: str, path: str, data: bytes) -> Answer:
    """Status and body of an answer; `path` is that of the request behind `PATH`.

    An entry has the `hash` of a document, 64 hexadecimal digits, and how many `tokens` it has, in
    the order of the prompt. What vLLM refuses, and what would be discovered, has none.

    Errors: `BadRequest` naming the field, and as `check_arguments`.
    """
    route = path[len(PATH) :]
    if method != "POST" or route not in ROUTES:
        text = f"expected POST {PATH} and one of {', '.join(ROUTES)}, got {method} {path}"
        return 405, body(405, text)
    return 200, {"object": "list", "data": await _named(state, route, json_object(data))}


async def _named(state: Any, route: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    api = APIS.get(route)
    marked = None if api is None else marks.read(given, api)
    markers: Markers | None
    if marked is not None and marked.asks:
        markers = parse(marked.section(await prompts.segments(state, marked) or []))
    else:
        markers = await check_arguments(state, api, given)
    if markers is None or not markers.segments:
        return []
    found = []
    for prompt in await prompts_of(state, api, given if marked is None else marked.body):
        for span in markers.segments:
            tokens = prompt["prompt_token_ids"][span.start : span.end]
            name = document_hash(tokens, markers.namespace).hex()
            found.append({"hash": name, "tokens": len(tokens)})
    return found
