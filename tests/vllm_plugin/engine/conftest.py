"""Tests of the plugin in a real vLLM, in an environment of its own: `make test-vllm`."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

# The folder above this one has its name too, and no file that vLLM's own folder begins with.
FOUND = importlib.util.find_spec("vllm")
HAS_VLLM = FOUND is not None and FOUND.origin is not None
# vLLM reads these when it is imported: one process, no network, no compiling on the way.
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # `test_*gpu.py` are for VLLM_TARGET_DEVICE=cuda.
    "VLLM_TARGET_DEVICE": os.environ.get("VLLM_TARGET_DEVICE", "cpu"),
}


def _not_for_this_version() -> list[str]:
    import vllm

    from kvweave.adapters.vllm import versions

    parts = {
        "test_virtual_pages*.py": versions.WITH_VIRTUAL_PAGES,
        "test_store_tier*.py": versions.WITH_TIERS,
    }
    return [name for name, known in parts.items() if not versions.is_known(vllm.__version__, known)]


if HAS_VLLM:
    os.environ.update(SETTINGS)
    if SETTINGS["VLLM_TARGET_DEVICE"] == "cpu":
        import vllm_cpu_ops

        vllm_cpu_ops.define()
    collect_ignore_glob = _not_for_this_version()
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_runtest_setup() -> None:
    """Where a run has an end, what would begin behind it is left out, and says so."""
    until = os.environ.get("TESTS_UNTIL")
    if until is not None and time.time() > float(until):
        pytest.skip("not begun: the time of this run is over")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders with tiny random models, by family."""
    from families import tiny

    made: dict[str, Path] = {}

    def folder(family: str, **changes: int) -> Path:
        key = f"{family}-{sorted(changes.items())}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model")
            sizes = {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.15}
            tiny(family, **{**sizes, **changes}).save_pretrained(made[key])
        return made[key]

    return folder


@pytest.fixture(autouse=True)
def _one_engine_at_a_time() -> Iterator[None]:
    yield
    # A start that is refused within vLLM 0.26 leaves torch with the refused model's default dtype.
    torch.set_default_dtype(torch.float32)
    from vllm_engines import clean

    clean()
