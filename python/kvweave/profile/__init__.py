"""Which (layer, KV) heads of a model need the whole context: measured on text, kept as a map."""

from kvweave.profile.duo import DuoPattern
from kvweave.profile.effect import Effect, EffectMeter, SmallestShare, smallest_share
from kvweave.profile.head_profile import HeadProfile
from kvweave.profile.measure import (
    DEFAULT_LENGTHS,
    DEFAULT_TEXTS,
    check_lengths,
    profile_heads,
)
from kvweave.profile.scores import LengthScores
from kvweave.profile.texts import ProfileText, held_out

__all__ = [
    "DEFAULT_LENGTHS",
    "DEFAULT_TEXTS",
    "DuoPattern",
    "Effect",
    "EffectMeter",
    "HeadProfile",
    "LengthScores",
    "ProfileText",
    "SmallestShare",
    "check_lengths",
    "held_out",
    "profile_heads",
    "smallest_share",
]
