"""Queries, keys and values of chosen rows, listened to while a prompt is prefilled whole.

A policy sees sums over heads; a profile needs every head by itself. The model's own projections are
torch modules, so hooks on them hear what the executor computes, and change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

import torch

from kvweave.errors import Unsupported
from kvweave.plan import Rows
from kvweave.runner.kv.tables import send_index
from kvweave.runner.model.model_spec import ModelSpec
from kvweave.runner.model.rope import PositionTable, rotated

Projection = Literal["q_proj", "k_proj", "v_proj"]


class Tap:
    """A context manager around one prefill of all rows; `rows` are sorted positions i32 [R].

    What it heard is kept until the next time it is entered.
    """

    def __init__(self, spec: ModelSpec, rows: Mapping[Projection, Rows]) -> None:
        self.spec = spec
        self.rows = rows
        self._heard: dict[tuple[Projection, int], list[torch.Tensor]] = {}
        self._passed: dict[tuple[Projection, int], int] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Tap:
        self._heard.clear()
        self._passed.clear()
        for index, layer in enumerate(self.spec.layers):
            for name in self.rows:
                module = getattr(layer.attention, name)
                hook = module.register_forward_hook(self._listener(name, index))
                self._hooks.append(hook)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def queries(self, layer: int, positions: PositionTable) -> torch.Tensor:
        """Normed and rotated queries [R, H, D] of the rows asked for.

        # Errors
        `Unsupported` when the prefill did not compute all of them.
        """
        spec = self.spec.layers[layer]
        q = self._rows_of("q_proj", layer, self.spec.query_heads)
        q = q if spec.query_norm is None else spec.query_norm(q)
        if not spec.rotates:
            return q
        index = send_index(q.device, self.rows["q_proj"])
        cos, sin = positions.cos[spec.rope_key], positions.sin[spec.rope_key]
        turn = cos.index_select(0, index), sin.index_select(0, index)
        return rotated(self.spec, turn, (q,), own=False)[0]

    def keys(self, layer: int) -> torch.Tensor:
        """Normed keys [R, G, D] of the rows asked for, before rotation; errors as `queries`."""
        norm = self.spec.layers[layer].key_norm
        k = self._rows_of("k_proj", layer, self.spec.kv_heads)
        return k if norm is None else norm(k)

    def values(self, layer: int) -> torch.Tensor:
        """Values [R, G, D] of the rows asked for; errors as `queries`."""
        return self._rows_of("v_proj", layer, self.spec.kv_heads)

    def _listener(self, name: Projection, layer: int) -> Any:
        wanted = torch.from_numpy(self.rows[name]).long()

        def listen(_module: Any, _inputs: Any, out: torch.Tensor) -> None:
            # A machine that needs tiles projects a prompt in several calls, in order of position.
            passed = self._passed.get((name, layer), 0)
            inside = wanted[(wanted >= passed) & (wanted < passed + len(out))] - passed
            kept = out.index_select(0, inside.to(out.device))
            self._heard.setdefault((name, layer), []).append(kept)
            self._passed[name, layer] = passed + len(out)

        return listen

    def _rows_of(self, name: Projection, layer: int, heads: int) -> torch.Tensor:
        heard = torch.cat(self._heard.get((name, layer), [torch.zeros(0, 1)]))
        if len(heard) != len(self.rows[name]):
            raise Unsupported(
                f"profile: expected a prefill of all rows at once, got {len(heard)} of "
                f"{len(self.rows[name])} rows of {name} in layer {layer}"
            )
        return heard.view(len(heard), heads, self.spec.head_dim)
