"""What a model allows: heads that need no whole context, and a policy that keeps a bound.

Each name is imported when it is asked for: what reads recorded scores needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvweave.lab.profile.certifying import certify
    from kvweave.lab.profile.decode_effect import DecodeEffect, DecodeMeter
    from kvweave.lab.profile.duo import DuoPattern
    from kvweave.lab.profile.effect import Effect, EffectMeter, SmallestShare, smallest_share
    from kvweave.lab.profile.effort import CertifyJob, Effort, effort_of
    from kvweave.lab.profile.head_ladder import HeadLadder
    from kvweave.lab.profile.head_profile import HeadProfile
    from kvweave.lab.profile.measure import (
        DEFAULT_LENGTHS,
        DEFAULT_TEXTS,
        check_lengths,
        profile_heads,
    )
    from kvweave.lab.profile.ranked_heads import with_ranked_pages
    from kvweave.lab.profile.scores import LengthScores
    from kvweave.lab.profile.stability import Stability, measure_stability, text_tasks
    from kvweave.lab.profile.texts import ProfileText, held_out

_MODULES = {
    "certifying": ("certify",),
    "decode_effect": ("DecodeEffect", "DecodeMeter"),
    "duo": ("DuoPattern",),
    "effect": ("Effect", "EffectMeter", "SmallestShare", "smallest_share"),
    "effort": ("CertifyJob", "Effort", "effort_of"),
    "head_ladder": ("HeadLadder",),
    "head_profile": ("HeadProfile",),
    "measure": ("DEFAULT_LENGTHS", "DEFAULT_TEXTS", "check_lengths", "profile_heads"),
    "ranked_heads": ("with_ranked_pages",),
    "scores": ("LengthScores",),
    "stability": ("Stability", "measure_stability", "text_tasks"),
    "texts": ("ProfileText", "held_out"),
}
_LATER = {name: module for module, names in _MODULES.items() for name in names}

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


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'kvweave.lab.profile' has no attribute {name!r}")
    return getattr(import_module(f"kvweave.lab.profile.{_LATER[name]}"), name)
