"""Bytes by head group and stalls, from a real engine to vLLM's own registry."""

from __future__ import annotations

from collections import Counter as Counts
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvweave import Unsupported
from kvweave.adapters.vllm.heads.connector import KvweaveHeads
from kvweave.adapters.vllm.heads.scheduler import HeadSchedulerConnector
from kvweave.adapters.vllm.metrics.pool import PoolMetrics, PoolStats
from kvweave.adapters.vllm.metrics.scheduler import PoolReporter
from test_head_split import checkpoint_of, ours, written
from vllm_dashboard import OF_POOL, missing
from vllm_engines import engine, metric, prompt, sampling

TYPES = {kind: kind for kind in (Counter, Gauge, Histogram)}
LAYERS, PAGE = 4, 2 * 16 * 3 * 32 * 4
"""A block of the three local heads: K and V of 16 tokens, D = 32, f32."""


def reporting(choice: dict[str, Any], connector: type = KvweaveHeads) -> dict[str, Any]:
    named = {"kv_connector": connector.__name__, "kv_connector_module_path": connector.__module__}
    return {**choice, "kv_transfer_config": {**named, "kv_role": "kv_producer"}}


def shown(name: str, **labels: str) -> float:
    """A sample of the registry that the server's `/metrics` prints."""
    samples = (s for m in prometheus_client.REGISTRY.collect() for s in m.samples)
    found = [
        s.value
        for s in samples
        if s.name == f"kvweave_{name}" and labels.items() <= s.labels.items()
    ]
    assert found, f"expected a metric {name} with labels {labels}"
    return sum(found)


def states(llm, prompts: list[dict[str, list[int]]], monkeypatch, count: int) -> list[dict]:
    """What was shown after each step, bytes counted in every one."""
    monkeypatch.setattr("kvweave.adapters.vllm.metrics.scheduler.BYTES_EVERY_S", 0)
    for number, given in enumerate(prompts):
        llm.llm_engine.add_request(str(number), given, sampling(count))
    found = []
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        samples = (s for m in prometheus_client.REGISTRY.collect() for s in m.samples)
        kept = {"kvweave_kv_bytes"}
        found.append(
            {(s.labels["group"], s.labels["state"]): s.value for s in samples if s.name in kept}
        )
    return found


def test_head_classes_report_their_bytes(checkpoint, tmp_path, monkeypatch) -> None:
    path = written(tmp_path, sink=20, recent=40)
    model = checkpoint_of(checkpoint, "llama")
    choice = reporting(ours(path))
    with engine(model, choice, enable_prefix_caching=False, num_gpu_blocks_override=60) as llm:
        found = states(llm, [prompt(60, 1)], monkeypatch, 100)
    block, local = PAGE * LAYERS, "window-40-sink-20"
    most = max(step["full", "held"] for step in found)
    # 159 tokens in blocks of 48 for the global head, and of 16 for the others: ten, but what lies
    # between the sink's two and those of the window was given back.
    assert most == 4 * block
    last = [step for step in found if step["full", "held"]][-1]
    assert 2 * block < last[local, "held"] <= 6 * block
    for step in found:
        assert sum(step.values()) == 59 * block
    assert found[-1] == {("full", "held"): 0, (local, "held"): 0, ("any", "free"): 59 * block}
    assert shown("given_back_bytes_total", group=local) == 10 * block - last[local, "held"]
    assert shown("stalls_total") == 0


def test_requests_that_wait_for_blocks_are_counted(checkpoint, tmp_path) -> None:
    path = written(tmp_path, sink=20, recent=40)
    model = checkpoint_of(checkpoint, "llama")
    changes = {"enable_prefix_caching": False, "num_gpu_blocks_override": 40}
    with engine(model, reporting(ours(path)), **changes) as llm:
        llm.generate([prompt(60, seed) for seed in range(8)], sampling(60), use_tqdm=False)
        preempted = metric(llm, "num_preemptions")
    assert shown("stalls_total", kind="preempted") == preempted > 0
    # All eight may run: whoever waits, waits for blocks; and who was preempted does.
    assert 1 <= shown("stalls_total", kind="waited") <= 8 + preempted
    found = [sample for metric in prometheus_client.REGISTRY.collect() for sample in metric.samples]
    assert missing(found, "pool") == {}
    assert missing(found[:1], "pool").keys() == set(OF_POOL)


