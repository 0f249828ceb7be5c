"""Parts of the plugin on two GPUs: `VLLM_TARGET_DEVICE=cuda pytest …`."""

from __future__ import annotations

import os

import pytest
import torch

from test_two_ranks import two_ranks

ASKED = os.environ["VLLM_TARGET_DEVICE"] == "cuda" and torch.cuda.device_count() > 1
pytestmark = pytest.mark.skipif(not ASKED, reason="needs two GPUs and VLLM_TARGET_DEVICE=cuda")


def test_a_draft_from_graphs_of_two_ranks_says_what_one_rank_does() -> None:
    one, two = two_ranks("drafted")
    assert (one["graphs"], two["graphs"]) == ([1], [1, 1])
    assert two["said"] == one["said"]
    assert two["first"] == pytest.approx(one["first"], abs=2e-3)
