"""One vLLM whose steps are timed on the host: `benchmarks.vllm.host_step` starts it and asks it.

Its engine is in this process. Each line of stdin is a load, a JSON object `{"batch": 8, "steps":
64}`, or `{"mixed": 64}`; the line that answers it has what its steps took on the host. An engine
that is not asked waits for its next line and computes nothing. Time is the processor's in the
thread that steps, so that what others do on the same machine is not in it. On a CPU nothing is
computed at all: hidden states are zeros. There a model's kernels share caches with the host's own
work, which is then slower in the engine whose kernels take longer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from benchmarks.device.models import MODELS
from benchmarks.vllm import device
from benchmarks.vllm.engine import Requests, Task, skip_layers, started
from benchmarks.vllm.found import say
from benchmarks.vllm.model import OFF, STOCK, WINDOWS

WITHOUT = (STOCK, WINDOWS)
"""Engines that load no plugin."""
PHASES = ("schedule", "execute", "sample", "update", "forward")
PROMPT, SLACK = 320, 8
"""Tokens of a prompt, more than a window sees, and steps that some of a batch may take before the
last of it decodes."""
MICRO = 1e6
PROMPTS, ANSWERS = (16, 200), (4, 40)
"""Tokens that requests of a mixed load have and say, ranges."""
LONGEST, CHUNK, KV_BYTES, STORE_BYTES = 1024, 512, 256 << 20, 64 << 20
BLOCK, RANKED_BLOCK = 32, 16
"""Tokens of a block: vLLM's own attention on CPUs has no smaller ones, and bounds of so small heads
do not fit larger ones there."""


class Step(NamedTuple):
    """Seconds of a step without the model's forward, tokens it said, and seconds of each phase."""

    host: float
    said: int
    phases: dict[str, float]


class Timed:
    """An engine's parts, each counted as long as it is called.

    `forward` is the Python of a model's layers; where vLLM replays a step from a graph it is not
    called, and the replay counts as `execute`.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.spent = dict.fromkeys(PHASES, 0.0)
        core = llm.llm_engine.engine_core.engine_core
        for owner, name, phase in (
            (core.scheduler, "schedule", "schedule"),
            (core.scheduler, "update_from_output", "update"),
            (core.model_executor, "execute_model", "execute"),
            (core.model_executor, "sample_tokens", "sample"),
            (model_of(llm), "forward", "forward"),
        ):
            setattr(owner, name, self._counted(getattr(owner, name), phase))

    def _counted(self, call: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*given, **named)
            finally:
                self.spent[phase] += time.thread_time() - start

        return counted

    def steps(self, requests: Requests) -> Iterable[Step]:
        """Every step until all requests have ended."""
        while requests.engine.has_unfinished_requests():
            self.spent = dict.fromkeys(PHASES, 0.0)
            start = time.thread_time()
            said = sum(count for _, count in requests.step())
            took = time.thread_time() - start
            phases = {**self.spent, "execute": self.spent["execute"] - self.spent["forward"]}
            yield Step(took - self.spent["forward"], said, phases)


def decoded(timed: Timed, requests: Requests, batch: int, count: int) -> dict[str, Any]:
    """Lower quartiles of the steps in which so many requests decode and none else is there.

    They all do the same, and what else runs on a machine only makes them longer.
    """
    for _ in range(batch):
        requests.add(PROMPT, count + SLACK + -(-batch * PROMPT // CHUNK))
    steps = [step for step in timed.steps(requests) if step.said == batch]
    return found_in(steps[-count:], lower_quartile)


def mixed(timed: Timed, requests: Requests, count: int) -> dict[str, Any]:
    """Means of all steps of requests of many lengths, of which some come while others leave."""
    numbers = np.random.default_rng(count)
    for _ in range(count):
        requests.add(int(numbers.integers(*PROMPTS)), int(numbers.integers(*ANSWERS)))
    return found_in(list(timed.steps(requests)), fmean)


def model_of(llm: Any) -> Any:
    """The model that an engine in this process runs."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.get_model()


def lower_quartile(values: Iterable[float]) -> float:
    """What a quarter of the values do not reach."""
    return float(np.percentile(list(values), 25))


def found_in(steps: list[Step], middle: Callable[[Iterable[float]], float]) -> dict[str, Any]:
    """Microseconds of the host and of each phase, in the middle of some steps."""
    phases = {name: MICRO * middle(step.phases[name] for step in steps) for name in PHASES}
    return {"steps": len(steps), "host": MICRO * middle(step.host for step in steps), **phases}


def engine_of(name: str, task: Task, folder: Path, heads: Path, most: int) -> Any:
    """The engine of that name, which has loaded the plugin or not as its name says."""
    from vllm import ModelRegistry

    llm = started(task, folder, heads, LONGEST, most)
    loaded = "KvweaveLlamaForCausalLM" in ModelRegistry.models
    if loaded is (name in WITHOUT):
        wanted, got = ("none", "ours") if loaded else ("ours", "none")
        raise RuntimeError(f"plugin: expected {wanted} in the engine {name}, got {got}")
    return llm


def main(words: list[str]) -> int:
    """Answers loads until stdin ends."""
    name, model, layers, folder, heads, most = words
    os.environ["VLLM_PLUGINS"] = "" if name in WITHOUT else "kvweave"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    device.prepare()
    on_gpu = device.has_gpu()
    others = {
        "dtype": "bfloat16" if on_gpu else "float32",
        "distributed_executor_backend": "uni",
        "block_size": RANKED_BLOCK if name == "top_k" else BLOCK,
        **({"gpu_memory_utilization": 0.1} if on_gpu else device.options()),
    }
    task = Task(
        engine=STOCK if name == OFF else name,
        job="host step",
        model=model,
        layers=int(layers),
        mode="graphs" if on_gpu else "eager",
        memory=KV_BYTES,
        chunk=CHUNK,
        store=STORE_BYTES,
        others=others,
    )
    llm = engine_of(name, task, Path(folder), Path(heads), int(most))
    if not on_gpu:
        skip_layers(model_of(llm))
    timed = Timed(llm)
    requests = Requests(llm, MODELS[model][1]["vocab_size"])
    say(name, what="ready")
    for line in sys.stdin:
        load = json.loads(line)
        if "mixed" in load:
            found = mixed(timed, requests, load["mixed"])
        else:
            found = decoded(timed, requests, load["batch"], load["steps"])
        say(name, what="load", **found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
