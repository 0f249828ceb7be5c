"""The plugin on a GPU, eager and with decode steps from graphs: `VLLM_TARGET_DEVICE=cuda pytest …`.

Half precision rounds differently in every kernel. So every step of an answer is compared with
transformers' forward in f32 over the same text, and ours may be off by twice what stock vLLM is.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform

from families import tiny
from kvweave.adapters.vllm.backend.paged_backend import PagedBackend
from test_head_split import Masked, is_split, ours, written
from vllm_engines import OURS, engine, metric, prompt

ASKED = os.environ["VLLM_TARGET_DEVICE"] == "cuda"
pytestmark = pytest.mark.skipif(not ASKED, reason="needs a GPU and VLLM_TARGET_DEVICE=cuda")

MIXED = [prompt(length, seed) for seed, length in enumerate([5, 40, 100, 200, 33, 64, 1, 250])]
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs": {
        "enforce_eager": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8],
        },
    },
}
STOCK = {"attention_config": {"backend": "FLASH_ATTN"}}
STOCK_F32 = {"attention_config": {"backend": "TRITON_ATTN"}}
STEPS = 24
EPSILON = 2e-3
SIZES = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
SPREAD = {"initializer_range": 0.06}
# Head sizes with a kernel for Hopper, and one without.
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "D64": ("float16", {}),
    "D128": ("bfloat16", {"head_dim": 128, "num_attention_heads": 4}),
    "D32": ("float16", {"head_dim": 32}),
}
MEMORY = {"kv_cache_memory_bytes": 256 * 2**20, "gpu_memory_utilization": 0.2}


@dataclass(frozen=True)
class Served:
    """Tokens and their log-probabilities [STEPS] of each prompt, and how many were thrown out."""

    tokens: list[list[int]]
    logprobs: list[torch.Tensor]
    preempted: int

    def same(self, other: Served) -> int:
        """Prompts that were answered alike."""
        return sum(a == b for a, b in zip(self.tokens, other.tokens, strict=True))


def served(
    model: Path,
    choice: dict[str, Any],
    mode: str,
    dtype: str,
    look: Callable[[LLM], object] = lambda _: None,
    **changes: Any,
) -> Served:
    """What an engine answers to `MIXED`, after a `look` at it."""
    start = time.perf_counter()
    # Graphs of an engine that is gone leave a pool behind that another cannot capture into.
    type(current_platform)._global_graph_pool = None
    options = {"block_size": 16, "dtype": dtype, **MEMORY, **MODES[mode], **changes}
    with engine(model, {**options, **choice}) as llm:
        ready = time.perf_counter() - start
        config = llm.llm_engine.vllm_config.compilation_config
        known = config.static_forward_context.values()
        layers = [layer for layer in known if isinstance(layer, Attention)]
        is_ours = choice not in (STOCK, STOCK_F32)
        assert all(issubclass(layer.attn_backend, PagedBackend) is is_ours for layer in layers)
        assert is_split(llm) is ("hf_overrides" in choice and "kv_transfer_config" not in choice)
        look(llm)
        sampling = SamplingParams(
            temperature=0, max_tokens=STEPS, logprobs=0, ignore_eos=True, detokenize=False
        )
        said = [o.outputs[0] for o in llm.generate(MIXED, sampling, use_tqdm=False)]
        preempted = metric(llm, "num_preemptions")
    print(f"ready in {ready:.1f} s, done in {time.perf_counter() - start:.1f} s", flush=True)
    return Served(
        [list(one.token_ids) for one in said],
        [
            torch.tensor([p[t].logprob for t, p in zip(one.token_ids, one.logprobs, strict=True)])
            for one in said
        ],
        preempted,
    )


@torch.no_grad()
def off(answer: Served, model: Any) -> tuple[float, float]:
    """How far log-probabilities are from the model's, and tokens from its most likely ones."""
    wrong, short = 0.0, 0.0
    for given, tokens, logprobs in zip(MIXED, answer.tokens, answer.logprobs, strict=True):
        ids = torch.tensor([given["prompt_token_ids"] + tokens])
        exact = model(ids, use_cache=False).logits[0].log_softmax(-1)[-STEPS - 1 : -1]
        said = exact.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        wrong = max(wrong, float((said - logprobs).abs().max()))
        short = max(short, float((exact.max(1).values - said).max()))
    return wrong, short


