"""How far the K and V of a text move when another text stands before it (RedKnot, §3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvweave.lab.profile.scores import Scores
from kvweave.lab.profile.tap import Tap
from kvweave.plan import Rows
from kvweave.runner import Runner


@dataclass(frozen=True)
class Shift:
    """Mean relative distance per (layer, KV head), f64 [L, G], of keys and of values."""

    keys: Scores
    values: Scores


def measure_shift(runner: Runner, prefix: Rows, segment: Rows) -> Shift:
    """Computes a segment alone and behind a prefix; both are i32 token ids.

    For each row r of the segment and each KV head: ‖k′ᵣ − kᵣ‖ / ‖kᵣ‖, k′ behind the prefix; the
    mean over rows. Keys are compared before RoPE: Δ-RoPE turns both sides of the difference by one
    rotation, which changes no length, so this is the distance of aligned keys without its rounding.
    """
    alone = _rows_of(runner, segment, 0)
    behind = _rows_of(runner, np.concatenate((prefix, segment)), len(prefix))
    keys, values = (
        np.stack([_moved(a, b) for a, b in zip(*pair, strict=True)])
        for pair in zip(alone, behind, strict=True)
    )
    return Shift(keys, values)


def _rows_of(
    runner: Runner, tokens: Rows, first: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values [R, G, D] of each layer, of the tokens from `first` on."""
    rows = np.arange(first, len(tokens), dtype=np.int32)
    layers = range(len(runner.spec.layers))
    with Tap(runner.spec, {"k_proj": rows, "v_proj": rows}) as tap, torch.inference_mode():
        runner.prefill(tokens.tolist(), "full", remember=False).release()
        return [tap.keys(i) for i in layers], [tap.values(i) for i in layers]


def _moved(alone: torch.Tensor, behind: torch.Tensor) -> Scores:
    """Mean over rows of the relative distance of each head, f64 [G]."""
    apart = (behind.double() - alone.double()).norm(dim=-1)
    size = alone.double().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return np.asarray((apart / size).mean(0).cpu().numpy())
