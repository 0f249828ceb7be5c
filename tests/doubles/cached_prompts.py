"""Prompts of cached segments with fresh text between, and what a runner says of them."""

from __future__ import annotations

from typing import Any

import torch

import kvweave
from families import random_tokens
from kvweave.runner import Runner, Segment


def knowledge(runner: Runner, segments: int) -> list[Any]:
    """A prompt of so many cached segments; nothing stands where it was."""
    parts: list[Any] = []
    for index in range(segments):
        segment = random_tokens(90 + 7 * index, index).tolist()
        runner.insert(segment, f"segment {index}", "kb")
        fresh = random_tokens(11 + index, 10 + index).tolist()
        parts += [Segment(tokens=fresh, namespace="fresh"), Segment(tokens=segment, namespace="kb")]
    return [*parts, Segment(tokens=random_tokens(9, 20).tolist(), namespace="fresh")]


def logits_of(runner: Runner, parts: Any, policy: Any) -> tuple[torch.Tensor, kvweave.Report]:
    """Logits of the last, fresh segment, and the report."""
    start = runner.tokenize(parts).segments[-1][0]
    with runner.prefill(parts, policy, logits_from=start, remember=False) as done:
        return done.logits.clone(), done.report


def two_documents(runner: Runner, length: int, fresh_end: bool = True) -> Any:
    """The tokens of a prompt with two cached segments, its parts, and where these are reused."""
    tokens = random_tokens(length, length)
    ends = (60, length - 14 if fresh_end else length)
    for name, start, stop in (("a", 7, 50), ("b", *ends)):
        runner.insert(tokens[start:stop].tolist(), name, "kb")
    parts = [
        Segment(tokens=tokens[:7].tolist()),
        Segment(tokens=tokens[7:50].tolist(), namespace="kb"),
        Segment(tokens=tokens[50:60].tolist()),
        Segment(tokens=tokens[slice(*ends)].tolist(), namespace="kb"),
    ]
    spans = ((7, 50), (60, min(ends[1], length - 1)))
    return tokens, [*parts, Segment(tokens=tokens[ends[1] :].tolist())][: 4 + fresh_end], spans


def answer_of(
    runner: Runner, parts: Any, policy: Any, **settings: Any
) -> tuple[torch.Tensor, kvweave.Report]:
    """Logits of a prompt that nobody finds later, and the report."""
    with runner.prefill(parts, policy, remember=False, **settings) as done:
        return done.logits.clone(), done.report
