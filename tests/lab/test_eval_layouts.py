"""Layouts: how documents stand, and what a real runner reuses of what was encoded."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvweave import models
from kvweave.lab.eval import Sample, draw, task_encoder, task_of
from kvweave.lab.eval.layout import BLOCK_TOKENS, REMARKS
from kvweave.runner import Report, Runner, Segment


@pytest.fixture(scope="module")
def tokenizer():
    return models.load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def runner(smollm2) -> Runner:
    return Runner(*smollm2, max_tokens=8192, progress=False, check=False)


def drawn(layout: str, length: int, documents: int, tokenizer, name: str = "two-hop") -> Sample:
    return draw(task_of(name, length, None, layout, documents), tokenizer, 1, 4)[0]


def ids_of(segment: Segment, encode) -> list[int]:
    return list(segment.tokens) if segment.tokens is not None else encode(segment.text)


def segment_lengths(sample: Sample, tokenizer) -> list[int]:
    return [len(ids_of(s, task_encoder(tokenizer))) for s in sample.segments]


@contextmanager
def prefilled(runner: Runner, sample: Sample, namespace: str) -> Iterator[Report]:
    """A naive prefill of the sample over its knowledge, in a namespace of its own."""
    for number, segment in enumerate(sample.knowledge):
        content = segment.text if segment.tokens is None else list(segment.tokens)
        runner.insert(content, str(number), namespace)
    parts = [
        replace(part, namespace=namespace) if isinstance(part, Segment) else part
        for part in sample.parts
    ]
    with runner.prefill(
        parts, "naive", namespace=namespace, discover=sample.discover, remember=False
    ) as done:
        yield done.report
    for number in range(len(sample.knowledge)):
        runner.delete(str(number), namespace)


def spans(report: Report) -> list[dict[str, Any]]:
    return list(report.plan.to_dict()["spans"])


def recomputed(report: Report) -> dict[str, int]:
    """Tokens recomputed, by reason."""
    by_reason: dict[str, int] = {}
    for span in spans(report):
        if span["reason"] is not None:
            length = span["end"] - span["start"]
            by_reason[span["reason"]] = by_reason.get(span["reason"], 0) + length
    return by_reason


def reused(report: Report) -> list[dict[str, Any]]:
    return [span for span in spans(report) if span["kind"] == "segment"]


# ---- how documents stand -----------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "ratio"), [("plain", 3.0), ("uneven", 10.0)])
@pytest.mark.parametrize("name", ["needles", "lookups", "lm"])
def test_lengths_are_uneven(layout: str, ratio: float, name: str, tokenizer) -> None:
    orders = set()
    for sample in draw(task_of(name, 2048, None, layout), tokenizer, 3, 1):
        lengths = segment_lengths(sample, tokenizer)
        assert len(lengths) == 8
        assert max(lengths) >= ratio * min(lengths)
        orders.add(tuple(np.argsort(lengths)))
    assert len(orders) == 3, "which document is long is drawn"


def test_fresh_text_stands_between_documents(tokenizer) -> None:
    for documents in (2, 8, 32):
        sample = drawn("interleaved", 2048, documents, tokenizer)
        assert len(sample.segments) == documents
        kinds = [isinstance(part, Segment) for part in sample.parts]
        first, last = kinds.index(True), len(kinds) - 1 - kinds[::-1].index(True)
        assert kinds[first : last + 1] == [True, False] * (documents - 1) + [True]
        for part in sample.parts[first + 1 : last : 2]:
            assert part.strip() in REMARKS


def test_even_documents_are_equally_long(tokenizer) -> None:
    lengths = segment_lengths(drawn("even", 1024, 4, tokenizer, "lookups"), tokenizer)
    assert max(lengths) <= 1.1 * min(lengths)


def test_an_edited_document_differs_by_one_word(tokenizer) -> None:
    sample = drawn("edited", 768, 4, tokenizer)
    assert sample.discover
    assert not sample.segments
    texts = [part for part in sample.parts if isinstance(part, str)]
    for encoded in sample.encoded:
        was = encoded.text.split(" ")
        (now,) = (
            text.split(" ")
            for text in texts
            if len(text.split(" ")) == len(was) and text.split(" ")[:2] == was[:2]
        )
        assert sum(a != b for a, b in zip(was, now, strict=True)) == 1


# ---- what is reused ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["plain", "even", "interleaved", "tail-only"])
def test_documents_encoded_alone_are_reused_whole(layout: str, runner: Runner, tokenizer) -> None:
    sample = drawn(layout, 448, 4, tokenizer)
    lengths = segment_lengths(sample, tokenizer)
    with prefilled(runner, sample, f"alone/{layout}") as report:
        ends_in_reused = layout == "tail-only"
        assert report.reused_prefix == 0
        assert report.reused_segment == sum(lengths) - ends_in_reused
        assert len({span["source"] for span in reused(report)}) == 4
        assert recomputed(report).keys() == {"fresh", "last-token"}
        assert (spans(report)[-2]["kind"] == "segment") == ends_in_reused


def test_moved_documents_are_one_block_at_another_offset(runner: Runner, tokenizer) -> None:
    sample = drawn("moved", 384, 4, tokenizer)
    (length,) = segment_lengths(sample, tokenizer)
    with prefilled(runner, sample, "moved") as report:
        assert report.reused_segment == length
        assert {span["source"] for span in reused(report)} == {"0"}
        # A span's delta counts the whole move, from a donor that began before the block.
        (delta,) = {span["delta"] for span in reused(report)}
        assert delta != 0


def test_permuted_documents_come_from_one_text_in_another_order(runner: Runner, tokenizer) -> None:
    sample = drawn("permuted", 384, 4, tokenizer)
    with prefilled(runner, sample, "permuted") as report:
        assert report.reused_segment == sum(segment_lengths(sample, tokenizer))
        assert {span["source"] for span in reused(report)} == {"0"}
        cached_at = [span["start"] - span["delta"] for span in reused(report)]
        assert cached_at != sorted(cached_at), "they lay in another order"


def test_nested_documents_come_from_two_places(runner: Runner, tokenizer) -> None:
    sample = drawn("nested", 512, 4, tokenizer)
    lengths = segment_lengths(sample, tokenizer)
    assert len(lengths) == 2
    with prefilled(runner, sample, "nested") as report:
        assert 0.75 * sum(lengths) <= report.reused_segment < sum(lengths)
        sources = [span["source"] for span in reused(report)]
        runs = [s for i, s in enumerate(sources) if i == 0 or sources[i - 1] != s]
        assert runs == ["0", "1", "0", "2", "3", "2"], "outer, inner, outer"


def test_edited_documents_are_found_by_their_content(runner: Runner, tokenizer) -> None:
    sample = drawn("edited", 384, 3, tokenizer)
    with prefilled(runner, sample, "edited") as report:
        lengths = sum(len(task_encoder(tokenizer)(s.text)) for s in sample.encoded)
        assert 0.6 * lengths < report.reused_segment < lengths
        assert recomputed(report)["not-cached"] >= 4
        parts = list(sample.parts)
        with runner.prefill(parts, "naive", namespace="edited", remember=False) as unmarked:
            assert unmarked.report.reused_segment == 0


def test_short_segments_are_reused_as_a_whole_or_not_at_all(runner: Runner, tokenizer) -> None:
    sample = drawn("short", 140, 1, tokenizer, "lookup")
    lengths = segment_lengths(sample, tokenizer)
    assert max(lengths) < BLOCK_TOKENS
    assert len(lengths) > 5
    with prefilled(runner, sample, "short") as report:
        assert report.reused_segment == sum(lengths)
    half = replace(sample, encoded=sample.knowledge[::2])
    with prefilled(runner, half, "short/half") as report:
        assert report.reused_segment == sum(lengths[::2])
        assert recomputed(report)["shorter-than-block"] == sum(lengths[1::2])


def test_text_of_tokens_is_laid_out_too(runner: Runner, tokenizer) -> None:
    """`lm` begins with its first document, so that is a prefix where it was encoded alone."""
    for layout in ("permuted", "edited"):
        sample = drawn(layout, 256, 2, tokenizer, "lm")
        with prefilled(runner, sample, f"lm/{layout}") as report:
            found = report.reused_prefix + report.reused_segment
            assert 0.8 * (256 - 64) <= found <= 256 - 64, layout


def test_what_agents_said_is_reused(runner: Runner, tokenizer) -> None:
    sample = drawn("moved", 400, 4, tokenizer, "debate")
    said = [
        "Aleppo has the larger number, as the documents say in so many words, and more than once.",
        "Bergen has the larger one.",
    ]
    last = sample.at_turn(2, said)
    with prefilled(runner, last, "debate") as report:
        messages = sum(len(task_encoder(tokenizer)(text)) for text in said)
        block = segment_lengths(sample, tokenizer)[0]
        assert report.reused_segment == block + messages
        assert {span["source"] for span in reused(report)} == {"0", "1", "2"}
