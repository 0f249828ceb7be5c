"""The example of one request that uses content, heads, tokens, channels and place at once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from byte_tokenizer import Bytes
from families import tiny

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "all_five.py"


@pytest.fixture
def example() -> Any:
    spec = importlib.util.spec_from_file_location("all_five", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["all_five"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["all_five"]


@pytest.mark.filterwarnings("ignore::kvweave.UncertifiedPolicy")
def test_each_dimension_saves(example: Any, capsys: Any) -> None:
    model = tiny("llama", head_dim=64, num_hidden_layers=4, max_position_embeddings=8192)
    saved = {one.what: one for one in example.print_saved(model, Bytes(), 9, max_tokens=65536)}
    assert list(saved) == ["content", "heads", "tokens", "channels", "place"]
    for one in saved.values():
        assert 0 < one.have < one.instead
    # f32 in exact pages; one head of two sees windows; no document was encoded here.
    assert saved["channels"].instead / saved["channels"].have == pytest.approx(4 * 128 / 52)
    assert saved["heads"].have == saved["heads"].instead / 2
    reused = saved["tokens"].instead
    assert saved["place"].instead - saved["place"].have >= reused
    text = capsys.readouterr().out
    assert "disk 2" in text
    assert all(str(one) in text for one in saved.values())
