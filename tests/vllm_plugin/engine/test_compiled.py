"""The model under `torch.compile`, as vLLM runs it by default; all other tests here are eager."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._dynamo.config
from vllm.config import CompilationMode

from test_head_split import PROMPTS, SIZES, Masked, checkpoint_of, is_split, ours, written
from test_top_k import KINDS, defined
from test_top_k import written as written_ranked
from vllm_engines import OURS, STOCK, answers, engine, same

# Compiling takes most of a minute.
pytestmark = [
    pytest.mark.usefixtures("compiling"),
    pytest.mark.skipif(os.environ["VLLM_TARGET_DEVICE"] != "cpu", reason="compares f32 on the CPU"),
]


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turns on what `conftest.py` turned off."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    machine = platform.machine()
    # torch 2.11 cannot trace what this looks at, on which vLLM's ops for CPUs depend.
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with torch._dynamo.config.patch(disable=False):
        yield


def test_the_backend_answers_as_stock_does(checkpoint) -> None:
    """Both compiled, and stock as it is without."""
    model, found = checkpoint_of(checkpoint, "llama"), []
    for choice, eager in ((STOCK, True), (STOCK, False), (OURS, False)):
        with engine(model, choice, enforce_eager=eager) as llm:
            found.append(answers(llm, PROMPTS, 8))
            worker = llm.llm_engine.model_executor.driver_worker.worker
            assert getattr(worker.model_runner.model.model, "compiled", False) is not eager
    same(found[1], found[0])
    same(found[2], found[1])


def test_split_heads_are_masked_ones(checkpoint, tmp_path: Path) -> None:
    """Chunks, mixed batches and decode steps of a compiled graph with split heads."""
    path = written(tmp_path, sink=20, recent=40)
    changes = {"head_dim": 32, "initializer_range": 0.15, "sliding_window": None, **SIZES}
    masked = Masked("llama", changes, path)
    wanted = [masked.answer(given, 8) for given in PROMPTS]
    model = checkpoint_of(checkpoint, "llama")
    with engine(model, ours(path, "llama"), enforce_eager=False) as llm:
        assert is_split(llm)
        compiled = llm.llm_engine.vllm_config.compilation_config
        assert compiled.mode is not CompilationMode.NONE
        got = answers(llm, PROMPTS, 8)
        worker = llm.llm_engine.model_executor.driver_worker.worker
        assert worker.model_runner.model.model.compiled
    same(got, wanted)


def test_top_k_heads_are_the_definition(checkpoint, tmp_path: Path) -> None:
    """The same of heads that choose pages."""
    path, model = written_ranked(tmp_path, KINDS), checkpoint_of(checkpoint, "llama")
    wanted = [defined("llama", KINDS, given, 8) for given in PROMPTS]
    with engine(model, ours(path, "llama"), enforce_eager=False) as llm:
        got = answers(llm, PROMPTS, 8)
        worker = llm.llm_engine.model_executor.driver_worker.worker
        assert worker.model_runner.model.model.compiled
    same(got, wanted)
