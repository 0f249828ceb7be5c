"""vLLM engines in this process, and what they answer."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.plugins import load_general_plugins

import vllm_cpu_ops
from families import VOCABULARY
from kvweave.adapters.vllm.versions import is_known
from kvweave.errors import KvweaveError

OURS = {"attention_config": {"backend": "CUSTOM"}}
STOCK: dict[str, Any] = {}
_STARTED: list[Path] = []


@dataclass(frozen=True)
class Answer:
    """Greedy tokens of a request, and the log-probability of each."""

    tokens: list[int]
    logprobs: list[float]
    cached: int


@cache
def _load(architecture: str) -> None:
    """Tells vLLM a model's class, which it otherwise looks at in a process of its own."""
    load_general_plugins()
    made = ModelRegistry.models[architecture].load_model_cls()
    ModelRegistry.register_model(architecture, made)


@contextmanager
def engine(model: Path, choice: dict[str, Any], **changes: Any) -> Iterator[LLM]:
    """A vLLM that chops prompts into chunks of up to 64 rows."""
    options = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "block_size": 32,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "distributed_executor_backend": "uni",
        "disable_log_stats": False,
        **vllm_cpu_ops.options(),
    }
    known = json.loads((model / "config.json").read_text())
    for name in {**known, **choice.get("hf_overrides", {})}["architectures"]:
        _load(name)
    _STARTED.append(model)
    # An engine collects garbage several times while it starts: what was there before is not gone
    # through each time. Its end thaws it.
    gc.freeze()
    llm = LLM(str(model), **{**options, **choice, **changes})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def long_with(package: str, name: str) -> list[pytest.MarkDecorator]:
    """Marks of a long test beside a package of others, tried with one vLLM on CPUs."""
    absent = importlib.util.find_spec(package) is None
    here = os.environ["VLLM_TARGET_DEVICE"] == "cpu" and is_known(vllm.__version__, ("0.33",))
    return [
        pytest.mark.long,
        pytest.mark.skipif(absent, reason=f"{name} is not installed"),
        pytest.mark.skipif(not here, reason="tried with vLLM 0.33 on CPUs"),
    ]


def clean() -> None:
    """Collects what engines left in a process, and another would trip over."""
    if _STARTED:
        # One that was refused while it started has left its connector.
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
    _STARTED.clear()


def prompt(length: int, seed: int) -> dict[str, list[int]]:
    numbers = np.random.default_rng(seed)
    return {"prompt_token_ids": numbers.integers(1, VOCABULARY, length).tolist()}


def sampling(count: int) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=count, logprobs=0, ignore_eos=True, detokenize=False
    )


def answer(output: Any) -> Answer:
    said = output.outputs[0]
    pairs = zip(said.token_ids, said.logprobs, strict=True)
    logprobs = [step[token].logprob for token, step in pairs]
    return Answer(list(said.token_ids), logprobs, output.num_cached_tokens or 0)


def answers(llm: LLM, prompts: list[dict[str, list[int]]], count: int) -> list[Answer]:
    outputs = llm.generate(prompts, sampling(count), use_tqdm=False)
    return [answer(output) for output in outputs]


def same(got: list[Answer], wanted: list[Answer], tolerance: float = 2e-3) -> None:
    """The same tokens, with the same log-probabilities but for rounding."""
    assert [a.tokens for a in got] == [a.tokens for a in wanted]
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=tolerance)


def ours(error: BaseException) -> BaseException | None:
    """The error that kvweave raised: from 0.33 on vLLM makes one of its own of what checks say."""
    return error if isinstance(error, KvweaveError) else error.__cause__


def metric(llm: LLM, name: str) -> int:
    """A counter of vLLM's own."""
    return sum(int(value.value) for value in llm.get_metrics() if value.name == f"vllm:{name}")
