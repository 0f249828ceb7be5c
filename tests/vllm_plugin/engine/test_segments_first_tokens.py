"""First tokens of documents in vLLM's engine, whose segments are packed beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from families import VOCABULARY
from kvweave.adapters.vllm.segments.knowledge_base import KnowledgeBase
from vllm_segments import SIZES, Counts, segments, settings, text

DOCUMENT, SHORT = tuple(text(120, 33)), tuple(text(60, 34))


@pytest.fixture
def model(checkpoint: Any) -> Path:
    found: Path = checkpoint("llama", **SIZES)
    return found


@dataclass
class Read:
    """A document as prompts have it: in vLLM's pages, and what is said behind it.

    `kv` [layers, heads, tokens, 2, D] and `said` f64 [vocabulary], log-probabilities, of each.
    """

    kv: list[torch.Tensor]
    said: list[torch.Tensor]


def read_by(llm: Any, counts: Counts, document: tuple[int, ...]) -> Read:
    """By prompts that have it behind different texts, of which the first one is none."""
    store, found = counts.worker.store, Read([], [])
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=VOCABULARY)
    kept = store.keep
    for before in (0, 20, 37):
        at = torch.arange(before, before + len(document))

        def keep(admitted: Any, end: int, layers: Any, blocks: Any) -> None:
            parts = [part for (part,) in layers.layers]
            size, heads = parts[0].page_tokens, range(parts[0].kv_heads)
            page, slot = blocks[0].long()[at // size], at % size  # noqa: B023
            kv = [torch.stack([part.pages[page + h, :, slot] for h in heads]) for part in parts]
            found.kv.append(torch.stack(kv))
            kept(admitted, end, layers, blocks)

        seed = before + len(document)
        prompt = [*text(before, seed), *document, *text(15, 100 + seed)]
        span = [before, before + len(document)]
        params.extra_args = {"kvweave": {"segments": [span], "policy": "naive"}}
        store.keep = keep
        (out,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        store.keep = kept
        said = out.outputs[0].logprobs[0]
        found.said.append(torch.tensor([said[i].logprob for i in range(VOCABULARY)]).double())
    return found


@contextmanager
def started(
    model: Path, seed: int = 50, **options: Any
) -> Iterator[tuple[Any, Counts, KnowledgeBase]]:
    """An engine that has two other documents, by which bases are made."""
    asked = {"max_logprobs": VOCABULARY, "enable_prefix_caching": False}
    with segments(model, settings(**options), **asked) as (llm, counts):
        base = KnowledgeBase(llm.collective_rpc)
        for more in range(2):
            base.insert(f"other {seed + more}", text(300, seed + more), "others")
        yield llm, counts, base


def run(model: Path, **options: Any) -> list[Read]:
    """What an engine has of both documents."""
    with started(model, **options) as (llm, counts, base):
        for name, document in (("one", DOCUMENT), ("short", SHORT)):
            base.insert(name, list(document))
        found = [read_by(llm, counts, document) for document in (DOCUMENT, SHORT)]
        assert counts.total.reused_tokens == 3 * (len(DOCUMENT) + len(SHORT))
        if "segment_dtype" in options:
            # Four documents; and two prompts each that begin with 20 and 37 tokens before them.
            kept = {0: 0, 1: 8, 64: 4}[options.get("exact_first", 1)]
            assert base.store()["firsts"] == kept
            assert ("firsts" in counts.total.store_bytes) == (kept > 0)
    return found


@pytest.mark.parametrize("kind", ["half-int4", "planes-3"])
def test_in_an_engine_they_are_to_the_bit_what_exact_segments_have(model: Path, kind: str) -> None:
    """And others are as near as their format; of a document that is exact all answers are."""
    exact = run(model)
    for count in (None, 0, 64):
        options = {} if count is None else {"exact_first": count}
        found = run(model, segment_dtype=kind, **options)
        first = 1 if count is None else count
        for one, other in zip(exact, found, strict=True):
            for wanted, got in zip(one.kv, other.kv, strict=True):
                assert torch.equal(got[:, :, :first], wanted[:, :, :first])
                apart = (got[:, :, first:] - wanted[:, :, first:]).abs().amax((0, 1, 3, 4))
                assert (apart > 1e-3).all()
            same = [torch.equal(a, b) for a, b in zip(one.said, other.said, strict=True)]
            assert same == [first >= len(one.kv[0][0, 0])] * 3


def test_a_restarted_engine_has_them(model: Path, tmp_path: Path) -> None:
    """From its folder, beside another basis; a folder with another number of them is computed."""
    kept = {"segment_dtype": "half-int4", "store": str(tmp_path), "store_reads": "always"}
    with started(model, **kept) as (llm, counts, base):
        assert base.insert("one", list(DOCUMENT))["kept"]
        wanted = read_by(llm, counts, DOCUMENT)
    for seed, options, brought in ((60, {}, 1), (70, {"exact_first": 3}, 0)):
        with started(model, seed, **kept, **options) as (llm, counts, base):
            found = read_by(llm, counts, DOCUMENT)
            said = base.store()
            assert said["brought_refused"] == 0
            assert said["brought_documents"] == brought
            if brought:
                pairs = zip(found.kv, wanted.kv, strict=True)
                assert all(torch.equal(one, other) for one, other in pairs)
