"""Rotary positions of one request: cos and sin for its rows, frequencies for Δ-RoPE.

The model's own rotary module is asked, so every RoPE kind is as the model defines it: default,
linear, dynamic NTK, YaRN, Llama-3, LongRoPE, partial, one θ per layer type. Kinds that change
with the length (dynamic, LongRoPE) are asked once for the whole request; the frequencies they
give are the request's *regime*, part of every cache key, so KV of another regime never matches.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvweave import ops
from kvweave.ops import RopeTable
from kvweave.power_of_two import power_of_two
from kvweave.runner.model.model_spec import ModelSpec

Turns: TypeAlias = dict[str | None, tuple[torch.Tensor, torch.Tensor]]
"""Cos and sin [R, rotary_dim] of some rows, per rope key."""

_FEWEST_POSITIONS = 1024
_MOST_REGIMES = 64


@dataclass(frozen=True)
class PositionTable:
    """cos and sin [T, rotary_dim] per rope key, the Δ-RoPE table, and the regime's hash."""

    cos: dict[str | None, torch.Tensor]
    sin: dict[str | None, torch.Tensor]
    rope: RopeTable
    regime: int

    def turns(self, rows: torch.Tensor) -> Turns:
        """Cos and sin [R, rotary_dim] of some positions, integers on the tables' device."""
        return {
            key: (cos.index_select(0, rows), self.sin[key].index_select(0, rows))
            for key, cos in self.cos.items()
        }

    def until(self, length: int) -> PositionTable:
        """The first `length` positions (views)."""
        cut = [{key: t[:length] for key, t in table.items()} for table in (self.cos, self.sin)]
        return PositionTable(cut[0], cut[1], self.rope, self.regime)


