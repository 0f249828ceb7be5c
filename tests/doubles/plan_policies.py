"""Policies of fixed plans, for tests of what the executor does with each field of a plan."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvweave.plan import Draft, LayerPlan, Probe, PromptView


@dataclass
class Planned:
    """Every row after the prefix in every layer, with `fields(view, layer)` of the plan set."""

    fields: Callable[[PromptView, int], dict[str, Any]] = lambda view, layer: {}
    reuse: str = "segments"
    name: str = "planned"
    delta_rope: bool = True
    measures: bool = False

    def rewrites_segments(self, layers: int) -> bool:
        return False

    def plan(self, prompt: PromptView) -> Generator[LayerPlan, Any, None]:
        for layer in range(prompt.layers):
            yield LayerPlan(layer, prompt.after_prefix, **self.fields(prompt, layer))


@dataclass
class Restoring:
    """Every row in every layer; asks for salience everywhere and restores heads by it.

    `restore(layer, salience)` names the heads; what was measured is kept in `seen`.
    """

    restore: Callable[[int, Any], tuple[int, ...]] = lambda layer, salience: ()
    local_rows: Callable[[PromptView], Any] = lambda view: None
    reuse: str = "none"
    name: str = "restoring"
    delta_rope: bool = True
    measures: bool = True
    seen: list[Any] = field(default_factory=list)

    def rewrites_segments(self, layers: int) -> bool:
        return False

    def plan(self, prompt: PromptView) -> Generator[LayerPlan, Any, None]:
        rows, local = prompt.after_prefix, self.local_rows(prompt)
        asked = rows[-min(7, len(rows)) :]
        for layer in range(prompt.layers):
            found = yield LayerPlan(layer, rows, Probe.SALIENCE, asked, local_rows=local)
            self.seen.append(found)
            yield LayerPlan(layer, rows, restore=self.restore(layer, found))


@dataclass
class Overheard:
    """A policy, with its steps and what they measured kept."""

    policy: Any
    said: list[torch.Tensor] = field(default_factory=list)
    steps: list[LayerPlan | Draft] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def plan(self, prompt: PromptView) -> Generator[LayerPlan | Draft, Any, None]:
        steps = self.policy.plan(prompt)
        step = next(steps)
        while True:
            self.steps.append(step)
            answer = yield step
            if answer is not None:
                self.said.append(answer.clone())
            try:
                step = steps.send(answer)
            except StopIteration:
                return


def every(rows: np.ndarray, step: int) -> np.ndarray:
    """Each `step`-th of some rows, and the last."""
    return np.union1d(rows[::step], rows[-1:]).astype(np.int32)
