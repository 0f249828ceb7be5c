"""Routes of the knowledge base: documents that stay in the store until they are deleted.

    GET    /kvweave/knowledge[?namespace=acme]
    POST   /kvweave/knowledge        {"name": "handbook", "text": "…", "namespace": "acme"}
    DELETE /kvweave/knowledge/handbook[?namespace=acme]

A document may come as `"tokens": [1, 2, 3]` instead of text.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import parse_qs, unquote

from kvweave.adapters.vllm.segments.knowledge_base import answer
from kvweave.adapters.vllm.server.replies import BadRequest, body

PATH = "/kvweave/knowledge"
FIELDS = ("name", "text", "tokens", "namespace")
Answer = tuple[int, dict[str, Any]]


def is_ours(path: str) -> bool:
    """Whether a path is one of these routes."""
    return path == PATH or path.startswith(f"{PATH}/")


async def call(state: Any, method: str, path: str, query: bytes, data: bytes) -> Answer:
    """Status and body of an answer; `path` is still percent-encoded.

    Errors: `BadRequest` naming the field, and what the engine's store refuses.
    """
    engine = state.engine_client
    name = unquote(path[len(PATH) + 1 :])
    if method == "GET" and not name:
        entries = answer(await engine.collective_rpc("kvweave_list", args=(_namespace(query),)))
        return 200, {"object": "list", "data": entries}
    if method == "POST" and not name:
        arguments = await _document(state, data)
        return 200, answer(await engine.collective_rpc("kvweave_insert", args=arguments))
    if method == "DELETE" and name:
        namespace = _namespace(query) or ""
        answer(await engine.collective_rpc("kvweave_delete", args=(name, namespace)))
        return 200, {"name": name, "namespace": namespace, "deleted": True}
    text = f"expected GET or POST {PATH}, or DELETE {PATH}/NAME, got {method} {path}"
    return 405, body(405, text)


def _namespace(query: bytes) -> str | None:
    fields = parse_qs(query.decode("latin-1"), keep_blank_values=True)
    for field in fields.keys() - {"namespace"}:
        raise BadRequest(field, "the parameter namespace", field)
    given = fields.get("namespace", [])
    if len(given) > 1:
        raise BadRequest("namespace", "one", given)
    return given[0] if given else None


async def _document(state: Any, data: bytes) -> tuple[str, list[int], str]:
    try:
        given = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequest("body", "a JSON object", str(error)) from None
    if not isinstance(given, dict):
        raise BadRequest("body", "a JSON object", given)
    for field in given.keys() - set(FIELDS):
        raise BadRequest(field, f"the fields {', '.join(FIELDS)}", field)
    name, namespace = given.get("name"), given.get("namespace", "")
    if not isinstance(name, str) or not name:
        raise BadRequest("name", "a string that is not empty", name)
    if not isinstance(namespace, str):
        raise BadRequest("namespace", "a string", namespace)
    text, tokens = given.get("text"), given.get("tokens")
    if (text is None) == (tokens is None):
        raise BadRequest("text", "either text or tokens", "both" if text is not None else "none")
    if text is not None:
        if not isinstance(text, str) or not text:
            raise BadRequest("text", "a string that is not empty", text)
        tokenizer = state.online_renderer.renderer.get_tokenizer()
        tokens = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False)
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise BadRequest("tokens", "a list of token ids", tokens)
    return name, tokens, namespace
