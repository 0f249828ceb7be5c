"""Models that the plugin has no class for, on a GPU: `VLLM_TARGET_DEVICE=cuda pytest …`.

In 16 bits two sums that are rounded otherwise may send a token to other experts, which is another
answer and nobody's error. So layers are looked at by themselves, beside the same attention in f64;
answers are of models whose tokens choose all experts, or that have none; and where tokens do
choose, the model in f32 that stands beside an engine is told what they chose. Ours may be off by
twice what stock vLLM is.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional
from vllm import LLM

from families import tiny
from kvweave.policies import SparseX
from test_gpu import (
    EPSILON,
    MEMORY,
    MIXED,
    MODES,
    SIZES,
    SPREAD,
    STEPS,
    STOCK,
    Served,
    Stock,
    off,
    served,
)
from test_segments import PROMPTS, SEEDS
from vllm_attended import Attended, attended, chosen_experts
from vllm_engines import OURS, Answer, answers, prompt
from vllm_segments import Counterpart, ask, named, plain, segments, settings

ASKED = os.environ["VLLM_TARGET_DEVICE"] == "cuda"
pytestmark = pytest.mark.skipif(not ASKED, reason="needs a GPU and VLLM_TARGET_DEVICE=cuda")

ALL = {"num_experts_per_tok": 4}
DELTAS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
CHANGES: dict[str, dict[str, Any]] = {
    # Smaller weights than the others', or rounding is most of what is seen.
    "gpt-oss": {**ALL, "initializer_range": 0.04},
    # Experts from the eighth layer on, of four.
    "llama4": {"interleave_moe_layer_step": 8, "attention_chunk_size": 48},
    "qwen3-next": {**ALL, **DELTAS, "initializer_range": 0.04},
    "qwen3-moe": ALL,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt-oss": {},
    "llama4": {},
    "qwen3-next": {
        "mamba_ssm_cache_dtype": "float32",
        "enable_prefix_caching": False,
        # FlashInfer's would be compiled here first.
        "additional_config": {"gdn_prefill_backend": "triton"},
    },
    "qwen3-moe": {},
}
MODE = {"gpt-oss": "graphs", "llama4": "eager", "qwen3-next": "graphs"}
"""vLLM captures no step with chunked local attention."""
LONG = prompt(150, 77)
"""In three steps, over windows of 24 tokens and chunks of 48."""
TOLD = 1e-3
"""What attention may be off beside twice what stock's is, as a share of what it says."""
SAME = 0.3
"""What stock's log-probabilities are off by at most if the model beside it is the same."""


@dataclass(frozen=True)
class Kept:
    """A model with weights of 16 bits: its checkpoint, and itself in f32."""

    folder: Path
    model: Any


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Kept]:
    def made(name: str, **changes: Any) -> Kept:
        folder = tmp_path_factory.mktemp("model")
        model = tiny(name, **{**SIZES, **SPREAD, **CHANGES[name], **changes})
        for called, weights in model.named_parameters():
            if called.endswith("sinks"):
                # Some take much of a row and some nothing, as in a model that has learned them.
                weights.data.normal_(std=2)
            weights.data = weights.data.bfloat16()
        model.save_pretrained(folder)
        return Kept(folder, model.float())

    return made


@dataclass(frozen=True)
class Told:
    """What an engine answers, and what its layers said of the rows of `LONG`."""

    answer: Served
    layers: dict[str, Attended]
    alone: list[float]

    def apart(self) -> float:
        """How far the first token of a prompt may be from itself in a batch."""
        return firsts_apart(self.alone, [float(said[0]) for said in self.answer.logprobs])


def firsts_apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def told(kept: Kept, name: str, choice: dict[str, Any], mode: str) -> Told:
    """One engine, which is asked `LONG`, then each of `MIXED` alone, then all of them."""
    layers: dict[str, Attended] = {}
    alone: list[float] = []

    def look(llm: LLM) -> None:
        with attended(llm, len(LONG["prompt_token_ids"])) as seen:
            answers(llm, [LONG], 1)
        layers.update(seen)
        alone.extend(answers(llm, [given], 1)[0].logprobs[0] for given in MIXED)
        llm.reset_prefix_cache()

    options = {**OPTIONS[name], "max_num_batched_tokens": 64}
    answer = served(kept.folder, choice, mode, "bfloat16", look, **options)
    return Told(answer, layers, alone)


