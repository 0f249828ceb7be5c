"""Segments beside a head map on a GPU: `VLLM_TARGET_DEVICE=cuda pytest …`.

kvweave's Runner stands beside them under the same map, in f32 on the CPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvweave.policies import Foresight
from test_gpu import MEMORY, MODES
from test_segments import compare
from test_segments_heads import CHOSEN, TOP_K, UNEVEN, Mapped, checkpoint_of
from test_segments_policies import about
from vllm_segments import segments

ASKED = os.environ["VLLM_TARGET_DEVICE"] == "cuda"
pytestmark = pytest.mark.skipif(not ASKED, reason="needs a GPU and VLLM_TARGET_DEVICE=cuda")

CASES = {
    "naive": "naive",
    "sparsex": "sparsex",
    "cacheblend": CHOSEN["cacheblend"],
    "infoflow-value": CHOSEN["infoflow-value"],
    # From the second prompt on a draft's steps are replayed from a graph.
    "foresight": Foresight(share=0.3, draft=8),
}


@pytest.mark.parametrize("mode", ["eager", "graphs"])
@pytest.mark.parametrize("kinds", [UNEVEN, TOP_K], ids=["windows", "top-k"])
def test_in_f32_answers_are_the_runners(
    checkpoint: Any, tmp_path: Path, kinds: list[dict[str, Any]], mode: str
) -> None:
    """The plain kernels: the same rows are chosen and the same tokens said, decoded from graphs."""
    mapped = Mapped(tmp_path, kinds)
    options = {**MEMORY, **MODES[mode], "enable_prefix_caching": False}
    with segments(checkpoint_of(checkpoint), mapped.settings(), **options) as (llm, counts):
        # What a Runner under top-k heads answered into the last block of a document parts that
        # document in two, whose seams `sparsex` and others compute.
        cases = CASES if kinds is UNEVEN else {"naive": "naive"}
        for case, policy in cases.items():
            with about(case):
                compare(llm, mapped.beside, policy, case)
        assert counts.total.copied_keys > 0
        assert counts.worker.store.cache.stats()["held"] == 0
