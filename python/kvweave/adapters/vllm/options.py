"""What the user sets for the plugin: `additional_config={"kvweave": {…}}` of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvweave.errors import InvalidArgument

SECTION = "kvweave"
NAMES = ("heads", "segment_bytes", "frozen_share", "virtual_pages")


@dataclass(frozen=True)
class Options:
    """`heads`: the file of a head class map (`kvweave profile-heads`), or None.

    `segment_bytes`: the store of segments on each worker's device, None: segments are not reused.
    `frozen_share` of it may be frozen by a knowledge base. `virtual_pages`: vLLM's block numbers
    are virtual pages (vLLM 0.33).
    """

    heads: Path | None = None
    segment_bytes: int | None = None
    frozen_share: float = 0.5
    virtual_pages: bool = False


def options_of(additional: Any) -> Options:
    """Reads the section of a `VllmConfig.additional_config`; without one, all is as by default.

    Errors: `InvalidArgument` for a name that is not known or a value of another kind.
    """
    section = additional.get(SECTION, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(section, Mapping):
        raise _invalid(SECTION, "a dictionary", repr(section))
    for name in section:
        if name not in NAMES:
            raise _invalid(SECTION, f"the options {', '.join(NAMES)}", repr(name))
    heads = section.get("heads")
    if heads is not None and not isinstance(heads, str):
        raise _invalid(f"{SECTION}.heads", "a path", repr(heads))
    size = section.get("segment_bytes")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise _invalid(f"{SECTION}.segment_bytes", "bytes, at least 1", repr(size))
    share = section.get("frozen_share", 0.5)
    if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share <= 1:
        raise _invalid(f"{SECTION}.frozen_share", "a share in 0..1", repr(share))
    virtual = section.get("virtual_pages", False)
    if not isinstance(virtual, bool):
        raise _invalid(f"{SECTION}.virtual_pages", "true or false", repr(virtual))
    return Options(None if heads is None else Path(heads), size, float(share), virtual)


def _invalid(what: str, expected: str, got: str) -> InvalidArgument:
    return InvalidArgument(
        f"additional_config: {what}: expected {expected}, got {got}", expected=expected, got=got
    )
