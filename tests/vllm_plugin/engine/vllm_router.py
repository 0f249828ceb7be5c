"""The example of a router as a module, and the events of engines by vLLM's own publisher."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
from vllm.distributed.kv_events import EventBatch, KVEventBatch, ZmqEventPublisher

from examples import example
from kvweave.adapters.vllm.segments.events import events_of
from kvweave.adapters.vllm.segments.known_documents import Change, document_hash
from vllm_server import free_port

SOON_S = 20.0
TOPIC = "kv"
Scenario = Callable[[], Awaitable[None]]


router = example("route_by_document")


def named(text: str) -> bytes:
    """The name of a document whose tokens are its letters."""
    return document_hash(list(text.encode()))


def stored(*texts: str, tokens: int = 64) -> list[Change]:
    return [("stored", named(text), tokens) for text in texts]


def removed(*texts: str) -> list[Change]:
    return [("removed", named(text), 64) for text in texts]


def payload(*events: Any) -> bytes:
    return msgspec.msgpack.encode(KVEventBatch(ts=time.time(), events=list(events)))


def taken(*batches: bytes) -> Any:
    held = router.Held()
    for number, batch in enumerate(batches):
        held.take(number, batch)
    return held


def names(*texts: str) -> list[int]:
    return [router.key(named(text)) for text in texts]


class Published:
    """The events of an engine, published by vLLM's own class; it may end and begin again."""

    def __init__(self, *, replay: bool = True) -> None:
        self.port, self.replay_port = free_port(), free_port() if replay else None
        self.begin()

    def begin(self) -> None:
        again = f"tcp://*:{self.replay_port}" if self.replay_port else None
        endpoint = f"tcp://*:{self.port}"
        self.publisher = ZmqEventPublisher(0, endpoint, again, buffer_steps=6, topic=TOPIC)

    def say(self, *events: Any) -> None:
        self.publisher.publish(EventBatch(ts=time.time(), events=list(events)))

    def change(self, changes: list[Change]) -> None:
        self.say(*events_of(changes))

    def lose(self) -> None:
        """A batch that nobody gets, now or later."""
        next(self.publisher._seq_gen)

    def end(self) -> None:
        self.publisher.shutdown()

    def addresses(self) -> list[str]:
        ports = [self.port] + ([self.replay_port] if self.replay_port else [])
        return [f"tcp://127.0.0.1:{port}" for port in ports]


@contextmanager
def published(**how: bool) -> Iterator[Published]:
    events = Published(**how)
    try:
        yield events
    finally:
        events.end()


async def until(holds: Callable[[], bool]) -> None:
    """Waits for what events are to bring about."""
    end = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


@asynccontextmanager
async def heard(events: Published) -> AsyncIterator[Any]:
    """What a listener knows of an engine."""
    engine = router.Engine("http://127.0.0.1:1", *events.addresses())
    task = asyncio.create_task(router.Listener(engine, TOPIC).run())
    try:
        yield engine.held
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def played(scenario: Scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 3 * SOON_S))