class Rotary:
    """A model's rotary module, asked as seldom as its kinds of RoPE allow.

    Fixed frequencies are tabulated once, for as many positions as were ever asked for: their
    tables keep their address until a longer request comes. Frequencies that depend on the length
    are asked for anew by each request. The module remembers what it was asked last, so that one
    thread asks at a time.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.keys = sorted({layer.rope_key for layer in spec.layers if layer.rotates}, key=str)
        self._fixed: PositionTable | None = None
        self._positions = 0
        self._ropes: dict[bytes, RopeTable] = {}
        self._asking = threading.RLock()

    @property
    def is_fixed(self) -> bool:
        """Whether the frequencies are the same for every request."""
        kind = getattr(self.spec.rotary, "rope_type", None)
        kinds = [kind[key] if isinstance(kind, dict) else kind for key in self.keys]
        return not any(k is None or "dynamic" in k or k == "longrope" for k in kinds)

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables that are kept."""
        if self._fixed is None:
            return 0
        kept = (*self._fixed.cos.values(), *self._fixed.sin.values())
        return sum(table.numel() * table.element_size() for table in kept)

    def table(self, length: int) -> PositionTable:
        """Positions [0, length) of a request that is `length` tokens long."""
        if not self.is_fixed:
            return self._tabulated(length)
        return self.fixed(length).until(length)

    def regime(self, length: int) -> int:
        """The regime of a request that is `length` tokens long. From any thread."""
        return (self.fixed(1) if self.is_fixed else self._tabulated(length)).regime

    def fixed(self, length: int) -> PositionTable:
        """The table of at least `length` positions, where the frequencies are fixed."""
        with self._asking:
            if self._fixed is None or length > self._positions:
                self._positions = max(_FEWEST_POSITIONS, power_of_two(length))
                self._fixed = self._tabulated(self._positions)
            return self._fixed

    def lone_turns(self, positions: npt.NDArray[np.int32]) -> Turns:
        """Turns of one decode row of each of R requests, each asked for alone.

        For frequencies that depend on the request's length.
        """
        asked = torch.from_numpy(positions).to(self.spec.device).long()
        turns: Turns = {}
        for key in self.keys:
            with self._asking:
                pairs = [self._ask(part, key) for part in torch.split(asked, 1)]
            turns[key] = (
                torch.cat([cos for cos, _ in pairs]),
                torch.cat([sin for _, sin in pairs]),
            )
        return turns

    def _ask(self, positions: torch.Tensor, key: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        like = torch.zeros(1, dtype=self.spec.dtype, device=self.spec.device)
        named = () if key is None else (key,)
        if not self.is_fixed:
            # A module of dynamic frequencies keeps those of the longest request that it was asked
            # for, until a short one comes: so that one request's do not depend on others.
            self.spec.rotary(like, torch.zeros_like(positions[None, :1]), *named)
        cos, sin = self.spec.rotary(like, positions[None], *named)
        frequencies = self._inv_freq(key).numel()
        return self._doubled(cos[0], frequencies), self._doubled(sin[0], frequencies)

    def _doubled(self, table: torch.Tensor, frequencies: int) -> torch.Tensor:
        """Cos or sin [R, rotary_dim] as ops take them: one of each frequency, twice over.

        Some families give each once (GPT-OSS), or, where neighbours are pairs, each twice in a row
        (Cohere).
        """
        if table.shape[-1] == frequencies:
            return torch.cat([table] * 2, dim=-1)
        if self.spec.pairing == "half" or not self._repeats_each:
            return table
        return torch.cat([table[:, ::2]] * 2, dim=-1)

    @cached_property
    def _repeats_each(self) -> bool:
        """Whether the module gives each frequency twice in a row, asked of it once."""
        like = torch.zeros(1, device=self.spec.device)
        named = () if self.keys[0] is None else (self.keys[0],)
        position = torch.ones(1, 1, dtype=torch.int64, device=self.spec.device)
        sin = self.spec.rotary(like, position, *named)[1][0, 0]
        return bool(torch.equal(sin[::2], sin[1::2]))

    def _tabulated(self, length: int) -> PositionTable:
        positions = torch.arange(length, device=self.spec.device)
        cos, sin = {}, {}
        with self._asking:
            for key in self.keys:
                cos[key], sin[key] = self._ask(positions, key)
            tables = {key: self._inv_freq(key) for key in self.keys}
        width = max(table.numel() for table in tables.values())
        inv_freq = np.zeros((len(self.spec.layers), width), np.float32)
        for index, layer in enumerate(self.spec.layers):
            if layer.rotates:
                inv_freq[index] = tables[layer.rope_key].numpy()
        regime = int.from_bytes(hashlib.sha256(inv_freq.tobytes()).digest()[:8], "little")
        return PositionTable(cos, sin, self._rope(inv_freq), regime)

    def _inv_freq(self, key: str | None) -> torch.Tensor:
        name = "inv_freq" if key is None else f"{key}_inv_freq"
        table: torch.Tensor = getattr(self.spec.rotary, name)
        return table.detach().float().cpu()

    def _rope(self, inv_freq: npt.NDArray[np.float32]) -> RopeTable:
        """One object for equal frequencies, so that each device gets one copy of them."""
        name = inv_freq.tobytes()
        with self._asking:
            if name not in self._ropes:
                if len(self._ropes) == _MOST_REGIMES:
                    del self._ropes[next(iter(self._ropes))]
                self._ropes[name] = RopeTable(inv_freq, self.spec.pairing)
            return self._ropes[name]


def rotated(
    spec: ModelSpec,
    turn: tuple[torch.Tensor, torch.Tensor],
    vectors: tuple[torch.Tensor, ...],
    own: bool,
) -> tuple[torch.Tensor, ...]:
    """Queries [R, H, D], and keys [R, G, D] if any, rotated by cos and sin [R, rotary_dim].

    With `own` nobody else holds them: then it is done in place.
    """
    results = vectors if own else tuple(x.new_empty(x.shape) for x in vectors)
    out = None if own else _queries_and_keys(results)
    ops.rotate_rows(*_queries_and_keys(vectors), *turn, pairing=spec.pairing, out=out)
    return results


def _queries_and_keys(
    vectors: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return vectors[0], vectors[1] if len(vectors) > 1 else None
