"""The example of a router: requests, before stand-ins for servers whose events are real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from vllm_router import TOPIC, Published, named, played, removed, router, stored, until
from vllm_server import free_port


class StandIn:
    """A server's routes that a router asks: names of documents are those of marked texts."""

    def __init__(self) -> None:
        self.port = free_port()
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.left = 0
        self.go_on = asyncio.Event()
        self.names_status = 200
        self._runner: web.AppRunner | None = None

    async def begin(self) -> None:
        app = web.Application()
        app.router.add_post("/kvweave/documents/v1/chat/completions", self._names)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models/{name}", self._models)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def end(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None

    async def _names(self, request: web.Request) -> web.Response:
        texts = [part["text"] for part in (await request.json())["messages"][0]["content"]]
        data = [{"hash": named(text).hex(), "tokens": len(text)} for text in texts]
        return web.json_response({"object": "list", "data": data}, status=self.names_status)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"asked": request.rel_url.raw_path_qs})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        given = await request.json()
        self.asked.append(given)
        self.headers.append(request.headers)
        if not given.get("stream"):
            status = 400 if given.get("wrong") else 200
            return web.json_response({"at": self.port}, status=status, headers={"x-own": "1"})
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        try:
            await answer.write(b"data: 1\n\n")
            await self.go_on.wait()
            if given.get("broken"):
                assert request.transport is not None
                request.transport.abort()
            await answer.write(b"data: 2\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        return answer


class Routed:
    """A router before stand-ins, and a client of it."""

    def __init__(self, stand_ins: list[StandIn], events: list[Published]) -> None:
        self.stand_ins, self.events = stand_ins, events
        pairs = zip(stand_ins, events, strict=True)
        words = [",".join([f"http://127.0.0.1:{a.port}", *b.addresses()]) for a, b in pairs]
        self.router = router.Router([router.Engine.of(word) for word in words], TOPIC)
        self.address = f"http://127.0.0.1:{free_port()}"
        self.session: aiohttp.ClientSession

    def ask(self, *texts: str, **others: Any) -> Any:
        content = [
            {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts
        ]
        body = {"messages": [{"role": "user", "content": content}], **others}
        headers = {"authorization": "Bearer k"}
        return self.session.post(f"{self.address}/v1/chat/completions", json=body, headers=headers)

    async def where(self, *texts: str) -> int:
        """Which engine answers a chat with these documents."""
        async with self.ask(*texts) as answer:
            assert answer.status == 200, await answer.text()
            at = (await answer.json())["at"]
        return [one.port for one in self.stand_ins].index(at)

    async def state(self) -> dict[str, Any]:
        async with self.session.get(f"{self.address}/router") as answer:
            return dict(await answer.json())


@asynccontextmanager
async def routed(count: int = 2) -> AsyncIterator[Routed]:
    """A router of engines that hold nothing yet, which it listens to."""
    stand_ins, events = [StandIn() for _ in range(count)], [Published() for _ in range(count)]
    made = Routed(stand_ins, events)
    runner = web.AppRunner(made.router.app(), handler_cancellation=True)
    try:
        for one in stand_ins:
            await one.begin()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(made.address.rpartition(":")[2])).start()
        async with aiohttp.ClientSession() as made.session:
            yield made
    finally:
        await runner.cleanup()
        for one, other in zip(stand_ins, events, strict=True):
            await one.end()
            other.end()


def test_a_request_goes_where_its_documents_are() -> None:
    async def scenario() -> None:
        async with routed() as made:
            first, second = made.events
            first.change(stored("a", "b"))
            second.change(stored("c", tokens=100))
            held = [engine.held for engine in made.router.engines]
            await until(lambda: [len(one.tokens) for one in held] == [2, 1])
            assert await made.where("c", "new") == 1
            assert await made.where("a", "c") == 1
            assert await made.where("a", "b", "c") == 0
            second.change(removed("c"))
            await until(lambda: not held[1].tokens)
            assert await made.where("a", "c") == 0
            said = await made.state()
            assert [one["documents"] for one in said["engines"]] == [2, 0]
            assert said["by_document"] == 4
            # The key is the client's, and the body is what it sent.
            assert made.stand_ins[0].headers[0]["authorization"] == "Bearer k"
            assert made.stand_ins[0].asked[0]["messages"][0]["content"][0]["cache_control"]

    played(scenario)


def test_without_documents_the_least_busy_is_asked_and_streams_pass_through() -> None:
    async def scenario() -> None:
        async with routed() as made:
            async with made.ask("new", stream=True) as streamed:
                assert await streamed.content.readline() == b"data: 1\n"
                assert streamed.headers["content-type"] == "text/event-stream"
                # What has come is passed on before the rest is there.
                busy = [one["busy"] for one in (await made.state())["engines"]]
                assert sorted(busy) == [0, 1]
                free = busy.index(0)
                assert await made.where("another") == free
                assert await made.where() == free
                for one in made.stand_ins:
                    one.go_on.set()
                assert (await streamed.content.read()).endswith(b"data: 2\n\n")
            said = await made.state()
            assert [one["busy"] for one in said["engines"]] == [0, 0]
            assert said["by_load"] == 3

    played(scenario)


def test_a_client_that_leaves_ends_the_engines_request() -> None:
    async def scenario() -> None:
        async with routed() as made:
            async with made.ask("new", stream=True) as streamed:
                await streamed.content.readline()
                streamed.close()
            await until(lambda: sum(one.left for one in made.stand_ins) == 1)
            await until(lambda: not any(engine.busy for engine in made.router.engines))

    played(scenario)


def test_an_engine_that_is_gone_is_passed_over() -> None:
    async def scenario() -> None:
        async with routed() as made:
            made.events[0].change(stored("a"))
            await until(lambda: len(made.router.engines[0].held.tokens) == 1)
            await made.stand_ins[0].end()
            assert await made.where("a") == 1
            assert (await made.state())["unreachable"] == 1
            await made.stand_ins[1].end()
            async with made.ask("a") as answer:
                assert answer.status == 502
                assert (await answer.json())["error"]["type"] == "BadGatewayError"

    played(scenario)


def test_an_answer_that_breaks_off_breaks_off_for_its_client() -> None:
    """It is not asked for once more: its beginning is said."""

    async def scenario() -> None:
        async with routed(1) as made:
            made.stand_ins[0].go_on.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                async with made.ask("a", stream=True, broken=True) as answer:
                    await answer.read()
            assert len(made.stand_ins[0].asked) == 1
            await until(lambda: not made.router.engines[0].busy)

    played(scenario)


def test_refusals_and_other_routes() -> None:
    async def scenario() -> None:
        async with routed() as made:
            async with made.ask("a", wrong=True) as answer:
                assert (answer.status, answer.headers["x-own"]) == (400, "1")
            # Who cannot name documents is asked none the less.
            for one in made.stand_ins:
                one.names_status = 501
            await made.where("a")
            path = "/v1/models/a%2Fb?c=%26&d"
            async with made.session.get(URL(made.address + path, encoded=True)) as answer:
                assert (await answer.json())["asked"] == path
            for path in ("/kvweave/knowledge", "/reset_prefix_cache", "/metrics"):
                async with made.session.post(made.address + path) as answer:
                    assert answer.status == 404

    played(scenario)


@pytest.mark.parametrize("text", ["", "http://a", "a,tcp://b", "http://a,b,c,d"])
def test_addresses_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        router.main(["--engine", text])
