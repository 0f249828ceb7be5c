"""What is at work says what it is, in a line of a notebook."""

from __future__ import annotations

import asyncio
from pathlib import Path

import kvweave
from families import random_tokens, tiny


def test_runners_and_what_they_hold() -> None:
    """In a line of a notebook: the model and its blocks, what a prompt and a talk hold."""
    runner = kvweave.Runner(tiny("llama"), max_tokens=256, progress=False, check=False)
    before = "Runner(4 layers, 2 KV heads, torch.float32, cpu; blocks held=0, cached=0, free=17)"
    assert repr(runner) == before
    with runner.prefill(random_tokens(20, 1), "full") as done:
        assert repr(done) == "Prefill(20 tokens, exact_tokens=20)"
        assert "blocks held=2," in repr(runner)
    assert repr(done) == "Prefill(released, exact_tokens=20)"
    with runner.conversation("full") as talk:
        talk.ask(random_tokens(9, 2), max_new_tokens=2)
        assert repr(talk) == "Conversation(full, turns=1, tokens=11)"
    assert repr(talk) == "Conversation(full, turns=1, closed)"
    packed = kvweave.Runner(tiny("llama"), max_tokens=256, check=False, kv_dtype="int4")
    assert "; blocks held=0, cached=0, free=" in repr(packed)
    assert repr(packed).endswith("packed blocks held=0, cached=0, free=5)")


def test_engines_servers_and_their_requests() -> None:
    runner = kvweave.Runner(tiny("llama"), max_tokens=256, progress=False, check=False)
    engine = runner.engine()
    request = engine.submit(random_tokens(9, 1), max_new_tokens=3)
    assert repr(engine) == "Engine(live=1)"
    assert repr(request) == f"EngineRequest({request.number}, live, tokens=0)"
    engine.run()
    assert repr(engine) == "Engine(live=0)"
    assert repr(request) == f"EngineRequest({request.number}, finished, tokens=3)"
    with runner.serve() as server:
        served = server.submit(random_tokens(9, 2), max_new_tokens=2)
        served.result(60)
        assert repr(served).endswith(", finished, tokens=2)")
        assert repr(server) == "Server(live=0)"
        tenant = kvweave.Tenant(runner, server, "a tenant")
        tenant.generate(random_tokens(9, 3), max_new_tokens=1)
        assert repr(tenant) == "Tenant('a tenant', requests=1)"
    assert repr(server) == "Server(closed)"

    async def serve() -> str:
        async with kvweave.AsyncRunner(runner) as answering:
            return repr(answering)

    assert asyncio.run(serve()) == "AsyncRunner(Server(live=0))"


def test_workflows() -> None:
    runner = kvweave.Runner(
        tiny("llama"), max_tokens=256, progress=False, check=False, eviction="cost-aware"
    )
    texts = {"writer": random_tokens(9, 1), "critic": random_tokens(9, 2)}
    with kvweave.Workflow(runner, texts, {"writer": ["critic"]}) as flow, flow.step("writer"):
        assert repr(flow) == "Workflow(writer=0, critic=1)"


def test_stores_say_nothing_that_is_secret(tmp_path: Path) -> None:
    assert repr(kvweave.Store(tmp_path)) == f'Store("{tmp_path}", hash="xxh3-128")'
    options = {"root": str(tmp_path / "far")}
    remote = kvweave.RemoteStore("fs", options, secret=b"0123456789abcdef")
    assert repr(remote) == "RemoteStore('fs', sealed=True)"
