"""Virtual pages on a GPU, held against stock vLLM and f32: `VLLM_TARGET_DEVICE=cuda pytest …`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from families import tiny
from test_gpu import ASKED, MIXED, Stock, served, stock
from test_head_split import Masked
from test_virtual_pages import one_global, virtual, written

pytestmark = pytest.mark.skipif(not ASKED, reason="needs a GPU and VLLM_TARGET_DEVICE=cuda")
MODES = pytest.mark.parametrize("mode", ["eager", "graphs"])
"""How decode steps run."""


@pytest.fixture(scope="module")
def f16(checkpoint: Any) -> Stock:
    return stock(checkpoint, "D64")


@MODES
def test_full_heads_are_stocks(f16: Stock, mode: str) -> None:
    got = served(f16.folder, virtual(), mode, f16.dtype)
    f16.close(got, tiny("llama", **f16.changes))
    assert got.same(f16.answer) >= len(MIXED) - 1


def test_bf16_heads_of_128_are_stocks(checkpoint: Any) -> None:
    wide = stock(checkpoint, "D128")
    got = served(wide.folder, virtual(), "graphs", wide.dtype)
    wide.close(got, tiny("llama", **wide.changes))


@MODES
def test_local_heads_are_masked_ones(f16: Stock, tmp_path: Path, mode: str) -> None:
    """Sink and window far shorter than the prompts, one head of four global."""
    layers = tiny("llama", **f16.changes).config.num_hidden_layers
    path = written(tmp_path, one_global(sink=20, recent=40, layers=layers))
    got = served(f16.folder, virtual(heads=path), mode, f16.dtype)
    f16.close(got, Masked("llama", f16.changes, path).model)
    assert got.same(f16.answer) < len(MIXED)


def test_preempted_requests_go_on(f16: Stock) -> None:
    got = served(f16.folder, virtual(), "graphs", f16.dtype, num_gpu_blocks_override=36)
    assert got.preempted > 0
    f16.close(got, tiny("llama", **f16.changes))
