"""What a contender is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvweave.lab.bench.device_timing import Call
from kvweave.lab.bench.problems import Problem


@dataclass(frozen=True)
class Contender:
    """`prepare` does what is not timed (layouts, plans) and returns the call that is.

    A contender that does less than the op, such as a plain copy, has `same` False: there is no
    answer to check.
    """

    name: str
    prepare: Callable[[], Call]
    same: bool = True


class Peer(Protocol):
    """A module of contenders."""

    def missing(self, device: torch.device) -> str:
        """Why it cannot take part, or ""."""

    def contenders(self, problem: Problem) -> Iterable[Contender]:
        """What it can do with the problem."""
