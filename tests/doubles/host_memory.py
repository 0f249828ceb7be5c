"""Runners that decode over host memory, beside those whose pages all stay on the device."""

from __future__ import annotations

from typing import Any

from kvweave.runner import Runner
from ranked_pages import every_place_came_back, kinds_map

AMPLE = 1 << 24
PAGE = 4


def host_runner(
    model: Any,
    kinds: list[dict[str, Any]],
    host_bytes: int | None = AMPLE,
    host_copies: str = "spill",
    host_dtype: str | None = None,
    host_arrivals: str = "exact",
    host_ahead_bytes: int | None = None,
    host_free_share: float = 1.0,
    **settings: Any,
) -> Runner:
    """A runner of a tiny model whose heads have these classes, in turn.

    Over host memory requests are spilled as soon as they can be, where nobody says otherwise.
    """
    settings = {"max_tokens": 4096, "page_tokens": PAGE, **settings}
    settings = {"progress": False, "check": False, **settings}
    plain = Runner(model, **{**settings, "max_tokens": 64, "speculate": None, "bounds_dtype": None})
    heads = kinds_map(plain.spec, kinds)
    over: dict[str, Any] = {"host_bytes": host_bytes, "host_copies": host_copies}
    over |= {"host_dtype": host_dtype, "host_arrivals": host_arrivals}
    over["host_free_share"] = None if host_bytes is None else host_free_share
    return Runner(model, heads=heads, host_ahead_bytes=host_ahead_bytes, **over, **settings)


def both(model: Any, kinds: list[dict[str, Any]], **settings: Any) -> tuple[Runner, Runner]:
    """The same runner twice: all pages on the device, and over host memory."""
    alike = {name: given for name, given in settings.items() if not name.startswith("host_")}
    resident = host_runner(model, kinds, None, **alike)
    return resident, host_runner(model, kinds, **settings)


def spills(runner: Runner) -> int:
    """How many requests have had pages of a group in host memory so far."""
    return sum(int(pool.stats()["requests"]) for pool in runner.host.values())


def held_at_home(runner: Runner) -> int:
    """Blocks of host memory that are held."""
    for pool in runner.host.values():
        pool.cache.check()
    return sum(int(pool.stats()["held"]) for pool in runner.host.values())


def nothing_is_held(runner: Runner) -> bool:
    """Whether blocks, slots, host pages and bounds have all come back, but for documents'."""
    runner.cache.check()
    stats = runner.cache.stats()
    pinned = int(stats["frozen"]) * len(runner.cache.groups)
    held = int(stats["held"]) - pinned + held_at_home(runner)
    return held == 0 and every_place_came_back(runner)
