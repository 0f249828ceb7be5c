"""What a model allows: heads that need no whole context, and a policy that keeps a bound."""

from kvweave.lab.profile.certify import certify
from kvweave.lab.profile.decode_effect import DecodeEffect, DecodeMeter
from kvweave.lab.profile.duo import DuoPattern
from kvweave.lab.profile.effect import Effect, EffectMeter, SmallestShare, smallest_share
from kvweave.lab.profile.effort import CertifyJob, Effort, effort_of
from kvweave.lab.profile.head_ladder import HeadLadder
from kvweave.lab.profile.head_profile import HeadProfile
from kvweave.lab.profile.measure import DEFAULT_LENGTHS, DEFAULT_TEXTS, check_lengths, profile_heads
from kvweave.lab.profile.ranked_heads import with_ranked_pages
from kvweave.lab.profile.scores import LengthScores
from kvweave.lab.profile.stability import Stability, measure_stability, text_tasks
from kvweave.lab.profile.texts import ProfileText, held_out

__all__ = [
    "DEFAULT_LENGTHS",
    "DEFAULT_TEXTS",
    "CertifyJob",
    "DecodeEffect",
    "DecodeMeter",
    "DuoPattern",
    "Effect",
    "EffectMeter",
    "Effort",
    "HeadLadder",
    "HeadProfile",
    "LengthScores",
    "ProfileText",
    "SmallestShare",
    "Stability",
    "certify",
    "check_lengths",
    "effort_of",
    "held_out",
    "measure_stability",
    "profile_heads",
    "smallest_share",
    "text_tasks",
    "with_ranked_pages",
]