@pytest.fixture(scope="module")
def both(kept: Callable[..., Kept]) -> Callable[[str], tuple[Kept, Told, Told]]:
    """Of a model what stock vLLM and our backend say, each asked once."""

    @functools.cache
    def made(name: str) -> tuple[Kept, Told, Told]:
        model = kept(name)
        stock, ours = (told(model, name, choice, MODE[name]) for choice in (STOCK, OURS))
        return model, stock, ours

    return made


def attend_alike(stock: dict[str, Attended], ours: dict[str, Attended]) -> None:
    """In every layer we are no further from f64 than twice stock's distance."""
    assert stock.keys() == ours.keys()
    for name, layer in stock.items():
        print(f"{name}: attention off by {ours[name].off():.5f}, stock's by {layer.off():.5f}")
    for name, layer in stock.items():
        assert ours[name].off() <= 2 * layer.off() + TOLD, name


@pytest.mark.parametrize("name", MODE)
def test_layers_attend_as_stocks_do(both: Any, name: str) -> None:
    """Sinks beside windows of 24, chunks of 48, and layers among those of states."""
    _, stock, ours = both(name)
    attend_alike(stock.layers, ours.layers)
    for layer in ours.layers.values():
        limit = 2 * layer.off() + TOLD
        # What would be seen if it were otherwise.
        if layer.sinks is not None:
            assert replace(layer, sinks=None).off() > limit
            assert replace(layer, sinks=layer.sinks * layer.scale).off() > limit
        if layer.window is not None:
            assert replace(layer, window=layer.window + 1).off() > limit
        if layer.chunk is not None:
            assert replace(layer, chunk=layer.chunk + 1).off() > limit
    kinds = {(layer.window, layer.chunk, layer.sinks is None) for layer in ours.layers.values()}
    expected = {
        "gpt-oss": {(24, None, False), (None, None, False)},
        "llama4": {(None, 48, True), (None, None, True)},
        "qwen3-next": {(None, None, True)},
    }
    assert kinds == expected[name]


@pytest.mark.parametrize("name", MODE)
def test_answers_are_as_near_f32_as_stocks(both: Any, name: str) -> None:
    """Every step of 24, of prompts in a batch."""
    kept, stock, ours = both(name)
    wrong, _ = off(stock.answer, kept.model)
    between = firsts_apart(ours.alone, stock.alone)
    print(f"{name}: first tokens {between:.4f} from stock's, stock's {stock.apart():.4f} from")
    print(f"itself in a batch, ours {ours.apart():.4f}")
    assert wrong < SAME
    wanted = Stock(kept.folder, "bfloat16", CHANGES[name], stock.answer, wrong)
    wanted.close(ours.answer, kept.model)


@contextmanager
def choosing(model: Any, chosen: list[torch.Tensor]) -> Iterator[None]:
    """transformers' GPT-OSS, whose tokens are sent to the experts [T, K] of each layer."""
    with ExitStack() as stack:
        for layer, experts in zip(model.model.layers, chosen, strict=True):
            router = layer.mlp.router

            def forward(hidden: Any, router: Any = router, experts: Any = experts) -> Any:
                logits = functional.linear(hidden, router.weight, router.bias)
                return logits, logits.gather(1, experts).softmax(-1), experts

            stack.enter_context(mock.patch.object(router, "forward", forward))
        yield


@torch.no_grad()
def wrong_of(model: Any, given: Any, said: Answer) -> float:
    """How far the log-probabilities of one answer are from the model's."""
    rows = given["prompt_token_ids"] + said.tokens[:-1]
    logprobs = model(torch.tensor([rows]), use_cache=False).logits[0].log_softmax(-1)
    exact = logprobs[-len(said.tokens) :].gather(1, torch.tensor(said.tokens)[:, None])[:, 0]
    return float((exact - torch.tensor(said.logprobs)).abs().max())


