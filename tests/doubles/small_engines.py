"""Runners and engines so small that a few tiny requests fill them."""

from __future__ import annotations

from typing import Any

from kvweave.runner import Engine, Runner

P = 16
SMALL: dict[str, Any] = {"token_budget": 72, "chunk_tokens": 32, "max_running": 8}


def runner_of(model: Any, blocks: int = 64, **given: Any) -> Runner:
    """A runner whose arena holds that many blocks of P tokens, and one more."""
    return Runner(model, max_tokens=blocks * P, page_tokens=P, check=False, progress=False, **given)


def small(runner: Runner, **given: Any) -> Engine:
    return runner.engine(**{**SMALL, **given})


def held(runner: Runner) -> int:
    """Blocks that somebody holds, once the cache has been checked."""
    runner.cache.check()
    return int(runner.cache.stats()["held"])
