"""What the plugin composes with."""

from __future__ import annotations

from kvweave.errors import Unsupported


def expect(what: str, holds: bool, expected: str, got: str) -> None:
    """Refuses what nothing here has a form of, unless `holds`.

    Errors: `Unsupported`, naming `what`.
    """
    if not holds:
        raise Unsupported(f"{what}: expected {expected}, got {got}", expected=expected, got=got)
