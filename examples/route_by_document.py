"""A router that sends a request to the engine which holds most of its documents.

    python examples/route_by_document.py --port 8080 \
      --engine http://a:8000,tcp://a:5557,tcp://a:5558 \
      --engine http://b:8000,tcp://b:5557,tcp://b:5558

Each engine is a `vllm serve` of the same model with segments and their middleware, that publishes
its events at the second address and, if there is a third, those of before at that
(docs/vllm.md, "Events for routers"). Clients ask the router as they would ask an engine; which
documents a request has any engine says. Counted are the documents' tokens that an engine holds,
and of engines with as many the one with the fewest requests in flight is asked.
`GET /router` says what is known of each. Wants aiohttp, pyzmq and msgspec, as vLLM does:
`pip install '.[router]'`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import zmq
import zmq.asyncio
from aiohttp import web
from yarl import URL
from zmq.utils.monitor import recv_monitor_message

MEDIUM = "KVWEAVE_SEGMENT"
"""Of events about documents; others are about prefixes."""
NAMED = "/kvweave/documents"
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
MARKS = (b"cache_control", b"kvweave")
"""What a body has in which documents are marked."""
MOST_BODY, MOST_EVENTS, MOST_DOCUMENTS = 256 << 20, 16 << 20, 1 << 20
"""Bytes of a request and of a batch of events; documents that are remembered of an engine."""
REPLAY_S, NAMED_S, CONNECT_S = 10.0, 30.0, 10.0
LOW = (1 << 64) - 1
END = (1 << 64) - 1
"""The number behind the last batch that is sent again."""
HOPS = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"}
CHANGED = {*HOPS, "content-length", "content-encoding", "host", "accept-encoding"}
"""Headers that are of one connection, or of a body as it was packed for it."""
UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
UNREAD = (msgspec.MsgspecError, ValueError, RecursionError)
UNNAMED = (aiohttp.ClientError, asyncio.TimeoutError, *UNREAD)
log = logging.getLogger("route_by_document")


class Stored(msgspec.Struct, tag="BlockStored"):
    """A document that came, of which the engine has `block_size` tokens."""

    block_hashes: list[int | bytes]
    block_size: int
    medium: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    """A document that went."""

    block_hashes: list[int | bytes]
    medium: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    """VLLM's own cache of prefixes is empty; what happens to documents is said besides."""


class Batch(msgspec.Struct, array_like=True):
    """What is published at a time: each event is decoded by itself, so that one may be spoiled."""

    ts: float
    events: list[msgspec.Raw]


class Document(msgspec.Struct):
    """A document of a request, by the name that events have for it."""

    hash: str
    tokens: int


class Documents(msgspec.Struct):
    """The documents of a request."""

    data: list[Document]


BATCH = msgspec.msgpack.Decoder(Batch)
EVENT = msgspec.msgpack.Decoder(Stored | Removed | Cleared)
DOCUMENTS = msgspec.json.Decoder(Documents)


def key(name: int | bytes) -> int:
    """The last 64 bits of a hash, all that vLLM publishes of it unless told otherwise."""
    number = name if isinstance(name, int) else int.from_bytes(name[-8:], "big")
    return number & LOW


class Held:
    """The documents of an engine, as its events say.

    An engine numbers its batches. Where one is missing, or numbers begin anew, all that was known
    may be wrong: it is forgotten. `expected` is the number of the next batch, None while nothing
    is known; `live` the last one that came by itself, and not because it was asked for again.
    """

    def __init__(self) -> None:
        self.tokens: OrderedDict[int, int] = OrderedDict()
        self.counts: Counter[str] = Counter()
        self.expected: int | None = None
        self.live = -1

    def forget(self) -> None:
        """Nothing is known of the engine any more."""
        self.tokens.clear()
        self.expected, self.live = None, -1

    def is_due(self, number: int) -> bool:
        """Whether a batch that came is the next; where it is not, all is to be asked for again."""
        if number <= self.live:
            self.counts["restarts"] += 1
            return False
        self.live = number
        if self.expected is None:
            return number == 0
        if number > self.expected:
            self.counts["gaps"] += 1
        return number <= self.expected

    def take(self, number: int, payload: bytes) -> None:
        """What a batch says; one that is known by now says nothing."""
        if self.expected is not None and number < self.expected:
            return
        self.expected = number + 1
        self.counts["batches"] += 1
        try:
            events = BATCH.decode(payload).events
        except UNREAD:
            self.counts["malformed"] += 1
            return
        for event in events:
            try:
                self._event(EVENT.decode(event))
            except UNREAD:
                self.counts["malformed"] += 1

    def _event(self, event: Stored | Removed | Cleared) -> None:
        if isinstance(event, Cleared) or event.medium != MEDIUM:
            return
        if isinstance(event, Removed):
            for name in event.block_hashes:
                self.tokens.pop(key(name), None)
            return
        if event.block_size < 1:
            raise ValueError(f"block_size: expected at least 1, got {event.block_size}")
        for name in event.block_hashes:
            self.tokens[key(name)] = event.block_size
            self.tokens.move_to_end(key(name))
        while len(self.tokens) > MOST_DOCUMENTS:
            self.tokens.popitem(last=False)

    def of(self, names: Iterable[int]) -> int:
        """How many tokens of some documents the engine holds."""
        return sum(self.tokens.get(name, 0) for name in names)


