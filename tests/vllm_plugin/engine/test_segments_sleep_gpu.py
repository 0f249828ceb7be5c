"""A GPU's engine that sleeps at both levels: `VLLM_TARGET_DEVICE=cuda pytest …`.

What its store then has is as it was, or nothing; an engine that stays awake stands beside it.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import vllm

from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from kvweave.adapters.vllm.versions import is_known
from kvweave.errors import DeviceUnavailable
from test_gpu import MEMORY, MODES
from test_segments_sleep import FORMATS, options
from vllm_engines import same
from vllm_segments import DOCUMENT, SECOND, ask, segments

ASKED = os.environ["VLLM_TARGET_DEVICE"] == "cuda"
pytestmark = pytest.mark.skipif(not ASKED, reason="needs a GPU and VLLM_TARGET_DEVICE=cuda")

TELLS = is_known(vllm.__version__, ("0.33",))
"""Whether vLLM tells connectors that it sleeps."""


@pytest.mark.parametrize("mode", ["eager", "graphs"])
@pytest.mark.parametrize(("kind", "kept"), FORMATS)
def test_a_store_after_sleep(
    checkpoint: Any, tmp_path: Path, kind: str | None, kept: bool, mode: str
) -> None:
    """Level 2 is noticed before weights are loaded again, and when they are."""
    model = checkpoint("llama")
    # vLLM has one engine that sleeps in a process.
    alone = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=alone) as process:
        process.submit(_sleep_and_ask, model, tmp_path, kind, kept, mode).result()


def _sleep_and_ask(model: Path, folder: Path, kind: str | None, kept: bool, mode: str) -> None:
    changes = {**MEMORY, **MODES[mode], "enable_sleep_mode": True}
    with segments(model, options(folder, kind, kept), **changes) as (llm, counts):
        base = KnowledgeBase(llm.collective_rpc)
        computed = ask(llm, SECOND, policy="full", namespace="alone")
        # What is exact would be found in vLLM's own cache, whoever had it computed.
        llm.reset_prefix_cache()
        base.insert("one", list(DOCUMENT))
        said = ask(llm, SECOND, policy="naive")
        for level in (1, 2, 1, 2):
            resident = [entry["resident_blocks"] > 0 for entry in base.entries()]
            llm.sleep(level=level)
            if TELLS:
                with pytest.raises(DeviceUnavailable, match="an engine that is awake"):
                    base.insert("two", list(DOCUMENT))
            llm.wake_up()
            found = [entry["resident_blocks"] > 0 for entry in base.entries()]
            assert found == (resident if level == 1 else [False] * kept)
            if level == 2:
                llm.collective_rpc("reload_weights")
                assert not any(entry["resident_blocks"] for entry in base.entries())
            counts.anew()
            again = ask(llm, SECOND, policy="naive")
            there = kept or level == 1
            same([again], [said if there else computed])
            assert counts.total.hits["frozen"] == there * len(DOCUMENT)
            if not there:
                base.insert("one", list(DOCUMENT))
                # The exact prefix that it is now is no document.
                counts.worker.store.forget(documents=False)
                if kind is not None:
                    said = ask(llm, SECOND, policy="naive")
            counts.worker.store.cache.check()