def test_prompts_that_wait_for_a_step_do_not_wait_for_blocks(checkpoint, tmp_path) -> None:
    """Prompts of which a step takes one at a time, in memory for all of them."""
    path = written(tmp_path, sink=20, recent=40)
    model = checkpoint_of(checkpoint, "llama")
    changes = {"enable_chunked_prefill": False, "max_num_batched_tokens": 512}
    with engine(model, reporting(ours(path)), **changes) as llm:
        prompts = [prompt(300, seed) for seed in range(3)]
        llm.generate(prompts, sampling(8), use_tqdm=False)
    assert shown("given_back_bytes_total") > 0
    assert shown("stalls_total", kind="waited") == 0


class Counted(PoolReporter):
    """A pool whose blocks are set by hand."""

    held, calls = 0, 0

    def bytes_now(self) -> list[tuple[str, str, int]]:
        self.calls += 1
        return [("full", "held", self.held)]

    def given_back_now(self) -> Counts[str]:
        return Counts()

    def is_idle(self) -> bool:
        return not self.held


def test_nothing_is_counted_while_nothing_runs(monkeypatch) -> None:
    config = SimpleNamespace(kv_transfer_config=object())
    config.scheduler_config = SimpleNamespace(enable_chunked_prefill=True)
    pool = Counted(config, KVConnectorRole.SCHEDULER, None)
    assert pool.get_kv_connector_stats().data["bytes"] == [("full", "held", 0)]
    assert pool.get_kv_connector_stats() is None
    assert pool.calls == 1
    request = SimpleNamespace(request_id="a", num_tokens=9)
    step = SimpleNamespace(preempted_req_ids=None, total_num_scheduled_tokens=0)
    pool.get_num_new_matched_tokens(request, 0)
    pool.build_connector_meta(step)
    assert pool.get_kv_connector_stats().data["stalls"] == {"waited": 1}
    # Admitted and gone again between two reports.
    pool.update_state_after_alloc(request, None, 0)
    assert pool.get_kv_connector_stats() is None
    assert pool.calls == 3
    pool.update_state_after_alloc(request, None, 0)
    pool.held = 16
    assert pool.get_kv_connector_stats() is None
    assert pool.calls == 3
    monkeypatch.setattr("kvweave.adapters.vllm.metrics.scheduler.BYTES_EVERY_S", 0)
    assert pool.get_kv_connector_stats().data["bytes"] == [("full", "held", 16)]
    pool.held = 0
    assert pool.get_kv_connector_stats().data["bytes"] == [("full", "held", 0)]
    assert pool.get_kv_connector_stats() is None


def test_the_connector_wants_a_map() -> None:
    connector = object.__new__(HeadSchedulerConnector)
    with pytest.raises(Unsupported, match="KvweaveHeads: expected a head map with a window"):
        connector.bind_gpu_block_pool(object())


def test_reports_add_up_but_for_bytes() -> None:
    labels, config = {"model_name": "m", "engine": "0"}, SimpleNamespace(kv_transfer_config=None)
    metrics = PoolMetrics(config, TYPES, list(labels), {0: list(labels.values())})
    report = {"bytes": [["full", "held", 64]], "given_back": {"w": 3}, "stalls": {"waited": 1}}
    report |= {"host": [["top-k", "held", 8]], "spilled": 5}
    later = {"bytes": [], "given_back": {"w": 4}, "stalls": {}, "host": [], "spilled": 2}
    both = KvweaveHeads.build_kv_connector_stats(dict(report)).aggregate(PoolStats(later))
    assert both.data == {**report, "given_back": {"w": 7}, "spilled": 7}
    assert not both.is_empty()
    said = {"KV bytes full held": 64, "KV bytes of hosts top-k held": 8, "Requests that waited": 1}
    assert both.reduce() == said
    assert KvweaveHeads.build_kv_connector_stats().is_empty()
    for data in (report, later, {**later, "bytes": [["full", "held", 16]]}):
        metrics.observe(data)
    assert shown("kv_bytes", group="full", state="held", tier="device") == 16
    assert shown("kv_bytes", group="top-k", state="held", tier="host") == 8
    assert shown("spilled_bytes_total") == 9
    assert shown("given_back_bytes_total", group="w") == 11
    assert shown("stalls_total", kind="waited") == 1
