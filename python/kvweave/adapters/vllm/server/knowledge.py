"""Routes of the knowledge base: documents that stay in the store until they are deleted.

    GET    /kvweave/knowledge[?namespace=acme]
    POST   /kvweave/knowledge        {"name": "handbook", "text": "…", "namespace": "acme"}
    DELETE /kvweave/knowledge/handbook[?namespace=acme]

A document may come as `"tokens": [1, 2, 3]` instead of text. A call is about one namespace.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qs, unquote

from kvweave.adapters.vllm.segments.knowledge_base import answer
from kvweave.adapters.vllm.segments.markers import LONGEST, is_text
from kvweave.adapters.vllm.server.json_body import json_object
from kvweave.adapters.vllm.server.replies import BadRequest, body
from kvweave.errors import DeviceUnavailable, Unsupported

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
    if not state.vllm_config.parallel_config.worker_extension_cls:
        text = "knowledge base: expected --worker-extension-cls to be given, got none"
        raise Unsupported(text, expected="--worker-extension-cls", got="none")
    if await engine.is_sleeping():
        # Its memory is gone, or its weights are about to be replaced.
        expected, got = "an engine that is awake", "one that sleeps or is paused"
        text = f"knowledge base: expected {expected}, got {got}"
        raise DeviceUnavailable(text, expected=expected, got=got)
    name = unquote(path[len(PATH) + 1 :])
    if method == "GET" and not name:
        entries = answer(await engine.collective_rpc("kvweave_list", args=(_namespace(query),)))
        return 200, {"object": "list", "data": entries}
    if method == "POST" and not name:
        arguments = await _document(state, data)
        return 200, await _changed(engine, "kvweave_insert", arguments)
    if method == "DELETE" and name:
        namespace = _namespace(query)
        await _changed(engine, "kvweave_delete", (name, namespace))
        return 200, {"name": name, "namespace": namespace, "deleted": True}
    text = f"expected GET or POST {PATH}, or DELETE {PATH}/NAME, got {method} {path}"
    return 405, body(405, text)


async def _changed(engine: Any, method: str, arguments: tuple[Any, ...]) -> Any:
    """Has the engine do something, after which the server's metrics are those of its store.

    Errors: as `answer`.
    """
    replies = await engine.collective_rpc(method, args=arguments)
    manager = getattr(engine, "logger_manager", None)
    loggers = [] if manager is None else manager.stat_loggers
    metrics = [found for one in loggers if (found := getattr(one, "kv_connector_prom", None))]
    if metrics:
        report = answer(await engine.collective_rpc("kvweave_report"))
        for one in metrics:
            one.observe(report, 0)
    return answer(replies)


def _namespace(query: bytes) -> str:
    """Whose documents are meant; a caller who names none has those of nobody in particular."""
    fields = parse_qs(query.decode("latin-1"), keep_blank_values=True)
    for field in fields.keys() - {"namespace"}:
        raise BadRequest(field, "the parameter namespace", field)
    given = fields.get("namespace", [])
    if len(given) > 1:
        raise BadRequest("namespace", "one", given)
    return given[0] if given else ""


async def _document(state: Any, data: bytes) -> tuple[str, list[int], str]:
    given = json_object(data)
    for field in given.keys() - set(FIELDS):
        raise BadRequest(field, f"the fields {', '.join(FIELDS)}", field)
    name, namespace = given.get("name"), given.get("namespace", "")
    if not is_text(name) or not name:
        raise BadRequest("name", f"a string of 1 to {LONGEST} characters", name)
    if not is_text(namespace):
        raise BadRequest("namespace", f"a string of up to {LONGEST} characters", namespace)
    text, tokens = given.get("text"), given.get("tokens")
    if (text is None) == (tokens is None):
        raise BadRequest("text", "either text or tokens", "both" if text is not None else "none")
    model = state.vllm_config.model_config
    if text is not None:
        tokens = await _tokens(state, text, model.max_model_len)
    # What is too much is not sent to the engine, which everybody waits for.
    if not isinstance(tokens, list) or not 0 < len(tokens) <= model.max_model_len:
        got = f"{len(tokens)} of them" if isinstance(tokens, list) else tokens
        raise BadRequest("tokens", f"a list of 1 to {model.max_model_len} token ids", got)
    vocabulary = model.get_vocab_size()
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise BadRequest("tokens", f"ids in [0, {vocabulary})", token)
    return name, tokens, namespace


async def _tokens(state: Any, text: Any, longest: int) -> list[int]:
    """The tokens of a text that may have `longest` of them."""
    if not isinstance(text, str) or not text:
        raise BadRequest("text", "a string that is not empty", text)
    tokenizer = state.online_renderer.renderer.get_tokenizer()
    most = longest * tokenizer.max_chars_per_token
    if not is_text(text, most):
        got = f"{len(text)} of them" if len(text) > most else "another"
        raise BadRequest("text", f"up to {most} characters of Unicode", got)
    tokens: list[int] = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False)
    return tokens
