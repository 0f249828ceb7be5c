"""Models that the plugin has no class for, tiny and random: where they are refused, and by what
name; that nothing of ours is in their way; and what our attention backend answers for them. On a
GPU likewise, by `VLLM_TARGET_DEVICE=cuda`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm

import vllm_cpu_ops
import vllm_without_plugin
from kvweave import Unsupported
from kvweave.adapters.vllm.versions import is_known
from test_head_split import ours as under_map
from test_head_split import written
from vllm_engines import OURS, STOCK, answers, clean, engine, ours, prompt
from vllm_segments import settings

PROMPTS = [prompt(length, seed) for seed, length in enumerate([5, 40, 100, 33])]
SIZES: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.15}
LATENT = {"kv_lora_rank": 32, "head_dim": 16, "qk_rope_head_dim": 16, "num_key_value_heads": 4}
CHANGES: dict[str, dict[str, Any]] = {
    "gpt-oss": SIZES,
    "llama4": SIZES,
    "deepseek-v3": {**SIZES, **LATENT, "topk_method": "noaux_tc"},
    "qwen3-next": SIZES,
}
"""Beside their configurations in `families`, so that vLLM's kernels have sizes that they know."""
BF16 = {"dtype": "bfloat16"}
ON_GPU = os.environ["VLLM_TARGET_DEVICE"] == "cuda"
MEMORY = {"kv_cache_memory_bytes": 256 << 20, "gpu_memory_utilization": 0.2}
OPTIONS: dict[str, dict[str, Any]] = {
    # vLLM's own compiled attention has sinks in bf16 alone, and its linear attention is so too.
    "gpt-oss": {} if vllm_cpu_ops.options() else BF16,
    "llama4": BF16 if ON_GPU else {},
    "deepseek-v3": BF16,
    "qwen3-next": {**BF16, "mamba_ssm_cache_dtype": "float32", "enable_prefix_caching": False},
}
"""Of each model's engines."""
if ON_GPU:
    OPTIONS = {name: {**options, **MEMORY} for name, options in OPTIONS.items()}
ROUNDED = "in 16 bits another expert is another answer: test_other_models_gpu.py"
HAS = {
    "gpt-oss": "GptOssForCausalLM, which has learned sinks",
    "llama4": "Llama4ForCausalLM, which has rows that see their own chunk alone",
    "deepseek-v3": "DeepseekV3ForCausalLM, which has pages with a latent vector a token",
    "qwen3-next": "Qwen3NextForCausalLM, which has layers of states beside attention",
}
Said = dict[str, Any]


def said_by(folder: Path, choice: dict[str, Any]) -> Said:
    """Tokens of each prompt and their log-probabilities, or by what an engine failed."""
    try:
        with engine(folder, choice) as llm:
            found = answers(llm, PROMPTS, 8)
    except Exception as error:  # Whatever vLLM raises for what it cannot run here.
        clean()
        return {"error": [type(error).__name__, str(error).splitlines()[0] if str(error) else ""]}
    clean()
    return {"said": [a.tokens for a in found], "logprobs": [a.logprobs for a in found]}


@pytest.fixture(scope="module")
def folder_of(checkpoint: Any) -> Callable[[str], Path]:
    return lambda name: checkpoint(name, **CHANGES[name])


@pytest.fixture(scope="module")
def without_plugin(folder_of: Callable[[str], Path]) -> dict[str, Said]:
    """What each model says in a process that has loaded no plugin, one of them for all."""
    script = Path(vllm_without_plugin.__file__)
    paths = [str(script.parent), *sys.path]
    path = os.pathsep.join(path for path in paths if path)
    given = {name: [str(folder_of(name)), OPTIONS[name]] for name in CHANGES}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(given)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=400,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"model"')]
    return {line.pop("model"): line for line in lines}


def needs(stock: Said) -> None:
    """Skips where vLLM itself has no way to run a model on this machine."""
    if "error" in stock:
        pytest.skip(f"vLLM does not run it here: {': '.join(stock['error'])}")


