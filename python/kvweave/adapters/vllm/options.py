"""What the user sets for the plugin: `additional_config={"kvweave": {…}}` of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvweave.errors import InvalidArgument

SECTION = "kvweave"


@dataclass(frozen=True)
class Options:
    """`heads`: the file of a head class map (`kvweave profile-heads`), or None."""

    heads: Path | None = None


def options_of(additional: Any) -> Options:
    """Reads the section of a `VllmConfig.additional_config`; without one, all is as by default.

    Errors: `InvalidArgument` for a name that is not known or a value of another kind.
    """
    section = additional.get(SECTION, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(section, Mapping):
        raise _invalid(SECTION, "a dictionary", repr(section))
    for name in section:
        if name != "heads":
            raise _invalid(SECTION, "the option heads", repr(name))
    heads = section.get("heads")
    if heads is not None and not isinstance(heads, str):
        raise _invalid(f"{SECTION}.heads", "a path", repr(heads))
    return Options(None if heads is None else Path(heads))


def _invalid(what: str, expected: str, got: str) -> InvalidArgument:
    return InvalidArgument(
        f"additional_config: {what}: expected {expected}, got {got}", expected=expected, got=got
    )
