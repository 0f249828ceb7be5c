"""What a recovery policy says, step by step: plain data, handed out by a `PlanWalk`.

A policy is a generator. It yields a `LayerPlan` for each layer, in order; a plan for layer 0 behind
one for a later layer begins another pass over the same pages, in which rows are written again. The
last pass goes through all layers. Behind a pass that does, a policy may yield a `Draft`. What a
step measured is sent back to it. `plan_walk` holds a policy to this, whoever carries it out.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Rows = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Salience:
    """What `Probe.SALIENCE` measured of one layer, before its attention.

    `mass` f32 [T]: the attention that each token gets, summed over score rows and query heads.
    `edge` f32 [G]: of the query heads of each KV head, the mean share of attention outside the
    head's own sink and window: what it does not see as a local head; 0 for full heads.
    """

    mass: torch.Tensor
    edge: torch.Tensor


class Probe(Enum):
    """What a policy wants to learn from a layer.

    `SCORES`: after the layer's K is written, the Sparse-Q mass per token (SparseX eq. 2), f32 [T].
    `DEVIATION`: after projection and before anything is written, the squared distance of each
    row's fresh K, V from the cached ones (CacheBlend), f32 [R]. The next plan must then name the
    same layer and a subset of its rows, and the layer is finished with those alone.
    `SALIENCE`: after the layer's K, V are written and before its attention, a `Salience` of
    `score_rows`, every head reading all that is kept (RedKnot §4.2: importance by attention).
    The next plan must then name the same layer and rows, now with `ffn_rows` and `restore`.
    Measured where `SCORES` is, and f32 [T] like it:
    `CONTEXT`: the mass where all score rows see only what stands before the first of them
    (ProphetKV, Algorithm 1).
    `NORMS`: of what each score row gives to a token, mean over query heads, the L2 norm over rows
    (InfoFlow KV's code).
    `VALUES`: the mass from each KV head's queries times the norm of the token's value there, summed
    over KV heads (the same code's `vatp`).
    """

    SCORES = "scores"
    CONTEXT = "context"
    NORMS = "norms"
    VALUES = "values"
    DEVIATION = "deviation"
    SALIENCE = "salience"


@dataclass(frozen=True)
class LayerPlan:
    """One layer: which rows have hidden states, and what is to be measured.

    `rows` i32 [R], sorted positions: those that are computed and whose K, V are written. They
    must be a subset of the rows of the layer before. Layer 0 alone may be planned twice in a row,
    the second time with further rows: their hidden states are the embeddings, known for every
    token. What the second plan says is of these rows, and it measures nothing.
    `score_rows` i32 [S]: the rows whose queries are scored (a subset of `rows`).
    `local_rows`, a subset of `rows`: those whose K, V of window heads are written; the others'
    stay as they were reused. Full heads always write all `rows`. None: all.
    `ffn_rows`, a subset of `rows`: those that run the feed-forward; the others keep the residual
    (RedKnot, Algorithm 1, lines 23-26). None: all.
    Layers may share arrays; what was planned is not changed any more.
    `restore`: KV heads of this layer that are full for the request from this layer's attention on;
    only of policies that measure.
    """

    layer: int
    rows: Rows
    probe: Probe | None = None
    score_rows: Rows = field(default_factory=lambda: np.zeros(0, np.int32))
    local_rows: Rows | None = None
    ffn_rows: Rows | None = None
    restore: tuple[int, ...] = ()


@dataclass(frozen=True)
class Draft:
    """Behind a pass: the model's likeliest next tokens, decoded from the KV as it is now.

    `tokens` n ≥ 1 are fed one by one, and their queries are kept. What comes back is the attention
    mass that they give to each token of the prompt, f32 [T], summed over query heads and the layers
    from `since` < L on; None when there is no room for n more tokens. Nothing of a draft stays:
    neither its tokens nor their KV.

    `drafts` ≥ 1 of them, side by side, each from another of the likeliest first tokens: the mass is
    their mean. Where there is room for one alone, it is the likeliest one's.
    """

    tokens: int
    since: int = 0
    drafts: int = 1


PlanStep: TypeAlias = LayerPlan | Draft


@dataclass(frozen=True)
class PromptView:
    """What a policy may know of a prompt before it is run.

    tokens T; layers L; page_tokens P; `prefix` tokens are exact and never recomputed; `fresh`
    i32 [F] are the positions with no cached KV (Sparse-Q's I_nr); `segments` are the reused
    spans, half-open and sorted. `heads` i32 [L, G, 2]: window and sink of every (layer, KV head)
    as the model's head map classes it; window 0: full. `settled` i32: positions that stay as they
    are, an earlier turn of the same conversation having computed their KV in this context; plans
    do not name them.
    """

    tokens: int
    layers: int
    page_tokens: int
    prefix: int
    fresh: Rows
    segments: tuple[tuple[int, int], ...]
    heads: npt.NDArray[np.int32]
    settled: Rows = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def after_prefix(self) -> Rows:
        """All positions after the exact prefix."""
        return np.arange(self.prefix, self.tokens, dtype=np.int32)

    @property
    def unsettled(self) -> Rows:
        """All positions after the exact prefix that no earlier turn computed: those of plans."""
        return np.setdiff1d(self.after_prefix, self.settled, assume_unique=True)

    @property
    def reused(self) -> Rows:
        """The positions that a segment covers and no earlier turn computed again."""
        return np.setdiff1d(self.unsettled, self.fresh, assume_unique=True)


ProbeResult = torch.Tensor | Salience | None

Plans: TypeAlias = Generator[PlanStep, ProbeResult, None]
"""What a policy yields and receives."""


def one_pass(layers: int, rows: Rows) -> Plans:
    """The same rows in all layers, once."""
    for layer in range(layers):
        yield LayerPlan(layer, rows)
