"""Texts that are measured one by one, and how far what follows them is from where it was to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch


class Measures(Protocol):
    """What a text is measured by."""

    def measure(self, index: int) -> dict[str, Any]:
        """The figures of one text, by way."""


def by_text(record: dict[str, Any], count: int, bench: Callable[[], Measures]) -> Iterator[int]:
    """Adds texts to a record that it has not yet, up to so many; yields which.

    `bench` is made for the first of them.
    """
    made: Measures | None = None
    done = record.setdefault("texts", [])
    for index in range(len(done), count):
        made = made or bench()
        done.append(made.measure(index))
        yield index


def far_from(wanted: torch.Tensor, said: torch.Tensor) -> dict[str, float]:
    """How far log-probabilities [R, V] are from those wanted.

    KL in nats a token, and the share of rows whose likeliest token stays.
    """
    kl = (wanted.exp() * (wanted - said)).sum(-1).mean()
    same = (wanted.argmax(-1) == said.argmax(-1)).float().mean()
    return {"kl": float(kl), "top1": float(same)}
