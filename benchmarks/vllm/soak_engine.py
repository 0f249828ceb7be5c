"""The engine of a soak: a tiny random Llama with all parts of the plugin that go together."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.soak.asked import CHOICE, EXACT, VOCABULARY, Asked
from benchmarks.soak.words import word_tokenizer
from benchmarks.vllm import device
from benchmarks.vllm.engine import DECODE_GRAPHS
from benchmarks.vllm.model import write_heads
from kvweave.adapters.vllm.serving import BLOCK_TOKENS, engine_options

ARCHITECTURE = "LlamaForCausalLM"
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
WHOLE = (0, 2, 1, 1)
"""KV heads of each layer that keep everything; the others a sink and a window."""
WINDOW = {"sink": 16, "recent": 48}
CHUNK, REQUESTS, BLOCKS = 64, 8, 96
"""Tokens of a prompt that a step computes, requests in a step, and blocks for too few of them."""
FROZEN, KEPT_BYTES = 0.25, 24 << 20
"""The share of the segments' store for documents, and what they may take on the disk."""
TOLERANCE = 2e-3
"""How far rounding may take a log-probability."""
GRAMMAR, ALLOWED = "(w[1-9])*", frozenset(range(10))
"""Of answers that a grammar bounds, and the tokens that it allows, an end of text among them."""


@dataclass(frozen=True)
class Served:
    """What an engine of a soak has: a store of so many bytes, packed in `dtype` if in any.

    `heads`: beside a map. `tolerance`: how far log-probabilities of answers that reuse documents
    may be from the quiet ones. A number between two codes is packed as either by rounding, which is
    another where the same document is computed in other chunks.
    """

    store_bytes: int
    heads: bool = True
    dtype: str | None = None
    tolerance: float = TOLERANCE

    @property
    def exact(self) -> tuple[str, ...]:
        """Kinds that are answered as without reuse: of packed pages a prefix is not exact."""
        return EXACT if self.dtype is None else tuple(kind for kind in EXACT if kind != "prefix")


SEGMENTS = Served(20 << 20)
PACKED = {
    "int4": Served(6 << 20, heads=False, dtype="int4", tolerance=0.02),
    "half-int4": Served(8 << 20, heads=False, dtype="half-int4", tolerance=0.02),
    "planes-3": Served(10 << 20, heads=False, dtype="planes-3", tolerance=0.02),
}


