"""The knowledge base of an engine, namespaces, and requests whose markers are malformed."""

from __future__ import annotations

import logging

import pytest
import torch

from families import VOCABULARY, tiny
from kvweave.adapters.vllm.segments import check
from kvweave.adapters.vllm.segments.check import MarkerCheck
from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from kvweave.errors import InvalidArgument, PoolFull, UnknownSegment, Unsupported
from vllm_engines import engine, ours, same, sampling
from vllm_segments import (
    DOCUMENT,
    FIRST,
    SECOND,
    SIZES,
    Counterpart,
    ask,
    close,
    plain,
    segments,
    settings,
    stock,
    text,
)


@pytest.mark.parametrize("batched", [512, 48], ids=["whole", "chunks"])
def test_inserted_documents_are_reused(checkpoint, batched: int) -> None:
    """Encoded alone, in pages of the store, and read like any other segment."""
    beside = Counterpart(tiny("qwen3", **SIZES))
    beside.runner.insert(list(DOCUMENT), "handbook")
    wanted = beside.ask(SECOND, "naive")
    choice = settings("qwen3")
    with segments(checkpoint("qwen3"), choice, max_num_batched_tokens=batched) as (llm, counts):
        base = KnowledgeBase(llm.collective_rpc)
        entry = base.insert("handbook", DOCUMENT)
        assert (entry["name"], entry["namespace"], entry["tokens"]) == ("handbook", "", 100)
        assert base.entries() == base.entries("") == [entry]
        assert base.entries("other") == []
        close(ask(llm, SECOND, policy="naive"), wanted)
        assert counts.total.hits["frozen"] == len(DOCUMENT)
        assert base.store()["frozen"] == 7
        base.delete("handbook")
        assert base.entries() == []
        assert base.store()["frozen"] == 0


def test_inserting_disturbs_nobody(checkpoint) -> None:
    """Between the steps of requests that run."""
    wanted = stock(checkpoint("llama"), text(80, 5), 12)
    with segments(checkpoint("llama"), settings(), max_num_batched_tokens=64) as (llm, _):
        base, inner, done = KnowledgeBase(llm.collective_rpc), llm.llm_engine, []
        inner.add_request("a", {"prompt_token_ids": text(80, 5)}, sampling(12))
        for step in range(40):
            if not inner.has_unfinished_requests():
                break
            done += [out for out in inner.step() if out.finished]
            base.insert(f"document {step % 3}", text(90, step))
        assert list(done[0].outputs[0].token_ids) == wanted.tokens
        assert len(base.entries()) == 3


def test_what_the_base_refuses(checkpoint) -> None:
    """Beyond its share, tokens that are none, names that are not there; the engine lives on."""
    choice = settings(arena=33 * 32 * 1024, frozen_share=0.4)
    with segments(checkpoint("llama"), choice) as (llm, _):
        base = KnowledgeBase(llm.collective_rpc)
        base.insert("a", text(150, 1))
        with pytest.raises(PoolFull, match="frozen share"):
            base.insert("b", text(150, 2))
        assert [entry["name"] for entry in base.entries()] == ["a"]
        for tokens in ([], [VOCABULARY], [-1], [3] * 513):
            with pytest.raises(InvalidArgument, match="tokens: expected"):
                base.insert("b", tokens)
        with pytest.raises(UnknownSegment, match="expected"):
            base.delete("b")
        for name in (3, "\ud800", "a" * 257):
            with pytest.raises(InvalidArgument, match="name: expected a string"):
                base.insert(name, [1, 2])
            with pytest.raises(InvalidArgument, match="namespace: expected a string"):
                base.delete("b", name)
            with pytest.raises(InvalidArgument, match="namespace: expected a string"):
                base.entries(name)
        assert len(ask(llm, SECOND).tokens) == 6


def test_an_engine_without_segments_has_no_base(checkpoint) -> None:
    choice = {"worker_extension_cls": settings()["worker_extension_cls"]}
    with (
        engine(checkpoint("llama"), choice) as llm,
        pytest.raises(Unsupported, match="expected an engine that reuses segments"),
    ):
        KnowledgeBase(llm.collective_rpc).entries()


def test_namespaces_never_meet(checkpoint) -> None:
    """Neither segments of requests nor a knowledge base cross from one to the other."""
    wanted = stock(checkpoint("llama"), SECOND.tokens)
    with segments(checkpoint("llama"), settings()) as (llm, counts):
        KnowledgeBase(llm.collective_rpc).insert("handbook", DOCUMENT, "acme")
        ask(llm, FIRST, namespace="acme", policy="naive")
        reused = counts.total.reused_tokens
        assert reused == len(DOCUMENT)
        for namespace in ("", "other", "acm"):
            same([ask(llm, SECOND, namespace=namespace, policy="naive")], [wanted])
        assert counts.total.reused_tokens == reused
        ask(llm, SECOND, namespace="acme", policy="naive")
    assert counts.total.reused_tokens == 2 * reused


