"""Segments beside heads of several classes in a real engine: what the Runner does under the map."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from families import tiny
from kvweave import HeadClassMap
from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from kvweave.adapters.vllm.segments.step import Step
from kvweave.adapters.vllm.top_k.bounds_cache import BoundsCache
from kvweave.errors import Unsupported
from kvweave.policies import (
    CacheBlend,
    Epic,
    Foresight,
    InfoFlow,
    Policy,
    Prophet,
    RandomRows,
    SparseX,
)
from kvweave.runner import Runner
from ranked_pages import FULL, kinds_map, top_k
from test_head_split import SIZES
from test_segments import PROMPTS, SEEDS, compare
from test_segments_policies import about
from test_top_k import layers_of
from vllm_engines import answer
from vllm_segments import (
    BOTH,
    DOCUMENT,
    FIRST,
    OTHER,
    SECOND,
    UNMARKED,
    Counterpart,
    Marked,
    ask,
    asked,
    close,
    named,
    plain,
    segments,
    settings,
    text,
)

WINDOW = {"kind": "window", "sink": 4, "recent": 24}
# Layers without global heads, with one, with all, and with two that do not lie side by side.
UNEVEN = [
    *(WINDOW, WINDOW, WINDOW, WINDOW),
    *(WINDOW, FULL, WINDOW, WINDOW),
    *(FULL, FULL, FULL, FULL),
    *(FULL, WINDOW, FULL, WINDOW),
]
EARLY, SHORT = {**WINDOW, "sink": 20, "recent": 17}, {**WINDOW, "recent": 16}
# The same with windows of which none keeps all that another does.
SEVERAL = [
    *(WINDOW, EARLY, SHORT, WINDOW),
    *(EARLY, FULL, WINDOW, SHORT),
    *(FULL, FULL, FULL, FULL),
    *(FULL, SHORT, FULL, EARLY),
]
# Blocks of 48 and of 16 tokens: a prefix is found in steps of 48.
FEW = [
    *(WINDOW, WINDOW, WINDOW, WINDOW),
    *(WINDOW, FULL, WINDOW, WINDOW),
    *(WINDOW, WINDOW, WINDOW, WINDOW),
    *(FULL, WINDOW, FULL, FULL),
]
CHANGES = {"head_dim": 32, "initializer_range": 0.15, **SIZES}
CHOSEN: dict[str, Policy | str] = {
    "naive": "naive",
    "sparsex": "sparsex",
    "sparsex-0": SparseX(0),
    "epic": Epic(first=5),
    "random": RandomRows(share=0.3),
    "cacheblend": CacheBlend(ratio=0.3),
    "prophet": Prophet(share=0.3),
    "infoflow": InfoFlow(share=0.3),
    "infoflow-value": InfoFlow(share=0.3, score="value", layers=(1, 3)),
    "foresight-no-draft": Foresight(share=0.3, draft=0),
    "foresight": Foresight(share=0.3, draft=8),
}


class Mapped:
    """A Runner under a map, and what gives vLLM the same."""

    def __init__(self, folder: Path, kinds: list[dict[str, Any]], family: str = "llama") -> None:
        model = tiny(family, **CHANGES)
        spec = Runner(model, max_tokens=64, progress=False, check=False).spec
        self.map: HeadClassMap = kinds_map(spec, kinds)
        self.path = folder / "map.json"
        self.path.write_text(self.map.to_json())
        self.beside = Counterpart(model, heads=self.map)
        self.family = family

    def settings(self) -> dict[str, Any]:
        return {**settings(self.family, heads=str(self.path)), "block_size": 16}


def checkpoint_of(checkpoint: Any, family: str = "llama") -> Path:
    return checkpoint(family, **SIZES)


@pytest.mark.parametrize(
    ("family", "kinds"), [("llama", UNEVEN), ("qwen3", UNEVEN), ("llama", SEVERAL)]
)
def test_answers_are_the_runners(
    checkpoint: Any, tmp_path: Path, family: str, kinds: list[dict[str, Any]]
) -> None:
    """Windows far shorter than documents, any number of whole heads in a layer; all policies."""
    mapped = Mapped(tmp_path, kinds, family)
    options = {"enable_prefix_caching": False}
    model = checkpoint_of(checkpoint, family)
    with segments(model, mapped.settings(), **options) as (llm, counts):
        for case, policy in CHOSEN.items():
            with about(case):
                compare(llm, mapped.beside, policy, case)
        assert counts.total.reused_tokens > len(CHOSEN) * 4 * len(DOCUMENT)
        assert counts.worker.store.cache.stats()["held"] == 0
        # What drafts wrote is gone.
        for part in counts.worker._layers().parts:
            assert not part.pages[: part.kv_heads].any()


@pytest.mark.parametrize("kinds", [UNEVEN, SEVERAL])
def test_chunks_and_others(checkpoint: Any, tmp_path: Path, kinds: list[dict[str, Any]]) -> None:
    """Windows move on between chunks; prompts without marks are what they are under the map."""
    mapped = Mapped(tmp_path, kinds)
    wanted = [mapped.beside.ask(Marked([tokens]), "full") for tokens in UNMARKED]
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 48}
    with segments(checkpoint_of(checkpoint), mapped.settings(), **options) as (llm, counts):
        compare(llm, mapped.beside, "naive")
        for tokens, runner in zip(UNMARKED, wanted, strict=True):
            close(plain(llm, tokens), runner)
        assert counts.total.copied_keys > 0


def test_prefixes_that_vllm_has_cached(checkpoint: Any, tmp_path: Path) -> None:
    """Of them windows keep the end alone, so what the store lacks of them it cannot be given."""
    mapped = Mapped(tmp_path, FEW)
    prefix = text(200, 31)
    behind = Marked([prefix, DOCUMENT, text(20, 32)])
    with segments(checkpoint_of(checkpoint), mapped.settings()) as (llm, counts):
        for given in (FIRST, Marked([prefix])):
            mapped.beside.ask(given, "full", 1)
        ask(llm, FIRST, 1, policy="full")
        plain(llm, [*prefix, 5])
        wanted = mapped.beside.ask(behind, "naive", remember=False)
        for _ in range(2):
            got = ask(llm, behind, policy="naive")
            close(got, wanted)
            assert got.cached > 0
        assert counts.total.reused_tokens == 2 * len(DOCUMENT)
        stats = counts.worker.store.cache.stats()
        assert stats["held"] == 0
        # The store was not given what lies behind its gap either: blocks of the first prompt alone.
        assert stats["cached"] == -(-len(FIRST.tokens) // 16)
        # Approximate KV is nobody's prefix in either class.
        tail = plain(llm, behind.tokens, 1)
        assert tail.cached <= len(prefix)


def test_a_document_of_a_knowledge_base(checkpoint: Any, tmp_path: Path) -> None:
    """Encoded alone, its local heads with their windows."""
    mapped = Mapped(tmp_path, UNEVEN)
    for document in (DOCUMENT, OTHER):
        mapped.beside.ask(Marked([document]), "full", 1)
    with segments(checkpoint_of(checkpoint), mapped.settings()) as (llm, counts):
        base = KnowledgeBase(llm.collective_rpc)
        base.insert("one", DOCUMENT)
        base.insert("other", OTHER)
        close(ask(llm, BOTH, policy="naive"), mapped.beside.ask(BOTH, "naive"))
        assert counts.total.hits["frozen"] == len(DOCUMENT) + len(OTHER)


TOP_K = [top_k(4), FULL, top_k(6), top_k(3), top_k(5)]
# Rows without the last of a page's are computed in `random` and `cacheblend`, in several passes in
# `foresight`: bounds are of what lies there in the end.
RANKED = ("naive", "sparsex", "random", "cacheblend", "infoflow-value", "foresight")


def expect_bounds(llm: Any, blocks: list[int]) -> int:
    """Compares the bounds of these blocks' pages with their keys; how many pages there are."""
    known, count = layers_of(llm), 0
    for name, layer in known.items():
        if isinstance(layer, BoundsCache):
            cache = known[name.removesuffix("_bounds")].kv_cache[blocks]
            keys = cache.reshape(*cache.shape[:2], 2, 16, -1)[:, :, 0]
            bounds = layer.values().view(-1, cache.shape[1], 3, layer.head_size)[blocks]
            assert torch.equal(bounds[:, :, 0], keys.amin(2))
            assert torch.equal(bounds[:, :, 1], keys.amax(2))
            count += keys.shape[0] * keys.shape[1]
    return count


