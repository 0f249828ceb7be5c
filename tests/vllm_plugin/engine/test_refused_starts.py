"""Engines that are refused while they start, by vLLM's own options as an operator gives them."""

from __future__ import annotations

import pytest

from kvweave import Unsupported
from kvweave.adapters.vllm.serving import engine_options
from test_head_split import checkpoint_of, written
from vllm_engines import engine, ours


@pytest.mark.parametrize("part", ["segments", "heads"])
def test_adapters_are_refused(checkpoint, tmp_path, part: str) -> None:
    given = {"heads": str(written(tmp_path, 16, 64))} if part == "heads" else {}
    choice = engine_options("LlamaForCausalLM", **(given or {"segment_bytes": 1 << 22}))
    started = engine(checkpoint_of(checkpoint, "llama"), choice, enable_lora=True)
    with pytest.raises(Exception, match="lora_config") as raised, started:
        pass
    error = ours(raised.value)
    assert isinstance(error, Unsupported), raised.value
