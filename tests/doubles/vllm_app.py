"""A double of the app of vLLM's server, behind the middleware, and of what it sends."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from kvweave.adapters.vllm.server import SegmentMiddleware
from kvweave.adapters.vllm.server.outcomes import Told

EPHEMERAL = {"type": "ephemeral"}
SAID = {"tokens": 90, "cached": 16, "found": {"request": 64}, "reused": 48, "recomputed": 8}


def part(text: str = "a text", **others: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **others}


def chat(*parts: Any, **others: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **others}


class Server:
    """What stands behind the middleware: keeps what it is asked, and has an engine that replies."""

    def __init__(self, key: str | None = None) -> None:
        self.asked: list[bytes] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.reply: dict[str, Any] = {"value": {"done": True}}
        self.response: dict[str, Any] = {}
        self.sleeps = False
        self.openapi_url = "/openapi.json"
        self.schema: dict[str, Any] = {"paths": {"/v1/models": {}}}
        self.headers: dict[bytes, bytes] = {}
        tokenizer = SimpleNamespace(
            encode=lambda text, add_special_tokens: list(text.encode()), max_chars_per_token=2
        )
        layers = SimpleNamespace(num_hidden_layers=30)
        model = SimpleNamespace(max_model_len=8, get_vocab_size=lambda: 256, hf_text_config=layers)
        parallel = SimpleNamespace(worker_extension_cls="KnowledgeBaseWorker")
        renderer = SimpleNamespace(get_tokenizer=lambda: tokenizer)
        args = SimpleNamespace(api_key=None if key is None else [key])
        self.state = SimpleNamespace(
            args=args,
            engine_client=self,
            online_renderer=SimpleNamespace(renderer=renderer),
            vllm_config=SimpleNamespace(model_config=model, parallel_config=parallel),
        )

    def openapi(self) -> dict[str, Any]:
        return self.schema

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, args))
        return [self.reply]

    async def is_sleeping(self) -> bool:
        return self.sleeps

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message: dict[str, Any] = {"more_body": True}
        data = b""
        while message.get("more_body"):
            message = await receive()
            data += message["body"]
        assert int(dict(scope["headers"])[b"content-length"]) == len(data)
        self.asked.append(data)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(self.response).encode()})

    def ask(
        self, method: str, path: str, value: Any = None, token: str = ""
    ) -> tuple[int, dict[str, Any]]:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "app": self,
            "headers": [
                (b"content-length", b"%d" % len(data)),
                (b"authorization", b"Bearer " + token.encode()),
            ],
        }
        sent: list[dict[str, Any]] = []
        halves = iter(
            [
                {"type": "http.request", "body": data[:3], "more_body": True},
                {"type": "http.request", "body": data[3:]},
            ]
        )

        async def receive() -> dict[str, Any]:
            return next(halves)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run(SegmentMiddleware(self)(scope, receive, send))
        self.headers = dict(sent[0]["headers"])
        return sent[0]["status"], json.loads(sent[1]["body"])


def told(kind: bytes, *parts: bytes) -> tuple[dict[bytes, bytes], bytes]:
    """Headers and body of a response that is sent in parts."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def respond() -> None:
        through = Told(send)
        length = b"%d" % sum(map(len, parts))
        headers = [(b"content-type", kind), (b"content-length", length)]
        await through({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts[:-1]:
            await through({"type": "http.response.body", "body": part, "more_body": True})
        await through({"type": "http.response.body", "body": parts[-1]})

    asyncio.run(respond())
    start, *bodies = sent
    assert start["type"] == "http.response.start"
    assert not bodies[-1].get("more_body", False)
    return dict(start["headers"]), b"".join(message["body"] for message in bodies)
