"""Parts in one engine that have no test of their own beside each other, and a setting of vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm

from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from kvweave.adapters.vllm.versions import WITH_VIRTUAL_PAGES, is_known
from test_head_split import ours as with_map
from test_segments_heads import (
    FEW,
    ONE_WHOLE,
    TOP_K,
    UNEVEN,
    Mapped,
    bounds_compared,
    checkpoint_of,
)
from test_segments_restart import refuse_encoding
from test_top_k import written as written_map
from test_virtual_pages import nothing_is_lost, virtual
from vllm_engines import OURS, answers, engine, prompt, same
from vllm_segments import FIRST, SECOND, Marked, ask, plain, segments, settings, text

LONG = tuple(text(200, 91))
BEGUN = text(120, 1)
BEHIND = Marked([BEGUN, LONG, text(15, 2)])
ALONE = Marked([text(37, 3), LONG, text(21, 4)])


@pytest.mark.parametrize(
    ("kinds", "others", "dtype"),
    [(FEW, ONE_WHOLE, None), (TOP_K, UNEVEN, None), (ONE_WHOLE, UNEVEN, "int4")],
    ids=["windows", "top-k", "windows-int4"],
)
def test_a_folder_under_a_map_behind_a_prefix(
    checkpoint: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kinds: list[dict[str, Any]],
    others: list[dict[str, Any]],
    dtype: str | None,
) -> None:
    """What an engine inserted the next one reads, behind a prefix that vLLM has too.

    Under another map keys and values are others, and what lies there is nobody's.
    """
    model, folder = checkpoint_of(checkpoint), tmp_path / "documents"
    kept: dict[str, Any] = {"store": str(folder), "store_reads": "always"}
    options = {"enable_prefix_caching": True, "block_size": 16}

    def chosen(under: list[dict[str, Any]], packed: str | None) -> dict[str, Any]:
        made = Mapped(tmp_path, under).settings()
        more = kept if packed is None else {**kept, "segment_dtype": packed}
        made["additional_config"]["kvweave"].update(more)
        return made

    said = []
    for run in range(2):
        with segments(model, chosen(kinds, dtype), **options) as (llm, counts):
            base = KnowledgeBase(llm.collective_rpc)
            if run == 0:
                assert base.insert("long", list(LONG))["kept"]
                refuse_encoding(monkeypatch)
            else:
                assert [entry["resident_blocks"] for entry in base.entries()] == [0]
            plain(llm, [*BEGUN, 7], 1)
            found = [ask(llm, given, policy="naive") for given in (BEHIND, ALONE)]
            assert found[0].cached >= 96
            assert counts.total.hits["frozen"] == 2 * len(LONG)
            assert base.store()["brought_documents"] == run
            said.append(found)
    same(said[1], said[0])
    assert [one.cached for one in said[1]] == [one.cached for one in said[0]]
    with segments(model, chosen(others, None), **options) as (llm, counts):
        base = KnowledgeBase(llm.collective_rpc)
        ask(llm, ALONE, policy="naive")
        assert [entry["resident_blocks"] for entry in base.entries()] == [0]
        assert counts.total.reused_tokens == base.store()["brought_documents"] == 0


def test_packed_segments_beside_heads_that_choose_pages(checkpoint: Any, tmp_path: Path) -> None:
    """Steps rank pages by bounds of what was unpacked; answers are near those of exact segments."""
    mapped, model, seen, said = Mapped(tmp_path, TOP_K), checkpoint_of(checkpoint), 0, {}
    for dtype in (None, "int8", "planes-3"):
        choice = mapped.settings()
        if dtype is not None:
            choice["additional_config"]["kvweave"]["segment_dtype"] = dtype
        with (
            segments(model, choice, enable_prefix_caching=False) as (llm, counts),
            bounds_compared(llm) as compared,
        ):
            KnowledgeBase(llm.collective_rpc).insert("long", list(LONG))
            said[dtype] = [ask(llm, one, 12, policy="naive") for one in (ALONE, BEHIND)]
            assert counts.total.hits["frozen"] == 2 * len(LONG)
        seen += sum(compared)
    assert seen > 3 * 2 * 14 * 16
    apart = {
        dtype: max(
            abs(one.logprobs[0] - other.logprobs[0])
            for one, other in zip(said[None], said[dtype], strict=True)
        )
        for dtype in ("int8", "planes-3")
    }
    assert 0 < apart["int8"] < 0.3
    assert apart["int8"] < apart["planes-3"]
    assert all(np.isfinite(one.logprobs).all() for found in said.values() for one in found)


PROMPTS = [prompt(length, seed) for seed, length in enumerate([40, 200, 1, 250])]
WITHOUT = {"disable_hybrid_kv_cache_manager": True}


@pytest.mark.long
def test_one_manager_of_blocks_beside_heads_and_pages(checkpoint: Any, tmp_path: Path) -> None:
    """`disable_hybrid_kv_cache_manager` changes nothing where all layers keep all tokens."""
    model = checkpoint_of(checkpoint)
    path = written_map(tmp_path, TOP_K)
    paged = [virtual()] if is_known(vllm.__version__, WITH_VIRTUAL_PAGES) else []
    for choice in (with_map(path), OURS, *paged):
        said = []
        for changes in ({}, WITHOUT):
            with engine(model, choice, **changes) as llm:
                said.append(answers(llm, PROMPTS, 12))
                if choice in paged:
                    nothing_is_lost(llm)
        same(said[1], said[0])


@pytest.mark.long
@pytest.mark.parametrize("dtype", [None, "int4"])
def test_one_manager_of_blocks_beside_segments(
    checkpoint: Any, tmp_path: Path, dtype: str | None
) -> None:
    model, said = checkpoint("llama"), []
    more = {} if dtype is None else {"segment_dtype": dtype}
    for number, changes in enumerate(({}, WITHOUT)):
        kept = {"store": str(tmp_path / str(number)), "store_reads": "always", **more}
        with segments(model, settings(**kept), **changes) as (llm, counts):
            base = KnowledgeBase(llm.collective_rpc)
            base.insert("long", list(LONG))
            given = (BEHIND, ALONE, FIRST, SECOND)
            said.append([ask(llm, one, policy="naive") for one in given])
            assert counts.total.hits["frozen"] == 2 * len(LONG)
    same(said[1], said[0])