MALFORMED = {
    "text": "nothing",
    "field": {"segment": [[0, 4]]},
    "order": {"segments": [[5, 9], [0, 6]]},
    "empty": {"segments": [[5, 5]]},
    "float": {"segments": [[0, 4.0]]},
    "policy": {"policy": "magic"},
    "namespace": {"namespace": 3},
    "discover": {"discover": "yes"},
    "boundary": {"segments": [[0, 8]], "policy": {"name": "sparsex", "boundary": 99}},
    "layers": {"discover": True, "policy": {"name": "infoflow", "layers": [99]}},
    "a policy alone": {"policy": "naive"},
    "no segment": {"policy": "naive", "segments": []},
}


def test_malformed_markers_are_refused_and_the_engine_lives(checkpoint) -> None:
    wanted = stock(checkpoint("llama"), SECOND.tokens)
    with segments(checkpoint("llama"), settings()) as (llm, _):
        for given in MALFORMED.values():
            params = sampling(6)
            params.extra_args = {"kvweave": given}
            with pytest.raises(Exception, match="kvweave") as caught:
                llm.generate([{"prompt_token_ids": SECOND.tokens}], params, use_tqdm=False)
            assert isinstance(ours(caught.value), InvalidArgument)
        same([ask(llm, SECOND)], [wanted])


def test_the_second_model_runner_takes_the_check() -> None:
    """vLLM has it where Triton is, with an interface of its own; it is not run here."""
    interface = pytest.importorskip("vllm.v1.worker.gpu.sample.logits_processor")
    names = settings()["logits_processors"]
    check = interface.build_custom_logits_processors_params_validator(names)
    params = sampling(1)
    check(params)
    params.extra_args = {"kvweave": {"segment": []}}
    with pytest.raises(Exception, match="kvweave: expected the fields segments") as caught:
        check(params)
    assert isinstance(ours(caught.value), InvalidArgument)
    params.extra_args = {"kvweave": MALFORMED["boundary"]}
    known = interface.build_custom_logits_processors_params_validator([f"{names[0]}Of98Layers"])
    with pytest.raises(Exception, match="boundary: expected layers of 98, got 99"):
        known(params)
    made, logits = MarkerCheck(None, None), torch.zeros(2, 3)
    assert made.add_request(0, params) is False
    assert made.apply(logits, None) is logits


def test_a_check_that_knows_of_no_layers_says_so(monkeypatch) -> None:
    """Beside an architecture that is not ours; what every model would refuse it refuses."""
    said: list[str] = []
    log = logging.getLogger("vllm.kvweave.segments")
    monkeypatch.setattr(log, "warning", lambda text, *given, **_: said.append(text % given))
    params = sampling(1)
    for given in (MALFORMED["boundary"], MALFORMED["boundary"], {"discover": True}):
        params.extra_args = {"kvweave": given}
        MarkerCheck.validate_params(params)
    (line,) = said
    assert line.startswith("logits_processors: expected an architecture of ours beside MarkerCheck")
    params.extra_args = {"kvweave": MALFORMED["a policy alone"]}
    with pytest.raises(InvalidArgument, match="segments or discover beside it, got naive alone"):
        MarkerCheck.validate_params(params)
    with pytest.raises(AttributeError, match="no attribute 'MarkerCheckOfLayers'"):
        check.__getattr__("MarkerCheckOfLayers")
    assert check.__getattr__("MarkerCheckOf7Layers").layers == 7


def test_markers_beyond_the_prompt_are_not_followed(checkpoint) -> None:
    """Its length is known to the scheduler alone, which computes such a prompt like any other."""
    with segments(checkpoint("llama"), settings(), enable_prefix_caching=True) as (llm, counts):
        params = sampling(6)
        params.extra_args = {"kvweave": {"segments": [[0, 10_000]]}}
        llm.generate([{"prompt_token_ids": SECOND.tokens}], params, use_tqdm=False)
        assert plain(llm, SECOND.tokens).cached == 128
    assert counts.total.requests == 0


def test_without_the_check_the_scheduler_passes_over_malformed_markers(checkpoint) -> None:
    choice = settings() | {"logits_processors": None}
    wanted = stock(checkpoint("llama"), SECOND.tokens)
    with segments(checkpoint("llama"), choice) as (llm, counts):
        for given in MALFORMED.values():
            params = sampling(6)
            params.extra_args = {"kvweave": given}
            llm.generate([{"prompt_token_ids": SECOND.tokens}], params, use_tqdm=False)
        same([ask(llm, SECOND)], [wanted])
    assert counts.total.requests == 1
