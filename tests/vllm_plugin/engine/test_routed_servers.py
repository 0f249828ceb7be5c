"""The example of a router before two real servers, asked by OpenAI's client."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest

from families import tiny
from vllm_segments import SIZES, settings, text
from vllm_server import (
    KEY,
    NAME,
    fetched,
    free_port,
    running,
    scraped,
    segment_options,
    served,
    tokenizer,
)

pytestmark = pytest.mark.long
ROUTER = Path(__file__).resolve().parents[3] / "examples" / "route_by_document.py"
TOPIC, SOON_S = "kv", 60.0
WORDS = ("the", "cat", "and", "hen", "fox", "went", "on")


class Servers:
    """Two servers, and a router before them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tiny("llama", **SIZES).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        self.ports = [(free_port(), free_port()) for _ in range(2)]
        self.opened = [ExitStack() for _ in range(2)]
        self.addresses = ["", ""]
        self.router = ""

    def begin(self, number: int) -> None:
        """Starts a server."""
        events, replay = self.ports[number]
        published = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "topic": TOPIC,
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replay}",
        }
        options = [*segment_options(settings()), "--kv-events-config", json.dumps(published)]
        log = self.folder / f"{number}.txt"
        started = served(self.folder, log, options, VLLM_SERVER_DEV_MODE="1")
        self.addresses[number] = self.opened[number].enter_context(started)

    def words(self) -> list[str]:
        """What the router is told of them."""
        words = ["--topic", TOPIC]
        for address, (events, replay) in zip(self.addresses, self.ports, strict=True):
            parts = (address, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")
            words += ["--engine", ",".join(parts)]
        return words

    def known(self) -> list[int]:
        """How many documents the router knows of each."""
        return [one["documents"] for one in fetched(f"{self.router}/router", "GET")[1]["engines"]]

    def until(self, holds: Callable[[], bool]) -> None:
        """Waits; events leave an engine with its steps, so each has some."""
        end = time.monotonic() + SOON_S
        while not holds():
            assert time.monotonic() < end, self.known()
            for address in filter(None, self.addresses):
                ask(address, "well?")
            time.sleep(0.5)

    def asked(self) -> list[float]:
        """Prompts with marks that each has looked up."""
        return [
            scraped(address).get("requests_total", 0) if address else 0
            for address in self.addresses
        ]


def ask(address: str, *parts: Any, **others: Any) -> dict[str, Any]:
    """A chat's response."""
    content = [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts]
    given = {
        "model": NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
        "temperature": 0,
        "extra_body": {"ignore_eos": True, **others.pop("extra_body", {})},
        **others,
    }
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
    return dict(client.chat.completions.create(**given).model_dump())


def marked(seed: str) -> dict[str, Any]:
    """A document of some hundred tokens."""
    said = f"{seed}: {' '.join(Random(seed).choices(WORDS, k=60))}."
    return {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("routed"))
    with made.opened[0], made.opened[1]:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(made.begin, range(2)))
        port = free_port()
        command = [sys.executable, str(ROUTER), "--port", str(port), *made.words()]
        log = made.folder / "router.txt"
        with running(command, port, 60, log, ready="/router") as made.router:
            yield made


def test_each_chat_goes_to_the_engine_that_has_its_document(servers: Servers) -> None:
    for address, seed in zip(servers.addresses, "ab", strict=True):
        ask(address, "first:", marked(seed), "who?")
    servers.until(lambda: min(servers.known()) >= 1)
    for seed, wanted in (("a", [1, 0]), ("b", [0, 1]), ("b", [0, 1]), ("a", [1, 0])):
        before = servers.asked()
        # Where a document stands says nothing: its name is the same.
        said = ask(servers.router, f"now of {seed} and of much else:", marked(seed), "who?")
        assert said["kvweave"]["found"]["request"] > 32
        assert [now - then for now, then in zip(servers.asked(), before, strict=True)] == wanted
    client = openai.OpenAI(base_url=f"{servers.router}/v1", api_key=KEY, max_retries=0)
    content = [{"type": "text", "text": "streamed:"}, marked("b")]
    pieces = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": content}], max_tokens=4, stream=True
    )
    before = servers.asked()
    assert sum(1 for _ in pieces) >= 2
    assert [now - then for now, then in zip(servers.asked(), before, strict=True)] == [0, 1]
    assert fetched(f"{servers.router}/router", "GET")[1]["by_document"] >= 5


def test_a_knowledge_bases_document_is_found_too(servers: Servers) -> None:
    ids = text(120, 7)
    document = {"name": "k", "tokens": ids[20:100], "namespace": "acme"}
    before = servers.known()
    assert fetched(f"{servers.addresses[1]}/kvweave/knowledge", "POST", document)[0] == 200
    servers.until(lambda: servers.known()[1] > before[1])
    counted = json.dumps({"segments": [[20, 100]], "namespace": "acme"})
    given = {"model": NAME, "prompt": ids, "max_tokens": 4, "vllm_xargs": {"kvweave": counted}}
    asked = servers.asked()
    status, said = fetched(f"{servers.router}/v1/completions", "POST", given)
    assert status == 200
    assert said["kvweave"]["found"]["frozen"] > 32
    assert [now - then for now, then in zip(servers.asked(), asked, strict=True)] == [0, 1]


def test_what_went_is_not_looked_for(servers: Servers) -> None:
    """Caches that are reset, and then a server that ends and starts again."""
    ask(servers.addresses[0], "then:", marked("d"), "who?")
    ask(servers.addresses[1], "then:", marked("e"), "who?")
    servers.until(lambda: min(servers.known()) >= 1)
    second = servers.known()[1]
    reset = f"{servers.addresses[1]}/reset_prefix_cache?reset_external=true"
    assert fetched(reset, "POST")[0] == 200
    # What a namespace keeps in its knowledge base stays.
    servers.until(lambda: servers.known()[1] < second)
    servers.opened[0].close()
    servers.addresses[0] = ""
    servers.until(lambda: servers.known()[0] == 0)
    before = servers.asked()
    said = ask(servers.router, "once more:", marked("d"), "who?")
    assert "found" in said["kvweave"]
    assert servers.asked()[1] - before[1] == 1
