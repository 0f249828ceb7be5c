"""A real engine with vLLM's tiered offloading, and our store as its tier on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import torch
from vllm import LLM

import vllm_cpu_offload
from families import tiny
from kvweave.adapters.vllm.serving import offloading_options
from kvweave.adapters.vllm.store_tier.connector import namespace_of
from kvweave.errors import ForeignStore, Unsupported
from kvweave.store import Store
from vllm_dashboard import OF_TIER, missing
from vllm_engines import STOCK, Answer, answers, clean, engine, prompt, same
from vllm_segments import SIZES

HOST = 1 << 24
PROMPTS = [prompt(200, 3), prompt(90, 4)]


def choice(folder: Path, **settings: Any) -> dict[str, Any]:
    """What a user gives vLLM; on CPUs the copies to the host are the tests' own."""
    given = offloading_options(str(folder), HOST, **settings)
    extra = given["kv_transfer_config"]["kv_connector_extra_config"]
    extra |= {"spec_name": "CpuTieringSpec", "spec_module_path": vllm_cpu_offload.__name__}
    return {**given, "enable_prefix_caching": True}


@contextmanager
def offloading(model: Path, folder: Path, **settings: Any) -> Iterator[LLM]:
    changes = settings.pop("changes", {})
    with engine(model, {**choice(folder, **settings), **changes}) as llm:
        yield llm


def asked(llm: LLM, salt: str = "") -> list[Answer]:
    """What an engine answers; then it steps until nothing more is carried."""
    salted = [{**given, **({"cache_salt": salt} if salt else {})} for given in PROMPTS]
    said = answers(llm, salted, 6)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    for _ in range(20_000):
        if not scheduler.connector.has_pending_push_work():
            break
        llm.llm_engine.engine_core.engine_core.step()
    return said


def dashboard_lacks() -> set[str]:
    """Metrics of the tier that the dashboard shows and `/metrics` has not yet, with its labels."""
    found = [s for metric in prometheus_client.REGISTRY.collect() for s in metric.samples]
    return {name.removeprefix(OF_TIER) for name in missing(found, "tier")}


def cached(said: list[Answer]) -> list[int]:
    return [answer.cached for answer in said]


@pytest.mark.parametrize("block_tokens", [None, 64], ids=["blocks", "chunks of two blocks"])
def test_a_restarted_engine_finds_its_prefixes(checkpoint, tmp_path: Path, block_tokens) -> None:
    """On disk, by whoever has the same salt; others compute."""
    model, settings = checkpoint("llama"), {"chunk_tokens": block_tokens}
    with engine(model, STOCK) as llm:
        wanted = answers(llm, PROMPTS, 6)
    with offloading(model, tmp_path, **settings) as llm:
        said = asked(llm, "a salt")
        same(said, wanted)
        assert cached(said) == [0, 0]
    with offloading(model, tmp_path, **settings) as llm:
        said = asked(llm)
        same(said, wanted)
        assert cached(said) == [0, 0]
        said = asked(llm, "a salt")
        same(said, wanted)
        assert cached(said) == [192, 64]
        # Nothing was refused, and no store was full.
        assert dashboard_lacks() == {"refused_total", "first_sights_total"}
    assert set(Store(tmp_path).held()[1]) == {"", namespace_of("a salt")}
    assert all((shard.cost or 0) > 0 for shard in Store(tmp_path).list())
    assert "a salt" not in "".join(shard.provenance.namespace for shard in Store(tmp_path).list())


def test_what_is_spoiled_is_computed(checkpoint, tmp_path: Path) -> None:
    model = checkpoint("llama")
    with offloading(model, tmp_path) as llm:
        wanted = asked(llm)
    for path in (tmp_path / "shards").iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with offloading(model, tmp_path) as llm:
        said = asked(llm)
        same(said, wanted)
        assert cached(said) == [0, 0]
        assert len(asked(llm)) == 2
        assert dashboard_lacks() == {"reads_total", "first_sights_total"}
    store = Store(tmp_path)
    for shard in store.list():
        store.verify(shard.name)


@pytest.mark.parametrize("foreign", ["weights", "rope", "dtype", "backend"])
def test_chunks_of_another_engine_are_none(checkpoint, tmp_path: Path, foreign: str) -> None:
    model, changes = checkpoint("llama"), {}
    with offloading(model, tmp_path / "store") as llm:
        asked(llm)
    if foreign == "weights":
        other = tiny("llama", **SIZES)
        with torch.no_grad():
            other.model.layers[2].self_attn.k_proj.weight[0, 0] += 1
        model = tmp_path / "model"
        other.save_pretrained(model)
    if foreign == "rope":
        rope = {"rope_type": "default", "rope_theta": 5e5}
        changes = {"hf_overrides": {"rope_parameters": rope}}
    if foreign == "dtype":
        changes = {"dtype": "bfloat16"}
    if foreign == "backend":
        changes = {"attention_config": {"backend": "CUSTOM"}}
    if foreign in ("weights", "rope"):
        refused = pytest.raises(ForeignStore, match="name another folder, or set .*shared")
        with refused as raised, offloading(model, tmp_path / "store", changes=changes):
            pass
        assert "a folder of model" in str(raised.value.expected)
        clean()
    if foreign == "rope":
        return
    shared = {"shared": True} if foreign == "weights" else {}
    with offloading(model, tmp_path / "store", changes=changes, **shared) as llm:
        assert cached(asked(llm)) == [0, 0]


def test_what_the_connector_refuses(checkpoint, tmp_path: Path) -> None:
    """Hashes that a tenant could make collide."""
    changes = {"prefix_caching_hash_algo": "xxhash"}
    with (
        pytest.raises(Unsupported, match="prefix_caching_hash_algo: expected one of sha256"),
        offloading(checkpoint("llama"), tmp_path, changes=changes),
    ):
        pass
