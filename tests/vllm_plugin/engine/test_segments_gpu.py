"""Segments on a GPU, eager and with decode steps from graphs: `VLLM_TARGET_DEVICE=cuda pytest …`.

kvweave's Runner stands beside them, in f32 on the CPU.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from vllm import LLM

from families import tiny
from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from kvweave.policies import Foresight, SparseX
from test_gpu import MEMORY, MODES, SPREAD
from test_segments import PROMPTS, SEEDS, compare
from vllm_segments import (
    FIRST,
    SECOND,
    SIZES,
    Counterpart,
    Counts,
    Marked,
    ask,
    asked,
    close,
    named,
    plain,
    segments,
    settings,
    text,
)

ASKED = os.environ["VLLM_TARGET_DEVICE"] == "cuda"
pytestmark = pytest.mark.skipif(not ASKED, reason="needs a GPU and VLLM_TARGET_DEVICE=cuda")

ROUNDED = 0.03
"""How far f16 may take the log-probability of a first token from the Runner's in f32."""
SHAPE: dict[str, Any] = {"hidden_size": 512, "head_dim": 128, "num_attention_heads": 4} | SPREAD


def test_in_f32_answers_are_the_runners(checkpoint) -> None:
    """The plain kernels: the same rows are chosen and the same tokens said."""
    with segments(checkpoint("llama"), settings(), **MEMORY) as (llm, _):
        compare(llm, Counterpart(tiny("llama", **SIZES)))


DRAFTED = ((8, 1), (8, 1), (3, 1), (12, 1), (2, 4), (2, 4), (5, 3), (4, 6), (4, 6))
"""Tokens and drafts: as many as a block of 16 tokens has room for are made side by side."""


@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_a_draft_says_the_same_from_a_graph(checkpoint, mode: str) -> None:
    """The first is decoded launch by launch, those of as many behind it from a graph."""
    beside = Counterpart(tiny("llama", **SIZES))
    options = {**MEMORY, **MODES[mode], "enable_prefix_caching": False}
    with segments(checkpoint("llama"), settings(), **options) as (llm, counts):
        for case, (draft, drafts) in enumerate(DRAFTED):
            policy = Foresight(share=0.3, draft=draft, drafts=drafts)
            made, side = counts.worker.drafts.made, min(drafts, 16 // draft)
            again = side in made
            beside.ask(FIRST, "full", 1, namespace=str(case))
            ask(llm, FIRST, policy="full", namespace=str(case))
            wanted = beside.ask(SECOND, policy, remember=False, namespace=str(case))
            got = ask(llm, SECOND, policy=named(policy), namespace=str(case))
            close(got, wanted)
            assert (made[side].graph is not None) == again
        for part in counts.worker._layers().parts:
            assert not part.pages[: part.kv_heads].any()


def near(llm: LLM, beside: Counterpart, given: Marked, policy: str | SparseX) -> None:
    wanted = beside.ask(given, policy, 1, remember=False)
    got = ask(llm, given, 6, policy=named(policy))
    assert got.tokens[0] == wanted.tokens[0]
    assert abs(got.logprobs[0] - wanted.logprobs[0]) < ROUNDED


def test_kernels_for_tensor_cores_and_decode_graphs(checkpoint) -> None:
    """f16 and heads of 128: spared rows, all rows, a knowledge base, and others in the batch."""
    beside = Counterpart(tiny("llama", **SHAPE))
    changes = {**MEMORY, **MODES["graphs"], "dtype": "float16", "block_size": 16}
    document = tuple(text(130, 40))
    with segments(checkpoint("llama", **SHAPE), settings(), **changes) as (llm, counts):
        stock = plain(llm, text(90, 41), 12)
        for given in SEEDS:
            beside.ask(given, "naive", 1)
            ask(llm, given, policy="naive")
        for given in PROMPTS:
            near(llm, beside, given, "naive")
            near(llm, beside, given, SparseX(0, top_k=1.0))
        spared = counts.total.copied_keys
        beside.runner.insert(list(document), "handbook")
        KnowledgeBase(llm.collective_rpc).insert("handbook", document)
        near(llm, beside, Marked([text(21, 42), document, text(9, 43)]), "naive")
        assert counts.total.hits["frozen"] == len(document)
        assert counts.total.copied_keys == spared + 4 * len(document)
        beside_others(llm, counts, stock.tokens)


def beside_others(llm: LLM, counts: Counts, wanted: list[int]) -> None:
    """A prompt that reuses segments in the steps in which another one decodes."""
    inner, said = llm.llm_engine, {}
    inner.reset_prefix_cache()
    plain_params = asked(Marked([text(90, 41)]), 12)[1]
    plain_params.extra_args = None
    inner.add_request("other", {"prompt_token_ids": text(90, 41)}, plain_params)
    inner.step()
    reused = counts.total.reused_tokens
    inner.add_request("marked", *asked(PROMPTS[0], 6, policy="naive"))
    while inner.has_unfinished_requests():
        said |= {out.request_id: out.outputs[0] for out in inner.step() if out.finished}
    assert list(said["other"].token_ids) == wanted
    assert len(said["marked"].token_ids) == 6
    assert counts.total.reused_tokens > reused
