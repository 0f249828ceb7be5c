"""One vLLM engine in a process of its own, measured: `benchmarks.vllm.serve` starts it.

`python -m benchmarks.vllm.engine '{"engine": "ours", "job": "latency", …}'` prints one JSON
object a line, each as soon as it is known, between whatever vLLM itself prints.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.device.models import MODELS
from benchmarks.heard import Heard, figures
from benchmarks.load import (
    AT_ONCE,
    POISSON,
    Callers,
    answers_of,
    arrivals,
    beside,
    come,
    lengths_of,
    load,
    longest_answer,
    told,
)
from benchmarks.vllm.found import say
from benchmarks.vllm.kv_bytes import Watched, held_bytes
from benchmarks.vllm.model import FAR, MAPPED, OFF, SEGMENTS, STOCK, options_named, written

ENGINES = (STOCK, "ours", "heads", "top_k", MAPPED, FAR, OFF)
MODES = ("eager", "graphs", "compiled")
"""How steps run: launch by launch, decode steps from graphs, or vLLM's default (torch.compile)."""
DECODE_GRAPHS: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
ROUNDS = 4
STEPS = 64
"""Decode steps that a median is taken of."""


@dataclass(frozen=True)
class Task:
    """What one process measures. `layers` 0: all of the model's; `memory` 0: what vLLM finds.

    `decodes`: batch and tokens before the step. `rate` in requests a second, 0 for what follows
    from the load at once; beside `talkers` who decode comes a prompt of `long` tokens. `pages` are
    what heads of the engines `top_k` and `far` read in a decode step, `store` the bytes of segments
    that `mapped` and `segments` have, out of `memory` where it is given, and `host` those of the
    host's memory that `far` has. With `poisson` requests come at that rate too, once those at once
    have ended; `ways` says the same of the job `load`. `others` go to vLLM as they are.
    """

    engine: str
    job: str
    model: str = "Llama-3.1-8B"
    layers: int = 0
    mode: str = "graphs"
    memory: int = 0
    chunk: int = 16384
    lengths: tuple[int, ...] = (8192, 32768)
    batches: tuple[int, ...] = (1, 16, 32)
    context: int = 8192
    decodes: tuple[tuple[int, int], ...] = ((40, 10_000), (8, 120_000))
    requests: int = 100
    span: tuple[int, int] = (10_000, 30_000)
    answer: int | tuple[int, int] = 500
    rate: float = 0.0
    talkers: int = 16
    long: int = 100_000
    pages: int = 64
    store: int = 0
    host: int = 64 << 30
    poisson: bool = False
    ways: tuple[str, ...] = (AT_ONCE, POISSON)
    others: dict[str, Any] = field(default_factory=dict)


def started(task: Task, model: Path, heads: Path, longest: int, most: int) -> Any:
    """The engine of a task, for up to `most` requests of `longest` tokens; says what it took."""
    start = time.perf_counter()
    from vllm import LLM

    architecture = f"{MODELS[task.model][0]}ForCausalLM"
    sizes = [size for size in (1, 2, 4, *range(8, 513, 8)) if size < most] + [most]
    graphs = {"cudagraph_capture_sizes": sizes}
    kind = {
        "eager": {"enforce_eager": True},
        "graphs": {"compilation_config": {**DECODE_GRAPHS, **graphs}},
        "compiled": {"compilation_config": graphs},
    }[task.mode]
    store = task.store if task.engine in (MAPPED, SEGMENTS) else 0
    choice = options_named(task.engine, architecture, heads, store, task.host)
    memory = {"kv_cache_memory_bytes": task.memory - store} if task.memory else {}
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "block_size": 16,
        "max_model_len": longest,
        "max_num_seqs": most,
        "max_num_batched_tokens": task.chunk,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
    }
    llm = LLM(str(model), **{**settings, **kind, **choice, **memory, **task.others})
    tell(task, "start", seconds=time.perf_counter() - start)
    return llm


def tell(task: Task, what: str, **found: Any) -> None:
    """One line of results."""
    say(task.engine, job=task.job, mode=task.mode, what=what, **found)


