"""`MapRunners`: the runners of one model under several head maps, made when they are wanted."""

from __future__ import annotations

from collections.abc import Collection

from kvweave.errors import InvalidArgument
from kvweave.lab.profile.candidate import Candidate
from kvweave.lab.profile.effect import MakeRunner
from kvweave.policies.policy_profile import heads_digest
from kvweave.runner import Runner


class MapRunners:
    """A whole runner without a map, and one a map, made when it is first asked for.

    `own`: a runner under a map that is there already, if any.
    """

    def __init__(
        self, whole: Runner, own: Runner | None = None, make_runner: MakeRunner | None = None
    ) -> None:
        self.whole = whole
        self._make_runner = make_runner
        self._made: dict[str | None, Runner] = {None: whole}
        if own is not None and own.heads is not None:
            self._made[heads_digest(own.heads)] = own

    def of(self, candidate: Candidate) -> Runner:
        """The runner under a candidate's map.

        # Errors
        `InvalidArgument` for a map of which there is no runner, and none is to be made.
        """
        digest = candidate.digest
        if digest not in self._made:
            if self._make_runner is None:
                raise InvalidArgument(f"head map: expected a runner under {digest}, got none")
            self._made[digest] = self._make_runner(candidate.heads)
        return self._made[digest]

    def keep(self, digests: Collection[str]) -> None:
        """Lets go of runners under other maps, whose memory is the larger part of them."""
        self._made = {d: r for d, r in self._made.items() if d is None or d in digests}
