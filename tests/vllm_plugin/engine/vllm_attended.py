"""What single layers of an engine were given and said, beside the same attention in f64.

T tokens of one request that is alone in its engine, H query heads, G KV heads of size D.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from vllm import LLM
from vllm.model_executor.layers.attention import Attention


@dataclass(frozen=True)
class Attended:
    """Queries [T, H, D], keys and values [T, G, D] of a layer and what it said [T, H, D].

    A row sees itself and what is before it: of that the latest `window` keys, or those of its own
    `chunk`. `sinks` [H]: of each head the logit of a key that has no value.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    said: torch.Tensor
    scale: float
    window: int | None
    chunk: int | None
    sinks: torch.Tensor | None

    @classmethod
    def of(cls, layer: Any, rows: list[list[torch.Tensor]], tokens: int) -> Attended:
        """By what vLLM's layer says of itself; rows behind the tokens are no request's."""
        taken = [torch.cat(parts)[:tokens] for parts in zip(*rows, strict=True)]
        assert len(taken[0]) == tokens
        chunk, sinks = getattr(layer, "attention_chunk_size", None), layer.impl.sinks
        sinks = None if sinks is None else sinks.double().cpu()
        return cls(*taken, layer.impl.scale, layer.sliding_window, chunk, sinks)

    def exact(self) -> torch.Tensor:
        """f64 [T, H, D]."""
        at = torch.arange(len(self.query))
        seen = at <= at[:, None]
        if self.window is not None:
            seen &= at > at[:, None] - self.window
        if self.chunk is not None:
            seen &= at // self.chunk == at[:, None] // self.chunk
        group = self.query.shape[1] // self.key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (self.key, self.value))
        scores = torch.einsum("rhd,khd->hrk", self.query, key) * self.scale
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.sinks is not None:
            of_rows = self.sinks[:, None, None].expand(-1, len(at), 1)
            scores = torch.cat([scores, of_rows], -1)
        return torch.einsum("hrk,khd->rhd", scores.softmax(-1)[..., : len(at)], value)

    def off(self) -> float:
        """How far off what was said is, of all numbers together, as a share of their size."""
        exact = self.exact()
        return float((self.said - exact).norm() / exact.norm())


@contextmanager
def _watched(layer: Any, rows: list[list[torch.Tensor]]) -> Iterator[None]:
    """Keeps the queries, keys, values and the output of each step of a layer."""
    attend = layer.impl.forward

    def forward(
        of: Any, query: Any, key: Any, value: Any, *others: Any, output: Any, **named: Any
    ) -> Any:
        said = attend(of, query, key, value, *others, output=output, **named)
        rows.append([x.double().cpu() for x in (query, key, value, output)])
        return said

    with mock.patch.object(layer.impl, "forward", forward):
        yield


@contextmanager
def attended(llm: LLM, tokens: int) -> Iterator[dict[str, Attended]]:
    """By layers, filled in at the end: of the request that is answered meanwhile.

    Steps from graphs are not seen, so `tokens` are those of the others, from the first on.
    """
    known = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    layers = {name: layer for name, layer in known.items() if isinstance(layer, Attention)}
    rows: dict[str, list[list[torch.Tensor]]] = {name: [] for name in layers}
    made: dict[str, Attended] = {}
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(_watched(layer, rows[name]))
        yield made
    made.update((name, Attended.of(layer, rows[name], tokens)) for name, layer in layers.items())


def model_of(llm: LLM) -> torch.nn.Module:
    """vLLM's model, which is in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


@contextmanager
def chosen_experts(llm: LLM, most: int, tokens: int) -> Iterator[list[torch.Tensor]]:
    """Of each layer the `most` experts that each token chose, [T, most], filled in at the end.

    By what `mlp.router` says in steps that are not from graphs: of equals the first are taken.
    """
    routers = [m for name, m in model_of(llm).named_modules() if name.endswith(".mlp.router")]
    logits: list[list[torch.Tensor]] = [[] for _ in routers]
    made: list[torch.Tensor] = []
    with ExitStack() as stack:
        for router, rows in zip(routers, logits, strict=True):

            def keep(_: Any, __: Any, said: torch.Tensor, rows: Any = rows) -> None:
                rows.append(said.float().cpu())

            stack.callback(router.register_forward_hook(keep).remove)
        yield made
    for rows in logits:
        ordered = torch.cat(rows)[:tokens].sort(dim=-1, descending=True, stable=True)
        made.append(ordered.indices[:, :most])
