"""Which manager of ours takes its blocks from a pool.

vLLM looks up prefixes, and 0.26 binds connectors, with a pool at hand and no manager.
"""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakValueDictionary

Manager = TypeVar("Manager")
# By the id of the pool, which lives as long as the manager that holds it.
_known: WeakValueDictionary[int, Any] = WeakValueDictionary()


def enter(manager: Any) -> None:
    """Makes a manager known by its `block_pool`."""
    _known[id(manager.block_pool)] = manager


def manager_of(pool: Any, kind: type[Manager]) -> Manager | None:
    """The manager of this kind whose blocks come from a pool; None if there is none."""
    found = _known.get(id(pool))
    return found if isinstance(found, kind) else None
