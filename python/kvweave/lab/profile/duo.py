"""Head maps from DuoAttention's published patterns: a TSV of L rows of G numbers, and a config.

One number a (layer, KV head), from 0 (streaming) to 1 (retrieval), was learned by distillation
(Xiao et al. 2024, DuoAttention, §2.2). Its `config.json` says with which sink and recent window.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvweave.arguments import shown
from kvweave.cache import HeadClassMap
from kvweave.errors import CorruptHeadMap, InvalidArgument
from kvweave.lab.profile.head_profile import head_map
from kvweave.lab.profile.scores import Scores, rounded, top
from kvweave.runner.model.model_spec import ModelSpec

DEFAULT_THRESHOLD = 0.5


@dataclass(frozen=True)
class DuoPattern:
    """Gates f64 [L, G] from 0 to 1, the window they were learned with, and where they are from."""

    gates: Scores
    sink: int | None
    recent: int | None
    source: dict[str, str]

    @staticmethod
    def read(pattern: Path, config: Path | None = None) -> DuoPattern:
        """Reads `full_attention_heads.tsv` and, if given, its `config.json`.

        # Errors
        `CorruptHeadMap` for a table that is not L × G numbers from 0 to 1, or a config without
        `sink_size` and `recent_size`; `OSError` for a file that cannot be read.
        """
        raw = pattern.read_bytes()
        source = {"pattern": pattern.name, "pattern_sha256": hashlib.sha256(raw).hexdigest()}
        gates = _gates(pattern.name, raw)
        if config is None:
            return DuoPattern(gates, None, None, source)
        sink, recent = _window(config)
        return DuoPattern(gates, sink, recent, source)

    def map(
        self,
        spec: ModelSpec,
        *,
        share: float | None = None,
        threshold: float | None = None,
        sink: int | None = None,
        recent: int | None = None,
    ) -> HeadClassMap:
        """The map of a model: heads at or above a threshold are global, or a share of the highest.

        Equal gates go by order of layers. `sink` and `recent` replace the config's. Without share
        and threshold the threshold is DuoAttention's own, 0.5.

        # Errors
        `CorruptHeadMap` when the pattern is not of a model of this shape; `InvalidArgument` for
        share and threshold together or out of range, or no window from either side.
        """
        wanted = (len(spec.layers), spec.kv_heads)
        if self.gates.shape != wanted:
            got = " x ".join(map(str, self.gates.shape))
            raise CorruptHeadMap(
                f"pattern: expected {wanted[0]} layers x {wanted[1]} KV heads, got {got}"
            )
        kept_sink = self.sink if sink is None else sink
        kept_recent = self.recent if recent is None else recent
        if kept_sink is None or kept_recent is None:
            raise InvalidArgument(
                "window: expected sink and recent, or a config with them, got neither"
            )
        evidence = {
            "imported_from": "DuoAttention",
            **self.source,
            "threshold" if share is None else "share": self._asked(share, threshold),
            "score": rounded(self.gates),
        }
        chosen = self._chosen(share, threshold)
        # The pattern says nothing of pages that stay important.
        unmeasured = np.zeros_like(chosen)
        window = kept_sink, kept_recent
        of, weights = spec.fingerprint, spec.weights
        return head_map(of, chosen, unmeasured, *window, evidence, weights=weights)

    def _asked(self, share: float | None, threshold: float | None) -> float:
        if share is not None and threshold is not None:
            raise InvalidArgument(
                f"pattern: expected a share or a threshold, got {share} and {threshold}"
            )
        name, value = ("threshold", threshold) if share is None else ("share", share)
        asked = DEFAULT_THRESHOLD if value is None else value
        if not 0.0 <= asked <= 1.0:
            raise InvalidArgument(f"{name}: expected 0..1, got {asked}")
        return asked

    def _chosen(self, share: float | None, threshold: float | None) -> np.ndarray:
        asked = self._asked(share, threshold)
        if share is None:
            return self.gates >= asked
        return top(self.gates, round(asked * self.gates.size))


def _gates(name: str, raw: bytes) -> Scores:
    try:
        lines = [line for line in raw.decode("utf-8").splitlines() if line.strip()]
        rows = [[float(cell) for cell in line.split("\t")] for line in lines]
    except ValueError as error:
        raise CorruptHeadMap(f"{name}: expected numbers parted by tabs, got {error}") from error
    widths = sorted({len(row) for row in rows})
    if len(widths) != 1:
        got = "no rows" if not rows else f"rows of {widths[0]} and of {widths[-1]}"
        raise CorruptHeadMap(f"{name}: expected rows of one length, got {got}")
    gates = np.asarray(rows, np.float64)
    # A comparison with NaN is false, so it is caught here as well.
    if not ((gates >= 0.0) & (gates <= 1.0)).all():
        worst = gates[~((gates >= 0.0) & (gates <= 1.0))][0]
        raise CorruptHeadMap(f"{name}: expected numbers from 0 to 1, got {worst:g}")
    return gates


def _window(path: Path) -> tuple[int, int]:
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise CorruptHeadMap(f"{path.name}: expected JSON, got {error}") from error
    found = []
    for key, least in (("sink_size", 0), ("recent_size", 1)):
        value = config.get(key) if isinstance(config, dict) else None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise CorruptHeadMap(
                f"{path.name}: expected {key} to be an integer >= {least}, got {shown(value)}"
            )
        found.append(value)
    return found[0], found[1]