@dataclass(frozen=True)
class Stock:
    """A model, what stock vLLM answers, and how far off that is."""

    folder: Path
    dtype: str
    changes: dict[str, Any]
    answer: Served
    wrong: float

    def close(self, got: Served, model: Any) -> None:
        """Ours is no further from f32 than twice stock's distance, in every step."""
        wrong, short = off(got, model)
        print(f"off by {wrong:.4f}, stock by {self.wrong:.4f}; {short:.4f} from the likeliest")
        assert wrong <= 2 * self.wrong + EPSILON
        assert short <= 2 * (2 * self.wrong + EPSILON)


def stock(checkpoint: Any, name: str) -> Stock:
    """What stock vLLM answers with one of `MODELS`."""
    dtype, changes = MODELS[name]
    changes = {**SIZES, **SPREAD, **changes}
    folder = checkpoint("llama", **changes)
    answer = served(folder, STOCK, "graphs", dtype)
    wrong, _ = off(answer, tiny("llama", **changes))
    return Stock(folder, dtype, changes, answer, wrong)


@pytest.fixture(scope="module")
def stocks(checkpoint: Any) -> Any:
    """Stock vLLM's answers, each asked for once."""
    return functools.cache(functools.partial(stock, checkpoint))


@pytest.mark.parametrize(
    ("name", "mode"), [("D64", "graphs"), ("D64", "eager"), ("D128", "graphs"), ("D32", "graphs")]
)
def test_answers_are_stocks(stocks: Any, name: str, mode: str) -> None:
    wanted = stocks(name)
    got = served(wanted.folder, OURS, mode, wanted.dtype)
    wanted.close(got, tiny("llama", **wanted.changes))
    print(f"{got.same(wanted.answer)} of {len(MIXED)} answers alike")
    assert got.same(wanted.answer) >= (len(MIXED) - 1 if wanted.dtype == "float16" else 1)


def test_preempted_requests_go_on_from_graphs(stocks: Any) -> None:
    wanted = stocks("D64")
    got = served(wanted.folder, OURS, "graphs", "float16", num_gpu_blocks_override=36)
    assert got.preempted > 0
    wanted.close(got, tiny("llama", **wanted.changes))


def test_heads_with_a_wide_window_are_stocks(stocks: Any, tmp_path: Path) -> None:
    wanted = stocks("D64")
    got = served(wanted.folder, ours(written(tmp_path, sink=0, recent=512)), "graphs", "float16")
    wanted.close(got, tiny("llama", **wanted.changes))
    assert got.same(wanted.answer) >= len(MIXED) - 1


@pytest.mark.parametrize("mode", ["graphs", "eager"])
def test_local_heads_are_masked_ones(stocks: Any, tmp_path: Path, mode: str) -> None:
    """Sink and window far shorter than the prompts."""
    wanted, path = stocks("D64"), written(tmp_path, sink=20, recent=40)
    got = served(wanted.folder, ours(path), mode, "float16")
    wanted.close(got, Masked("llama", wanted.changes, path).model)
    assert got.same(wanted.answer) < len(MIXED)


@pytest.mark.parametrize("mode", ["graphs", "eager"])
def test_local_heads_beside_experts_are_masked_ones(
    checkpoint: Any, tmp_path: Path, mode: str
) -> None:
    """In f32: rounded to 16 bits a token may go to another expert, which is no small error."""
    changes, path = {**SIZES, **SPREAD}, written(tmp_path, sink=20, recent=40)
    folder = checkpoint("qwen3-moe", **changes)
    # Tensor cores multiply f32 with 10 bits, of stock's experts too.
    answer = served(folder, STOCK_F32, mode, "float32")
    of_stock, _ = off(answer, tiny("qwen3-moe", **changes))
    wanted = Stock(folder, "float32", changes, answer, of_stock)
    got = served(folder, ours(path, "qwen3-moe"), mode, "float32")
    wanted.close(got, Masked("qwen3-moe", changes, path).model)