class Requests:
    """Random prompts in an engine, and what its steps answer."""

    def __init__(self, llm: Any, vocabulary: int) -> None:
        self.engine, self.vocabulary, self.made = llm.llm_engine, vocabulary, 0

    def add(self, length: int, answer: int) -> str:
        """The name of a prompt of its own, answered by exactly so many tokens."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        ids = np.random.default_rng(self.made).integers(1, self.vocabulary, length).tolist()
        sampling = SamplingParams(
            temperature=0,
            max_tokens=answer,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        name = str(self.made)
        self.engine.add_request(name, {"prompt_token_ids": ids}, sampling)
        self.made += 1
        return name

    def step(self) -> Iterator[tuple[str, int]]:
        """Who said how many tokens in one step."""
        for one in self.engine.step():
            yield one.request_id, len(one.outputs[0].token_ids)

    def steps(self) -> Iterator[tuple[float, int]]:
        """The clock behind each step, and the tokens that came out of it."""
        while self.engine.has_unfinished_requests():
            said = sum(count for _, count in self.step())
            yield time.perf_counter(), said

    def callers(self) -> Callers:
        """The same for a load."""
        return Callers(self.add, self.step, self.engine.has_unfinished_requests)


def latency(task: Task, model: Path, heads: Path) -> None:
    """Time to first token of one request at a time; the step of a batch that only decodes."""
    most = max(task.batches)
    answer = max(answer_of(task, batch, task.context) for batch in task.batches)
    longest = max(*task.lengths, task.context + answer) + 64
    requests = Requests(
        started(task, model, heads, longest, most), MODELS[task.model][1]["vocab_size"]
    )
    for tokens in task.lengths:
        times = []
        for _ in range(ROUNDS):
            requests.add(tokens, 1)
            start = time.perf_counter()
            times += [end - start for end, _ in requests.steps()][-1:]
        found = {"value": statistics.median(times[1:]), "most": max(times[1:])}
        tell(task, "ttft", tokens=tokens, seconds=found["value"], p95=found["most"])
    for batch in task.batches:
        say_decode(task, requests, batch, task.context)


def say_decode(task: Task, requests: Requests, batch: int, tokens: int) -> None:
    """The median step of a batch that decodes behind prompts of so many tokens."""
    start = time.perf_counter()
    for _ in range(batch):
        requests.add(tokens, answer_of(task, batch, tokens))
    ends = [end for end, said in requests.steps() if said == batch]
    gaps = np.diff(ends)[-STEPS:]
    found = {"seconds": float(np.median(gaps)), "p95": float(np.percentile(gaps, 95))}
    counted = {"steps": len(gaps), "prompts_took": ends[0] - start}
    tell(task, "decode", batch=batch, tokens=tokens, **found, **counted)


def answer_of(task: Task, batch: int, tokens: int) -> int:
    """Tokens that each says, for `STEPS` steps in which all decode.

    The first of a batch decodes while the last is computed: it has that many more to say.
    """
    return STEPS + 8 + -(-batch * tokens // task.chunk) + 1


def decode(task: Task, model: Path, heads: Path) -> None:
    """The step of batches that only decode, behind prompts that nobody computed.

    Computing 8 prompts of 120K tokens takes a minute, and what they hold does not matter to the
    time of a step: the KV memory is filled with random numbers, and steps of more rows than
    requests give zeros for hidden states. Blocks, tables and decode steps are as ever.
    """
    lengths = [(tokens, answer_of(task, batch, tokens)) for batch, tokens in task.decodes]
    most = max(batch for batch, _ in task.decodes)
    longest = max(map(sum, lengths)) + 64
    shape = MODELS[task.model][1]
    page = 4 * shape["num_key_value_heads"] * shape["head_dim"]  # K and V, bf16
    page *= task.layers or shape["num_hidden_layers"]
    if task.engine == "top_k":
        page += page // 16  # Bounds of blocks of 16 tokens.
    held = [b * (sum(n) + 64) for (b, _), n in zip(task.decodes, lengths, strict=True)]
    room = replace(task, memory=task.memory or page * max(held))
    llm = started(room, model, heads, longest, most)
    llm.collective_rpc(pass_over, args=(most,))
    requests = Requests(llm, shape["vocab_size"])
    for batch, tokens in task.decodes:
        say_decode(task, requests, batch, tokens)


def pass_over(worker: Any, rows: int) -> None:
    """From now on a worker computes nothing for steps of more rows; what it holds is random."""
    for cache in worker.model_runner.kv_caches:
        cache.normal_()
    skip_layers(worker.get_model(), rows)


def skip_layers(model: Any, rows: int = 0) -> None:
    """From now on a model's hidden states are zeros in steps of more rows, which take no time."""
    computed, like, hidden = model.forward, next(model.parameters()), model.config.hidden_size

    def forward(input_ids: Any, positions: Any, *others: Any, **named: Any) -> Any:
        count = positions.shape[-1]
        if count <= rows:
            return computed(input_ids, positions, *others, **named)
        return like.new_zeros(count, hidden)

    model.forward = forward


