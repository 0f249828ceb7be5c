"""One runner prefills, another decodes: the tokens are those of one that did both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from families import FAMILIES, VOCABULARY, random_tokens, tiny
from kvweave import InvalidArgument, NamespaceConflict, PoolFull
from kvweave.payload import KvPayload
from kvweave.runner import Runner, Sampling, Segment
from local_heads import local_heads
from versions import needs_cuda

WINDOW = (4, 24)


def runner_of(model: Any, local: int = 0, **more: Any) -> Runner:
    """A runner in which `local` heads of each layer keep a window."""
    heads = None
    if local:
        plain = Runner(model, max_tokens=64, check=False, progress=False)
        name = plain.spec.fingerprint
        heads = local_heads(plain.cache.shape, local, *WINDOW, model=name)
    return Runner(model, heads=heads, progress=False, **{"max_tokens": 2048, **more})


def nothing_held(runner: Runner) -> None:
    runner.cache.check()
    assert runner.cache.stats()["held"] == 0


@pytest.mark.parametrize("local", [0, 1])
@pytest.mark.parametrize("family", ["llama", "llama-dynamic", "qwen2-sliding", "qwen3"])
def test_decoding_goes_on_elsewhere(family: str, local: int) -> None:
    model = tiny(family)
    here, there = (runner_of(model, local, chunk_tokens=chunk) for chunk in (32, None))
    prompt = random_tokens(100, 1)
    alone = here.generate(prompt, "full", max_new_tokens=40, stop=(), remember=False)
    with here.prefill(prompt, "full", remember=False) as done:
        sent = here.export(done).to_bytes()
        payload = KvPayload.from_bytes(sent)
        went_on = there.resume(payload, max_new_tokens=40, stop=())
        again = there.resume(payload, max_new_tokens=40, stop=())
    assert went_on.tokens == again.tokens == alone.tokens
    assert went_on.report.policy == "payload"
    assert went_on.report.kv_bytes == alone.report.kv_bytes
    if local:
        sizes = payload.sizes()
        assert sizes.total < sizes.dense
    for runner in (here, there):
        nothing_held(runner)


@pytest.mark.parametrize("local", [0, 2])
@pytest.mark.parametrize("mode", ["share", "materialise"])
def test_documents_are_handed_over_with_the_rest(smollm2: Any, mode: str, local: int) -> None:
    """Real weights; a document whose keys lie at other positions than the prompt's."""
    model, tokenizer = smollm2
    here, there = (runner_of(model, local, tokenizer=tokenizer, mode=mode) for _ in range(2))
    text = "The pump must be primed with two litres of clean water before its first start. " * 4
    here.insert(text, "manual")
    prompt = ["Read this.\n", Segment(text=text), "\nWhat must be done before the first start?\n"]
    asked = {"max_new_tokens": 12, "stop": (), "sampling": Sampling(0.8, seed=3)}
    alone = here.generate(prompt, "naive", remember=False, **asked)
    with here.prefill(prompt, "naive", remember=False) as done:
        assert done.report.reused_segment > 50
        assert done.report.mode == mode
        payload = KvPayload.from_bytes(here.export(done).to_bytes())
    went_on = there.resume(payload, **asked)
    assert went_on.tokens == alone.tokens
    assert went_on.text == alone.text
    nothing_held(there)


def test_what_is_handed_over_is_not_remembered() -> None:
    model = tiny("llama")
    here, there = (runner_of(model) for _ in range(2))
    prompt = random_tokens(90, 2)
    with here.prefill(prompt, "full", namespace="a") as done:
        payload = here.export(done)
    assert here.cache.match_prefix(prompt, "a", regime=payload.header.regime) == 90
    there.resume(payload, max_new_tokens=4, stop=(), namespace="a")
    assert there.cache.match_prefix(prompt, "a", regime=payload.header.regime) == 0


def test_payloads_of_others_are_refused() -> None:
    model = tiny("llama")
    here, there = (runner_of(model) for _ in range(2))
    with here.prefill(random_tokens(40, 3), "full", namespace="a") as done:
        payload = here.export(done)
        done.request.append(np.asarray([1], np.int32))
        with pytest.raises(InvalidArgument, match="expected the 40 tokens of the prompt, got 41"):
            here.export(done)
    with pytest.raises(InvalidArgument, match="released"):
        here.export(done)

    def changed(**fields: Any) -> KvPayload:
        return KvPayload(replace(payload.header, **fields), payload.parts)

    def without(name: str, **parts: torch.Tensor) -> KvPayload:
        kept = {n: part for n, part in payload.parts.items() if n != name}
        return KvPayload(payload.header, {**kept, **parts})

    ids = torch.full_like(payload.tokens, VOCABULARY)
    for wrong, says in (
        (changed(fingerprint="other"), "fingerprint"),
        (changed(regime=1), "regime"),
        (without("logits"), "logits: expected"),
        (without("logits", logits=torch.zeros(7)), "logits: expected"),
        (without("tokens", tokens=ids), "token ids: expected 0 <= id"),
        (without("tokens", tokens=-ids), "token ids: expected 0 <= id"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            there.resume(wrong)
    with pytest.raises(NamespaceConflict):
        there.resume(payload, namespace="b")
    with pytest.raises(PoolFull):
        there.resume(payload, max_new_tokens=100_000)
    with pytest.raises(InvalidArgument, match="head"):
        runner_of(model, local=1).resume(payload)
    nothing_held(there)


def test_every_family_has_a_payload() -> None:
    for family in FAMILIES:
        runner = runner_of(tiny(family))
        with runner.prefill(random_tokens(30, 4), "full") as done:
            payload = KvPayload.from_bytes(runner.export(done).to_bytes())
        assert runner.resume(payload, max_new_tokens=2, stop=()).report.tokens == 30


@needs_cuda
@pytest.mark.parametrize("local", [0, 1])
@pytest.mark.parametrize("mode", ["share", "materialise"])
def test_between_gpus_and_hosts(mode: str, local: int) -> None:
    model = tiny("llama").to("cuda")
    here, there = (runner_of(model, local, mode=mode) for _ in range(2))
    document, asked = random_tokens(70, 5).tolist(), {"max_new_tokens": 30, "stop": ()}
    here.insert(document, "document")
    fresh = random_tokens(60, 6).tolist()
    prompt = [Segment(tokens=fresh[:21]), Segment(tokens=document), Segment(tokens=fresh[21:])]
    alone = here.generate(prompt, "naive", remember=False, **asked)
    with here.prefill(prompt, "naive", remember=False) as done:
        assert done.report.reused_segment > 60
        payload = here.export(done)
        assert all(part.is_cuda for name, part in payload.parts.items() if name != "tokens")
        stored = KvPayload.from_bytes(payload.to_bytes())
    assert not any(part.is_cuda for part in stored.parts.values())
    for sent in (payload, stored):
        assert there.resume(sent, **asked).tokens == alone.tokens
    host = runner_of(tiny("llama"), local, mode=mode)
    assert host.resume(payload, **asked).tokens[0] == alone.tokens[0]
    nothing_held(there)
    nothing_held(host)
