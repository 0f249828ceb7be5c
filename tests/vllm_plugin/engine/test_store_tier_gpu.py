"""What outlives an engine on a GPU: `VLLM_TARGET_DEVICE=cuda pytest …`.

vLLM's own copies between GPU and host, with our store behind them; and a knowledge base.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from kvweave.adapters.vllm.serving import offloading_options
from kvweave.store import Store
from test_gpu import MEMORY
from test_store_tier import HOST, PROMPTS, asked, cached
from vllm_engines import answers, engine, same
from vllm_segments import BOTH, DOCUMENT, OTHER, ask, segments, settings

ASKED = os.environ["VLLM_TARGET_DEVICE"] == "cuda"
pytestmark = pytest.mark.skipif(not ASKED, reason="needs a GPU and VLLM_TARGET_DEVICE=cuda")


@pytest.mark.parametrize("chunk_tokens", [None, 64], ids=["blocks", "chunks of two blocks"])
@pytest.mark.parametrize("backend", ["stock", "ours"])
def test_a_restarted_engine_finds_its_prefixes(
    checkpoint, tmp_path: Path, chunk_tokens: int | None, backend: str
) -> None:
    """With the worker's part of vLLM's own offloading, on either backend."""
    model = checkpoint("llama")
    options: dict[str, Any] = {**MEMORY, "enable_prefix_caching": True}
    chosen = {"attention_config": {"backend": "CUSTOM"}} if backend == "ours" else {}
    with engine(model, chosen, **options) as llm:
        wanted = answers(llm, PROMPTS, 6)
    store = offloading_options(str(tmp_path), HOST, chunk_tokens=chunk_tokens)
    for found in ([0, 0], [192, 64]):
        with engine(model, {**store, **chosen}, **options) as llm:
            said = asked(llm, "a salt")
        same(said, wanted)
        assert cached(said) == found
    for shard in Store(tmp_path).list():
        Store(tmp_path).verify(shard.name)


def test_a_restarted_engine_has_its_documents(checkpoint, tmp_path: Path) -> None:
    """Read from disk into pages on the GPU."""
    model, said = checkpoint("llama"), []
    for start in range(2):
        with segments(model, settings(store=str(tmp_path), store_reads="always"), **MEMORY) as (
            llm,
            counts,
        ):
            base = KnowledgeBase(llm.collective_rpc)
            for name, tokens in (("a", DOCUMENT), ("b", OTHER)):
                if start == 0:
                    assert base.insert(name, tokens)["kept"]
            said.append(ask(llm, BOTH, policy="naive"))
            assert counts.total.hits["frozen"] == len(DOCUMENT) + len(OTHER)
            assert base.store()["brought_documents"] == 2 * start
    same(said[1:], said[:1])
