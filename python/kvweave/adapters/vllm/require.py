"""Refusals of what the plugin does not compose with."""

from __future__ import annotations

from kvweave.errors import KvweaveError, Unsupported


def require(
    what: str,
    holds: bool,
    expected: str,
    got: str,
    error: type[KvweaveError] = Unsupported,
) -> None:
    """Refuses what nothing here has a form of, or what can never be right, unless `holds`.

    Errors: `error`, naming `what`.
    """
    if not holds:
        raise error(f"{what}: expected {expected}, got {got}", expected=expected, got=got)
