"""`EngineRoom`: what a scheduler is told of the room that an engine's requests have and need."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from kvweave.arguments import whole
from kvweave.runner.engine.live_request import LiveRequest
from kvweave.runner.prefill.parted_job import PartedJob, homes_of, may_part
from kvweave.runner.prefill.prefill import Prefiller
from kvweave.scheduler import Scheduler

_NO_LIMIT = 2**31 - 1
_MOST = {
    "token_budget": _NO_LIMIT,
    "chunk_tokens": _NO_LIMIT,
    "span_tokens": _NO_LIMIT,
    "max_running": 2**20,
}


def _limit(name: str, given: Any) -> Any:
    """A setting of the scheduler, which says what each number has to be at least."""
    if name not in _MOST:
        return given
    return _MOST[name] if given is None else whole(name, given, most=_MOST[name])


class EngineRoom:
    """Looks up for requests that are to wait what they will find, and what is theirs already.

    The `scheduler` plans for the prefiller's cache, and host memory beside it where there is any,
    prompts of `part_tokens` at once whose pages go there; `known` are its other settings, where
    None is no limit.
    """

    def __init__(self, prefiller: Prefiller, part_tokens: int, **known: Any) -> None:
        homes = homes_of(prefiller, part_tokens)
        known = {name: _limit(name, given) for name, given in known.items()}
        self.scheduler = Scheduler(prefiller.cache, homes=homes, part_tokens=part_tokens, **known)
        self._prefiller = prefiller
        # Those whose prompts are being computed in parts.
        self._parted: list[LiveRequest] = []

    def of_arrival(self, live: LiveRequest, regime: int) -> dict[str, Any]:
        """What `Scheduler.arrive` is told of a request.

        # Errors
        `PoolFull` for one that the empty pool of packed pages could not hold.
        """
        cached, shared = self._found(live, regime)
        reserve = max(0, live.room - len(live.prompt.tokens))
        if self._prefiller.packed is not None:
            self._prefiller.packed.expect_room(len(live.prompt.tokens) + reserve)
        leaves = self._leaves(live)
        return {"cached": cached, "shared_pages": shared, "reserve": reserve, "leaves": leaves}

    def expect(self, live: LiveRequest) -> None:
        """Tells the scheduler what a request that waits again will find."""
        regime = self._prefiller.rotary.regime(len(live.resumed_as.tokens))
        cached, shared = self._found(live, regime)
        known = {"cached": cached, "shared_pages": shared, "reserved": live.room}
        self.scheduler.expect(live.handle.number, **known, leaves=self._leaves(live))

    def _leaves(self, live: LiveRequest) -> bool:
        """Whether a prompt may be computed in parts."""
        return not live.given and may_part(self._prefiller, live.ask.policy)

    def in_parts(self, live: LiveRequest) -> bool:
        """Whether a request was admitted by its working set; it is looked after from then on."""
        if not self.scheduler.in_parts(live.handle.number):
            return False
        self._parted.append(live)
        return True

    def tell_held(self) -> None:
        """Tells the scheduler what prompts in parts have taken by now of what they were promised.

        The rest is theirs: it is not what others may be admitted to.
        """
        parted, self._parted = self._parted, []
        for live in parted:
            if isinstance(live.job, PartedJob):
                pages, homes = live.job.held
                self.scheduler.holds(live.handle.number, pages=pages, homes=homes)
                self._parted.append(live)
            else:
                self.scheduler.holds(live.handle.number)

    def anybody_besides(self, some: Collection[LiveRequest], lives: Iterable[LiveRequest]) -> bool:
        """Whether anybody else holds room that it will give back."""
        others = (live for live in lives if live not in some)
        return any(
            self.scheduler.state(live.handle.number) in ("prefilling", "decoding")
            for live in others
        )

    def _found(self, live: LiveRequest, regime: int) -> tuple[int, int]:
        """Tokens of what is to be prefilled that are there, and pages that need not be paid."""
        cache = self._prefiller.cache
        if live.given:
            assert live.done is not None
            request = live.done.request
            if request.released:
                return 0, 0
            # Of windows fewer pages may be held than are counted; with reserved room more.
            held = sum(request.kv_bytes()) // cache.shape.page_bytes
            return len(live.known) - 1, max(held, self.scheduler.pages_of(request.length))
        if live.ask.policy.reuse == "none":
            return 0, 0
        tokens = live.resumed_as.tokens
        found = self._prefiller.found_prefix(tokens, live.ask.lookup.namespace, regime)
        return min(found, len(tokens) - 1), 0
