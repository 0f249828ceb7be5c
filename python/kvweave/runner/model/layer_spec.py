"""One decoder layer of a model, as data: which modules do what, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from kvweave.runner.model.joined import GatedProducts, Joined
from kvweave.runner.model.projections import HeadProjections

Norm: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class NormOverHeads:
    """A norm whose mean is over all heads of a row together (OLMo 2), for heads [R, H, D]."""

    norm: Norm

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """The normed heads [R, H, D]."""
        return self.norm(heads.flatten(1)).view(heads.shape)


def unchanged(states: torch.Tensor) -> torch.Tensor:
    """Where a layer has no norm before attention or feed-forward (OLMo 2, EXAONE 4)."""
    return states


class Scores(Protocol):
    """How a layer scores keys: q · k times `scale`, s as softcap · tanh(s / softcap) with one."""

    @property
    def scale(self) -> float:
        """What q · k is multiplied by."""

    @property
    def softcap(self) -> float | None:
        """The bound of a score; None without one."""


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: its modules and the constants of its attention.

    `heads` makes queries, keys and values of normed rows, `out` what is added to the states of what
    was attended. `attention_in_norm` and `feed_forward_in_norm` are before attention and
    feed-forward, `attention_out_norm` and `feed_forward_out_norm` behind them (Gemma 2, OLMo 2),
    `query_norm` and `key_norm` of heads (Qwen 3). What both add is multiplied by `residual_scale`
    (Granite). `is_parallel`: the feed-forward reads what attention reads, not what it made (Cohere,
    Phi). `window` w keeps keys with position > row position − w. `sinks` f32 [H]: of each query
    head the logit of a key that has no value (GPT-OSS). `rope_key` names the rotary parameters (a
    layer type, or None when there is one set); `rotates` is False on layers without positions
    (SmolLM3). `joined_heads` and `gated`: the same matrices side by side in memory, where they are.
    """

    attention: Any
    heads: HeadProjections
    out: Any
    feed_forward: nn.Module
    attention_in_norm: Norm
    query_norm: Norm | None
    key_norm: Norm | None
    feed_forward_in_norm: Norm
    attention_out_norm: Norm | None
    feed_forward_out_norm: Norm | None
    residual_scale: float
    is_parallel: bool
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    rope_key: str | None
    rotates: bool
    joined_heads: Joined | None = None
    gated: GatedProducts | None = None
