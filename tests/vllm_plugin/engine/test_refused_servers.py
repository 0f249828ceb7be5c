"""Servers of marked chats that are refused while they start, by options of vLLM's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvweave.adapters.vllm.composition import NOT_BESIDE, SEGMENTS
from vllm_segments import SIZES, settings
from vllm_server import segment_options, served, tokenizer

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
REFUSED = {
    "lora_config": ("--enable-lora",),
    "speculative_config": ("--speculative-config", json.dumps(DRAFTS)),
    "pipeline_parallel_size": (
        "--pipeline-parallel-size=2",
        "--distributed-executor-backend=mp",
    ),
}
"""Words of the command that ask for a setting beside which nothing is reused."""


@pytest.mark.long
@pytest.mark.parametrize("setting", REFUSED)
def test_a_server_is_refused(checkpoint: Callable[..., Path], tmp_path: Path, setting: str) -> None:
    """Nobody's marks are passed over: the server ends, and its log has the error and the reason."""
    model, log = checkpoint("llama", **SIZES), tmp_path / "log.txt"
    tokenizer().save_pretrained(model)
    options = [*segment_options(settings()), *REFUSED[setting]]
    if setting == "speculative_config":
        # Beside drafts vLLM refuses any logits processor, before it makes a model.
        at = options.index("--logits-processors")
        del options[at : at + 2]
    with (
        pytest.raises(RuntimeError, match="its end with status"),
        served(model, log, options),
    ):
        pass
    expected = f"{setting}: expected none beside {SEGMENTS}, since {NOT_BESIDE[SEGMENTS][setting]}"
    assert f"kvweave.errors.Unsupported: {expected}" in log.read_text()