def capacity(task: Task, model: Path, heads: Path) -> None:
    """vLLM's own figure of how many requests fit, and how many it then runs at once.

    `task.requests` prompts, by default as many as the engine says, are served until all ended.
    """
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    longest = task.context
    llm = started(task, model, heads, longest, most=128)
    core = llm.llm_engine.engine_core.engine_core
    config = llm.llm_engine.vllm_config
    fit = get_kv_cache_capacity(config, core.scheduler.kv_cache_config)[1]
    tell(task, "fit", tokens=longest, requests=float(fit))
    count = task.requests or int(fit)
    # As many steps to answer as all prompts take to compute: the first is there when the last is.
    answer = min(-(-count * longest // task.chunk) + 32, longest // 4)
    requests = Requests(llm, MODELS[task.model][1]["vocab_size"])
    for _ in range(count):
        requests.add(longest - answer, answer)
    start, most, tokens, preempted = time.perf_counter(), 0, 0, 0
    for _, new in requests.steps():
        most, tokens = max(most, len(core.scheduler.running)), tokens + new
    with suppress(StopIteration):
        preempted = next(
            int(m.value) for m in llm.get_metrics() if m.name == "vllm:num_preemptions"
        )
    took = time.perf_counter() - start
    tell(
        task,
        "served",
        tokens=longest,
        requests=count,
        at_once=most,
        preempted=preempted,
        seconds=took,
        answered=tokens,
        layers=task.layers or MODELS[task.model][1]["num_hidden_layers"],
        chunk=task.chunk,
    )


def throughput(task: Task, model: Path, heads: Path) -> None:
    """Requests of many lengths, all there at the start, until the last has ended.

    With `task.poisson` the same come again at a mean rate.
    """
    lengths, answers = lengths_of(task), answers_of(task)
    longest = task.span[1] + longest_answer(task)
    llm = started(task, model, heads, longest, task.requests)
    requests = Requests(llm, MODELS[task.model][1]["vocab_size"])
    requests.add(task.span[0], 4)
    for _ in requests.steps():
        pass
    watched = Watched(requests.step, lambda: held_bytes(block_bytes(task)))
    callers = Callers(requests.add, watched, requests.engine.has_unfinished_requests)
    heard = come(callers, lengths, answers, [0.0] * task.requests)
    at_once = next(iter(figures("", heard, {})))
    say_throughput(task, "", heard, watched, rate=0.0)
    if task.poisson:
        rate, apart = arrivals(task, at_once)
        heard = come(callers, lengths, answers, apart)
        say_throughput(task, ", Poisson", heard, watched, rate=rate)


def block_bytes(task: Task, tokens: int = 16) -> int:
    """Bytes of a block of vLLM with the keys and values of all layers, in bf16."""
    shape = MODELS[task.model][1]
    layers = task.layers or shape["num_hidden_layers"]
    return int(4 * tokens * layers * shape["num_key_value_heads"] * shape["head_dim"])


def say_throughput(
    task: Task, way: str, heard: list[Heard], watched: Watched, *, rate: float
) -> None:
    """What a load's callers heard and what the device held; `way` is how they came."""
    whole, first, between = figures("", heard, {})
    known = {"requests": task.requests, "come": way, "arrivals_s": rate}
    said = {"read": sum(one.tokens for one in heard), "said": sum(len(one.at) for one in heard)}
    told_of = {"out_s": whole.of["out/s"], "requests_s": whole.of["requests/s"]}
    seconds = {"seconds": whole.of["seconds"], "rate": whole.value}
    tell(task, "throughput", **known, **said, **told_of, **seconds)
    for what, row in (("first", first), ("between", between)):
        tell(task, what, **known, value=row.value, p95=row.p95, **row.of)
    tell(task, "device", **known, **watched.taken())


def loads(task: Task, model: Path, heads: Path) -> None:
    """Requests at once and at a mean rate, and when each of their tokens was there."""
    llm = started(task, model, heads, task.span[1] + longest_answer(task), 256)
    requests = Requests(llm, MODELS[task.model][1]["vocab_size"])
    for _ in range(4):
        requests.add(task.span[0], 8)
    for _ in requests.steps():
        pass
    for row in load(requests.callers(), task):
        tell(task, "row", **told(row))


def long_prompt(task: Task, model: Path, heads: Path) -> None:
    """The time between tokens while a long prompt is computed, and before."""
    llm = started(task, model, heads, task.long + 64, task.talkers + 1)
    requests = Requests(llm, MODELS[task.model][1]["vocab_size"])
    for row in beside(requests.callers(), task):
        tell(task, "row", **told(row))


JOBS = {
    "latency": latency,
    "capacity": capacity,
    "decode": decode,
    "throughput": throughput,
    "load": loads,
    "beside": long_prompt,
}


def main(words: list[str]) -> int:
    """Carries one task out."""
    given = json.loads(words[0])
    task = Task(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    if task.job == "capacity":
        # The scheduler is looked at: it must be in this process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_PLUGINS"] = "" if task.engine == STOCK else "kvweave"
    # A worker is told to pass prompts over by a function of ours.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = str(int(task.job == "decode"))
    with TemporaryDirectory() as folder:
        pages, far = task.pages if task.engine in ("top_k", FAR) else 0, task.engine == FAR
        made = written(Path(folder), task.model, task.layers, pages, some_whole=far)
        JOBS[task.job](task, *made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
