"""What makes queries, keys and values of a layer's rows: three matrices, or one of all three."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvweave.runner.model.joined import is_plain

Vectors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class HeadProjections:
    """Modules of `owner` by name: of queries, keys and values, or one of all.

    The outputs of one module are queries, keys and values of `query_heads`, `kv_heads` and as many
    heads of `head_dim` elements, side by side (Phi 3); with `per_head` those of one head behind
    those of another (GPT-NeoX), whose numbers are the same then. Modules are looked up at each
    call, so that one that takes another's place is found.
    """

    owner: Any
    names: tuple[str, ...]
    query_heads: int
    kv_heads: int
    head_dim: int
    per_head: bool = False

    @property
    def modules(self) -> tuple[Any, ...]:
        """What the owner has by these names now."""
        return tuple(getattr(self.owner, name) for name in self.names)

    @property
    def are_apart(self) -> bool:
        """Whether each of the three has a module of its own."""
        return len(self.names) > 1

    @property
    def query(self) -> Any:
        """The module that makes queries, alone or among others."""
        return self.modules[0]

    @property
    def key(self) -> Any:
        """The module that makes keys."""
        return self.modules[1 if self.are_apart else 0]

    @property
    def value(self) -> Any:
        """The module that makes values."""
        return self.modules[-1]

    @property
    def is_queries_own(self) -> bool:
        """Whether nobody else holds what is made of queries.

        A plain matrix makes a tensor of its own. Any other module, such as one that passes on its
        input, and what listens to a module may keep what it returns.
        """
        return is_plain(self.query)

    @property
    def is_keys_own(self) -> bool:
        """The same of keys."""
        return is_plain(self.key)

    def queries(self, project: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Queries [R, H, D] alone; `project` gives what a module makes of the rows, [R, outputs].

        Of projections that are apart.
        """
        return self._as_heads(project(self.query))

    def __call__(self, project: Callable[[Any], torch.Tensor]) -> Vectors:
        """Queries [R, H, D], keys and values [R, G, D]."""
        if self.are_apart:
            q, k, v = (self._as_heads(project(module)) for module in self.modules)
            return q, k, v
        return self.split(project(self.query))

    def split(self, made: torch.Tensor) -> Vectors:
        """The same of what one module made of the rows, [R, outputs]."""
        if self.per_head:
            each = made.view(len(made), self.query_heads, 3, self.head_dim).unbind(2)
            # Each is rotated in memory of its own.
            q, k, v = (one.contiguous() for one in each)
            return q, k, v
        heads = self._as_heads(made)
        q, k, v = torch.split(heads, [self.query_heads, self.kv_heads, self.kv_heads], dim=1)
        return q, k, v

    def _as_heads(self, made: torch.Tensor) -> torch.Tensor:
        return made.view(len(made), -1, self.head_dim)
