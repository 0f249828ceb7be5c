"""`HeadLadder`: the head maps of a model that `certify` tries, from most saving to least."""

from __future__ import annotations

from dataclasses import dataclass

from kvweave.arguments import real
from kvweave.cache import HeadClassMap
from kvweave.errors import InvalidArgument
from kvweave.lab.profile.effect import MakeRunner
from kvweave.lab.profile.measure import profile_heads
from kvweave.runner import Runner


@dataclass(frozen=True)
class HeadLadder:
    """How heads are profiled and which maps are made of it.

    `make_runner`: a runner of the model under a map. `shares`: of the heads, those that need the
    whole context most and keep it; the others keep `sink` + `recent` tokens. `tokens`: length of
    the prompts that heads are ranked on, `prompts` of each kind.

    Raises InvalidArgument for no shares, or one that is not above 0 and below 1.
    """

    make_runner: MakeRunner
    shares: tuple[float, ...] = (1 / 8, 1 / 4, 1 / 2, 3 / 4)
    sink: int = 16
    recent: int = 256
    tokens: int = 1024
    prompts: int = 2

    def __post_init__(self) -> None:
        if not self.shares:
            raise InvalidArgument("head ladder: expected at least one share, got none")
        for share in self.shares:
            if not 0.0 < real("head ladder", share, name="share") < 1.0:
                raise InvalidArgument(f"head ladder: expected 0 < share < 1, got {share}")

    def maps(self, runner: Runner, corpus: str, seed: int) -> tuple[HeadClassMap, ...]:
        """Profiles the heads of a runner without a map on a text; maps, fewest whole heads first.

        One of the same number of whole heads as another, or of all, is left out. Errors as
        `profile_heads`.
        """
        profile = profile_heads(
            runner,
            lengths=(self.tokens,),
            texts=(corpus,),
            sink=self.sink,
            recent=self.recent,
            prompts=self.prompts,
            seed=seed,
        )
        counts = {profile.count_of(share) for share in self.shares} - {profile.heads}
        return tuple(profile.map(count=count) for count in sorted(counts))
