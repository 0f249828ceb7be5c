"""How what a soak asks is said to a runner: parts of a prompt, a policy, and how it ends."""

from __future__ import annotations

from typing import Any

from benchmarks.soak.asked import POLICIES, Asked
from benchmarks.soak.words import words_of
from kvweave import Sampling, Segment

CHATS = "chats"
"""The namespace of prompts without marks."""
TEMPERATURE = 0.8


def prompt_of(asked: Asked, namespace: str | None = None) -> Any:
    """Its tokens, or its parts where documents are marked; of the namespace that is named."""
    if asked.marks is None:
        return asked.tokens
    space = asked.marks["namespace"] if namespace is None else namespace
    parts: list[Any] = []
    at = 0
    for start, end in [*asked.marks["segments"], [len(asked.tokens)] * 2]:
        if at < start:
            parts.append(words_of(asked.tokens[at:start]))
        if start < end:
            parts.append(Segment(tokens=asked.tokens[start:end], namespace=space))
        at = end
    return parts


def policy_of(asked: Asked) -> str:
    """Its policy; of prompts without marks prefix reuse."""
    return asked.kind if asked.kind in POLICIES else "prefix"


def how_of(asked: Asked, number: int = 0) -> dict[str, Any]:
    """Keyword arguments of `submit` for one of its answers."""
    return {
        "max_new_tokens": asked.answer,
        "stop": tuple(asked.stop),
        "sampling": Sampling(temperature=TEMPERATURE, seed=number) if asked.n > 1 else None,
        "namespace": CHATS if asked.marks is None else asked.marks["namespace"],
    }
