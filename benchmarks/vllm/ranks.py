"""The plugin over several ranks: `python -m benchmarks.vllm.ranks [--ranks 2] [--json FILE]`.

A small Llama with random weights in float32 answers the same prompts by one rank and by several,
each engine in a process of its own: `ours` (the attention backend), `heads` (some keep a window, in
each layer another number), `top_k` (three of four read few pages in decode steps), `segments`
(marked documents, reused), `both` (these under the map of `heads`) and `stages` (the backend by
pipeline parallelism; all others by tensor parallelism). Greedy tokens must be the same; how far
log-probabilities are apart is recorded.

On CPUs ranks are processes (`--layers 4 --limit 600`); with a vLLM that was built for GPUs,
`tests/vllm_plugin/engine` on PYTHONPATH has the ops that it lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.report.record import of_device
from benchmarks.vllm.device import options, prepare
from benchmarks.vllm.model import write_heads, write_ranked
from kvweave.adapters.vllm.serving import engine_options
from kvweave.lab.bench.rows import Row

ENGINES = ("ours", "heads", "top_k", "segments", "both", "stages")
REUSING = ("segments", "both")
ARCHITECTURE = "LlamaForCausalLM"
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}
WINDOW = {"sink": 16, "recent": 64}
UNEVEN = (0, 1, 4, 2)
"""Whole heads of every four layers: ranks have their first in different ones."""
LENGTHS = (40, 600, 17, 333, 128, 1000)
DOCUMENTS, ANSWER = 3, 32


def written(folder: Path, layers: int) -> None:
    """A checkpoint of the shape, and its two maps: of windows, and of few pages."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=layers)).save_pretrained(folder)
    kv_heads = SHAPE["num_key_value_heads"]
    write_heads(folder, layers, kv_heads, lambda layer, head: head < UNEVEN[layer % 4], **WINDOW)
    write_ranked(folder, layers, kv_heads, lambda layer, head: (layer + head) % 4 * 4)


def engine(name: str, model: Path, ranks: int) -> Any:
    """A vLLM of so many ranks."""
    from vllm import LLM

    segments, heads = {"segment_bytes": 1 << 28}, {"heads": str(model / "heads.json")}
    ours: dict[str, dict[str, Any]] = {
        "heads": heads,
        "top_k": {"heads": str(model / "ranked.json")},
        "segments": segments,
        "both": {**segments, **heads},
    }
    parallel = "pipeline_parallel_size" if name == "stages" else "tensor_parallel_size"
    common: dict[str, Any] = {
        "dtype": "float32",
        parallel: ranks,
        "skip_tokenizer_init": True,
        "block_size": 16,
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 30,
        **options(enforce_eager=True, gpu_memory_utilization=0.3),
    }
    return LLM(str(model), **{**common, **engine_options(ARCHITECTURE, **ours.get(name, {}))})


def answers(name: str, model: Path, ranks: int) -> dict[str, Any]:
    """Tokens and log-probabilities of every prompt; with segments, of documents that moved."""
    from vllm import SamplingParams

    numbers = np.random.default_rng(0)

    def text(length: int) -> list[int]:
        return [int(token) for token in numbers.integers(1, SHAPE["vocab_size"], length)]

    given: list[tuple[list[int], dict[str, Any] | None]] = [(text(n), None) for n in LENGTHS]
    if name in REUSING:
        documents = [text(200) for _ in range(DOCUMENTS)]
        given = []
        for policy in ("full", "naive", "sparsex", "foresight"):
            ids, spans = text(30), []
            for number in numbers.permutation(DOCUMENTS):
                spans.append([len(ids), len(ids) + len(documents[number])])
                ids += documents[number] + text(20)
            given.append((ids, {"segments": spans, "policy": policy}))
    llm = engine(name, model, ranks)
    tokens, logprobs = [], []
    # One after the other: a document is there when the next prompt comes.
    for ids, marks in given:
        extra = None if marks is None else {"kvweave": marks}
        params = SamplingParams(
            temperature=0, max_tokens=ANSWER, logprobs=0, ignore_eos=True, detokenize=False
        )
        params.extra_args = extra
        said = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].outputs[0]
        pairs = zip(said.token_ids, said.logprobs, strict=True)
        tokens.append(list(said.token_ids))
        logprobs.append([step[token].logprob for token, step in pairs])
    return {"tokens": tokens, "logprobs": logprobs}


def rows_of(ranks: int, model: Path, engines: list[str], limit_s: float) -> Iterator[Row]:
    """Each engine by one rank and by several; all side by side where there are GPUs.

    To start takes them longest.
    """

    def start(name: str, count: int, gpu: int | None) -> subprocess.Popen[bytes]:
        seen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
        words = [sys.executable, "-m", "benchmarks.vllm.ranks"]
        words += ["--child", name, "--ranks", str(count), "--model", str(model)]
        return subprocess.Popen(
            ["timeout", str(limit_s), *words], env={**os.environ, **seen}, stdout=sys.stderr
        )

    import torch

    together = len(engines) if torch.cuda.is_available() else 1
    for first in range(0, len(engines), together):
        some = engines[first : first + together]
        running = [start(name, 1, number % ranks) for number, name in enumerate(some)]
        if together == 1:
            running.pop().wait()
        for process in [*running, *(start(name, ranks, None) for name in some)]:
            process.wait()
    for name in engines:
        paths = [model / f"{name}-{count}.json" for count in (1, ranks)]
        if not all(path.exists() for path in paths):
            yield Row(f"{name}: no answer of {ranks} ranks or of one", float("nan"), "", None, {})
            continue
        one, many = (json.loads(path.read_text()) for path in paths)
        same = [a == b for a, b in zip(one["tokens"], many["tokens"], strict=True)]
        apart = [
            abs(a - b)
            for first, second, alike in zip(one["logprobs"], many["logprobs"], same, strict=True)
            if alike
            for a, b in zip(first, second, strict=True)
        ]
        beside = {"of": len(same), "log-probabilities apart by at most": max(apart, default=0.0)}
        title = f"answers of {ANSWER} tokens that are the same by 1 and by {ranks} ranks: {name}"
        yield Row(title, sum(same), "", None, beside)


def main(words: list[str] | None = None) -> int:
    """Returns the exit status: 1 when an answer differs."""
    parser = argparse.ArgumentParser(prog="benchmarks.vllm.ranks", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--limit", type=float, default=240, help="seconds a process may take")
    parser.add_argument("--json", type=Path, help="where the run goes")
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(words)
    if chosen.child:
        found = answers(chosen.child, chosen.model, chosen.ranks)
        (chosen.model / f"{chosen.child}-{chosen.ranks}.json").write_text(json.dumps(found))
        return 0
    with TemporaryDirectory() as folder:
        written(Path(folder), chosen.layers)
        rows = []
        for row in rows_of(chosen.ranks, Path(folder), chosen.engines, chosen.limit):
            print(json.dumps(asdict(row)), flush=True)
            rows.append(row)
    if chosen.json:
        chosen.json.write_text(json.dumps(of_device("vllm_ranks", rows), indent=1) + "\n")
    return int(any(row.value != row.of.get("of") for row in rows))


# This process, and what it starts.
if __name__ in ("__main__", "__mp_main__"):
    prepare()

if __name__ == "__main__":
    sys.exit(main())
