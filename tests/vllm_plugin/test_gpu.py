"""The plugin on a GPU: eager, and with decode steps replayed from graphs; skipped without one.

Half precision rounds differently in every kernel, so two tokens that are about equally likely may
change places. Where an answer leaves stock's, both tokens must have been such a pair.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_head_split import Masked, is_split, ours, written
from vllm import SamplingParams

from families import VOCABULARY
from kvweave.adapters.vllm.backend import PagedBackend
from vllm_engines import OURS, engine, metric, prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MIXED = [prompt(length, seed) for seed, length in enumerate([5, 40, 100, 200, 33, 64, 1, 250])]
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    },
}
MODES: dict[str, dict[str, Any]] = {"eager": {}, "graphs": GRAPHS}
STOCK = {"attention_config": {"backend": "FLASH_ATTN"}}
STEPS = 24
# Two log-probabilities nearer than this may change places in half precision.
NEAR = {"float16": 0.02, "bfloat16": 0.1}
SIZES = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
MEMORY = 256 * 2**20


def served(model, choice: dict[str, Any], mode: str, dtype: str, **changes: Any) -> list[dict]:
    """For each prompt: its tokens, and what was likely at each step."""
    memory = {"kv_cache_memory_bytes": MEMORY, "gpu_memory_utilization": 0.2}
    options = {"block_size": 16, "dtype": dtype, **memory, **MODES[mode], **changes}
    with engine(model, {**options, **choice}) as llm:
        config = llm.llm_engine.vllm_config.compilation_config
        layers = config.static_forward_context.values()
        is_ours = choice is not STOCK
        assert all((layer.attn_backend is PagedBackend) is is_ours for layer in layers)
        assert is_split(llm) is ("hf_overrides" in choice)
        sampling = SamplingParams(
            temperature=0, max_tokens=STEPS, logprobs=8, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(MIXED, sampling, use_tqdm=False)
        preempted = metric(llm, "num_preemptions")
    said = [output.outputs[0] for output in outputs]
    return [
        {
            "tokens": list(one.token_ids),
            "likely": [{t: p.logprob for t, p in step.items()} for step in one.logprobs],
            "preempted": preempted,
        }
        for one in said
    ]


def agree(got: list[dict], wanted: list[dict], near: float) -> None:
    """The same tokens up to a tie; log-probabilities within rounding until there."""
    steps = 0
    for a, b in zip(got, wanted, strict=True):
        for step in range(STEPS):
            ours_, stocks = a["tokens"][step], b["tokens"][step]
            likely = b["likely"][step]
            assert ours_ in likely, (step, ours_, likely)
            assert likely[stocks] - likely[ours_] < near, (step, ours_, stocks, likely)
            assert abs(a["likely"][step][ours_] - likely[ours_]) < near
            steps += 1
            if ours_ != stocks:
                break
    print(f"{steps} of {STEPS * len(got)} steps before a tie")
    assert steps >= STEPS * len(got) // 2


@pytest.fixture(scope="module")
def stocks(checkpoint):
    """Stock vLLM's answers, each asked for once."""
    known: dict[tuple, list[dict]] = {}

    def of(family: str, dtype: str, **changes: Any) -> tuple[Any, list[dict]]:
        key = (family, dtype, *sorted(changes.items()))
        model = checkpoint(family, **{**SIZES, "initializer_range": 0.06, **changes})
        if key not in known:
            known[key] = served(model, STOCK, "graphs", dtype)
        return model, known[key]

    return of


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("family", "dtype", "changes"),
    [
        ("llama", "float16", {}),
        ("qwen3", "bfloat16", {"head_dim": 128, "hidden_size": 256}),
        ("llama", "float16", {"head_dim": 32}),
    ],
    ids=["D64", "D128", "D32"],
)
def test_tokens_are_stocks(stocks, family: str, dtype: str, changes: dict, mode: str) -> None:
    model, wanted = stocks(family, dtype, **changes)
    agree(served(model, OURS, mode, dtype), wanted, NEAR[dtype])


def test_preempted_requests_go_on_from_graphs(stocks) -> None:
    model, wanted = stocks("llama", "float16")
    got = served(model, OURS, "graphs", "float16", num_gpu_blocks_override=36)
    assert got[0]["preempted"] > 0
    agree(got, wanted, NEAR["float16"])


@pytest.mark.parametrize("mode", MODES)
def test_heads_with_a_wide_window_are_stocks(stocks, tmp_path, mode: str) -> None:
    path = written(tmp_path, sink=0, recent=512)
    model, wanted = stocks("llama", "float16")
    agree(served(model, ours(path), mode, "float16"), wanted, NEAR["float16"])


@pytest.mark.parametrize("mode", MODES)
def test_local_heads_are_masked_ones(checkpoint, tmp_path, mode: str) -> None:
    """Sink and window far shorter than prompts; transformers' forward in f32 is what it means."""
    path = written(tmp_path, sink=20, recent=40)
    changes = {**SIZES, "initializer_range": 0.06}
    model = checkpoint("llama", **changes)
    got = served(model, ours(path), mode, "float16")
    masked = Masked("llama", changes, path)
    for given, one in zip(MIXED, got, strict=True):
        # Each step of ours is one that the masked model, given the same text, might have made.
        ids = given["prompt_token_ids"] + one["tokens"]
        logits = masked.model(torch.tensor([ids]), use_cache=False).logits[0]
        logprobs = logits.float().log_softmax(-1)[-STEPS - 1 : -1]
        said = logprobs.gather(1, torch.tensor(one["tokens"])[:, None])[:, 0]
        assert (logprobs.max(1).values - said).max() < NEAR["float16"]
        assert max(one["tokens"]) < VOCABULARY