@contextmanager
def bounds_compared(llm: Any) -> Iterator[list[int]]:
    """Has bounds compared behind each chunk that may copy some; of how many pages, by chunk."""
    seen, bound = list[int](), Step._bound

    def checked(step: Step, work: Any) -> None:
        bound(step, work)
        numbers = step.batch.classes[0].batch.blocks[work.request]
        seen.append(expect_bounds(llm, numbers[: work.chunk.end // 16].tolist()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "_bound", checked)
        yield seen


def test_beside_heads_that_choose_pages(checkpoint: Any, tmp_path: Path) -> None:
    """Prompts read all and steps few pages, ranked by bounds of what was copied too.

    So a prompt's first token is that of a Runner whose heads are all full, under any policy. (A
    Runner under the map finds a document in two pieces where an answer went on in its last block,
    and policies compute the seam.)
    """
    mapped = Mapped(tmp_path, TOP_K)
    dense = Counterpart(tiny("llama", **CHANGES))
    model, options = checkpoint_of(checkpoint), {"enable_prefix_caching": True}
    with (
        segments(model, mapped.settings(), **options) as (llm, counts),
        bounds_compared(llm) as seen,
    ):
        compare(llm, mapped.beside, "naive", "decoded")
        for case in RANKED:
            llm.reset_prefix_cache()
            policy = CHOSEN[case]
            markers = {"policy": named(policy), "namespace": case}
            with about(case):
                for given in SEEDS:
                    ask(llm, given, 1, **markers)
                    dense.ask(given, policy, 1, namespace=case)
                for given in PROMPTS:
                    wanted = dense.ask(given, policy, 1, remember=False, namespace=case)
                    close(ask(llm, given, 1, **markers), wanted)
        assert counts.total.reused_tokens > len(RANKED) * 4 * len(DOCUMENT)
    # Each of four prompts has ten pages and more, in four layers of four heads.
    assert sum(seen) > len(RANKED) * 4 * 10 * 16


def test_chunks_beside_heads_that_choose_pages(checkpoint: Any, tmp_path: Path) -> None:
    """Requests that decode share steps with chunks of others, which are narrowed apart."""
    mapped = Mapped(tmp_path, TOP_K)
    runners = [mapped.beside.ask(given, "naive", 12) for given in (FIRST, SECOND, BOTH)]
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 48}
    with segments(checkpoint_of(checkpoint), mapped.settings(), **options) as (llm, counts):
        close(ask(llm, FIRST, 12, policy="naive"), runners[0])
        pairs = [asked(given, 12, policy="naive") for given in (SECOND, FIRST, SECOND)]
        prompts, params = (list(each) for each in zip(*pairs, strict=True))
        found = [answer(o) for o in llm.generate(prompts, params, use_tqdm=False)]
        for got, runner in zip(found, (runners[1], runners[0], runners[1]), strict=True):
            close(got, runner)
        assert counts.total.reused_tokens >= 2 * len(DOCUMENT)


LONG = {**WINDOW, "recent": 100}
# A global head a layer, whose blocks hold three times as many tokens: pages of 96 are packed.
ONE_WHOLE = [LONG, FULL, LONG, LONG, FULL, LONG, LONG, LONG]


def test_packed_segments_are_near_to_exact_ones(checkpoint: Any, tmp_path: Path) -> None:
    """Documents that a window does not reach over, a prefix that vLLM has, a knowledge base."""
    mapped, document = Mapped(tmp_path, ONE_WHOLE), tuple(text(200, 9))
    prompts = [Marked([text(120, 1), document, text(15, 2)])]
    prompts += [Marked([text(37, 3), document, text(21, 4)])]
    behind = Marked([text(120, 1), document, text(90, 5)])
    of_base = Marked([text(9, 6), tuple(text(120, 33)), text(130, 7)])
    model, said = checkpoint_of(checkpoint), {}
    for dtype in (None, "int8", "int4", "planes-3"):
        chosen = mapped.settings()
        if dtype is not None:
            chosen["additional_config"]["kvweave"]["segment_dtype"] = dtype
        options = {"enable_prefix_caching": True, "max_num_batched_tokens": 80}
        with segments(model, chosen, **options) as (llm, counts):
            if dtype == "planes-3":
                KnowledgeBase(llm.collective_rpc).insert("first", text(90, 34), "others")
                # Heads of either class tell of their queries, in each layer.
                found = counts.worker.store.bases._found
                assert found is not None
                assert found._moments.metric is not None
            said[dtype] = [ask(llm, one, policy="naive") for one in prompts]
            plain(llm, text(120, 1) + text(9, 7))
            said[dtype].append(ask(llm, behind, policy="naive"))
            assert said[dtype][-1].cached > 0
            KnowledgeBase(llm.collective_rpc).insert("one", text(120, 33))
            said[dtype].append(ask(llm, of_base, policy="naive"))
        assert counts.total.hits["request"] >= 190
        assert counts.total.hits["frozen"] == 120
    apart = {
        dtype: [
            abs(one.logprobs[0] - other.logprobs[0])
            for one, other in zip(said[None], said[dtype], strict=True)
        ]
        for dtype in ("int8", "int4", "planes-3")
    }
    # What is computed whole is the same; what is reused differs by its codes, as without a map.
    assert max(far[0] for far in apart.values()) < 1e-4
    assert min(map(min, (far[1:] for far in apart.values()))) > 0
    near, far, planes = (max(found[1:]) for found in apart.values())
    assert near < 0.15
    assert 4 * near < far < 1.5
    assert near < planes < 1.5


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([FULL, *[WINDOW] * 3], "heads: expected windows of at least 96 tokens, .* got one of 24"),
        (UNEVEN, "segment_dtype: expected blocks of vLLM that make a page .* got 1008"),
    ],
)
def test_maps_whose_heads_keep_no_whole_page_are_refused(
    checkpoint: Any, tmp_path: Path, kinds: list[dict[str, Any]], expected: str
) -> None:
    chosen = Mapped(tmp_path, kinds).settings()
    chosen["additional_config"]["kvweave"]["segment_dtype"] = "int4"
    with pytest.raises(Unsupported, match=expected), segments(checkpoint_of(checkpoint), chosen):
        pass