@dataclass
class Engine:
    """An engine's addresses, the documents that it holds, and its requests in flight."""

    url: str
    events: str
    replay: str | None = None
    held: Held = field(default_factory=Held)
    busy: int = 0

    @classmethod
    def of(cls, text: str) -> Engine:
        """`URL,EVENTS` or `URL,EVENTS,REPLAY`."""
        parts = text.split(",")
        if len(parts) not in (2, 3) or not parts[0].startswith(("http://", "https://")):
            raise argparse.ArgumentTypeError(f"expected URL,EVENTS or URL,EVENTS,REPLAY: {text}")
        return cls(parts[0].rstrip("/"), parts[1], parts[2] if len(parts) == 3 else None)


def best(engines: Sequence[Engine], names: Sequence[int]) -> Engine:
    """The engine that holds most of some documents; of several the least busy, the first of these.

    A document that a prompt has twice is counted twice: so often it is not computed.
    """
    return max(engines, key=lambda engine: (engine.held.of(names), -engine.busy))


class Listener:
    """Follows the events of an engine for as long as `run` does."""

    def __init__(self, engine: Engine, topic: str = "") -> None:
        self.engine = engine
        self._context = zmq.asyncio.Context.instance()
        self._one_at_a_time = asyncio.Lock()
        self._socket: Any = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_EVENTS)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor: Any = self._socket.get_monitor_socket(events)
        self._socket.connect(engine.events)

    async def run(self) -> None:
        """Listens; whenever the engine is there anew, and whenever a batch is missing, catches up.

        An engine that is not there holds nothing.
        """
        tasks = [asyncio.create_task(one) for one in (self._watch(), self._listen())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)

    async def _watch(self) -> None:
        while True:
            said = await recv_monitor_message(self._monitor)
            async with self._one_at_a_time:
                self.engine.held.forget()
                if said["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    await self._catch_up()

    async def _listen(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            async with self._one_at_a_time:
                await self._heard(frames)

    async def _heard(self, frames: list[bytes]) -> None:
        held = self.engine.held
        if len(frames) != 3 or len(frames[1]) != 8:
            held.counts["malformed"] += 1
            return
        number = int.from_bytes(frames[1], "big")
        if not held.is_due(number):
            held.forget()
            held.live = number
            await self._catch_up()
            if held.expected is None:
                # Without batches of before what comes from here on is known at least.
                held.expected = number
        held.take(number, frames[2])

    async def _catch_up(self) -> None:
        """Takes all batches that the engine still has."""
        if self.engine.replay is None:
            return
        socket: Any = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_EVENTS)
        try:
            socket.connect(self.engine.replay)
            await socket.send_multipart([b"", (0).to_bytes(8, "big")])
            await asyncio.wait_for(self._replayed(socket), REPLAY_S)
        except (asyncio.TimeoutError, zmq.ZMQError) as error:
            self.engine.held.counts["without_replay"] += 1
            log.warning("%s: no batches of before: %r", self.engine.replay, error)
        finally:
            socket.close(linger=0)

    async def _replayed(self, socket: Any) -> None:
        held = self.engine.held
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 4 or len(frames[2]) != 8:
                held.counts["malformed"] += 1
                continue
            number = int.from_bytes(frames[2], "big")
            if number == END:
                return
            held.counts["replayed"] += 1
            held.take(number, frames[3])


class Router:
    """Answers clients by asking engines."""

    def __init__(self, engines: Sequence[Engine], topic: str = "") -> None:
        self.engines, self.topic = list(engines), topic
        self.counts: Counter[str] = Counter()
        self._session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        """The router as an application of aiohttp."""
        app = web.Application(client_max_size=MOST_BODY)
        app.cleanup_ctx.append(self._while_it_runs)
        app.router.add_get("/router", self._state)
        # Other routes of an engine are about that engine alone.
        app.router.add_route("*", "/v1/{rest:.*}", self._route)
        return app

    async def _while_it_runs(self, _: web.Application) -> AsyncIterator[None]:
        listeners = [Listener(engine, self.topic) for engine in self.engines]
        listening = [asyncio.create_task(listener.run()) for listener in listeners]
        # Answers may take as long as they like; a connection that an engine gave up is not reused.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            yield
        for task in listening:
            task.cancel()
        await asyncio.gather(*listening, return_exceptions=True)

    async def _state(self, _: web.Request) -> web.Response:
        engines = [
            {
                "url": engine.url,
                "busy": engine.busy,
                "documents": len(engine.held.tokens),
                **engine.held.counts,
            }
            for engine in self.engines
        ]
        return web.json_response({"engines": engines, **self.counts})

    async def _route(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        names = await self._names(request, body)
        left = list(self.engines)
        while left:
            engine = best(left, names)
            left.remove(engine)
            try:
                answer = await self._forwarded(engine, request, body)
            except UNREACHED as error:
                # Nothing was sent: another one may answer.
                log.warning("%s: %s", engine.url, error)
                self.counts["unreachable"] += 1
                continue
            except aiohttp.ServerDisconnectedError:
                return _bad_gateway(f"{engine.url}: expected an answer, got the connection's end")
            self.counts["by_document" if engine.held.of(names) else "by_load"] += 1
            return answer
        return _bad_gateway("engines: expected one that can be reached, got none")

    async def _names(self, request: web.Request, body: bytes) -> list[int]:
        """The documents of a request; none where no engine says which, or has any."""
        if request.method != "POST" or request.path not in ROUTES:
            return []
        if not any(mark in body for mark in MARKS):
            return []
        assert self._session is not None
        for engine in sorted(self.engines, key=lambda one: one.busy):
            asked = self._session.post(
                f"{engine.url}{NAMED}{request.path}",
                data=body,
                headers=_kept(request.headers),
                timeout=aiohttp.ClientTimeout(total=NAMED_S),
            )
            try:
                async with asked as answer:
                    said = await answer.read()
                if answer.status != 200:
                    # Whoever answers the request says what is wrong with it.
                    return []
                documents = DOCUMENTS.decode(said).data
                return [key(bytes.fromhex(document.hash)) for document in documents]
            except UNNAMED as error:
                log.warning("%s: names of documents: %r", engine.url, error)
                self.counts["unnamed"] += 1
        return []

    async def _forwarded(
        self, engine: Engine, request: web.Request, body: bytes
    ) -> web.StreamResponse:
        assert self._session is not None
        headers = _kept(request.headers)
        url = URL(f"{engine.url}{request.rel_url.raw_path_qs}", encoded=True)
        asked = self._session.request(request.method, url, data=body, headers=headers)
        engine.busy += 1
        try:
            async with asked as answer:
                told = web.StreamResponse(status=answer.status, headers=_kept(answer.headers))
                await told.prepare(request)
                async for piece in answer.content.iter_any():
                    await told.write(piece)
                await told.write_eof()
                return told
        finally:
            engine.busy -= 1


def _bad_gateway(text: str) -> web.Response:
    error = {"message": text, "type": "BadGatewayError", "param": None, "code": 502}
    return web.json_response({"error": error}, status=502)


def _kept(headers: Any) -> list[tuple[str, str]]:
    """Headers that go on: what is one connection's does not."""
    return [(name, value) for name, value in headers.items() if name.lower() not in CHANGED]


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until it is told to end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=Engine.of, action="append", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--topic", default="", help="of the engines' events")
    asked = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    # A client that leaves ends its request, and so the engine's.
    web.run_app(
        Router(asked.engine, asked.topic).app(),
        host=asked.host,
        port=asked.port,
        handler_cancellation=True,
        access_log=None,
    )


if __name__ == "__main__":
    main()