def written(folder: Path) -> Path:
    """A checkpoint of the shape with a tokenizer of its own, and a map with uneven layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = folder / "model"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(model)
    word_tokenizer(VOCABULARY).save_pretrained(model)
    layers, kv_heads = SHAPE["num_hidden_layers"], SHAPE["num_key_value_heads"]
    write_heads(model, layers, kv_heads, lambda layer, head: head < WHOLE[layer], **WINDOW)
    return model


@contextmanager
def engine(model: Path, served: Served, *, quiet: bool) -> Iterator[Any]:
    """A vLLM in this process. `quiet`: for a request at a time, with room for all.

    Prompts are cut into chunks alike: a step of the quiet one has no room for more.
    """
    kept = model.parent / ("quiet" if quiet else "kept")
    shutil.rmtree(kept, ignore_errors=True)
    blocks = {} if quiet else {"num_gpu_blocks_override": BLOCKS}
    parts = _parts(model, kept, served, quiet=quiet)
    with serving(model, {**parts, **blocks}, quiet=quiet) as llm:
        yield llm


@contextmanager
def serving(model: Path, ours: dict[str, Any], *, quiet: bool) -> Iterator[Any]:
    """The same with options of the plugin, `ours`, whatever they are."""
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins

    # A class that is known need not be looked at in a process of its own.
    load_general_plugins()
    architecture = f"Kvweave{ARCHITECTURE}"
    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
    with device.in_process(str(model), **_options(quiet=quiet), **ours) as llm:
        yield llm


def server_options(model: Path, kept: Path, served: Served) -> dict[str, Any]:
    """Options of a server with the same parts, and room for all that is asked at once."""
    made = {**_options(quiet=False), **_parts(model, kept, served, quiet=False)}
    return {name: value for name, value in made.items() if value is not False}


def _parts(model: Path, kept: Path, served: Served, *, quiet: bool) -> dict[str, Any]:
    chosen = {"heads": str(model / "heads.json")} if served.heads else {}
    chosen |= {"segment_dtype": served.dtype} if served.dtype is not None else {}
    made = engine_options(
        ARCHITECTURE,
        **chosen,
        segment_bytes=served.store_bytes * (8 if quiet else 1),
        frozen_share=0.9 if quiet else FROZEN,
        store=str(kept),
        # Answers must be those of the quiet engine, which computes or reads the same.
        store_reads="always",
        store_bytes=KEPT_BYTES * (64 if quiet else 1),
    )
    return {"block_size": BLOCK_TOKENS, **made}


def _options(*, quiet: bool) -> dict[str, Any]:
    limits: dict[str, Any] = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 4}
    if not quiet:
        limits = {"max_num_batched_tokens": REQUESTS * CHUNK, "max_num_seqs": REQUESTS}
        limits |= {"long_prefill_token_threshold": CHUNK}
    gpu = {"compilation_config": DECODE_GRAPHS, "gpu_memory_utilization": 0.2}
    return {
        "dtype": "float32",
        "max_model_len": 640,
        "disable_log_stats": False,
        "seed": 0,
        "distributed_executor_backend": "uni",
        **limits,
        **device.options(**gpu, enable_sleep_mode=not quiet),
    }


def sampling(asked: Asked) -> Any:
    """Greedy in effect: vLLM wants a temperature where there are several answers."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    params = SamplingParams(
        n=asked.n,
        temperature=1.0 if asked.n > 1 else 0.0,
        top_k=1 if asked.n > 1 else 0,
        max_tokens=asked.answer,
        stop=asked.stop or None,
        logprobs=2,
        ignore_eos=asked.kind != CHOICE,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    if asked.kind == CHOICE:
        params.structured_outputs = StructuredOutputsParams(regex=GRAMMAR)
    if asked.marks is not None:
        params.extra_args = {"kvweave": asked.marks}
    return params


def said(output: Any) -> dict[str, Any]:
    """What a finished request was answered, as plain data.

    `near`: at each token the two likeliest, with their log-probabilities.
    """
    answers = []
    for one in output.outputs:
        steps = list(zip(one.token_ids, one.logprobs, strict=True))
        near = [sorted(((-p.logprob, t) for t, p in step.items()))[:2] for _, step in steps]
        answers.append(
            {
                "tokens": list(one.token_ids),
                "logprobs": [step[token].logprob for token, step in steps],
                "near": [[[t, -p] for p, t in pair] for pair in near],
                "text": one.text,
                "reason": str(one.finish_reason),
            }
        )
    outcome = (output.kv_transfer_params or {}).get("kvweave")
    return {"answers": answers, "outcome": outcome}


class Steps:
    """Hears what an engine's scheduler plans: how prompts are cut, and who is preempted."""

    def __init__(self, llm: Any) -> None:
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.chunks: dict[str, list[int]] = {}
        self.preempted: Counter[str] = Counter()
        self._schedule = self.scheduler.schedule
        self.scheduler.schedule = self.schedule

    def schedule(self, *given: Any, **named: Any) -> Any:
        """vLLM's own plan of a step, noted."""
        plan = self._schedule(*given, **named)
        for name, count in plan.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            if request.num_computed_tokens - count < request.num_prompt_tokens:
                self.chunks.setdefault(_outer(name), []).append(count)
        for name in plan.preempted_req_ids or ():
            self.preempted[_outer(name)] += 1
        return plan

    def taken(self, name: str) -> dict[str, Any]:
        """What was noted of a request, which is over."""
        return {"chunks": self.chunks.pop(name, []), "preempted": self.preempted.pop(name, 0)}


def _outer(name: str) -> str:
    """The name under which a request came: vLLM adds eight characters, and a number before it."""
    return (name.rpartition("-")[0] or name).rpartition("_")[2]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """What a file has, a JSON object a line."""
    return [json.loads(line) for line in path.read_text().splitlines()]
