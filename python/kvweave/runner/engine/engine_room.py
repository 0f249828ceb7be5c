"""`EngineRoom`: what a scheduler is told of the room that an engine's requests have and need."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvweave.runner.engine.live_request import LiveRequest
from kvweave.runner.prefill.prefill import Prefiller
from kvweave.scheduler import Scheduler


class EngineRoom:
    """Looks up for requests that are to wait what they will find, and what is theirs already."""

    def __init__(self, scheduler: Scheduler, prefiller: Prefiller) -> None:
        self._scheduler = scheduler
        self._prefiller = prefiller

    def of_arrival(self, live: LiveRequest, regime: int) -> dict[str, int]:
        """What `Scheduler.arrive` is told of a request.

        # Errors
        `PoolFull` for one that the empty pool of packed pages could not hold.
        """
        cached, shared = self._found(live, regime)
        reserve = max(0, live.room - len(live.prompt.tokens))
        if self._prefiller.packed is not None:
            self._prefiller.packed.expect_room(len(live.prompt.tokens) + reserve)
        return {"cached": cached, "shared_pages": shared, "reserve": reserve}

    def expect(self, live: LiveRequest) -> None:
        """Tells the scheduler what a request that waits again will find."""
        regime = self._prefiller.rotary.regime(len(live.resumed_as.tokens))
        cached, shared = self._found(live, regime)
        self._scheduler.expect(
            live.handle.number, cached=cached, shared_pages=shared, reserved=live.room
        )

    def anybody_besides(self, some: Collection[LiveRequest], lives: Iterable[LiveRequest]) -> bool:
        """Whether anybody else holds room that it will give back."""
        others = (live for live in lives if live not in some)
        return any(
            self._scheduler.state(live.handle.number) in ("prefilling", "decoding")
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
            return len(live.known) - 1, max(held, self._scheduler.pages_of(request.length))
        if live.ask.policy.reuse == "none":
            return 0, 0
        tokens = live.resumed_as.tokens
        found = self._prefiller.found_prefix(tokens, live.ask.lookup.namespace, regime)
        return min(found, len(tokens) - 1), 0
