"""What every recovery policy is, and the table of their names."""

from __future__ import annotations

from typing import Literal, Protocol

from kvweave.plan import Plans, PromptView

Reuse = Literal["none", "prefix", "segments"]


class Policy(Protocol):
    """A recovery policy: what to look up, and a `LayerPlan` for each layer.

    `reuse` says what admission may take from the cache. `delta_rope` False copies keys without
    rotating them to their new position: the control that shows what Δ-RoPE is worth.
    `rewrites_segments` says that some layer writes K, V of (nearly) every reused token, so
    sharing the donors' blocks saves nothing and admission copies them at once. `measures` says
    that a plan depends on what is measured; only plans that do not can be prefilled in chunks.
    `passes`: how often rows go through the layers, at most.
    """

    @property
    def name(self) -> str:
        """The name it is asked for by, and reported under."""
        ...

    @property
    def reuse(self) -> Reuse:
        """What admission may take from the cache."""
        ...

    @property
    def delta_rope(self) -> bool:
        """Whether reused keys are rotated to their new position."""
        ...

    @property
    def measures(self) -> bool:
        """Whether a plan depends on what a probe measured."""
        ...

    @property
    def passes(self) -> int:
        """How often rows go through the layers, at most."""
        ...

    def rewrites_segments(self, layers: int) -> bool:
        """Whether a model of that many layers has nearly every reused token written again."""
        ...

    def plan(self, prompt: PromptView) -> Plans:
        """Yields a plan for each layer; receives what the plan's probe measured."""
        ...