@dataclass(frozen=True)
class Chosen:
    """Answers to prompts that were asked alone, and the experts of their tokens, by layer."""

    said: list[Answer]
    experts: list[list[torch.Tensor]]
    layers: dict[str, Attended]

    def wrong(self, model: Any) -> tuple[float, float]:
        """Off by how much beside a model of the same choices, and of one that chooses itself."""
        same, own = 0.0, 0.0
        for given, said, experts in zip(MIXED, self.said, self.experts, strict=True):
            with choosing(model, experts):
                same = max(same, wrong_of(model, given, said))
            own = max(own, wrong_of(model, given, said))
        return same, own

    def otherwise(self, other: Chosen) -> int:
        """Tokens of prompts that chose otherwise in some layer."""
        count = 0
        for given, a, b in zip(MIXED, self.experts, other.experts, strict=True):
            rows = len(given["prompt_token_ids"])
            pairs = zip(a, b, strict=True)
            moved = [(x[:rows].sort().values != y[:rows].sort().values).any(-1) for x, y in pairs]
            count += int(torch.stack(moved).any(0).sum())
        return count


def chosen(kept: Kept, choice: dict[str, Any], most: int) -> Chosen:
    """One engine whose steps are all seen."""
    made: list[Chosen] = []

    def look(llm: LLM) -> None:
        rows = len(LONG["prompt_token_ids"]) + STEPS - 1
        with attended(llm, rows) as layers:
            answers(llm, [LONG], STEPS)
        said, experts = [], []
        for given in MIXED:
            with chosen_experts(llm, most, len(given["prompt_token_ids"]) + STEPS - 1) as taken:
                said += answers(llm, [given], STEPS)
            experts.append(taken)
        made.append(Chosen(said, experts, layers))

    options = {**OPTIONS["gpt-oss"], "enable_prefix_caching": False}
    served(kept.folder, choice, "eager", "bfloat16", look, **options)
    return made[0]


def test_what_parts_gpt_oss_from_stock_is_a_choice_of_experts(kept: Callable[..., Kept]) -> None:
    """Two of four experts a token. Decode steps are looked at too."""
    most = 2
    model = kept("gpt-oss", num_experts_per_tok=most)
    stock, ours = (chosen(model, choice, most) for choice in (STOCK, OURS))
    attend_alike(stock.layers, ours.layers)
    of_stock, of_ours = stock.wrong(model.model), ours.wrong(model.model)
    print(f"{ours.otherwise(stock)} tokens went to other experts than stock's")
    for name, (same, own) in {"ours": of_ours, "stock": of_stock}.items():
        print(f"{name}: off by {same:.4f} beside the same choices, by {own:.4f} beside f32's own")
    firsts = ([said.logprobs[0] for said in one.said] for one in (ours, stock))
    print(f"first tokens {firsts_apart(*firsts):.4f} apart")
    assert of_stock[0] < SAME
    assert of_ours[0] <= 2 * of_stock[0] + EPSILON


def answer_of(said: list[Answer]) -> Served:
    return Served([a.tokens for a in said], [torch.tensor(a.logprobs) for a in said], 0)


def test_segments_beside_experts_are_the_runners(kept: Callable[..., Kept]) -> None:
    """Nothing of a document computed again, and everything; what is unmarked is as near as stock's.

    The Runner's first tokens are of f32, so what rounding takes is what it takes of stock.
    """
    shape = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = kept("qwen3-moe", **shape)
    answer = served(model.folder, STOCK, "eager", "bfloat16")
    wrong, _ = off(answer, model.model)
    assert wrong < SAME
    limit, moved = 2 * wrong + EPSILON, 0.0
    beside = Counterpart(model.model)
    options = {**MEMORY, **MODES["eager"], "dtype": "bfloat16", "block_size": 16}
    with segments(model.folder, settings("qwen3-moe"), **options) as (llm, counts):
        unmarked = answer_of([plain(llm, given["prompt_token_ids"], STEPS) for given in MIXED])
        for given in SEEDS:
            beside.ask(given, "naive", 1)
            ask(llm, given, 1, policy="naive")
        for given in PROMPTS:
            firsts = {}
            for name, policy in {"naive": "naive", "whole": SparseX(0, top_k=1.0)}.items():
                wanted = beside.ask(given, policy, 1, remember=False)
                got = ask(llm, given, 1, policy=named(policy))
                firsts[name] = wanted.logprobs[0]
                apart = abs(got.logprobs[0] - wanted.logprobs[0])
                print(f"{name}: {apart:.4f} from the Runner's, {limit:.4f} are allowed")
                assert apart <= limit
            moved = max(moved, abs(firsts["naive"] - firsts["whole"]))
        assert counts.total.copied_keys > 0
    assert moved > 2 * limit, "the two policies are too near each other to be told apart"
    Stock(model.folder, "bfloat16", {}, answer, wrong).close(unmarked, model.model)
