"""Scores of heads that an earlier map keeps, and other maps made of them: no model is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvweave.errors import CorruptHeadMap

if TYPE_CHECKING:
    from kvweave.cache import HeadClassMap
    from kvweave.lab.profile import HeadProfile


@dataclass(frozen=True)
class RecordedScores:
    """What a map was made of. `stability`: what it says of decode steps, None where none were."""

    profile: HeadProfile
    stability: Mapping[str, Any] | None

    @staticmethod
    def read(path: Path) -> RecordedScores:
        """Those of a map's file.

        Raises OSError, and `CorruptHeadMap` for what is no map or has no scores of a profile.
        """
        from kvweave.cache import HeadClassMap
        from kvweave.lab.profile import HeadProfile

        text = path.read_text(encoding="utf-8")
        profile = HeadProfile.from_map(HeadClassMap.from_json(text))
        stability = json.loads(text)["evidence"].get("stability")
        if stability is not None and not isinstance(stability, dict):
            raise CorruptHeadMap(f"{path.name}: expected stability by name, got {stability!r:.80}")
        return RecordedScores(profile, stability)


def map_of(
    recorded: RecordedScores,
    count: int,
    window: tuple[int, int],
    evidence: Mapping[str, Any] | None = None,
) -> HeadClassMap:
    """The map with `count` global heads; the others keep `window`, a sink and a recent part.

    `evidence` is kept beside the scores. Raises as `HeadProfile.map`.
    """
    profile, stability, kept = recorded.profile, recorded.stability, dict(evidence or {})
    unstable, (sink, recent) = None, window
    if stability is not None:
        unstable = profile.flags("stability", stability.get("unstable"))
        kept["stability"] = stability
    return profile.map(count=count, sink=sink, recent=recent, unstable=unstable, evidence=kept)
