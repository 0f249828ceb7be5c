"""How many blocks of a cache are held, cached and free, in one line for a `repr`."""

from __future__ import annotations

from kvweave.cache import KvCache


def block_counts(exact: KvCache, packed: KvCache | None) -> str:
    """Those of exact pages, and of packed ones where there are any."""
    caches = {"blocks": exact} if packed is None else {"blocks": exact, "packed blocks": packed}
    return ", ".join(f"{name} {_counts(cache)}" for name, cache in caches.items())


def _counts(cache: KvCache) -> str:
    used = cache.stats()
    free = used["free"] + used["claimable"]
    return f"held={used['held']}, cached={used['cached']}, free={free}"
