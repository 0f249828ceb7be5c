"""Where vLLM runs: on a GPU, or on the CPU with what it lacks there."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.report import record
from kvweave.lab.bench.rows import Row

OPS = "vllm_cpu_ops"
"""The module in `tests/vllm_plugin/engine`: ops of vLLM's CPU build, for a build for GPUs."""
OFFLOAD = "vllm_cpu_offload"
"""The module there that copies to the host what a GPU's streams do."""
QUIETLY = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def prepare() -> None:
    """Before vLLM is imported in a process: the ops, if they are on the path, and settings."""
    for name, said in QUIETLY.items():
        os.environ.setdefault(name, said)
    if importlib.util.find_spec(OPS) is not None:
        importlib.import_module(OPS).define()


def has_gpu() -> bool:
    """Whether vLLM runs on a GPU here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def run_of(case: str, rows: list[Row]) -> dict[str, Any]:
    """A run for `benchmarks.report.record`: of the GPU, or of this machine where vLLM has none."""
    return record.of_device(case, rows) if has_gpu() else record.here(case, rows)


def offloading(tiers: dict[str, Any]) -> dict[str, Any]:
    """Options of offloading, on a CPU with what copies there: vLLM does that on GPUs alone."""
    if not has_gpu():
        extra = tiers["kv_transfer_config"]["kv_connector_extra_config"]
        extra |= {"spec_name": "CpuTieringSpec", "spec_module_path": OFFLOAD}
    return tiers


def options(**on_gpu: Any) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`: on a CPU torch's form of each op, eagerly."""
    if has_gpu():
        return on_gpu
    return {"enforce_eager": True, "compilation_config": {"custom_ops": ["none"]}}


@contextmanager
def in_process(model: str, **given: Any) -> Iterator[Any]:
    """An `LLM` whose engine is in this process, which leaves nothing of vLLM's behind."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    llm = LLM(model, **given)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