@pytest.fixture(params=CHANGES)
def name(request: Any) -> str:
    return request.param


def test_nothing_of_ours_is_in_the_way(name: str, folder_of: Any, without_plugin: Any) -> None:
    """The plugin is loaded and nothing is asked of it: answers and failures are stock's."""
    assert said_by(folder_of(name), {**STOCK, **OPTIONS[name]}) == without_plugin[name]
    needs(without_plugin[name])


@pytest.mark.parametrize("part", ["heads", "segments"])
def test_a_part_is_refused_by_the_models_name(
    name: str, part: str, folder_of: Any, tmp_path: Path
) -> None:
    """Whoever names a class of ours for a checkpoint of another model is told what that has."""
    choice = under_map(written(tmp_path, 16, 64)) if part == "heads" else settings()
    expected = f"expected LlamaForCausalLM for KvweaveLlamaForCausalLM, got {HAS[name]}"
    started = engine(folder_of(name), choice, **OPTIONS[name])
    with pytest.raises(Exception, match=expected) as raised, started:
        pass
    assert isinstance(ours(raised.value), Unsupported), raised.value


def test_segments_are_refused_without_a_class_of_ours(folder_of: Any) -> None:
    """Stock's own class beside the connector would compute everything and reuse nothing."""
    choice = settings()
    del choice["hf_overrides"]
    expected, started = f"KvweaveSegments, got {HAS['llama4']}", engine(folder_of("llama4"), choice)
    with pytest.raises(Exception, match=expected) as raised, started:
        pass
    assert isinstance(ours(raised.value), Unsupported), raised.value


@pytest.mark.skipif(
    not ON_GPU and is_known(vllm.__version__, ("0.26",)),
    reason="vLLM 0.26 itself refuses MLA on CPUs, before it looks for a backend",
)
def test_the_backend_refuses_latent_vectors(folder_of: Any) -> None:
    """On CPUs vLLM would take a backend of its own instead, and say so in a line of its log."""
    expected = f"attention: expected keys and values of heads .*, got MLA of {HAS['deepseek-v3']}"
    started = engine(folder_of("deepseek-v3"), OURS, **OPTIONS["deepseek-v3"])
    with pytest.raises(Exception, match=expected) as raised, started:
        pass
    assert isinstance(ours(raised.value), Unsupported), raised.value


@pytest.mark.parametrize("model", ["gpt-oss", "llama4", "qwen3-next"])
def test_the_backend_answers_as_stock_does(model: str, folder_of: Any, without_plugin: Any) -> None:
    """Learned sinks beside windows, chunked local attention, and layers between linear ones."""
    stock = without_plugin[model]
    needs(stock)
    if ON_GPU and "dtype" in OPTIONS[model]:
        pytest.skip(ROUNDED)
    got = said_by(folder_of(model), {**OURS, **OPTIONS[model]})
    if "dtype" not in OPTIONS[model]:
        assert got["said"] == stock["said"]
    first_tokens_alike(model, got, stock)


def first_tokens_alike(model: str, got: Said, stock: Said) -> None:
    """In 16 bits two rounded sums may choose other experts, so only first tokens are compared."""
    tolerance = 0.1 if "dtype" in OPTIONS[model] else 2e-3
    first = [[said[0] for said in one["logprobs"]] for one in (got, stock)]
    np.testing.assert_allclose(first[0], first[1], rtol=0, atol=tolerance)


@pytest.mark.skipif(ON_GPU, reason=ROUNDED)
def test_two_rows_on_both_sides_of_a_chunks_edge(folder_of: Any, without_plugin: Any) -> None:
    """Of 33 and 100 tokens in chunks of 32: two requests to a layer, where an engine has one."""
    stock = without_plugin["llama4"]
    needs(stock)
    alone = {"max_num_seqs": 1, "max_num_batched_tokens": 31, "enable_prefix_caching": False}
    got = said_by(folder_of("llama4"), {**OURS, **OPTIONS["llama4"], **alone})
    first_tokens_alike("llama4", got, stock)
