"""What was measured of every (layer, KV head) of a model, and the head maps that follow from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from kvweave.cache import HeadClassMap
from kvweave.errors import CorruptHeadMap, InvalidArgument
from kvweave.lab.profile.scores import (
    LengthScores,
    Scores,
    agreement,
    rank_correlation,
    rounded,
    top,
)
from kvweave.weight_sample import WeightSample, samples_json, samples_of

SCHEMA_VERSION = 1
UNSTABLE_SHARE = 0.25
"""FlexiCache (§2.3) calls the quarter of heads whose important pages change most unstable."""

Flags = npt.NDArray[np.bool_]

_SUBJECT = ("kvweave", "date", "texts", "prompts", "hidden_numbers", "sampled_rows", "seed")


@dataclass(frozen=True)
class HeadProfile:
    """Scores of L × G heads at some prompt lengths.

    `subject`: what decides the figures (texts with digests, seed, prompts), as plain data.
    `sink` and `recent`: the local window that `edge` was measured with. `weights`: a few values of
    the weights that were measured; none of scores that say nothing of them.
    """

    model_fingerprint: str
    sink: int
    recent: int
    lengths: tuple[LengthScores, ...]
    subject: Mapping[str, Any] = field(default_factory=dict)
    weights: tuple[WeightSample, ...] = ()

    @staticmethod
    def from_map(heads: HeadClassMap) -> HeadProfile:
        """The profile that a map was made from: for another share, nothing is measured again.

        # Errors
        `CorruptHeadMap` for a map without the scores of a profile, such as an imported one.
        """
        plain = json.loads(heads.to_json())
        evidence = plain["evidence"]
        try:
            lengths = tuple(
                LengthScores(int(length), **{k: np.asarray(v, np.float64) for k, v in s.items()})
                for length, s in evidence["by_length"].items()
            )
            window = int(evidence["measured_sink"]), int(evidence["measured_recent"])
            subject = {name: evidence[name] for name in _SUBJECT}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptHeadMap(
                f"head map evidence: expected the scores of a profile, got {error!r}"
            ) from error
        wanted = (heads.layers, heads.kv_heads)
        for values in (v for scores in lengths for v in scores.named().values()):
            if values.shape != wanted or not np.isfinite(values).all():
                raise CorruptHeadMap(
                    f"head map evidence: expected finite scores of shape {wanted}, "
                    f"got shape {values.shape}"
                )
        if not lengths:
            raise CorruptHeadMap("head map evidence: expected scores at some length, got none")
        of = samples_of(heads)
        return HeadProfile(heads.model_fingerprint, *window, lengths, subject, of)

    @property
    def heads(self) -> int:
        """L × G."""
        return self.lengths[0].edge.size

    def score(self, at: LengthScores | None = None) -> Scores:
        """How much a head needs the whole context, f64 [L, G]; the mean over lengths, or at one.

        It is the retrieval mass. Of the rankings that `benchmarks/quality/head_ranking.py` compares
        it left the least KL, on answers and on running text alike; edge mass and the shift under
        another prefix did no better than a random choice (docs/heads.md).
        """
        if at is not None:
            return at.retrieval
        return np.asarray(np.mean([scores.retrieval for scores in self.lengths], axis=0))

    def stable(self) -> Flags:
        """Heads whose important pages change little at every length: bool [L, G].

        They are never among the quarter with the least overlap.
        """
        few = round(UNSTABLE_SHARE * self.heads)
        least = np.stack([top(-scores.overlap, few) for scores in self.lengths])
        return np.asarray(~least.any(0))

    def flags(self, what: str, values: Any) -> Flags:
        """Nested lists of evidence as bool [L, G]; raises CorruptHeadMap for anything else."""
        found = np.array(values, object)
        wanted = self.lengths[0].edge.shape
        if found.shape != wanted or not all(isinstance(value, bool) for value in found.flat):
            raise CorruptHeadMap(
                f"head map evidence: expected {what} as flags of shape {wanted}, "
                f"got {found.size} values of shape {found.shape}"
            )
        return found.astype(bool)

    def global_heads(self, count: int) -> Flags:
        """The `count` heads that need the whole context most, bool [L, G]."""
        return top(self.score(), count)

    def count_of(self, share: float) -> int:
        """Global heads of a share of all; raises InvalidArgument outside 0..1."""
        if not 0.0 <= share <= 1.0:
            raise InvalidArgument(f"share: expected 0..1, got {share}")
        return round(share * self.heads)

    def map(
        self,
        share: float | None = None,
        *,
        count: int | None = None,
        sink: int | None = None,
        recent: int | None = None,
        unstable: Flags | None = None,
        evidence: Mapping[str, Any] | None = None,
    ) -> HeadClassMap:
        """The head map with a share (or a count) of global heads; the others keep a window.

        `sink` and `recent` are those measured unless given. `unstable` bool [L, G], as `Stability`
        says it of decode steps, comes before what `stable` says of prompts. `evidence` is kept
        beside the profile's own.

        # Errors
        `InvalidArgument` for a share outside 0..1, a count above L × G, both or neither of them,
        or a window without tokens.
        """
        if (share is None) == (count is None):
            raise InvalidArgument(f"map: expected a share or a count, got {share} and {count}")
        kept = self.count_of(share) if share is not None else int(count or 0)
        if not 0 <= kept <= self.heads:
            raise InvalidArgument(f"count: expected 0..{self.heads}, got {kept}")
        chosen = self.global_heads(kept)
        evidence = {**self.evidence(kept), **(evidence or {})}
        window = (self.sink if sink is None else sink, self.recent if recent is None else recent)
        stable = self.stable() if unstable is None else ~unstable
        of = self.model_fingerprint
        return head_map(of, chosen, stable, *window, evidence, weights=self.weights)

    def evidence(self, count: int) -> dict[str, Any]:
        """Everything measured, as plain data, with how alike lengths are at that many heads."""
        return {
            "measured_by": "kvweave profile-heads",
            **self.subject,
            "measured_sink": self.sink,
            "measured_recent": self.recent,
            "global_heads": count,
            "lengths": [scores.length for scores in self.lengths],
            "agreement": self.agreement(count),
            "score": rounded(self.score()),
            "by_length": {str(scores.length): scores.to_dict() for scores in self.lengths},
        }

    def agreement(self, count: int) -> dict[str, Any]:
        """How alike lengths are: rank correlations of scores, and classes that are the same.

        `same_class`: share of heads that every length puts in one class, `count` being global;
        `same_class_by_chance` what random classes of that size would have for two lengths.
        """
        share = count / self.heads
        found: dict[str, Any] = {
            "same_class": round(agreement([top(self.score(s), count) for s in self.lengths]), 4),
            "same_class_by_chance": round(share**2 + (1 - share) ** 2, 4),
        }
        named = [{"score": self.score(s), **s.named()} for s in self.lengths]
        for name in named[0]:
            pairs = [rank_correlation(a[name], b[name]) for a, b in combinations(named, 2)]
            real = [r for r in pairs if not np.isnan(r)]
            found[f"rank_correlation_{name}"] = round(min(real), 4) if real else None
        return found


def head_map(
    model_fingerprint: str,
    global_heads: Flags,
    stable: Flags,
    sink: int,
    recent: int,
    evidence: Mapping[str, Any],
    *,
    weights: Iterable[WeightSample] = (),
) -> HeadClassMap:
    """A validated map from bool [L, G]: which heads are global, and which are stable.

    `weights`: a few values of the model's, by which others tell whether the map is theirs.

    # Errors
    `InvalidArgument` for a sink below 0 or a window below 1.
    """
    if sink < 0 or recent < 1:
        raise InvalidArgument(
            f"window: expected sink >= 0 and recent >= 1, got {sink} and {recent}"
        )
    window = {"kind": "window", "sink": sink, "recent": recent}
    layers, kv_heads = global_heads.shape
    plain = {
        "schema_version": SCHEMA_VERSION,
        "model_fingerprint": model_fingerprint,
        "layers": layers,
        "kv_heads": kv_heads,
        "heads": [
            {
                "layer": layer,
                "head": head,
                "class": {"kind": "full"} if global_heads[layer, head] else window,
                "reach": "global" if global_heads[layer, head] else "local",
                "stability": "stable" if stable[layer, head] else "unstable",
            }
            for layer in range(layers)
            for head in range(kv_heads)
        ],
        "evidence": {**evidence, "sink": sink, "recent": recent},
        "weights": samples_json(weights),
    }
    return HeadClassMap.from_json(json.dumps(plain, allow_nan=False))
