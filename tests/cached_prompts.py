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
