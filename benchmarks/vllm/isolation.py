"""Whether one tenant of a vLLM can tell from the time to his first token what another has cached.

`python -m benchmarks.vllm.isolation [--trials N] [--json FILE]`, on a CPU or a GPU. What
`benchmarks.cases.isolation` asks of a `Runner`, asked of an engine with segments: of whole prompts
in vLLM's own prefix cache, which tenants keep apart by their `cache_salt`, and of marked documents
in the store, which they keep apart by their `namespace`. A server only adds its own noise to that.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.cases.isolation import CONTROLS
from benchmarks.classifier import Trials, row
from benchmarks.report import record
from benchmarks.soak.asked import VOCABULARY
from benchmarks.vllm import device
from benchmarks.vllm.engine import DECODE_GRAPHS
from benchmarks.vllm.soak_engine import ARCHITECTURE, written
from kvweave.adapters.vllm.serving import engine_options
from kvweave.lab.bench.rows import Row, expect

CASE, TRIALS = "vllm_isolation", 10_000
TEXT, BEFORE = 512, 16
"""Tokens of what may be cached, and of fresh text before a document."""
STORE_BYTES = 64 << 20
KINDS = ("prompts", "documents")


class Asked:
    """An engine whose tenant A computes and whose tenant B asks."""

    def __init__(self, llm: Any, kind: str) -> None:
        self.llm, self.kind = llm, kind
        self.random = np.random.default_rng(7)
        self.asked = 0

    def trials(self, count: int, owner: str) -> Trials:
        """Trials in which the texts were cached by `owner`."""
        cached = self.random.permutation(np.arange(count) % 2 == 0)
        for _ in range(20):
            self.seconds(True, owner)
        return Trials(np.asarray([self.seconds(bool(one), owner) for one in cached]), cached)

    def seconds(self, cached: bool, owner: str) -> float:
        """Seconds to B's first token of a text that was cached, or of one that nobody has seen."""
        text, other = (self.random.integers(1, VOCABULARY, TEXT).tolist() for _ in range(2))
        self.ask(text if cached else other, owner)
        found, taken = self.ask(text, "b")
        expect((found > TEXT // 2) == (cached and owner == "b"), f"got {found} known tokens")
        return taken

    def ask(self, text: list[int], tenant: str) -> tuple[int, float]:
        """How many tokens of a text were known to a tenant, and the seconds to the first token.

        There is another token behind it: vLLM says nothing of documents with the first.
        """
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
        ids = [*text, 1]
        if self.kind == "documents":
            # Another text stands before a document: no prefix is found.
            ids = [*self.random.integers(1, VOCABULARY, BEFORE).tolist(), *ids]
            span = [BEFORE, BEFORE + TEXT]
            marks = {"segments": [span], "namespace": tenant, "policy": "naive"}
            params.extra_args = {"kvweave": marks}
        engine, self.asked = self.llm.llm_engine, self.asked + 1
        begun, taken = time.perf_counter(), 0.0
        prompt = {"prompt_token_ids": ids, "cache_salt": tenant}
        engine.add_request(str(self.asked), prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                taken = taken or time.perf_counter() - begun
                last = output
        if self.kind == "prompts":
            return int(last.num_cached_tokens or 0), taken
        return int(last.kv_transfer_params["kvweave"]["reused"]), taken


def started(model: Path) -> Any:
    """A vLLM in this process that computes a prompt in one step."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    gpu = {"compilation_config": DECODE_GRAPHS, "gpu_memory_utilization": 0.2}
    return LLM(
        str(model),
        dtype="float32",
        max_model_len=640,
        max_num_batched_tokens=640,
        max_num_seqs=4,
        seed=0,
        distributed_executor_backend="uni",
        **device.options(**gpu),
        **engine_options(ARCHITECTURE, segment_bytes=STORE_BYTES),
    )


def measured(trials: int) -> list[Row]:
    """What a classifier tells, and the same of what is no secret."""
    device.prepare()
    rows = []
    with TemporaryDirectory() as folder:
        llm = started(written(Path(folder)))
        for kind in KINDS:
            asked = Asked(llm, kind)
            others = asked.trials(trials, "a")
            rows.append(row(f"vLLM, {kind}: what another has cached", others))
            own = asked.trials(min(trials, CONTROLS), "b")
            rows.append(row(f"vLLM, {kind}: what he has cached himself", own))
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Measures and prints; FILE is a run for `python -m benchmarks.report.record FILE`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(words)
    rows = measured(given.trials)
    for each in rows:
        print(each.name, f"{each.value:.4f}", each.of)
    if given.json is not None:
        run = record.of_device(CASE, rows) if device.has_gpu() else record.here(CASE, rows)
        given.json.write_text(json.dumps(run))


if __name__ == "__main__":
    main()
